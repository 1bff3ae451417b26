"""What the overview says of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_utils.common.errors import UserError
from data_utils.common.settings import build
from megatron_lite.config.tree import Config
from megatron_lite.report.render import utc
from megatron_lite.report.run import RunReport
from megatron_lite.report.tables import brief
from megatron_lite.telemetry.formatting import format_count, format_duration, format_percent


def _what(run: RunReport) -> Iterator[tuple[str, str]]:
    """What was trained, on what, and how."""
    corpora = run.setting("data.train")
    task = [run.setting(f"task.{key}") for key in ("name", "kind", "train", "sequence_length")]
    if task[0] is not None:
        yield "task", f"{task[0]} ({task[1]})"
        corpora, length = [{"prefix": task[2]}], task[3]
    else:
        with suppress(UserError):  # of another version
            choices = build(Config, run.config).objective_choices
            shares = (f"{one.name} {one.weight:g}" if len(choices) > 1 else one.name for one in choices)
            yield "objective", ", ".join(shares)
        length = run.setting("data.sequence_length")
    if isinstance(corpora, list):
        names = [Path(str(each.get("prefix"))).name for each in corpora if isinstance(each, Mapping)]
        yield "training data", ", ".join(names)
    kind, path = run.setting("tokenizer.kind"), run.setting("tokenizer.path")
    if kind is not None:
        yield "tokenizer", f"{kind}, {Path(str(path)).name}"
    batch, rate = run.setting("batch.global_batch_size"), run.setting("optimizer.lr")
    for name, value in (("sequence length", length), ("batch, samples", batch), ("peak learning rate", rate)):
        if value is not None:
            yield name, str(value)


def facts(run: RunReport) -> Iterator[tuple[str, str]]:
    """The rows of the overview: (name, text)."""
    records = run.records
    start = records.starts[-1] if records.starts else {}
    yield from _what(run)
    steps = run.setting("training.steps")
    yield "trained", f"step {records.last_step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    for label, kind in (("training loss", "train"), ("validation loss", "validation")):
        if (curve := records.curve(kind, "loss")) is not None:
            step, lowest = curve.lowest
            yield label, f"{curve.last.value:.4f}, lowest {lowest:.4f} at step {step:,}"
    if (curve := records.curve("validation", "perplexity")) is not None:
        yield "perplexity", f"{curve.last.value:.4g}"
    if (curve := records.curve("scores", "score")) is not None:
        step, best = curve.highest
        yield "score", f"{curve.last.value:.4f}, best {best:.4f} at step {step:,}"
    counted, at = _counted(run)
    for name, key in (("training tokens", "consumed_tokens"), ("samples", "consumed_samples")):
        if isinstance(value := counted.get(key), int):
            yield name, f"{value:,}" + ("" if at == records.last_step else f" at step {at:,}")
    if (curve := records.curve("train", "tokens_per_second")) is not None:
        yield "tokens/s, mean", format_count(curve.mean)
    if (share := _share(run)) is not None:
        yield share
    if records.first_time is not None:
        yield "first and last record", f"{utc(records.first_time)} to {utc(records.last_time)}"
        yield "training time, pauses excluded", format_duration(records.seconds)
    yield "restarts", f"{max(records.num_starts - 1, int_or_0(run.state.get('restarts'))):,}"
    yield "skipped steps (non-finite gradients)", f"{int_or_0(records.last_train.get('skipped_steps')):,}"
    for name in ("parameters", "processes"):
        if isinstance(start.get(name), int):
            yield name, f"{start[name]:,}"
    for name in ("layout", "device", "program"):
        if name in start:
            yield name, brief(start[name])


def _counted(run: RunReport) -> tuple[dict[str, Any], int]:
    """The counts of consumed samples and tokens and their step: from the last record, or from a later checkpoint."""
    recorded = run.records.last_train, int_or_0(run.records.last_train.get("step"))
    saved = run.state, run.checkpoints[0].step if run.checkpoints else 0
    return saved if run.state and recorded[1] < saved[1] <= run.records.last_step else recorded


def _share(run: RunReport) -> tuple[str, str] | None:
    """The mean of the utilization that the run reports: of the measured peak, or MFU."""
    share, machine = (run.records.curve("train", name) for name in ("machine_share", "machine_tflops"))
    if share is not None and machine is not None:
        return (
            "share of the measured peak, mean",
            f"{format_percent(share.mean)}; peak measured during the run: {machine.last.value:.3g} TFLOP/s per rank",
        )
    mfu = run.records.curve("train", "mfu")
    return None if mfu is None else ("MFU, mean", format_percent(mfu.mean))


def int_or_0(value: Any) -> int:
    return value if isinstance(value, int) else 0
