"""`--dry-run`: what a layout needs and reaches, and the fastest layout of those that fit, by counts and formulas.

Every possible layout is estimated like the given one, which is a candidate itself. Nothing is computed, so the answer
needs neither GPU nor data.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from megatron_lite.config.tree import Config
from megatron_lite.estimate.gpus import HOST, Gpu
from megatron_lite.estimate.rows import Rows, average_rows
from megatron_lite.estimate.step_estimate import RESERVED_GIB, Estimate, estimate
from megatron_lite.model.build import model_spec

MOST_MICRO_BATCH = 64
Phase = tuple[Config, Rows, Estimate]  # a phase as a run of its own, and what its layout needs
LOSS_ROWS = 2048  # of logits at a time: sixteen tiles of rows, so that few waves are not full
MOST_CHANGE = 1.0  # of the samples of a step, in a proposal
_WIDTH, _INDENT = 116, 18  # of a line of the report, and of what goes on below it


@dataclass(frozen=True)
class ParallelLayout:
    """The settings of a configuration that a search may change."""

    tensor: int
    pipeline: int
    zero: int
    recompute: str
    micro_batch: int

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1

    def applied(self, config: Config) -> Config:
        """Raises ConfigError if it does not fit the model or the batch."""
        return replace(
            config,
            parallel=replace(
                config.parallel,
                tensor_parallel_size=self.tensor,
                pipeline_parallel_size=self.pipeline,
                zero_stage=self.zero,
                sequence_parallel=self.sequence_parallel,
            ),
            training=replace(config.training, recompute=self.recompute),
            batch=replace(config.batch, micro_batch_size=self.micro_batch),
        )

    def settings(self) -> str:
        """As they are written on a command line."""
        parallel = (
            f"parallel.tensor_parallel_size={self.tensor} parallel.pipeline_parallel_size={self.pipeline}"
        )
        sequence = f" parallel.sequence_parallel={str(self.sequence_parallel).lower()}"
        rest = f"training.recompute={self.recompute} batch.micro_batch_size={self.micro_batch}"
        return f"{parallel}{sequence} parallel.zero_stage={self.zero} {rest}"


def possible_layouts(config: Config, processes: int) -> Iterator[ParallelLayout]:
    """Layouts that divide the processes, the model and the batch."""
    model, batch = config.model, config.batch.global_batch_size
    sizes = [size for size in (1, 2, 4, 8) if model.num_attention_heads % size == 0]
    stages = [size for size in range(1, model.total_layers // 2 + 1) if processes % size == 0] or [1]
    rows = [2**i for i in range(MOST_MICRO_BATCH.bit_length())]
    rows = sorted({*rows, config.batch.micro_batch_size})
    for tensor, pipeline in itertools.product(sizes, stages):
        if processes % (tensor * pipeline) or (pipeline > 1 and model.share_layers != "none"):
            continue
        dp = processes // (tensor * pipeline)
        for recompute, micro in itertools.product(("none", "full"), rows):
            if batch % (dp * micro) == 0:
                # Pipeline stages support ZeRO 1 only.
                for zero in (1,) if pipeline > 1 else (1, 2):
                    yield ParallelLayout(tensor, pipeline, zero, recompute, micro)


def advise(
    config: Config, processes: int, gpu: Gpu, rows: Rows, given: Estimate
) -> tuple[ParallelLayout | None, Estimate] | None:
    """The layout with the shortest step of those that fit; None if none fits.

    The given layout, which the result names by None, stays unless another one is faster whether communication overlaps
    or not, or it does not fit itself.

    Args: given: the estimate of the configuration's own layout.
    """
    found: list[tuple[ParallelLayout | None, Estimate]] = []
    for layout in possible_layouts(config, processes):
        try:
            other = estimate(layout.applied(config), processes, gpu, rows)
        except ConfigError:  # rows that tensor parallelism does not divide, and the like
            continue
        if other.fits(gpu) and (not given.fits(gpu) or _is_faster(other, given)):
            found.append((layout, other))
    if given.fits(gpu):
        found.insert(0, (None, given))
    return min(found, key=lambda pair: pair[1].step_ms) if found else None


def for_all(
    phases: Sequence[Phase],
    advised: Sequence[tuple[ParallelLayout | None, Estimate] | None],
    processes: int,
    gpu: Gpu,
) -> str:
    """Which phase's advice on what all phases share makes the run shortest, each phase with its own micro-batch."""

    def hours(chosen: ParallelLayout) -> float:
        found, sizes = 0.0, set()
        for (config, rows, _), best in zip(phases, advised, strict=True):
            # Micro-batches may differ between phases, layouts and recomputation may not.
            own = None if best is None else best[0]
            micro = config.batch.micro_batch_size if own is None else own.micro_batch
            try:
                one = estimate(replace(chosen, micro_batch=micro).applied(config), processes, gpu, rows)
            except ConfigError:
                return math.inf
            sizes.add((micro, config.row_length))
            found += one.step_ms * config.training.steps / 3600e3 if one.fits(gpu) else math.inf
        return found if chosen.pipeline == 1 or len(sizes) == 1 else math.inf

    found = [(hours(best[0]), number) for number, best in enumerate(advised, 1) if best and best[0]]
    least, number = min(found, default=(math.inf, 0))
    given = [one.step_ms * config.training.steps / 3600e3 for config, _, one in phases if one.fits(gpu)]
    if len(given) == len(phases) and sum(given) <= least:
        return f"keep this layout: at most {sum(given):.3g} hours."
    if least == math.inf:
        return (
            f"no layout recommended for one phase fits all phases on {processes} x {gpu.name}; use more GPUs."
        )
    return (
        f"parallel.* and training.recompute as recommended for phase {number}, batch.micro_batch_size in "
        f"the batch of each phase: at most {least:.3g} hours."
    )


