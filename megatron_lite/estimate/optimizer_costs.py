"""The update of a step by the optimizers other than AdamW, at ZeRO 1 and 2."""

from __future__ import annotations

from megatron_lite.estimate.parameters import Bucket
from megatron_lite.estimate.roofline import RankGroup
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally
from megatron_lite.optim.buckets import MOMENTS
from megatron_lite.optim.muon import ITERATIONS

# Counted in traces: kernels over all numbers of a bucket, their bytes per number, short kernels per bucket, and per
# step.
_COSTS = {
    "lamb": (13, 128, 13, 11), "stable_adamw": (15, 152, 26, 5), "adafactor": (7, 64, 16, 24), "muon": (7, 80, 9, 8),
}  # fmt: skip
_SUMS = {"lamb": 2, "stable_adamw": 1, "adafactor": 2, "muon": 0}  # scalars per tensor that all ranks sum


def add_update(tally: Tally, stage_buckets: list[Bucket], s: Sizes) -> None:
    """The update of all buckets of a stage."""
    kind = s.config.optimizer.kind
    kernels, size, short, step_kernels = _COSTS[kind]
    tally.small(step_kernels, "optimizer")
    for bucket in stage_buckets:
        numbers = bucket.numbers / s.dp
        if kind == "muon" and bucket.moments == MOMENTS:
            tally.kernel(32 * numbers, 1, "optimizer")
            continue
        tally.kernel(size / kernels * numbers, kernels, "optimizer")
        tally.small(short, "optimizer")
        if kind == "adafactor" and bucket.decays and s.config.optimizer.weight_decay:
            tally.kernel(40 / 3 * numbers, 3, "optimizer")
            tally.small(3, "optimizer")
        if kind == "adafactor" and not bucket.moments:
            # For each shard of a matrix: factors, sums of rows and of columns.
            shards = max(1.0, sum(len(parameter.tensors) for parameter in bucket.parameters) / s.dp)
            tally.kernel(6 * numbers / shards, 4 * shards, "optimizer")
            tally.small(4 * shards, "optimizer")
    tensors = [
        shape for bucket in stage_buckets for parameter in bucket.parameters for shape in parameter.tensors
    ]
    if _SUMS[kind]:
        tally.collective("all_reduce", 8 * _SUMS[kind] * len(tensors), s.world)
    if kind == "adafactor":
        tally.collective("all_reduce", 8 * sum(map(sum, tensors)), s.world)
    if kind == "muon":
        _add_orthogonal(tally, [bucket for bucket in stage_buckets if bucket.moments != MOMENTS], s)


def _add_orthogonal(tally: Tally, matrix_buckets: list[Bucket], s: Sizes) -> None:
    """Muon: two exchanges over the ranks of the stage, and between them this rank's share of the matrices."""
    ranks, element = s.dp * s.tp, max(2, s.element)
    group = RankGroup({s.tp: "tp", s.dp: "dp"}.get(ranks, "world"), tuple(range(ranks)))
    tally.collective("scatter", element * sum(bucket.numbers for bucket in matrix_buckets) / s.dp, group, 2)
    iteration, count = Tally(tally.gpu), 0
    for bucket in matrix_buckets:
        for parameter in bucket.parameters:
            for short, long in map(sorted, parameter.tensors):
                iteration.product(short, long, short, element)
                iteration.product(short, short, short, element)
                iteration.product(short, short, long, element)
                iteration.kernel(30 / 7 * short * long, 7 / ITERATIONS, "optimizer")  # its norm, and copies
                count += 1
    tally.add(iteration, ITERATIONS * max(1 / ranks, 1 / max(1, count)))
