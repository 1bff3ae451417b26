#!/usr/bin/env python3
"""Draw the pictures of the pages with the project's own code.

    python docs/pictures/draw.py [--output DIRECTORY] [NAME.png ...]

What is shown is computed: the Example by the objective, who sees whom by the attention rule, the boxes of a checkpoint
by the code that reads and writes them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.checkpoint.shard_slices import flattened_ranges
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.tensor_parallel import Partition

TEXT = ["the", "cat", "sat", "on", "the", "old", "mat"]
SPANS, ORDER = [(1, 2), (4, 6)], [1, 0]  # "cat" and "the old"; part B begins with the second
COLOURS = ["#4c72b0", "#dd8452", "#55a868", "#c44e52"]
PALE = ["#c9d5e8", "#f5d9c8", "#cde5d3", "#eccbcc"]
GREY = "#e8e8e8"
SPECIAL = ["[CLS]", "[SEP]", "[MASK]", "[sMASK]", "[gMASK]", "sop", "eop", "eos", "[PAD]", "[UNK]", "dBLOCK"]


def cell(
    axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.0, height: float = 1.0
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def draw_blank_infilling(path: Path) -> None:
    """A text, its Example with every field, and who sees whom."""
    ids = {name: number for number, name in enumerate(SPECIAL)}
    words = sorted(set(TEXT))
    names = [*SPECIAL, *words]
    special = SpecialTokens(*range(len(SPECIAL)))
    vocabulary = Vocabulary(special, len(names))
    objective = BlankInfilling(BlankInfillingConfig(), vocabulary, 0, 64)
    piece = np.array([names.index(word) for word in TEXT], np.int32)
    example = objective.build(piece, SPANS, ORDER)
    size = len(example.tokens)
    part_a = int((example.ord == 0).sum())
    part_b = np.cumsum(example.tokens == ids["sop"])
    colours = [GREY if i < part_a else PALE[part_b[i] - 1] for i in range(size)]

    figure, (fields, mask) = plt.subplots(1, 2, figsize=(13, 5.2), width_ratios=[1.75, 1])
    hidden = {i: PALE[ORDER.index(k)] for k, span in enumerate(SPANS) for i in range(*span)}
    for i, word in enumerate(TEXT):
        cell(fields, i + 1, 6.2, word, hidden.get(i, GREY))
    fields.text(-0.2, 6.7, "text", ha="right", va="center")
    targets = [names[t] if w else "" for t, w in zip(example.targets, example.weights, strict=True)]
    rows = {
        "input": [names[token] for token in example.tokens],
        "position": [str(number) for number in example.position_ids],
        "block position": [str(number) for number in example.block_position_ids],
        "target": targets,
    }
    for line, (name, values) in enumerate(rows.items()):
        y = 4.2 - 1.15 * line
        fields.text(-0.2, y + 0.5, name, ha="right", va="center")
        for i, value in enumerate(values):
            cell(fields, i, y, value, colours[i])
    for first, last, name in (
        (0, part_a, "part A: the text with its blanks"),
        (part_a, size, "part B: the blanks"),
    ):
        fields.annotate("", (first, 5.45), (last, 5.45), arrowprops={"arrowstyle": "<->", "color": "#666666"})
        fields.text((first + last) / 2, 5.6, name, ha="center", color="#444444", fontsize=9)
    fields.set(xlim=(-3.2, size + 0.2), ylim=(0.4, 7.6))
    fields.axis("off")

    sees = allowed(example.doc[None], example.ord[None], example.grp[None])[0]
    for query in range(size):
        for key in range(size):
            colour = colours[key] if sees[query, key] else "white"
            mask.add_patch(Rectangle((key, size - 1 - query), 1, 1, facecolor=colour, edgecolor="#dddddd"))
    labels = rows["input"]
    mask.set(
        xlim=(0, size), ylim=(0, size), aspect="equal", title="the token of a row sees the coloured columns"
    )
    mask.set_xticks(np.arange(size) + 0.5, labels, rotation=90, fontsize=8)
    mask.set_yticks(np.arange(size) + 0.5, labels[::-1], fontsize=8)
    mask.tick_params(length=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_layout(path: Path) -> None:
    """Eight ranks: two pipeline stages, two data-parallel halves, two tensor-parallel ranks."""
    figure, axes = plt.subplots(figsize=(11, 5.4))
    grid = np.arange(8).reshape(2, 2, 2)  # pipeline x data x tensor, as in the parallel context
    for pp, dp, tp in np.ndindex(2, 2, 2):
        x, y = 6.2 * pp + 2.6 * tp, 3.4 * (1 - dp)
        axes.add_patch(Rectangle((x, y), 2.4, 2.6, facecolor=PALE[tp], edgecolor=COLOURS[tp], linewidth=1.5))
        first, last = (0, 5) if pp == 0 else (6, 11)
        table = "word embedding" if pp == 0 else "head (tied)"
        lines = [
            f"rank {grid[pp, dp, tp]}",
            f"blocks {first} to {last}",
            f"half {tp + 1} of every matrix",
            f"half {tp + 1} of the {table}",
            f"samples of replica {dp + 1}",
            f"ZeRO: optimizer state {dp + 1} of 2",
        ]
        for i, line in enumerate(lines):
            weight = "bold" if i == 0 else "normal"
            axes.text(x + 1.2, y + 2.35 - 0.34 * i, line, ha="center", va="center", fontsize=9, weight=weight)
    for pp in (0, 1):
        axes.text(6.2 * pp + 2.5, 6.35, f"pipeline stage {pp + 1}", ha="center", fontsize=11)
    for dp in (0, 1):
        axes.text(
            -0.25,
            3.4 * (1 - dp) + 1.3,
            f"replica {dp + 1}",
            ha="center",
            va="center",
            rotation=90,
            fontsize=11,
        )
        arrow = {"arrowstyle": "<->", "color": "#444444"}
        axes.annotate("", (6.15, 3.4 * (1 - dp) + 1.3), (5.05, 3.4 * (1 - dp) + 1.3), arrowprops=arrow)
        axes.text(5.6, 3.4 * (1 - dp) + 1.45, "hidden\nstate", ha="center", fontsize=8)
    for x in (1.2, 3.8, 7.4, 10.0):
        axes.annotate("", (x, 3.35), (x, 2.65), arrowprops={"arrowstyle": "<->", "color": "#444444"})
    axes.text(5.6, 2.95, "sums of gradients", ha="center", fontsize=8)
    axes.text(
        *(5.6, -0.5, "the two tensor-parallel ranks of a pair sum partial products twice in each block"),
        ha="center",
        fontsize=9,
    )
    axes.set(xlim=(-0.6, 11.6), ylim=(-0.8, 6.7))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shards(rows: int, columns: int, tp: int, zero: int) -> dict[int, list[tuple[int, int, int, int]]]:
    """rank -> boxes (row, row stop, column, column stop) that it owns of a matrix split along its columns."""
    shape = (rows, columns // tp)
    count = rows * columns // tp // zero
    owned = {}
    for dp, rank in np.ndindex(zero, tp):
        found = [
            owned.slice for owned in flattened_ranges(shape, Partition(dim=1), rank, tp, dp * count, count)
        ]
        owned[dp * tp + rank] = [(box.row, box.row_stop, box.column, box.column_stop) for box in found]
    return owned


def draw_matrix(
    axes: Axes, owned: dict[int, list[tuple[int, int, int, int]]], title: str, highlighted: int | None
) -> None:
    rows = max(box[1] for boxes in owned.values() for box in boxes)
    columns = max(box[3] for boxes in owned.values() for box in boxes)
    for rank, boxes in owned.items():
        for row, row_stop, column, column_stop in boxes:
            place, shape = (column, rows - row_stop), (column_stop - column, row_stop - row)
            axes.add_patch(
                Rectangle(place, *shape, facecolor=PALE[rank % 4], edgecolor=COLOURS[rank % 4], linewidth=1.5)
            )
            middle = (place[0] + shape[0] / 2, place[1] + shape[1] / 2)
            axes.text(*middle, f"rank {rank}", ha="center", va="center", fontsize=8)
            if rank == highlighted:
                axes.add_patch(
                    Rectangle(place, *shape, fill=False, edgecolor="black", linewidth=2.5, zorder=3)
                )
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(-0.1, rows + 0.1), aspect="equal", title=title)
    axes.axis("off")


def draw_reshard(path: Path) -> None:
    """A row-parallel matrix as four ranks wrote it, and as three others read it."""
    written, read = shards(12, 8, 2, 2), shards(12, 8, 1, 3)
    reader = 1
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 5))
    draw_matrix(left, written, "written: 2 tensor-parallel ranks,\nZeRO over 2 replicas", None)
    draw_matrix(middle, written, f"what rank {reader} of the new layout reads", None)
    for row, row_stop, column, column_stop in read[reader]:
        place = (column, 12 - row_stop)
        size = (column_stop - column, row_stop - row)
        middle.add_patch(Rectangle(place, *size, fill=False, edgecolor="black", linewidth=2.5, zorder=3))
    draw_matrix(right, read, "continued: no tensor parallelism,\nZeRO over 3 replicas", reader)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


PICTURES = {
    "blank_infilling.png": draw_blank_infilling,
    "layout.png": draw_layout,
    "reshard.png": draw_reshard,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="directory of the pictures"
    )
    parser.add_argument("names", nargs="*", metavar="NAME.png", help="pictures to draw; none = all")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(PICTURES)
    if unknown:
        parser.error(f"unknown picture {min(unknown)}; the pictures are {', '.join(PICTURES)}")
    for name in arguments.names or PICTURES:
        PICTURES[name](arguments.output / name)


if __name__ == "__main__":
    main()