def fuller(
    config: Config, processes: int, gpu: Gpu, rows: Rows, given: Estimate
) -> tuple[str, Estimate] | None:
    """The micro-batch, or shorter rows, whose products fill whole waves of tiles: settings, and their estimate.

    Most change what a step learns from (`is_same_recipe`), so that they are proposed and not advised. None if nothing
    is 3 % faster.

    Args: given: the estimate of the configuration's own.
    """
    dp, batch = config.parallel.data_parallel_size(processes), config.batch
    lengths = {config.data.sequence_length: (config, rows)}
    # A little shorter rows may end at a border of waves.
    for share in (0.98, 0.96, 0.94):
        length = int(share * config.data.sequence_length)
        shorter = replace(config, data=replace(config.data, sequence_length=length))
        lengths[length] = shorter, average_rows(shorter)
    found: list[tuple[dict[str, int], Estimate]] = []
    for length, (one, its_rows) in lengths.items():
        for micro in range(1, MOST_MICRO_BATCH + 1):
            samples = max(1, round(batch.global_batch_size / dp / micro)) * dp * micro
            sized = replace(one, batch=replace(batch, micro_batch_size=micro, global_batch_size=samples))
            other = estimate(sized, processes, gpu, its_rows)
            if not other.fits(gpu):
                break  # more rows need more memory
            if abs(samples / batch.global_batch_size - 1) <= MOST_CHANGE:
                sized_as = {"batch.micro_batch_size": micro, "batch.global_batch_size": samples}
                found.append(({**sized_as, "data.sequence_length": length}, other))
    settings, best = max(found, key=lambda pair: _rate(pair[1]), default=({}, given))
    if _rate(best) <= 1.03 * _rate(given):
        return None
    own = (batch.micro_batch_size, batch.global_batch_size, config.data.sequence_length)
    changed = [f"{key}={new}" for (key, new), old in zip(settings.items(), own, strict=True) if new != old]
    return " ".join(changed), best


def is_same_recipe(settings: str, config: Config) -> bool:
    """Whether steps learn the same with the settings of `fuller`. A mean over micro-batches depends on their size."""
    return (
        "batch.global_batch_size" not in settings
        and "data.sequence_length" not in settings
        and config.training.loss_normalization != "mean_of_means"
    )


