#!/usr/bin/env python3
"""What the vectors of a model are worth as it was pretrained and after further training: sentence pairs and retrieval.

    python benchmarks/laptop_vectors.py --run laptop/run --sts stsb-test.csv --retrieval laptop/pairs/retrieval \
        --others SimCSE=laptop/simcse pairs=laptop/vectors all-MiniLM-L6-v2=runs/minilm --plot vectors.png

The first row has no context: the mean of the run's input embeddings of a text's tokens, without special tokens. The
second is the run as it is, the others are runs or directories of sentence-transformers by name. All rows read the same
files as scripts/evaluate.py reads them: Spearman's correlation with people's scores, and nDCG@10, both times 100.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from benchmarks.arguments import write_json
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_named, require_writable, write_picture
from data_utils.tasks.readers.similarity import Retrieval, ScoredPairs, read_retrieval, read_scored_pairs
from megatron_lite.checkpoint.resolve_path import MODEL_OR_EXPORT_PATH, resolve_model
from megatron_lite.telemetry.version import describe, program

WORDS, PRETRAINED = "mean of input embeddings", "pretrained"


def measure(name: str, path: Path, sts: ScoredPairs, retrieval: Retrieval) -> dict[str, Any]:
    """A row of the table."""
    import torch

    from megatron_lite.embedding.scores import VectorScores
    from megatron_lite.finetune.checkpoints import opened

    class WordScores(VectorScores):
        def embed(self, texts: Sequence[str], role: str | None = None) -> torch.Tensor:
            del role  # whose prompt is for a model with context
            table = self.run.model.embedding.word_embeddings.weight.detach().float()
            return torch.stack([table[self.run.tokenizer.encode(text)].mean(0) for text in texts])

    with opened(path, None, {}) as run:
        scores = (WordScores if name == WORDS else VectorScores)(run.with_model(), {})
        found = {"sts": scores.sts(sts)["spearman"], "retrieval": scores.retrieval(retrieval)["nDCG@10"]}
    return {"name": name, "path": str(path), **found}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Two groups of bars, the rows from top to bottom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"sts": "STS: Spearman's correlation, x 100", "retrieval": "retrieval: nDCG@10, x 100"}
    figure, both = pyplot.subplots(
        1, 2, figsize=(8, 0.6 + 0.4 * len(rows)), sharey=True, layout="constrained"
    )
    for axes, (kind, title) in zip(both, titles.items(), strict=True):
        bars = axes.barh([row["name"] for row in rows], [row[kind] for row in rows])
        axes.bar_label(bars, fmt="%.1f", padding=2)
        axes.set_xlim(0, 109)  # room for a label of 100
        axes.set_title(title, fontsize=10)
    both[0].invert_yaxis()
    write_picture(path, figure, "--plot", dpi=120)
    pyplot.close(figure)


def named_model(text: str) -> tuple[str, Path]:
    name, found, path = text.partition("=")
    if not (name and found and path):
        raise ConfigError(f"--others has {text}; give NAME=PATH.")
    return name, resolve_model(Path(path), "--others", MODEL_OR_EXPORT_PATH)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--run", type=Path, required=True, help="pretrained run, such as that of scripts/laptop.sh")
    add("--others", nargs="*", default=[], metavar="NAME=PATH", help="further runs, or exports")
    add("--sts", type=Path, nargs="+", required=True, metavar="FILE", help="pairs of sentences, joined")
    add("--retrieval", type=Path, required=True, metavar="DIR", help="directory of BEIR")
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    run = resolve_model(options.run, "--run", MODEL_OR_EXPORT_PATH)
    models = [(WORDS, run), (PRETRAINED, run), *map(named_model, options.others)]
    if options.json is not None:
        require_writable(options.json, "--json")
    if options.plot is not None:
        require_named(options.plot, "--plot")
    from megatron_lite.embedding.scores import require_ir_measures

    require_ir_measures()
    sts, retrieval = read_scored_pairs(options.sts), read_retrieval(options.retrieval)
    print("| vectors | STS | retrieval |\n|---|---|---|", flush=True)
    rows = []
    for name, path in models:
        rows.append(measure(name, path, sts, retrieval))
        print(f"| {name} | {rows[-1]['sts']:.2f} | {rows[-1]['retrieval']:.2f} |", flush=True)
    if options.json is not None:
        facts = {"date": datetime.now(UTC).date().isoformat(), "program": describe(program())}
        write_json(options.json, {**facts, "rows": rows})
    if options.plot is not None:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
