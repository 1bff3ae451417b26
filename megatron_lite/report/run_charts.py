"""The charts of runs: which numbers, on which scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from data_utils.common.setting_files import shorten
from data_utils.tasks.metrics.metrics_by_task import is_cost
from megatron_lite.report.charts import Chart, Line
from megatron_lite.report.run import RunReport
from megatron_lite.telemetry.formatting import format_count, format_percent

MAX_TITLE = 60  # characters

four_digits, three_digits = "{:.4g}".format, "{:.3g}".format


def run_charts(runs: Sequence[RunReport]) -> dict[str, list[Chart]]:
    """The charts of each section of the page."""
    sections = {
        "loss": _loss(runs),
        "scores": _scores(runs),
        "latent": _latent(runs),
        "optimization": _optimization(runs),
        "speed": _speed(runs),
    }
    return {name: [chart for chart in charts if chart.lines] for name, charts in sections.items()}


def loss_unit(runs: Sequence[RunReport]) -> str:
    """Of a task as its kind has it; per sentence for OPTIMUS, whose loss bounds a sentence's likelihood."""
    units = []
    for run in runs:
        kind = run.setting("task.kind")
        if kind is None:
            is_optimus = run.records.curve("train", "beta") is not None
            units.append("nats per sentence" if is_optimus else "nats per token")
        elif kind == "regression":
            units.append("squared error")
        else:
            by_tokens = {"tagging": "word", "seq2seq": "token", "blanks": "token"}
            units.append(f"nats per {by_tokens.get(kind, 'sample')}")
    return " or ".join(dict.fromkeys(units))


def restarts(runs: Sequence[RunReport]) -> list[tuple[int, int]]:
    """(run, step) of each."""
    starts = ((number, start["step"]) for number, run in enumerate(runs) for start in run.records.starts)
    return [(number, step) for number, step in starts if step > 0]


def _lines(
    runs: Sequence[RunReport], kind: str, name: str, label: str = "", thin: bool = False
) -> list[Line]:
    """One line for each run that has the number. Args: label: of the number, in the caption."""
    found = [(number, run, run.records.curve(kind, name)) for number, run in enumerate(runs)]
    names = [", ".join(filter(None, (run.name if len(runs) > 1 else "", label))) for run in runs]
    return [Line(curve, number, names[number], thin) for number, run, curve in found if curve is not None]


def _loss(runs: Sequence[RunReport]) -> list[Chart]:
    curves = [name for kind in ("validation", "train") for run in runs for name in run.records.curves[kind]]
    charts = []
    for name in dict.fromkeys(["loss", *(name for name in curves if name.startswith("loss/"))]):
        lines = _lines(runs, "train", name, "training", thin=True)
        lines += _lines(runs, "validation", name, "validation")
        levels = [
            (number, run.unigram[name], "unigram model")
            for number, run in enumerate(runs)
            if math.isfinite(run.unigram.get(name, math.nan))
        ]
        title = "all objectives" if name == "loss" else shorten(name.removeprefix("loss/"), MAX_TITLE)
        charts.append(Chart(title, lines, four_digits, levels, restarts(runs)))
    return _distinct(charts)


def _distinct(charts: Sequence[Chart]) -> list[Chart]:
    """Each set of curves once: a loss that is the only one, or a metric that is the score, under its own name."""
    found: dict[Any, Chart] = {}
    for chart in charts:
        key = tuple((line.run, line.thin, tuple(line.points)) for line in chart.lines)
        found[key] = replace(found[key], title=chart.title) if key in found else chart
    return list(found.values())


def _scores(runs: Sequence[RunReport]) -> list[Chart]:
    """Metrics of a task's validation, the score that chooses the best checkpoint first."""
    names = dict.fromkeys(["score", *(name for run in runs for name in run.records.curves["scores"])])
    charts = []
    for name in names:
        also = "lowest" if is_cost(name.rpartition("/")[2]) else "highest"
        lines = _lines(runs, "scores", name)
        charts.append(Chart(shorten(name, MAX_TITLE), lines, four_digits, (), restarts(runs), also=also))
    return _distinct(charts)


def _latent(runs: Sequence[RunReport]) -> list[Chart]:
    """Of the latent space, for runs of the objective optimus."""
    measured = (("mutual information, nats", "mutual_information"), ("active units", "active_units"))
    charts = [Chart(title, _lines(runs, "validation", name), four_digits) for title, name in measured]
    return [
        *charts,
        _train(runs, "KL weight (beta)", "beta", three_digits, from_zero=True, also="highest"),
    ]


def _train(
    runs: Sequence[RunReport], title: str, name: str, text: Callable[[float], str], **options: Any
) -> Chart:
    """A chart of one number of the training records. Args: options: further fields of Chart."""
    return Chart(title, _lines(runs, "train", name), text, (), restarts(runs), **options)


def _optimization(runs: Sequence[RunReport]) -> list[Chart]:
    options: dict[str, Any] = {"logarithmic": True, "also": "highest"}
    charts = [
        _train(runs, "learning rate", "lr", three_digits, from_zero=True, also="highest"),
        _train(runs, "gradient norm before clipping", "grad_norm", three_digits, **options),
        _train(runs, "z-loss, not included in the loss", "z_loss", three_digits),
        _train(runs, "highest load of an expert, times the mean", "expert_load_highest", three_digits),
        _train(runs, "lowest load of an expert, times the mean", "expert_load_lowest", three_digits),
        _train(runs, "balance loss of a block, 1 if balanced", "balance_loss", three_digits),
        _train(runs, "z-loss of the routers", "router_z_loss", three_digits),
        _train(runs, "entropy of the routers, nats", "router_entropy", three_digits),
        _train(runs, "range of the experts' biases", "expert_bias_range", three_digits),
    ]
    scales = _train(runs, "loss scale", "loss_scale", "{:g}".format, **options)
    is_constant = all(line.curve.lowest.value == line.curve.highest.value for line in scales.lines)
    return charts if is_constant else [*charts, scales]


def _speed(runs: Sequence[RunReport]) -> list[Chart]:
    options: dict[str, Any] = {"from_zero": True, "also": "mean"}
    memory = {"from_zero": True, "also": "highest"}
    return [
        _train(runs, "tokens per second", "tokens_per_second", format_count, **options),
        _train(runs, "share of the measured peak", "machine_share", format_percent, **options),
        _train(runs, "MFU", "mfu", format_percent, **options),
        _train(runs, "TFLOP/s per device", "tflops_per_device", three_digits, **options),
        _train(runs, "peak memory of rank 0, GiB", "memory_gib", three_digits, **memory),
        _train(runs, "data waiting time, share", "data_share", format_percent, **options),
    ]
