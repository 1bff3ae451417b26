"""The table of a run's phases: tokens, corpora, batch sizes, learning rates, and the time that each took."""

from __future__ import annotations

import statistics

from data_utils.common.errors import UserError
from data_utils.common.settings import build
from data_utils.loader.mixtures_ahead import corpus_report_if_here
from megatron_lite.config.tree import Config
from megatron_lite.report.run import RunReport
from megatron_lite.report.tables import Table
from megatron_lite.telemetry.formatting import format_count, format_duration

HEAD = (
    "phase",
    "steps",
    "trained",
    "samples' tokens",
    "corpora",
    "batch",
    "learning rate",
    "tokens/s",
    "time",
)


def phases(run: RunReport) -> list[Table]:
    """The table; none for a run of one phase, or for settings that this version cannot read."""
    try:
        config = build(Config, run.config)
    except UserError:
        return []
    phase_plan = config.phase_plan
    if len(phase_plan.configs) == 1:
        return []
    samples = phase_plan.consumed(config.training.steps)
    try:
        sampling = phase_plan.largest_batch, config.objective_choices, phase_plan.samples, config.sample_unit
        lines = list(corpus_report_if_here(config.data, config.training.seed, samples, *sampling))
    except UserError as error:
        lines = [str(error)]
    speed = run.records.curve("train", "tokens_per_second")
    rows: list[list[str]] = []
    for number, phase in enumerate(phase_plan.configs, start=1):
        first, end = phase_plan.first_steps[number - 1 : number + 1]
        trained = min(max(0, run.records.last_step - first), end - first)
        length = phase.data.sequence_length
        tokens = [
            (phase_plan.consumed(step) - phase_plan.consumed(first)) * length
            for step in (first + trained, end)
        ]
        sizes = sorted({phase_plan.batch_size(first), phase_plan.batch_size(end - 1)})
        rates = dict.fromkeys(f"{phase_plan.learning_rate(step):.3g}" for step in (first + 1, end))
        speeds = [point.value for point in speed.points() if first < point.step <= end] if speed else []
        tokens_per_second = statistics.mean(speeds) if speeds else 0.0
        prefix = f"phase {number} reads "
        texts = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        rows.append(
            [
                f"{number}: {phase_plan.phases[number - 1]}",
                f"{first + 1:,} to {end:,}",
                f"{trained:,}",
                f"{tokens[1]:,}",
                texts[0].partition(": ")[2] if texts else "-",
                " to ".join(f"{size:,}" for size in sizes),
                " to ".join(rates),
                format_count(tokens_per_second) if tokens_per_second else "-",
                format_duration(tokens[0] / tokens_per_second) if tokens_per_second else "-",
            ]
        )
    return [Table(HEAD, rows)]