def in_parts(
    config: Config, processes: int, gpu: Gpu, rows: Rows, given: Estimate
) -> tuple[str, Estimate] | None:
    """`training.loss_rows` where it saves a tenth of the memory: the setting, and the estimate. None elsewhere."""
    if config.training.loss_rows:
        return None
    try:
        parts = replace(config, training=replace(config.training, loss_rows=LOSS_ROWS))
    except ConfigError:  # an objective with a model of its own
        return None
    other = estimate(parts, processes, gpu, rows)
    return (f"training.loss_rows={LOSS_ROWS}", other) if other.peak_gib < 0.9 * given.peak_gib else None


def _rate(found: Estimate) -> float:
    """Tokens in a millisecond."""
    return found.tokens / found.step_ms


def _is_faster(one: Estimate, other: Estimate) -> bool:
    # Both times, with communication hidden and not: the output shows both, so neither may grow.
    return one.step_ms < other.step_ms and one.busy_ms <= other.busy_ms


def dry_run_report(config: Config, processes: int, gpu: Gpu, found: Estimate) -> str:
    """A layout in words, for a terminal."""
    parallel, peak = config.parallel, found.peak
    dp = parallel.data_parallel_size(processes)
    passes = config.batch.accumulation_steps(dp)
    room = "fits" if found.fits(gpu) else "DOES NOT FIT"
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in vars(peak).items() if size)
    return "\n".join(
        folded(line)
        for line in [
            f"parameters        {model_spec(config).count(config):,}; {found.rank_parameters:,} on the largest "
            "rank",
            f"layout            {processes} processes: pipeline {parallel.pipeline_parallel_size} x data {dp} "
            f"x tensor {parallel.tensor_parallel_size}, ZeRO {parallel.zero_stage}, recompute "
            f"{config.training.recompute}, {passes} micro-batch{'es' * (passes > 1)} of "
            f"{config.batch.micro_batch_size} x {config.row_length} tokens per step",
            f"device            {gpu.describe()}; host overhead {HOST.operation_us:g} us per operation and "
            f"{HOST.row_us:g} us per sequence of 512 tokens",
            f"memory            {found.peak_gib:.2f} GiB peak on the largest rank ({parts}); with "
            f"{RESERVED_GIB:g} GiB for CUDA, NCCL and fragmentation it\N{NO-BREAK SPACE}{room} "
            f"{gpu.memory_gib:g} GiB",
            f"step              {found.tokens:,.0f} tokens, padding {found.padding:.1%} to {found.lengths}; "
            f"GPU {found.roofline_ms:,.0f} ms, host {found.host_ms:,.0f} ms for {found.launches:,.0f} "
            f"operations, communication {sum(found.communication_ms.values()):,.0f} ms",
            _speed(config, gpu, found),
        ]
    )


def folded(line: str) -> str:
    """A line of a report, broken where a terminal ends. What a no-break space joins stays in one line."""
    indent = " " * _INDENT
    text = textwrap.fill(
        line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return text.replace("\N{NO-BREAK SPACE}", " ")


def _speed(config: Config, gpu: Gpu, found: Estimate) -> str:
    """Tokens/s and MFU if all communication overlaps, and if none does."""
    least = found.step_ms
    slow, fast = (found.tokens / ms * 1e3 for ms in (least, found.busy_ms))
    hours = config.training.steps * least / 3600e3
    duration = (
        f"{hours / 24:.3g} days"
        if hours >= 48
        else f"{hours:.3g} hours"
        if hours >= 2
        else f"{hours * 60:.3g} minutes"
    )
    return (
        f"speed             {slow:,.0f} to {fast:,.0f} tokens/s, MFU {found.mfu_without_overlap(gpu):.1%} "
        f"to {found.mfu(gpu):.1%} without and with full overlap of communication; "
        f"{config.training.steps:,} steps take at most {duration}"
    )
