#!/usr/bin/env python3
"""GLM on its own and on a modern body, and masked words on that body, at equal parameters, tokens and seconds.

With `--kinds` some of them, or also GLM on a modern body whose second block sees 8 tokens to each side.

    bash scripts/quickstart.sh
    python benchmarks/bodies.py

Trains three models of two blocks on the quickstart's corpus by the recipe of configs/tiny.yaml: GLM with its own body
(learned tables, LayerNorm, a plain FFN, biases), GLM on a modern one (rotary halves, RMSNorm, a gated FFN, no biases),
and masked language modelling on the modern one. The share of hidden words is the same. Seconds are of the CPU, start
and validations counted; the losses at equal seconds are read between the validations of the slower runs.

The losses of short spans and of masked words have the same targets, words drawn alike, but not the same question: a
span is predicted from left to right, with what came before in it, and a masked word alone. So each is shown beside the
loss of a unigram model of its own targets.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np

from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.quickstart_runs import ROOT, records, settings_of, start
from data_utils.common.errors import ArgumentParser, expanded_path, run_command
from data_utils.common.files import require_directory
from data_utils.common.setting_files import load_json
from megatron_lite.config.tree import load_config
from megatron_lite.model.flops import parameter_count
from scripts.quickstart.unigram_baseline import unigram_losses

MODERN = ("model.rms_norm=true", "model.ffn=gated", "model.ffn_size=344", "model.biases=none")
MASKS = (
    "objectives={masked_lm: 1}",
    "masked_lm.whole_words=true",
    "masked_lm.masked_ratio=0.3",
    "model.max_position=66",
)
# Name -> settings on top of tiny.yaml. The widths of the FFN make parameters equal within a hundredth.
KINDS: dict[str, tuple[str, ...]] = {
    "GLM": ("model.positions=learned_blocks", "model.block_positions=added"),
    "GLM, modern body": MODERN,
    "masked words, modern body": (*MODERN, *MASKS),
}
MORE = {"GLM, modern body, a local block": (*MODERN, "model.attention_window=8", "model.global_every=2")}
MEASURES = {"loss/token": "short spans", "loss/document": "long spans", "loss/masked": "masked words"}
EVALUATIONS = 10  # of a run


def measured(options: Any, run: Path, seed: int, kind: str) -> dict[str, Any]:
    """A run that is made now: its parameters, CPU seconds, curve and unigram losses. Raises DataError if it fails."""
    settings = [*settings_of(options, run, seed, EVALUATIONS), *(KINDS | MORE)[kind]]
    vocabulary = load_json(options.quickstart / "data/corpus_train.json", "manifest")["vocab_size"]
    config = load_config([ROOT / "configs/tiny.yaml"], settings).with_vocab_size(vocabulary)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(run, settings, options.threads)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    unigram = unigram_losses(config)
    names = ["step", *(name for name in MEASURES if name in unigram)]
    return {
        "parameters": parameter_count(config.model),
        "seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "curve": records(run, "validation", names),
        "unigram": unigram,
    }


def at(run: dict[str, Any], measure: str, seconds: float) -> float:
    """A loss of a run after so many CPU seconds, between two validations; NaN for one that it has not."""
    if measure not in run["curve"][0]:
        return float("nan")
    steps = [point["step"] for point in run["curve"]]
    return float(
        np.interp(seconds / run["seconds"] * steps[-1], steps, [point[measure] for point in run["curve"]])
    )


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Means of the seeds: losses at equal tokens; in brackets at the fastest kind's seconds, and the unigram's."""
    seconds = {kind: statistics.mean(run["seconds"] for run in of) for kind, of in runs.items()}
    least = min(seconds.values())
    lines = [
        f"| | parameters | CPU seconds | {' | '.join(MEASURES.values())} |",
        f"|---|---|---|{'---|' * len(MEASURES)}",
    ]
    for kind, of in runs.items():
        cells = []
        for measure in MEASURES:
            last = [at(run, measure, run["seconds"]) for run in of]
            early = [at(run, measure, run["seconds"] * least / seconds[kind]) for run in of]
            unigram = statistics.mean(run["unigram"].get(measure, float("nan")) for run in of)
            spread = f" ± {statistics.stdev(last):.3f}" if len(last) > 1 else ""
            cells.append(
                f"{statistics.mean(last):.3f}{spread} ({statistics.mean(early):.3f}; unigram {unigram:.3f})"
            )
        shown = " | ".join("" if "nan" in cell else cell for cell in cells)
        lines.append(f"| {kind} | {of[0]['parameters']:,} | {seconds[kind]:.0f} | {shown} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--quickstart", type=Path, default=ROOT / "quickstart", help="what scripts/quickstart.sh wrote")
    add("--steps", type=int, default=1000, help="of each run (default: 1000)")
    add("--samples", type=int, default=512, help="of a validation (default: 512)")
    add("--seeds", type=int, nargs="+", default=[1, 2])
    add("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS, *MORE])
    add("--threads", type=int, default=None)
    add("--json", type=expanded_path, metavar="FILE", help="write the curves there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "steps", "samples", "threads")
    check_at_least(options, 0, "seeds")
    check_places(result=options.json)
    require_directory(
        options.quickstart / "data", "run scripts/quickstart.sh, or give --quickstart its directory"
    )
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory() as work:
        for seed in options.seeds:
            for number, (kind, of) in enumerate(runs.items()):
                of.append(measured(options, Path(work) / f"{number}_{seed}", seed, kind))
                print(f"{kind}, seed {seed}: {of[-1]['curve'][-1]}", flush=True)
    print(table(runs))
    if options.json is not None:
        write_json(options.json, runs)
    return 0


if __name__ == "__main__":
    run_command(main)
