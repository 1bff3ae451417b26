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
from megatron_lite.estimate.average_sequence import AverageSequence
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.step_estimate import EFFICIENCY, Estimate, estimate

MOST_MICRO_BATCH = 64
Phase = tuple[Config, AverageSequence, Estimate]  # a phase as a separate run, and its estimate
LOSS_ROWS = 2048  # positions of a chunk of logits: sixteen tiles of a product
COARSE = 1.1  # times within this factor count as equal: the estimate knows no kernels


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
    config: Config,
    processes: int,
    gpu: Gpu,
    sequence: AverageSequence,
    current: Estimate,
    efficiency: float = EFFICIENCY,
) -> tuple[ParallelLayout | None, Estimate] | None:
    """The simplest of the layouts that fit and are about as fast as the fastest; None if none fits.

    The current layout, which the result names by None, stays unless it does not fit or another one is clearly faster.

    Args: current: the estimate of the configuration's layout.
    """
    found: list[tuple[ParallelLayout, Estimate]] = []
    for layout in possible_layouts(config, processes):
        try:
            other = estimate(layout.applied(config), processes, gpu, sequence, efficiency)
        except ConfigError:  # for example lengths that tensor parallelism does not divide
            continue
        if other.fits(gpu):
            found.append((layout, other))
    steps = [one.step_ms for _, one in found]
    if current.fits(gpu) and current.step_ms <= COARSE * min(steps, default=math.inf):
        return None, current
    near = [one for one in found if one[1].step_ms <= COARSE * min(steps)]
    # Few ranks that wait for each other, and large micro-batches, which reach more of the peak.
    return min(
        near,
        key=lambda one: (one[0].tensor * one[0].pipeline, one[0].tensor, -one[0].micro_batch, one[1].step_ms),
        default=None,
    )


def advise_for_all_phases(
    phases: Sequence[Phase],
    advised: Sequence[tuple[ParallelLayout | None, Estimate] | None],
    processes: int,
    gpu: Gpu,
    efficiency: float = EFFICIENCY,
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
                applied = replace(layout, micro_batch=micro).applied(config)
                phase = estimate(applied, processes, gpu, sequence, efficiency)
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
        return f"keep this layout: about {sum(current):.3g} hours."
    if least == math.inf:
        return (
            f"no layout recommended for one phase fits all phases on {processes} x {gpu.name}; use more GPUs."
        )
    return (
        f"parallel.* and training.recompute as recommended for phase {number}, batch.micro_batch_size in "
        f"the batch of each phase: about {least:.3g} hours."
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
