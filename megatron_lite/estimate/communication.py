"""The bytes that a training step exchanges, and the time that they take if nothing overlaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.parameters import StageParameters, buckets
from megatron_lite.estimate.sizes import RankGroup, Sizes
from megatron_lite.optim.buckets import MOMENTS

# Numbers that DeepSpeed keeps gathered at ZeRO 3 for their next use: its default.
LIVE_PARAMETERS = 1_000_000_000


@dataclass
class Traffic:
    """Sums over the collectives of one rank, by the name of their group."""

    gpu: Gpu
    bytes: Counter[str] = field(default_factory=Counter)  # of the largest tensor of each call
    milliseconds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, size: float, group: RankGroup, times: float = 1) -> None:
        """Args: kind: all_reduce, gather, scatter or send. size: bytes of the largest tensor: the input of a reduction,
        the result of a gather."""
        ranks = len(group.ranks)
        if ranks == 1:
            return
        # A ring sends every piece to all others; a sum over all is a scatter and a gather.
        passes = {"all_reduce": 2.0, "gather": 1.0, "scatter": 1.0}.get(kind)
        moved = size if passes is None else passes * size * (ranks - 1) / ranks
        self.bytes[group.name] += times * size  # type: ignore[assignment]
        self.milliseconds[group.name] += times * moved / self.gpu.ring_gbs(group.ranks) / 1e6  # type: ignore[assignment]


def traffic(stage: StageParameters, sizes: Sizes, gpu: Gpu) -> Traffic:
    """A whole step on the first rank of a pipeline stage."""
    found = Traffic(gpu)
    _within_micro_batches(found, stage, sizes)
    if sizes.pp > 1:  # hidden states and their gradients, sent and received
        hidden = sizes.all_tokens / sizes.share * sizes.width * sizes.element
        neighbours = 2 - stage.is_first - stage.is_last
        found.add("send", hidden, sizes.neighbours, 2 * neighbours * sizes.micro_batches)
    (_zero_3 if sizes.config.parallel.zero_stage == 3 else _data_parallel)(found, stage, sizes)
    return found


def _within_micro_batches(found: Traffic, stage: StageParameters, s: Sizes) -> None:
    """Hidden states of blocks, embedding and head."""
    encoders, decoders = stage.block_counts(s.config.model.num_layers + s.config.model.mtp_layers)
    passes, e = s.micro_batches, s.element
    groups = {
        "tp": s.tp_group,
        "dp": RankGroup("dp", s.dp_group.ranks[: s.config.parallel.expert_parallel_size]),
    }
    layers = range(stage.first_block, stage.first_block + stage.blocks)
    # They alone send to others of "dp".
    with_experts = sum(s.config.model.has_experts(layer) for layer in layers)
    for is_decoder, blocks in ((False, encoders), (True, decoders)):
        if blocks:
            for (kind, group), size in s.block(is_decoder).sent.items():
                found.add(kind, size, groups[group], passes * (with_experts if group == "dp" else blocks))
    if stage.is_first:
        size = s.all_tokens * s.embedding * e
        kinds = ("all_reduce",) if s.share == 1 else ("scatter", "gather")
        for kind in kinds:
            found.add(kind, size, s.tp_group, passes)
    if stage.is_last:
        if s.share > 1:
            found.add("gather", s.tokens(s.sequence.decoder is not None) * s.width * e, s.tp_group, passes)
        # Three numbers of each loss, and the gradient of its hidden state.
        found.add("all_reduce", s.losses * (12 + s.embedding * e), s.tp_group, passes)


def _data_parallel(found: Traffic, stage: StageParameters, s: Sizes) -> None:
    """Gradients are summed in fp32: at ZeRO 2 in each micro-batch, at ZeRO 1 once. New weights are gathered."""
    exchanges = s.micro_batches if s.config.parallel.zero_stage == 2 else 1
    for bucket in buckets(stage, s):
        group = s.dp_group.every(s.dp // bucket.holders(s))
        found.add("scatter", 4 * bucket.numbers, group, exchanges)
        found.add("gather", s.element * bucket.numbers, group)
        if bucket.is_summed:
            group = s.tp_group if bucket.parameters[0].is_partial else s.ends
            found.add("all_reduce", 4 * bucket.numbers / s.dp, group)
        if s.config.optimizer.kind == "muon" and bucket.moments != MOMENTS:
            # Each matrix goes to one rank, and its update back.
            ranks = s.dp * s.tp
            group = RankGroup({s.tp: "tp", s.dp: "dp"}.get(ranks, "world"), tuple(range(ranks)))
            found.add("scatter", max(2, s.element) * bucket.numbers / s.dp, group, 2)


def _zero_3(found: Traffic, stage: StageParameters, s: Sizes) -> None:
    """Weights are gathered before their use, those beyond LIVE_PARAMETERS for the backward pass too."""
    again = max(0.0, 1 - LIVE_PARAMETERS / stage.numbers)
    trained = sum(parameter.numbers for parameter in stage.trained)
    found.add("gather", s.element * stage.numbers * (1 + again), s.dp_group, s.micro_batches)
    found.add("scatter", 4 * trained, s.dp_group, s.micro_batches)
