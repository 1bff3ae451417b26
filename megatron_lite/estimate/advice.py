"""The fastest layout that fits, for `--dry-run`.

Every possible layout is estimated like the current one, which is a candidate too. Nothing is computed, so the search
needs neither GPU nor data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from megatron_lite.config.tree import Config
from megatron_lite.estimate.average_sequence import AverageSequence, average_sequence
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.step_estimate import Estimate, estimate

MOST_MICRO_BATCH = 64
Phase = tuple[Config, AverageSequence, Estimate]  # a phase as a separate run, and its estimate
LOSS_ROWS = 2048  # positions of a chunk of logits: sixteen tiles, so that most waves are full
MOST_CHANGE = 1.0  # relative change of a step's samples in a proposal


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
        """As arguments of a command line."""
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
    micro_batches = [2**i for i in range(MOST_MICRO_BATCH.bit_length())]
    micro_batches = sorted({*micro_batches, config.batch.micro_batch_size})
    for tensor, pipeline in itertools.product(sizes, stages):
        if processes % (tensor * pipeline) or (pipeline > 1 and model.share_layers != "none"):
            continue
        dp = processes // (tensor * pipeline)
        for recompute, micro in itertools.product(("none", "full"), micro_batches):
            if batch % (dp * micro) == 0:
                # Pipeline stages support ZeRO 1 only.
                for zero in (1,) if pipeline > 1 else (1, 2):
                    yield ParallelLayout(tensor, pipeline, zero, recompute, micro)


def advise(
    config: Config, processes: int, gpu: Gpu, sequence: AverageSequence, current: Estimate
) -> tuple[ParallelLayout | None, Estimate] | None:
    """The layout with the shortest step of those that fit; None if none fits.

    The current layout, which the result names by None, stays unless it does not fit, or another one is faster both
    with and without overlap of communication.

    Args: current: the estimate of the configuration's layout.
    """
    candidates: list[tuple[ParallelLayout | None, Estimate]] = []
    for layout in possible_layouts(config, processes):
        try:
            other = estimate(layout.applied(config), processes, gpu, sequence)
        except ConfigError:  # for example lengths that tensor parallelism does not divide
            continue
        if other.fits(gpu) and (not current.fits(gpu) or _is_faster(other, current)):
            candidates.append((layout, other))
    if current.fits(gpu):
        candidates.insert(0, (None, current))
    return min(candidates, key=lambda candidate: candidate[1].step_ms) if candidates else None


def advise_for_all_phases(
    phases: Sequence[Phase],
    advised: Sequence[tuple[ParallelLayout | None, Estimate] | None],
    processes: int,
    gpu: Gpu,
) -> str:
    """Advice for a run of several phases, which share a layout: the phase's layout that makes the whole run shortest.

    Each phase keeps the micro-batch of its own advice.
    """

    def hours(layout: ParallelLayout) -> float:
        total, sizes = 0.0, set()
        for (config, sequence, _), best in zip(phases, advised, strict=True):
            # Micro-batches may differ between phases, layouts and recomputation may not.
            phase_layout = None if best is None else best[0]
            micro = config.batch.micro_batch_size if phase_layout is None else phase_layout.micro_batch
            try:
                phase = estimate(replace(layout, micro_batch=micro).applied(config), processes, gpu, sequence)
            except ConfigError:
                return math.inf
            sizes.add((micro, config.row_length))
            total += phase.step_ms * config.training.steps / 3600e3 if phase.fits(gpu) else math.inf
        return total if layout.pipeline == 1 or len(sizes) == 1 else math.inf  # a pipeline has one size

    candidates = [(hours(best[0]), number) for number, best in enumerate(advised, 1) if best and best[0]]
    least, number = min(candidates, default=(math.inf, 0))
    current = [
        phase.step_ms * config.training.steps / 3600e3 for config, _, phase in phases if phase.fits(gpu)
    ]
    if len(current) == len(phases) and sum(current) <= least:
        return f"keep this layout: at most {sum(current):.3g} hours."
    if least == math.inf:
        return (
            f"no layout recommended for one phase fits all phases on {processes} x {gpu.name}; use more GPUs."
        )
    return (
        f"parallel.* and training.recompute as recommended for phase {number}, batch.micro_batch_size in "
        f"the batch of each phase: at most {least:.3g} hours."
    )


def propose_full_waves(
    config: Config, processes: int, gpu: Gpu, sequence: AverageSequence, current: Estimate
) -> tuple[str, Estimate] | None:
    """A micro-batch, or shorter sequences, whose products fill whole waves of tiles: settings, and their estimate.

    Most of them change the training (`is_same_recipe`), so they are proposed and not advised. None if nothing is 3 %
    faster.

    Args: current: the estimate of the configuration.
    """
    dp, batch = config.parallel.data_parallel_size(processes), config.batch
    lengths = {config.data.sequence_length: (config, sequence)}
    # Slightly shorter sequences may fill whole waves.
    for share in (0.98, 0.96, 0.94):
        length = int(share * config.data.sequence_length)
        shorter = replace(config, data=replace(config.data, sequence_length=length))
        lengths[length] = shorter, average_sequence(shorter)
    candidates: list[tuple[dict[str, int], Estimate]] = []
    for length, (config_of_length, sequence_of_length) in lengths.items():
        for micro in range(1, MOST_MICRO_BATCH + 1):
            samples = max(1, round(batch.global_batch_size / dp / micro)) * dp * micro
            sized = replace(
                config_of_length,
                batch=replace(batch, micro_batch_size=micro, global_batch_size=samples),
            )
            other = estimate(sized, processes, gpu, sequence_of_length)
            if not other.fits(gpu):
                break  # a larger micro-batch needs more memory
            if abs(samples / batch.global_batch_size - 1) <= MOST_CHANGE:
                settings = {"batch.micro_batch_size": micro, "batch.global_batch_size": samples}
                candidates.append(({**settings, "data.sequence_length": length}, other))
    settings, best = max(candidates, key=lambda candidate: _rate(candidate[1]), default=({}, current))
    if _rate(best) <= 1.03 * _rate(current):
        return None
    values = (batch.micro_batch_size, batch.global_batch_size, config.data.sequence_length)
    changed = [f"{key}={new}" for (key, new), old in zip(settings.items(), values, strict=True) if new != old]
    return " ".join(changed), best


def is_same_recipe(settings: str, config: Config) -> bool:
    """Whether training is the same with the settings of `propose_full_waves`."""
    # mean_of_means: a mean over micro-batches depends on their size.
    return (
        "batch.global_batch_size" not in settings
        and "data.sequence_length" not in settings
        and config.training.loss_normalization != "mean_of_means"
    )


def propose_loss_chunks(
    config: Config, processes: int, gpu: Gpu, sequence: AverageSequence, current: Estimate
) -> tuple[str, Estimate] | None:
    """`training.loss_rows` where it saves a tenth of the memory: the setting, and the estimate. None otherwise."""
    if config.training.loss_rows:
        return None
    try:
        chunked = replace(config, training=replace(config.training, loss_rows=LOSS_ROWS))
    except ConfigError:  # objectives with another model refuse it
        return None
    other = estimate(chunked, processes, gpu, sequence)
    return (f"training.loss_rows={LOSS_ROWS}", other) if other.peak_gib < 0.9 * current.peak_gib else None


def _rate(one: Estimate) -> float:
    """Tokens per millisecond."""
    return one.tokens / one.step_ms


def _is_faster(one: Estimate, other: Estimate) -> bool:
    # Both times, with communication hidden and not: the output shows both, so neither may grow.
    return one.step_ms < other.step_ms and one.busy_ms <= other.busy_ms
