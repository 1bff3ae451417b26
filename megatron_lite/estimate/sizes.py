"""The sizes on one rank of a parallel layout: tokens, widths, groups of ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.config.deepspeed_options import default_bucket_size
from megatron_lite.config.model import padded_vocab_size
from megatron_lite.config.tree import Config
from megatron_lite.estimate.average_sequence import AverageSequence
from megatron_lite.estimate.block_costs import BlockCosts, block_costs
from megatron_lite.transformer.attention_backends.cross_attention import constant_length
from megatron_lite.transformer.length_table import length_table

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a collective."""

    name: str  # tp, dp, pp, world or other
    ranks: tuple[int, ...]  # global

    def every(self, step: int) -> RankGroup:
        """Each so many of them."""
        return RankGroup(self.name, self.ranks[::step])


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro-batch on the first rank of a layout. Widths are local to this rank."""

    config: Config
    processes: int
    sequence: AverageSequence
    processors: int = 132  # of a GPU

    @cached_property
    def dp(self) -> int:
        return self.config.parallel.data_parallel_size(self.processes)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.config.batch.accumulation_steps(self.dp)

    @cached_property
    def bucket_size(self) -> int:
        """Numbers of a bucket of gradients at ZeRO 1 and 2."""
        size = (self.config.deepspeed.get("zero_optimization") or {}).get("reduce_bucket_size")
        return default_bucket_size(self.dp) if size is None else int(float(size))

    @cached_property
    def element(self) -> int:
        """Bytes of a number in training precision."""
        return _BYTES[self.config.training.precision]

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_parallel_size

    @cached_property
    def share(self) -> int:
        """Ranks over which tokens are split outside the tensor-parallel layers."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    # Tokens

    def tokens(self, is_decoder: bool = False) -> float:
        """T of a stack on average."""
        return sum(length * share for length, share in self.lengths[is_decoder].items())

    @cached_property
    def lengths(self) -> tuple[dict[float, float], dict[float, float]]:
        """T of the only stack or the encoder, and of the decoder -> share of micro-batches; one T in pipelines."""
        sequence, micro = self.sequence, self.config.batch.micro_batch_size
        positions = micro * sequence.length  # padding included
        multiple = sequence.multiple(micro)
        if sequence.decoder is None:
            if self.pp > 1:
                return {positions: 1.0}, {}
            table = length_table(
                positions, self.config.model, self.processors, self.tp, self.config.training.cuda_graphs
            )
            return sequence.stack.lengths(micro, table), {}
        if self.pp == 1 and self.share > 1:
            multiple = math.lcm(multiple, self.share)
        table = np.arange(multiple, positions + multiple, multiple)
        encoder, decoder = (stack.lengths(micro, table) for stack in (sequence.stack, sequence.decoder))
        if self.pp > 1:
            mean = sum(length * share for length, share in encoder.items())
            decoder = {constant_length(positions, multiple) - mean: 1.0}
        return encoder, decoder

    @cached_property
    def all_tokens(self) -> float:
        """Tokens of both stacks."""
        return self.tokens() + (self.tokens(True) if self.sequence.decoder is not None else 0.0)

    @cached_property
    def predicted(self) -> float:
        """Positions of a micro-batch that predict a token."""
        return self.sequence.loss_tokens * self.config.batch.micro_batch_size

    @cached_property
    def losses(self) -> float:
        """Predicted tokens of a micro-batch; SpanBERT's boundary head predicts some twice."""
        return self.predicted + self.sequence.boundaries * self.config.batch.micro_batch_size

    @cached_property
    def loss_chunks(self) -> list[float]:
        """Predicted positions of each chunk of logits, see `training.loss_rows`."""
        most = self.config.training.loss_rows
        if not 0 < most < self.losses:
            return [self.losses]
        boundaries = self.losses - self.predicted
        chunks = [[most] * int(total // most) + [total % most] for total in (self.predicted, boundaries)]
        return [chunk for chunk in itertools.chain(*chunks) if chunk]

    # Widths

    @property
    def width(self) -> int:
        """D."""
        return self.config.model.hidden_size

    @property
    def embedding(self) -> int:
        """Width of the embeddings."""
        return self.config.model.embedding_size or self.width

    def block(self, is_decoder: bool) -> BlockCosts:
        """Of a pass of a micro-batch through one block: of its tokens, not of one."""
        costs, tokens = block_costs(self.config, self.sequence.batch, is_decoder), self.tokens(is_decoder)
        sent = {key: size * tokens for key, size in costs.sent.items()}
        return BlockCosts(costs.saved * tokens, costs.backward * tokens, sent)

    @cached_property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        assert self.config.model.vocab_size is not None
        return padded_vocab_size(self.config.model.vocab_size, self.tp) // self.tp

    # Groups

    @cached_property
    def tp_group(self) -> RankGroup:
        return RankGroup("tp", tuple(range(self.tp)))

    @cached_property
    def dp_group(self) -> RankGroup:
        return RankGroup("dp", tuple(range(0, self.dp * self.tp, self.tp)))

    @cached_property
    def neighbours(self) -> RankGroup:
        """Two pipeline stages."""
        return RankGroup("pp", (0, self.processes // self.pp))

    @cached_property
    def ends(self) -> RankGroup:
        """The stages that hold a tied word embedding."""
        ranks = (0, self.processes // self.pp * (self.pp - 1))
        return RankGroup("pp" if self.pp == 2 else "other", ranks)
