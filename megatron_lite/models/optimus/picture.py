"""A picture of a latent space: positions of sentences, and the divergence of each component."""

# N sentences, P components of the latent vector

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes

from data_utils.common.files import write_picture
from megatron_lite.models.optimus.metrics import active_units

MOST_CLASSES = 9  # with a colour of their own
MOST_NUMBERS = 40  # of components below their bars
ACTIVE, INACTIVE, OTHER = "C0", "0.8", "0.6"


def plane(mu: torch.Tensor, axes: tuple[int, int] | None) -> tuple[torch.Tensor, list[str]]:
    """Places [N, 2] of the sentences, and the names of both axes: two components, or the first principal ones.

    The sign of a principal component is such that its largest weight is positive. With P = 1 the second axis is 0.
    """
    if axes is not None:
        return mu[:, list(axes)], [f"component {axis}" for axis in axes]
    centred = mu - mu.mean(0)
    _, deviations, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:2]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    places = centred @ (directions * largest.sign()).T
    shares = deviations.square() / deviations.square().sum().clamp(min=torch.finfo(mu.dtype).tiny)
    names = [f"principal component {i + 1} ({shares[i]:.0%} of variance)" for i in range(len(directions))]
    if len(directions) == 1:
        return torch.cat([places, torch.zeros_like(places)], 1), [*names, ""]
    return places, names


def draw(
    path: Path,
    mu: torch.Tensor,
    divergence: torch.Tensor,
    labels: Sequence[str] | None = None,
    axes: tuple[int, int] | None = None,
) -> None:
    """Left: sentences by their mu, coloured by label. Right: mean divergence of each component, the largest first.

    Args:
        mu, divergence: [N, P], N at least 2.
        axes: numbers of two components, instead of principal ones.
    Raises: DataError if the file cannot be written.
    """
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    places, names = plane(mu, axes)
    draw_sentences(left, places, labels)
    left.set_xlabel(names[0])
    left.set_ylabel(names[1])
    draw_components(right, divergence.mean(0), active_units(mu))
    write_picture(path, figure, "--picture", dpi=130)
    pyplot.close(figure)


def draw_sentences(axes: Axes, places: torch.Tensor, labels: Sequence[str] | None) -> None:
    axes.set_title(f"{len(places)} sentences")
    axes.grid(alpha=0.3)
    if labels is None:
        axes.scatter(places[:, 0], places[:, 1], s=9, alpha=0.6, linewidths=0)
        return
    common = [label for label, _ in Counter(labels).most_common(MOST_CLASSES)]
    shown = [label if label in common else None for label in labels]
    for label in dict.fromkeys([None, *sorted(common)]):
        own = places[[i for i, one in enumerate(shown) if one == label]]
        if len(own):
            colour = OTHER if label is None else f"C{sorted(common).index(label)}"
            name = "others" if label is None else label
            axes.scatter(own[:, 0], own[:, 1], s=9, alpha=0.6, linewidths=0, color=colour, label=name)
    axes.legend(markerscale=2)


def draw_components(axes: Axes, divergence: torch.Tensor, active: torch.Tensor) -> None:
    order = divergence.argsort(descending=True)
    colours = [ACTIVE if flag else INACTIVE for flag in active[order].tolist()]
    axes.bar(range(len(order)), divergence[order].tolist(), color=colours, width=0.9)
    axes.set_title(f"{int(active.sum())} of {len(active)} components are active")
    axes.set_xlabel("component, by its divergence")
    axes.set_ylabel("mean divergence from the prior (nats)")
    if len(order) <= MOST_NUMBERS:
        axes.set_xticks(range(len(order)), map(str, order.tolist()))
    axes.grid(alpha=0.3, axis="y")
