"""The parts of the Transformer: embeddings, attention, MLP, and the block.

Between layers the hidden state is a token matrix [T, D]; under sequence parallelism each tensor-parallel rank holds
T / size of its tokens. Dropout is a pure function of each token and the place in the model (dropout.py), so every
layout gives the same, and so does a block that is computed again.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_utils.common.batch_fields import ID_PLANES, ORD
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.calls import PartsPlan
from megatron_lite.model.forward_context import Flow, by_ranks, own_lengths, own_tokens
from megatron_lite.model.kernels.dropout import AttentionDropout, FeatureDropout
from megatron_lite.model.kernels.fused import Biased, activated, add, has_kernels
from megatron_lite.model.rope import spread
from megatron_lite.model.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    make_norm,
)

if TYPE_CHECKING:
    from megatron_lite.model.adapter import Adapter
    from megatron_lite.model.dense import Linear
    from megatron_lite.model.fused_block import Parts
    from megatron_lite.model.head_norms import HeadNorms
    from megatron_lite.model.position_bias import DistanceScores
    from megatron_lite.model.rope import Rotary


def recomputed(again: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), which the backward pass computes `again` instead of what it would keep."""
    if again and torch.is_grad_enabled():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)


class _ShrinkGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):  # type: ignore[no-untyped-def]
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.alpha, None


class Stream(NamedTuple):
    """The hidden state between blocks: hidden + dropout(x), [T, D]. The next norm's kernel makes the sum.

    A tuple, so that DeepSpeed finds the tensors in it.
    """

    hidden: torch.Tensor
    x: Biased | None = None
    dropout: FeatureDropout | None = None

    def summed(self) -> torch.Tensor:
        return self.hidden if self.x is None else add(self.hidden, self.x, self.dropout)


class OwnEmbedding(Protocol):
    """Parameters of the embedding that encoder and decoder do not share."""

    position_embeddings: nn.Embedding | None
    layernorm: LayerNorm | RMSNorm | None


