"""Plots of the measures of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from data_utils.common.files import write_picture


def save(figure: Figure, path: Path) -> None:
    """Write a picture and close it. Raises: DataError if the file cannot be written."""
    write_picture(path, figure, "--plot", dpi=130)
    pyplot.close(figure)


def lines(
    path: Path, curves: Mapping[str, Sequence[float]], y: str, dashed: Mapping[str, Sequence[float]]
) -> None:
    """Curves over the layers, 0 = the embeddings. Args: dashed: baselines of the curves, by name."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for number, (key, values) in enumerate(curves.items()):
        name = key.replace("_", "-")
        axes.plot(range(len(values)), values, marker="o", color=f"C{number}", label=name)
        if key in dashed:
            baseline = dashed[key]
            axes.plot(range(len(baseline)), baseline, "--", color=f"C{number}", label=f"{name}, random words")
    axes.set_xlabel("layer (0 = embeddings)")
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def head_picture(
    path: Path, groups: Mapping[str, Sequence[float]], removed: Mapping[str, Sequence[int]], title: str
) -> None:
    """A cell for each head, darker for larger values; removed heads are crossed out."""
    count = max(map(len, groups.values()))
    figure, axes = pyplot.subplots(figsize=(2 + 0.5 * count, 1.2 + 0.4 * len(groups)), layout="constrained")
    image = axes.imshow(torch.tensor(list(groups.values())), cmap="Blues", aspect="auto", vmin=0)
    for row, name in enumerate(groups):
        for head in removed.get(name, ()):
            axes.text(head, row, "\u00d7", ha="center", va="center", color="C3")
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_xticks(range(count))
    axes.set_xlabel("head")
    axes.set_title(title)
    figure.colorbar(image)
    save(figure, path)


def maps(path: Path, weights: torch.Tensor, tokens: Sequence[str]) -> None:
    """The weights of every head of every layer for one text. Args: weights: [layers, H, N, N], queries down."""
    layers, heads, count, _ = weights.shape
    size = max(1.0, min(2.2, 0.09 * count + 0.6))
    figure, grid = pyplot.subplots(
        layers, heads, figsize=(0.8 + size * heads, 0.8 + size * layers), squeeze=False, layout="constrained"
    )
    named = count <= 24  # more tokens cannot be read
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
            axes.set_xticks(range(count) if named and layer == layers - 1 else [])
            axes.set_yticks(range(count) if named and head == 0 else [])
            if named and layer == layers - 1:
                axes.set_xticklabels(tokens, rotation=90, fontsize=5, parse_math=False)
            if named and head == 0:
                axes.set_yticklabels(tokens, fontsize=5, parse_math=False)
            if layer == 0:
                axes.set_title(f"head {head}", fontsize=7)
            if head == 0:
                axes.set_ylabel(f"layer {layer}", fontsize=7)
    save(figure, path)
