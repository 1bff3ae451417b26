"""The update of a step under the optimizers beside AdamW, at ZeRO 1 and 2."""

from __future__ import annotations

from megatron_lite.profile.parameters import Bucket
from megatron_lite.profile.roofline import Members
from megatron_lite.profile.sizes import Sizes
from megatron_lite.profile.tally import Tally
from megatron_lite.train.engine.buckets import MOMENTS
from megatron_lite.train.engine.optimizers.muon import ITERATIONS

# Kernels over all numbers of a bucket, and the bytes that they pass over for each: reads and writes of fp32.
_PASSES = {"lamb": (12, 108), "stable_adamw": (14, 132), "adafactor": (11, 88), "muon": (8, 76)}
_SUMS = {"lamb": 2, "stable_adamw": 1, "adafactor": 2, "muon": 0}  # numbers of a tensor that all ranks add up


def add_update(tally: Tally, found: list[Bucket], s: Sizes) -> None:
    """The update of all buckets of a stage."""
    kind = s.config.optimizer.kind
    kernels, size = _PASSES[kind]
    for bucket in found:
        if kind == "muon" and bucket.moments == MOMENTS:
            tally.kernel(32 * bucket.numbers / s.dp, 1, "optimizer")
        else:
            tally.kernel(size / kernels * bucket.numbers / s.dp, kernels, "optimizer")
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
                count += 1
    tally.add(every, ITERATIONS * max(1 / ranks, 1 / max(1, count)))
