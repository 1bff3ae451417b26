"""`--dry-run`: memory and speed of a layout, from the trace of its ranks, and the fastest layout that fits.

Formulas choose which of the possible layouts are worth a trace: they leave out what cannot fit, and order the rest by
an estimate of time. The trace decides. Nothing is computed, so the answer needs neither GPU nor data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.base.settings import build, merge, to_tree
from megatron_lite.config.tree import Config
from megatron_lite.model.trunk.counts import parameter_count, step_flops
from megatron_lite.profile.gpus import GPUS_OF_A_NODE, Gpu
from megatron_lite.profile.request import Profile, Request, profiles

RESERVED_GIB = 3.0  # for CUDA, NCCL and fragmentation, which no trace shows
TRACED_AT_ONCE, ROUNDS = 2, 4  # layouts; until one fits
MOST_MICRO_BATCH = 64
FILLED = 0.96  # share of a row's tokens that are not padding (docs/log.md)
# The formulas that order layouts: share of the peak that large matmuls reach, and tolerated excess of estimated memory.
_REACHED, _TOLERANCE = 0.5, 1.25


@dataclass(frozen=True)
class Layout:
    """The settings that the search for a layout varies."""

    tensor: int
    pipeline: int
    zero: int
    recompute: str
    micro_batch: int

    @property
    def sequence_parallel(self) -> bool:
        return self.tensor > 1

    def applied(self, config: Config) -> Config:
        """The configuration in this layout. Raises: ConfigError if the layout does not fit the model or the batch."""
        changes = {
            "parallel": {
                "tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline, "zero_stage": self.zero,
                "sequence_parallel": self.sequence_parallel,
            },
            "training": {"recompute": self.recompute},
            "batch": {"micro_batch_size": self.micro_batch},
        }  # fmt: skip
        return build(Config, merge(to_tree(config), changes))

    def settings(self) -> str:
        """The settings as they are written on a command line."""
        parallel = (
            f"parallel.tensor_parallel_size={self.tensor} parallel.pipeline_parallel_size={self.pipeline}"
        )
        sequence = " parallel.sequence_parallel=true" if self.sequence_parallel else ""
        rest = f"training.recompute={self.recompute} batch.micro_batch_size={self.micro_batch}"
        return f"{parallel}{sequence} parallel.zero_stage={self.zero} {rest}"


def step_ms(profile: Profile) -> float:
    """Milliseconds of a step with its communication, as if nothing of that overlapped."""
    details, moved = profile.details, profile.details.communication_ms
    within = sum(moved.get(group, 0.0) for group in ("tp", "pp"))
    busy = max(profile.expected.host_ms, profile.expected.roofline_ms)
    return busy + details.bubble * within + sum(moved.values()) - within


def fits(profile: Profile, gpu: Gpu) -> bool:
    return profile.expected.peak_gib + RESERVED_GIB <= gpu.memory_gib


def possible_layouts(config: Config, processes: int) -> Iterator[Layout]:
    """Layouts that divide the processes, the model and the batch."""
    model, batch = config.model, config.batch.global_batch_size
    sizes = [size for size in (1, 2, 4, 8) if model.num_attention_heads % size == 0]
    stages = [size for size in range(1, model.total_layers // 2 + 1) if processes % size == 0]
    rows = [2**i for i in range(MOST_MICRO_BATCH.bit_length())]
    rows = sorted({*rows, config.batch.micro_batch_size})
    for tensor, pipeline in itertools.product(sizes, stages):
        if processes % (tensor * pipeline) or (pipeline > 1 and model.share_layers):
            continue
        dp = processes // (tensor * pipeline)
        for recompute, micro in itertools.product(("none", "full"), rows):
            if batch % (dp * micro) == 0:
                for zero in (1,) if pipeline > 1 else (1, 2):
                    yield Layout(tensor, pipeline, zero, recompute, micro)


def guess(config: Config, layout: Layout, processes: int, gpu: Gpu) -> tuple[float, float]:
    """Milliseconds of a step and GiB of a rank, by formulas: only to choose what is traced."""
    model, width = config.model, config.model.hidden_size
    dp = processes // (layout.tensor * layout.pipeline)
    micro_batches = config.batch.global_batch_size // (dp * layout.micro_batch)
    layers = -(-model.total_layers // layout.pipeline)
    tokens = layout.micro_batch * config.row_length
    owned = parameter_count(model) / (layout.tensor * layout.pipeline)
    activation = tokens * width * 2.0
    kept = 2 / layout.tensor if layout.recompute == "full" else 34 / layout.tensor
    in_flight = min(layout.pipeline, micro_batches)
    assert model.vocab_size is not None
    logits = tokens * config.loss_share * model.vocab_size * 6 / layout.tensor
    state = owned * (2 + 12 / dp + (4 if layout.zero == 1 else 4 / dp))
    memory = state + activation / 2 * kept * layers * in_flight + activation * 17 / layout.tensor + logits

    real = int(tokens * FILLED)
    flops = step_flops(model, real, int(real * config.loss_share), 0) * micro_batches * dp / processes
    again = 4 / 3 if layout.recompute == "full" else 1.0
    bubble = 1 + (layout.pipeline - 1) / micro_batches
    compute = flops * again / (gpu.peak_tflops * _REACHED) / 1e9
    small = 3e-3 * 54 * layers * micro_batches * again  # ms of kernels that are as short as kernels get
    added = (
        owned * 14 * micro_batches / gpu.bandwidth_tbs / 1e9
    )  # fp32 sums of gradients, in every micro-batch
    tensor = (
        4 * again * layers * micro_batches * 2 * (1 - 1 / layout.tensor) * activation / gpu.link_gbs / 1e6
    )
    pipe = 2 * micro_batches * activation / layout.tensor / gpu.network_gbs / 1e6 * (layout.pipeline > 1)
    ring = gpu.ring_gbs(min(dp, max(1, GPUS_OF_A_NODE // layout.tensor)), dp * layout.tensor > GPUS_OF_A_NODE)
    sums = (4 * (micro_batches if layout.zero == 2 else 1) + 2) * owned * (1 - 1 / dp) / ring / 1e6
    return (max(compute, small) + added + tensor + pipe) * bubble + sums, memory / 2**30


def advise(
    config: Config, processes: int, gpu: Gpu, given: Profile, say: Callable[[str], None] = lambda text: None
) -> tuple[Layout | None, Profile] | None:
    """The layout with the shortest step of those that fit; None if no traced one fits.

    Args:
        given: the profile of the configuration's own layout, which competes; the result names it by None.
        say: called with a line before each round of traces, which takes many seconds.
    Raises: ConfigError where torch or the machine are unknown to fake devices.
    """
    guesses = {
        layout: guess(config, layout, processes, gpu) for layout in possible_layouts(config, processes)
    }
    room = gpu.memory_gib - RESERVED_GIB
    able = sorted(
        (layout for layout, (_, gib) in guesses.items() if gib <= room * _TOLERANCE),
        key=lambda layout: guesses[layout][0],
    )
    # The best of each division of the model: neighbours in the order differ in little else.
    best: dict[tuple[int, int, bool], Layout] = {}
    for layout in able:
        best.setdefault((layout.tensor, layout.pipeline, guesses[layout][1] > room), layout)
    order = sorted(best.values(), key=lambda layout: guesses[layout][0])
    own: list[tuple[Layout | None, Profile]] = [(None, given)] if fits(given, gpu) else []
    for start in range(0, TRACED_AT_ONCE * ROUNDS, TRACED_AT_ONCE):
        chosen = order[start : start + TRACED_AT_ONCE]
        say(f"tracing {len(chosen)} of {len(guesses)} possible layouts")
        found = [pair for pair in _traced(config, chosen, processes, gpu) if fits(pair[1], gpu)]
        if found:
            return min([*own, *found], key=lambda pair: step_ms(pair[1]))
    return own[0] if own else None


def _traced(config: Config, layouts: list[Layout], processes: int, gpu: Gpu) -> list[tuple[Layout, Profile]]:
    requests, asked = [], []
    for layout in layouts:
        try:
            requests.append(Request.of(layout.applied(config), processes, gpu))
        except ConfigError:  # rows that tensor parallelism does not divide, and the like
            continue
        asked.append(layout)
    found: list[Any] = profiles(requests) if requests else []
    return [
        (layout, answer) for layout, answer in zip(asked, found, strict=True) if isinstance(answer, Profile)
    ]


def dry_run_report(config: Config, processes: int, gpu: Gpu, profile: Profile) -> str:
    """A layout in words, for a terminal."""
    parallel, details = config.parallel, profile.details
    dp = parallel.data_parallel_size(processes)
    room = "fits" if fits(profile, gpu) else "DOES NOT FIT"
    return "\n".join(
        [
            f"parameters        {parameter_count(config.model):,}; on the fullest rank {details.rank_parameters:,.0f}",
            f"layout            {processes} processes: pipeline {parallel.pipeline_parallel_size} x data {dp} x tensor "
            f"{parallel.tensor_parallel_size}, ZeRO {parallel.zero_stage}, recompute {config.training.recompute}, "
            f"{config.batch.accumulation_steps(dp)} micro-batches of {config.batch.micro_batch_size} x "
            f"{config.row_length} tokens a step",
            f"device            {gpu.describe()}",
            f"memory            {profile.expected.peak_gib:.2f} GiB on the fullest rank at the peak; with "
            f"{RESERVED_GIB:g} GiB for CUDA, NCCL and fragmentation it {room} {gpu.memory_gib:g} GiB",
            f"a step            {details.tokens:,.0f} tokens; GPU {profile.expected.roofline_ms:,.0f} ms, host "
            f"{profile.expected.host_ms:,.0f} ms, communication {sum(details.communication_ms.values()):,.0f} ms",
            _speed(config, gpu, profile),
        ]
    )


def _speed(config: Config, gpu: Gpu, profile: Profile) -> str:
    """Tokens/s and MFU if all communication overlaps, and if none does."""
    most = max(profile.expected.host_ms, profile.expected.roofline_ms)
    least, mfu = step_ms(profile), profile.expected.expected_mfu
    tokens, hours = profile.details.tokens, config.training.steps * least / 3600e3
    duration = (
        f"{hours / 24:.3g} days"
        if hours >= 48
        else f"{hours:.3g} hours"
        if hours >= 2
        else f"{hours * 60:.3g} minutes"
    )
    return (
        f"speed             {tokens / least * 1e3:,.0f} to {tokens / most * 1e3:,.0f} tokens/s, MFU "
        f"{mfu * most / least:.1%} to {mfu:.1%}, if no communication overlaps or all; {config.training.steps:,} steps "
        f"take {duration} at most"
    )
