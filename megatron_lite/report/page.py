"""One HTML page about one or several runs. It needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from megatron_lite.report.facts import facts
from megatron_lite.report.minimal_pairs import pair_charts
from megatron_lite.report.phases import phases
from megatron_lite.report.render import render, utc
from megatron_lite.report.run import RunReport
from megatron_lite.report.run_charts import loss_unit, restarts, run_charts
from megatron_lite.report.tables import checkpoints, corpora, events, fillings, scores, settings, side_by_side

MAX_RUNS = 8  # as many as there are colours

TABLES = {
    "scores": scores, "fillings": fillings, "events": events, "phases": phases, "corpora": corpora,
    "checkpoints": checkpoints,
}  # fmt: skip


def page(runs: Sequence[RunReport], made_at: float) -> str:
    """The page. Args: made_at: Unix time."""
    return render(
        "training.html",
        title=f"Training report: {', '.join(run.name for run in runs)}",
        made_at=utc(made_at),
        runs=runs,
        overview=side_by_side([(run.name, dict(facts(run))) for run in runs]),
        has_restarts=bool(restarts(runs)),
        loss_unit=loss_unit(runs),
        charts=run_charts(runs),
        tables={name: [(run.name, tables(run)) for run in runs] for name, tables in TABLES.items()},
        minimal_pairs=[(run.name, pair_charts(run)) for run in runs],
        settings=settings(runs),
        configurations=[
            (run.name, yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
            for run in runs
            if run.config
        ],
    )
