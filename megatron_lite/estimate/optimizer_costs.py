"""The update of a step under the optimizers beside AdamW, at ZeRO 1 and 2."""

from __future__ import annotations

from megatron_lite.estimate.parameters import Bucket
from megatron_lite.estimate.roofline import Members
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally
from megatron_lite.optim.buckets import MOMENTS
from megatron_lite.optim.muon import ITERATIONS

# Kernels over all numbers of a bucket, their bytes for each number, short kernels of a bucket, and of a step.
_COSTS = {
    "lamb": (13, 128, 13, 11), "stable_adamw": (15, 152, 26, 5), "adafactor": (7, 64, 16, 24), "muon": (7, 80, 9, 8),
}  # fmt: skip
_SUMS = {"lamb": 2, "stable_adamw": 1, "adafactor": 2, "muon": 0}  # numbers of a tensor that all ranks add up


def add_update(tally: Tally, found: list[Bucket], s: Sizes) -> None:
    """The update of all buckets of a stage."""
    kind = s.config.optimizer.kind
    kernels, size, short, of_step = _COSTS[kind]
    tally.small(of_step, "optimizer")
    for bucket in found:
        numbers = bucket.numbers / s.dp
        if kind == "muon" and bucket.moments == MOMENTS:
            tally.kernel(32 * numbers, 1, "optimizer")
            continue
        tally.kernel(size / kernels * numbers, kernels, "optimizer")
        tally.small(short, "optimizer")
        if kind == "adafactor" and bucket.decays and s.config.optimizer.weight_decay:
            tally.kernel(40 / 3 * numbers, 3, "optimizer")
            tally.small(3, "optimizer")
        if (
            kind == "adafactor" and not bucket.moments
        ):  # each piece of a matrix: factors, sums of rows and columns
            pieces = max(1.0, sum(len(parameter.tensors) for parameter in bucket.parameters) / s.dp)
            tally.kernel(6 * numbers / pieces, 4 * pieces, "optimizer")
            tally.small(4 * pieces, "optimizer")
    tensors = [shape for bucket in found for parameter in bucket.parameters for shape in parameter.tensors]
    if _SUMS[kind]:
        tally.collective("all_reduce", 8 * _SUMS[kind] * len(tensors), s.world)
    if kind == "adafactor":
        tally.collective("all_reduce", 8 * sum(map(sum, tensors)), s.world)
    if kind == "muon":
        _add_orthogonal(tally, [bucket for bucket in found if bucket.moments != MOMENTS], s)


def _add_orthogonal(tally: Tally, found: list[Bucket], s: Sizes) -> None:
    """Two exchanges over the ranks of the stage, and this rank's share of the matrices between them."""
    ranks, element = s.dp * s.tp, max(2, s.element)
    group = Members({s.tp: "tp", s.dp: "dp"}.get(ranks, "world"), tuple(range(ranks)))
    tally.collective("scatter", element * sum(bucket.numbers for bucket in found) / s.dp, group, 2)
    every, count = Tally(tally.gpu), 0
    for bucket in found:
        for parameter in bucket.parameters:
            for short, long in map(sorted, parameter.tensors):
                every.product(short, long, short, element)
                every.product(short, short, short, element)
                every.product(short, short, long, element)
                every.kernel(30 / 7 * short * long, 7 / ITERATIONS, "optimizer")  # its norm, and copies
                count += 1
    tally.add(every, ITERATIONS * max(1 / ranks, 1 / max(1, count)))