class PositionEmbeddings(nn.Module):
    """Adds the embeddings of `ID_PLANES` to those of the words, then norm and dropout: [T, E] -> [T, D].

    The configuration says which tables there are, and whether there is a norm. With a factorised embedding (ALBERT)
    all are of size E, and the result is projected to D.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.position_embeddings = self.position_table(config)
        has_blocks = config.positions == "learned_blocks" or config.block_positions == "table"
        self.block_position_embeddings = _table(config.max_position + 1 if has_blocks else 0, config)
        self.segment_embeddings = _table(config.segments, config)
        self.task_embeddings = _table(config.task_types, config)
        # Initial embedding of XLNet's query stream.
        has_vector = config.has_distance_scores
        self.query_vector = nn.Parameter(torch.empty(size)) if has_vector else None
        self.layernorm = self.norm(config, parallel)
        self.projection: Linear | None = None
        if config.embedding_size is not None:
            from megatron_lite.model.dense import Linear

            self.projection = Linear(size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    @staticmethod
    def position_table(config: ModelConfig) -> nn.Embedding | None:
        return _table(config.max_position + 1 if config.positions.startswith("learned") else 0, config)

    @staticmethod
    def norm(config: ModelConfig, parallel: TensorParallel) -> LayerNorm | RMSNorm | None:
        size = config.embedding_size or config.hidden_size
        return make_norm(config, size, parallel) if config.embedding_norm else None

    def forward(
        self, words: torch.Tensor, ids: torch.Tensor, flow: Flow, decoder: OwnEmbedding | None = None
    ) -> torch.Tensor:
        """The hidden state before the first block.

        Args:
            words: [T, E], or this rank's tokens of it under sequence parallelism.
            ids: int [len(ID_PLANES), T].
            decoder: what the decoder's rows have of their own, if there is a decoder.
        """
        if self.gradient_shrink != 1.0:
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        ids = own_tokens(ids, flow.plan, self.parallel)
        if self.query_vector is not None:
            is_query = ids[ID_PLANES.index(ORD)] < 0
            words = torch.where(is_query[:, None], self.parallel.replicated(self.query_vector), words)
        hidden = words if self.scale == 1.0 else words * self.scale
        if decoder is None:
            hidden = self._sum(hidden, ids, self)
        else:
            assert isinstance(flow.plan, PartsPlan)
            lengths = own_lengths(flow.plan, self.parallel)
            first, second = hidden.split(lengths)
            first_ids, second_ids = ids.split(lengths, dim=1)
            hidden = torch.cat([self._sum(first, first_ids, self), self._sum(second, second_ids, decoder)])
        if flow.condition is not None and flow.condition.added is not None:
            hidden = hidden + flow.condition.added
        dropout = flow.features(self.dropout, -1, "embedding")
        if dropout is not None:
            hidden = add(None, Biased(hidden), dropout)
        if self.projection is not None:
            weight, bias = map(self.parallel.replicated, (self.projection.weight, self.projection.bias))
            hidden = linear(hidden, weight, bias)
        return hidden

    def _sum(self, hidden: torch.Tensor, ids: torch.Tensor, own: OwnEmbedding) -> torch.Tensor:
        """All embeddings of tokens, and the norm. Args: own: whose positions and norm."""
        shared = (self.block_position_embeddings, self.segment_embeddings, self.task_embeddings)
        tables = (own.position_embeddings, *shared)
        for table, plane in zip(tables, ids[: len(tables)], strict=True):
            if table is not None:
                hidden = hidden + F.embedding(plane, self.parallel.replicated(table.weight))
        return hidden if own.layernorm is None else own.layernorm.after_sum(hidden)[1]


def _table(rows: int, config: ModelConfig) -> nn.Embedding | None:
    return nn.Embedding(rows, config.embedding_size or config.hidden_size) if rows else None


class Embedding(PositionEmbeddings):
    """All embeddings: int [T], int [len(ID_PLANES), T] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.word_embeddings = VocabParallelEmbedding(config, parallel)

    def forward(
        self, tokens: torch.Tensor, ids: torch.Tensor, flow: Flow, decoder: OwnEmbedding | None = None
    ) -> torch.Tensor:
        words = self.word_embeddings(by_ranks(tokens, flow.plan, self.parallel))
        return super().forward(words, ids, flow, decoder)


