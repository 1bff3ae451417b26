"""The losses of a run as a picture: RUN_DIRECTORY/metrics.jsonl drawn with matplotlib.

Left: training and validation loss. Right: validation loss of each objective. Dotted: the unigram model, if
RUN_DIRECTORY/unigram.json exists (scripts/quickstart/unigram_baseline.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files, needs no display
from matplotlib import pyplot
from matplotlib.axes import Axes

from data_utils.common.errors import DataError
from data_utils.common.files import write_picture

COLORS = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
DOTTED: dict[str, Any] = {"linestyle": ":", "linewidth": 1.5}
GREY = "0.4"


def plot_losses(records: Sequence[Mapping[str, Any]], unigram: Mapping[str, float], output: Path) -> None:
    """Draw the losses of a run to `output`. Raises DataError without a training step or if writing fails."""
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    if not train:
        raise DataError("metrics.jsonl has no training step yet; train for at least run.log_interval steps.")
    figure, (total_axes, objective_axes) = pyplot.subplots(
        1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
    )
    draw_total(total_axes, train, validation, unigram)
    draw_objectives(objective_axes, validation, unigram)
    for axes in (total_axes, objective_axes):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_lines():
            axes.legend()
    total_axes.set_ylabel(f"loss, nats per {'sentence' if 'beta' in train[-1] else 'token'}")
    write_picture(output, figure, "--output", dpi=120)
    pyplot.close(figure)


def draw_total(
    axes: Axes,
    train: Sequence[Mapping[str, Any]],
    validation: Sequence[Mapping[str, Any]],
    unigram: Mapping[str, float],
) -> None:
    axes.set_title("all objectives")
    axes.plot(*series(train, "loss"), label="training", color=COLORS[0], alpha=0.8)
    if validation:
        axes.plot(*series(validation, "loss"), label="validation", color=COLORS[1], marker="o")
    if "loss" in unigram:
        axes.axhline(unigram["loss"], label="unigram", color=GREY, **DOTTED)


def draw_objectives(
    axes: Axes, validation: Sequence[Mapping[str, Any]], unigram: Mapping[str, float]
) -> None:
    axes.set_title("validation by objective")
    names = dict.fromkeys(name for record in validation for name in record if name.startswith("loss/"))
    for color, name in zip(COLORS, names, strict=False):
        axes.plot(*series(validation, name), label=name.removeprefix("loss/"), color=color, marker="o")
        if name in unigram:
            axes.axhline(unigram[name], color=color, **DOTTED)
    if unigram:
        axes.plot([], [], label="unigram", color=GREY, **DOTTED)


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have `name`, without null, which stands for infinite values."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
