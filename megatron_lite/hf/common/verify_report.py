"""Writes the report of an export's verification: what was compared, on which inputs, and with which result.

An import does not read the report; it compares outputs itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_lite.hf.common.verify import Comparison
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison
from megatron_lite.hf.common.weights import write_json
from megatron_lite.telemetry import version

PROOF_JSON = "proof.json"
FORMAT, VERSION = "megatron-lite-proof", 1
INPUTS = {
    "logits": "random tokens; positions, segments and masks handed over",
    "default inputs": "random tokens and a mask alone: positions and all else are the class's own",
    "labels": "the loss of labels that are given to the class",
    "generation": "the logits of each step of the class's generate, with its cache",
    "pipeline": "the tokens that the pipeline writes into texts with blanks",
    "head": "the head on the first token, or that of a task",
    "hidden states": "the last layer, of a class without a head",
    "memory": "a text in two segments",
    "vectors": "texts with each prompt, embedded by sentence-transformers",
    "replaced": "random tokens: whether each was replaced (ELECTRA's discriminator)",
    "posteriors": "random sentences: mean and log variance of their latent vectors (OPTIMUS, whose logits take such)",
}
_HEADING = "## Proof"
_NOT_VERIFIED = "Nothing was proven: this directory was written with `--no-verify`."


@dataclass(frozen=True)
class Report:
    """Results of a verification.

    Args:
        comparisons: name, as in INPUTS -> result.
        tolerance: largest difference allowed.
        tokenizers: name of the directory, or of a part of it -> the comparison of token ids.
    """

    comparisons: Mapping[str, Comparison]
    tolerance: float
    tokenizers: Mapping[str, TokenizerComparison]


def write_report(directory: Path, report: Report | None) -> None:
    """Write proof.json, and a section of the card if there is one. Args: report: None = nothing was proven."""
    program = version.program()
    described: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "proven": report is not None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "program": program,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if report is None:
        described["reason"] = "--no-verify"
    else:
        described["comparisons"] = {
            name: {
                "inputs": INPUTS[name],
                "rows": found.rows,
                "largest_difference": found.largest_difference,
                "limit": found.limit(report.tolerance),
                "largest_logit": found.largest_logit,
                "rounding_of_the_reference": found.rounding or None,
                "argmax_agreement": found.agreement,
            }
            for name, found in report.comparisons.items()
        }
        described["tolerance"] = report.tolerance
        described["tokenizers"] = {name: asdict(found) for name, found in report.tokenizers.items()}
    write_json(directory / PROOF_JSON, described)
    card = directory / "README.md"
    if card.exists():
        text = card.read_text(encoding="utf-8")
        before, heading, after = text.partition("## License")
        card.write_text(f"{before}{_HEADING}\n\n{_section(report)}\n\n{heading}{after}", encoding="utf-8")


def _section(report: Report | None) -> str:
    if report is None:
        return _NOT_VERIFIED
    lines = [
        f"Both models were run on the same inputs when this directory was written ({PROOF_JSON} has the versions):",
        "",
        "| compared | rows | largest difference | limit |",
        "|---|---|---|---|",
    ]
    for name, found in report.comparisons.items():
        figures = f"{found.rows} | {found.largest_difference:.1e} | {found.limit(report.tolerance):.1e}"
        lines.append(f"| {name}: {INPUTS[name]} | {figures} |")
    for name, ids in report.tokenizers.items():
        lines.append(f"| {name}: ids of texts that are hard to encode | {ids.texts} | {ids.differing} | 0 |")
    return "\n".join(lines)