class Attention(nn.Module):
    """Fused Q|K|V projection (contiguous; K and V may have fewer heads), the plan's kernel, output projection."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        self.head_size = config.head_size
        self.query_factor, self.is_local = config.query_factor, config.is_local
        self.dropout = config.attention_dropout
        self.parallel, self.recompute = parallel, recompute
        heads, key_value_heads = config.num_attention_heads, config.key_value_heads
        self.key_value_heads = key_value_heads // parallel.group.size
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * key_value_heads) * self.head_size,
            parallel,
            parts=(heads // key_value_heads, 1, 1),
            has_bias=config.has_bias("qkv"),
        )
        self.dense = RowParallelLinear(
            config.attention_size, config.hidden_size, parallel, has_bias=config.has_bias("attention")
        )
        self.head_norms: HeadNorms | None = None
        if config.query_key_norm:
            from megatron_lite.model.head_norms import HeadNorms

            self.head_norms = HeadNorms(config, parallel)
        self.relative: DistanceScores | None = None
        if config.has_distance_scores:
            from megatron_lite.model.position_bias import DistanceScores

            self.relative = DistanceScores(config, parallel)
        self.is_disentangled = config.relative == "disentangled"
        if self.is_disentangled:
            from megatron_lite.model.disentangled import own_projection

            self.position_query_key = own_projection(config, parallel, self.query_key_value)

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> Biased:
        qkv = self.query_key_value(hidden).x
        if self.is_disentangled:
            flow = flow.distances.projected(flow, self.position_query_key or self.query_key_value, layer)
        out = recomputed(self.recompute, self._attend, qkv, flow, layer)
        return self.dense(out.reshape(math.prod(flow.shape), -1))

    def _attend(self, qkv: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        assert not isinstance(flow.plan, PartsPlan)
        heads, rotary = qkv.view(len(qkv), -1, self.head_size), self.rotary_of(flow, layer)
        heads = spread(heads, self.key_value_heads, rotary, self.head_norms, self.query_factor)
        qkv = heads.view(len(qkv), 3, -1, self.head_size)
        if flow.condition is not None:
            qkv = flow.condition.remembered(qkv, layer)
        qkv = qkv.view(*flow.shape, *qkv.shape[1:])
        dropout, bias = self.dropout_of(flow, layer), flow.bias
        if self.is_disentangled:
            bias = flow.distances.bias_of(qkv)
        elif self.relative is not None:
            qkv, bias = self.relative.biased(qkv, flow.distances)
        return flow.plan.attend(layer, [qkv], dropout, bias)

    def rotary_of(self, flow: Flow, layer: int) -> Rotary | None:
        return None if flow.rotary is None else flow.rotary[self.is_local(layer)]

    def dropout_of(self, flow: Flow, layer: int) -> AttentionDropout | None:
        if not self.dropout or flow.dropout is None:
            return None
        return flow.dropout.attention(self.dropout, layer)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.activation = config.activation
        self.dropout = config.activation_dropout
        inner, has_bias = config.inner_size, config.has_bias("mlp")
        self.is_gated = config.ffn == "gated"
        parts = 2 if self.is_gated else 1
        self.first_feature = inner // parallel.group.size * parallel.group.rank
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, parts * inner, parallel, parts=parts, has_bias=has_bias, leaves_bias=True
        )
        self.dense_4h_to_h = RowParallelLinear(inner, config.hidden_size, parallel, has_bias=has_bias)

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> Biased:
        dropout = None
        if self.dropout and flow.dropout is not None:
            of_all = flow.dropout.features(self.dropout, layer, "activated")
            dropout = of_all and of_all.from_feature(self.first_feature)
        x = self.dense_h_to_4h(hidden)
        return self.dense_4h_to_h(activated(x, self.activation, gated=self.is_gated, dropout=dropout))


class Block(nn.Module):
    """Attention and MLP. `layer` is its index, for dropout and caches.

    Pre-norm: x + dropout(attention(norm(x))), then the same with the MLP. Post-norm: norm(x + dropout(attention(x))),
    then the same with the MLP. In both `post_attention_layernorm` lies between the two. DeepNorm: post-norm with the
    residual times sqrt(2L). A sandwich has a norm on the outputs of attention and MLP besides, after their adapters.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str, is_first: bool = False):
        super().__init__()

        def norm() -> LayerNorm | RMSNorm:
            return make_norm(config, config.hidden_size, parallel)

        is_normed = config.first_norm or not is_first
        self.input_layernorm = norm() if config.norm == "pre" and is_normed else None
        self.attention = Attention(config, parallel, recompute == "selective")
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, parallel)
        self.output_layernorm = norm() if config.norm != "pre" else None
        self.attention_adapter: Adapter | None = None
        self.mlp_adapter: Adapter | None = None
        if config.adapter_size:
            from megatron_lite.model.adapter import Adapter

            self.attention_adapter, self.mlp_adapter = Adapter(config, parallel), Adapter(config, parallel)
        more = [norm() if config.sandwich_norm else None for _ in range(2)]
        self.attended_layernorm, self.expanded_layernorm = more
        self.residual_scale = math.sqrt(2 * config.num_layers) if config.norm == "deepnorm" else 1.0
        self.dropout = config.output_dropout
        self.parallel, self.recompute = parallel, recompute == "full"
        self.may_fuse = config.has_plain_blocks and recompute == "none" and parallel.group.size == 1
        self.parts: Parts | None = None  # of a block that is one function of autograd

    def take_gradients(self, take: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Have gradients of parameters, which are used once in a pass, taken in by an optimizer; so may `fused_block`.

        After `take_products` of the weights.
        """
        if self.may_fuse and has_kernels(next(self.parameters())):
            from megatron_lite.model.fused_block import Parts

            self.parts = Parts.of(self, take)

    def forward(self, stream: Stream, flow: Flow, layer: int) -> Stream:
        if self.recompute and torch.is_grad_enabled():
            return Stream(recomputed(True, self._summed, stream.summed(), flow, layer))
        hidden = stream.hidden
        is_trained = hidden.requires_grad and torch.is_grad_enabled() and flow.condition is None
        is_chosen = self.parts is not None and is_trained and has_kernels(hidden)
        if is_chosen and (plan := self.parts.plan_of(flow.plan, layer)):  # type: ignore[union-attr]
            return self._fused(stream, flow, layer, self.parts, plan)  # type: ignore[arg-type]
        if self.parallel.sums_at_once:  # at ZeRO 3 this block's bias is gone when the next block runs
            return Stream(self._summed(stream.hidden, flow, layer))
        return self._forward(stream, flow, layer)

    def _fused(self, stream: Stream, flow: Flow, layer: int, parts: Parts, plan: Any) -> Stream:
        """`_forward` as one function of autograd. Args: plan: of this layer."""
        dropout = self.attention.dropout_of(flow, layer)
        after = flow.features(self.dropout, layer, "attended")
        hidden, x = parts.block(*stream, after, dropout, plan, self.attention.rotary_of(flow, layer))
        return Stream(hidden, x, flow.features(self.dropout, layer, "expanded"))

    def _summed(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        return self._forward(Stream(hidden), flow, layer).summed()

    def _forward(self, stream: Stream, flow: Flow, layer: int) -> Stream:
        hidden, normed = self._attended(stream, flow, layer, self.post_attention_layernorm)
        return self._expanded(hidden, normed, flow, layer)

    def _attended(
        self, stream: Stream, flow: Flow, layer: int, norm: LayerNorm | RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With attention: the sum, and its norm."""
        if self.input_layernorm is None:
            hidden = normed = stream.summed()
        else:
            hidden, normed = self.input_layernorm.after_sum(*stream)
        x = _adapted(self.attention(normed, flow, layer), self.attention_adapter)
        x = _normed(x, self.attended_layernorm)
        dropout = flow.features(self.dropout, layer, "attended")
        return norm.after_sum(self._residual(hidden), x, dropout)

    def _expanded(self, hidden: torch.Tensor, normed: torch.Tensor, flow: Flow, layer: int) -> Stream:
        """With the MLP. Args: hidden, normed: a sum and its norm."""
        x = _adapted(self.mlp(normed, flow, layer), self.mlp_adapter)
        x = _normed(x, self.expanded_layernorm)
        dropout = flow.features(self.dropout, layer, "expanded")
        if self.output_layernorm is None:
            return Stream(hidden, x, dropout)
        return Stream(self.output_layernorm.after_sum(self._residual(normed), x, dropout)[1])

    def _residual(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale


def stack(config: ModelConfig, parallel: TensorParallel, recompute: str) -> nn.ModuleList:
    """The first `num_layers` blocks, or one to run again. What they share is a module of the first alone, named so."""
    count = 1 if config.share_layers == "all" else config.num_layers
    first, *others = made = [Block(config, parallel, recompute, layer == 0) for layer in range(count)]
    for block in others if config.share_layers != "none" else ():
        part = {"attention": "attention", "ffn": "mlp"}[config.share_layers]
        delattr(block, part)
        block.__dict__[part] = getattr(first, part)
    return nn.ModuleList(made)


def _adapted(x: Biased, adapter: Adapter | None) -> Biased:
    return x if adapter is None else adapter(x)


def _normed(x: Biased, norm: nn.Module | None) -> Biased:
    return x if norm is None else Biased(norm(x.added()))


def final_layernorm(config: ModelConfig) -> nn.Module:
    """The norm before the heads; none in post-norm models. All ranks have all tokens with loss: its whole gradient."""
    return make_norm(config, config.hidden_size, TensorParallel()) if config.norm == "pre" else nn.Identity()
