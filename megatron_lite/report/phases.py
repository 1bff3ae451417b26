"""The table of a run's phases: how much text each reads, with which batches and rates, and the time that it took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from data_utils.common.errors import UserError
from data_utils.common.settings import build
from data_utils.loader.extent_ahead import extent_if_here
from megatron_lite.config.tree import Config
from megatron_lite.metrics.formatting import format_count, format_duration
from megatron_lite.report.html import Html, table
from megatron_lite.report.run import RunReport
from megatron_lite.train.lr_schedule import step_rate

HEAD: list[object] = [
    "phase",
    "steps",
    "trained",
    "samples' tokens",
    "corpora",
    "batch",
    "learning rate",
    "tokens/s",
    "time",
]


def phase_table(run: RunReport) -> Iterator[Html]:
    """Nothing for a run of one phase, or one whose settings this version does not read."""
    try:
        config = build(Config, run.config)
    except UserError:
        return
    phase_plan = config.phase_plan
    if len(phase_plan.configs) == 1:
        return
    samples = phase_plan.consumed(config.training.steps)
    try:
        drawn = phase_plan.largest_batch, config.objective_choices, phase_plan.samples
        reading = list(extent_if_here(config.data, config.training.seed, samples, *drawn))
    except UserError as error:
        reading = [str(error)]
    speed = run.records.curve("train", "tokens_per_second")
    rows: list[list[object]] = []
    for number, of_phase in enumerate(phase_plan.configs, start=1):
        first, end = phase_plan.first_steps[number - 1 : number + 1]
        trained = min(max(0, run.records.last_step - first), end - first)
        length = of_phase.data.sequence_length
        tokens = [
            (phase_plan.consumed(step) - phase_plan.consumed(first)) * length
            for step in (first + trained, end)
        ]
        sizes = sorted({phase_plan.batch_size(first), phase_plan.batch_size(end - 1)})
        rates = dict.fromkeys(f"{step_rate(of_phase, phase_plan, step):.3g}" for step in (first + 1, end))
        found = [point.value for point in speed.points() if first < point.step <= end] if speed else []
        pace = statistics.mean(found) if found else 0.0
        begin = f"phase {number} reads "
        texts = [line.removeprefix(begin) for line in reading if line.startswith(begin)]
        rows.append(
            [
                f"{number}: {phase_plan.phases[number - 1]}",
                f"{first + 1:,} to {end:,}",
                f"{trained:,}",
                f"{tokens[1]:,}",
                texts[0].partition(": ")[2] if texts else "-",
                " to ".join(f"{size:,}" for size in sizes),
                " to ".join(rates),
                format_count(pace) if pace else "-",
                format_duration(tokens[0] / pace) if pace else "-",
            ]
        )
    yield table(HEAD, rows)
