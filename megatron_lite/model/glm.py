"""One Transformer for every system. Input: tokens, their ids (positions, segment, task), an attention plan.

By default it is GLM: pre-LN blocks, learned tables for both position ids, output projection tied to the word embedding
without a bias (arXiv:2103.10360). The options of `ModelConfig` make it the Transformer of the other systems.
docs/architecture.md compares the module names with those of released checkpoints.

Between layers the hidden state is a token matrix [T, D]; under sequence parallelism each tensor-parallel rank holds
T / size of its tokens. Dropout is a pure function of each token and the place in the model (dropout.py), so every
layout gives the same, and so does a block that is computed again.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised), H heads of this rank,
V vocabulary (unpadded); K, P, M as in heads.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_utils.base.random_streams import derive_seed
from megatron_lite.config.tree import Config, ModelConfig
from megatron_lite.model.attention import AttentionPlan
from megatron_lite.model.dropout import Dropout, FeatureDropout
from megatron_lite.model.fused import Biased, activate, add, gate
from megatron_lite.model.heads import Heads, Linear, row_losses, sum_losses
from megatron_lite.model.model_input import ModelInput
from megatron_lite.model.rotary import Rotary, spread
from megatron_lite.model.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    local_shard,
    make_norm,
    partition_of,
    whole_shape,
)
from megatron_lite.parallel.collectives import SINGLE


class _ShrinkGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):  # type: ignore[no-untyped-def]
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.alpha, None


@dataclass(frozen=True)
class Flow:
    """What the layers need of a micro-batch beside the hidden state."""

    shape: tuple[int, ...]  # of the tokens: [T] in training
    plan: AttentionPlan
    dropout: Dropout | None  # of all tokens
    own_dropout: Dropout | None  # of this rank's tokens: all but under sequence parallelism
    rotary: Rotary | None = field(default=None, kw_only=True)  # of all tokens

    @staticmethod
    def of(
        shape: tuple[int, ...],
        plan: AttentionPlan,
        dropout: Dropout | None,
        parallel: TensorParallel,
        rotary: Rotary | None = None,
    ) -> Flow:
        own = dropout
        if dropout is not None and parallel.sequence_parallel:
            own = replace(dropout, keys=dropout.keys.chunk(parallel.group.size)[parallel.group.rank])
        return Flow(shape, plan, dropout, own, rotary=rotary)

    def features(self, p: float, layer: int, place: str) -> FeatureDropout | None:
        """Dropout of this rank's hidden states, None if there is none. Args: as of `Dropout.features`."""
        return None if self.own_dropout is None else self.own_dropout.features(p, layer, place)


class PositionEmbeddings(nn.Module):
    """Adds the embeddings of `ID_PLANES` to those of the words, then norm and dropout: [T, E] -> [T, D].

    The configuration says which tables there are, and whether there is a norm. With a factorised embedding (ALBERT)
    all are of size E, and the result is projected to D.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size = config.embedding_size or config.hidden_size

        def table(rows: int) -> nn.Embedding | None:
            return nn.Embedding(rows, size) if rows else None

        positions = config.max_position + 1
        self.position_embeddings = table(positions if config.positions.startswith("learned") else 0)
        self.block_position_embeddings = table(positions if config.positions == "learned_blocks" else 0)
        self.segment_embeddings = table(config.segments)
        self.task_embeddings = table(config.task_types)
        self.layernorm = make_norm(config, size, parallel) if config.embedding_norm else None
        self.projection = None if config.embedding_size is None else Linear(size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    def forward(self, words: torch.Tensor, ids: torch.Tensor, flow: Flow) -> torch.Tensor:
        """Args: words: [T, E], or this rank's tokens of it under sequence parallelism. ids: int [len(ID_PLANES), T]."""
        if self.gradient_shrink != 1.0:
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        if self.parallel.sequence_parallel:
            ids = ids.chunk(self.parallel.group.size, dim=1)[self.parallel.group.rank]
        hidden = words if self.scale == 1.0 else words * self.scale
        positions = (self.position_embeddings, self.block_position_embeddings)
        tables = (*positions, self.segment_embeddings, self.task_embeddings)
        for table, plane in zip(tables, ids, strict=True):
            if table is not None:
                hidden = hidden + F.embedding(plane, self.parallel.replicated(table.weight))
        if self.layernorm is not None:
            _, hidden = self.layernorm.after_sum(hidden)
        dropout = flow.features(self.dropout, -1, "embedding")
        if dropout is not None:
            hidden = add(None, Biased(hidden), dropout)
        if self.projection is not None:
            weight, bias = map(self.parallel.replicated, (self.projection.weight, self.projection.bias))
            hidden = linear(hidden, weight, bias)
        return hidden


class Embedding(PositionEmbeddings):
    """All embeddings: int [T], int [len(ID_PLANES), T] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.word_embeddings = VocabParallelEmbedding(config, parallel)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, flow: Flow) -> torch.Tensor:
        return super().forward(self.word_embeddings(tokens), ids, flow)


class Attention(nn.Module):
    """Fused Q|K|V projection (contiguous; K and V may have fewer heads), the plan's kernel, output projection."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.parallel = parallel
        self.recompute = recompute
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

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> Biased:
        qkv = self.query_key_value(hidden).x
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(self._attend, qkv, flow, layer, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._attend(qkv, flow, layer)
        return self.dense(out.reshape(math.prod(flow.shape), -1))

    def _attend(self, qkv: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        dropout = None
        if self.dropout and flow.dropout is not None:
            dropout = flow.dropout.attention(self.dropout, layer)
        heads = qkv.view(len(qkv), -1, self.head_size)
        heads = spread(heads, self.key_value_heads, flow.rotary)
        return flow.plan.attend(layer, heads.view(*flow.shape, 3, -1, self.head_size), dropout)


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
        x = (gate if self.is_gated else activate)(self.dense_h_to_4h(hidden), self.activation)
        if self.dropout and flow.dropout is not None:
            dropout = flow.dropout.features(self.dropout, layer, "activated")
            assert dropout is not None
            x = add(None, Biased(x), dropout.from_feature(self.first_feature))
        return self.dense_4h_to_h(x)


class Block(nn.Module):
    """Attention and MLP. `layer` is its index, for dropout and caches.

    Pre-norm: x + dropout(attention(norm(x))), then the same with the MLP. Post-norm: norm(x + dropout(attention(x))),
    then the same with the MLP. In both `post_attention_layernorm` lies between the two. DeepNorm: post-norm with the
    residual times sqrt(2L). A sandwich has a norm on the outputs of attention and MLP besides.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str):
        super().__init__()

        def norm() -> LayerNorm | RMSNorm:
            return make_norm(config, config.hidden_size, parallel)

        self.input_layernorm = norm() if config.norm == "pre" else None
        self.attention = Attention(config, parallel, recompute == "selective")
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, parallel)
        self.output_layernorm = norm() if config.norm != "pre" else None
        more = [norm() if config.sandwich_norm else None for _ in range(2)]
        self.attended_layernorm, self.expanded_layernorm = more
        self.residual_scale = math.sqrt(2 * config.num_layers) if config.norm == "deepnorm" else 1.0
        self.dropout = config.output_dropout
        self.parallel = parallel
        self.recompute = recompute == "full"

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._forward, hidden, flow, layer, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(hidden, flow, layer)

    def _forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        normed = hidden
        if self.input_layernorm is not None:
            hidden, normed = self.input_layernorm.after_sum(hidden)
        x = _normed(self.attention(normed, flow, layer), self.attended_layernorm)
        dropout = flow.features(self.dropout, layer, "attended")
        hidden, normed = self.post_attention_layernorm.after_sum(self._residual(hidden), x, dropout)
        x = _normed(self.mlp(normed, flow, layer), self.expanded_layernorm)
        dropout = flow.features(self.dropout, layer, "expanded")
        if self.output_layernorm is None:
            return add(hidden, x, dropout)
        return self.output_layernorm.after_sum(self._residual(normed), x, dropout)[1]

    def _residual(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale


def _normed(x: Biased, norm: nn.Module | None) -> Biased:
    return x if norm is None else Biased(norm(x.added()))


def final_layernorm(config: ModelConfig) -> nn.Module:
    """The norm before the heads; none in post-norm models. All ranks have all tokens with loss: its whole gradient."""
    return make_norm(config, config.hidden_size, TensorParallel()) if config.norm == "pre" else nn.Identity()


class GLM(nn.Module):
    """Embedding, blocks, final LayerNorm and heads. Args: parallel: None = one process holds every layer whole."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: str = "none",
        num_losses: int = 1,
        parallel: TensorParallel | None = None,
    ):
        super().__init__()
        self.config = config
        self.num_losses = num_losses
        self.parallel = parallel or TensorParallel(SINGLE)
        self.embedding = Embedding(config, self.parallel)
        blocks = 1 if config.share_layers else config.num_layers
        self.layers = nn.ModuleList([Block(config, self.parallel, recompute) for _ in range(blocks)])
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, self.parallel)
        # Called before a part of the model is computed: its weights may still be on their way from other ranks.
        self.before_use: Callable[[nn.Module], None] = lambda part: None

    def _run(
        self, tokens: torch.Tensor, ids: torch.Tensor, plan: AttentionPlan, dropout: Dropout | None
    ) -> torch.Tensor:
        rotary = Rotary.of(self.config, ids.flatten(1))
        flow = Flow.of(tokens.shape, plan, dropout, self.parallel, rotary)
        self.before_use(self.embedding)
        hidden = self.embedding(tokens.flatten(), ids.flatten(1), flow)
        for layer in range(self.config.num_layers):
            block = self.layers[layer % len(self.layers)]
            self.before_use(block)
            hidden = block(hidden, flow, layer)
        self.before_use(self.final_layernorm)
        self.before_use(self.heads)
        return hidden

    def hidden_states(self, tokens: torch.Tensor, ids: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Output of the last block, before the final LayerNorm, without dropout: [..., D]. One process only.

        Args: tokens: int [...]. ids: int [len(ID_PLANES), ...].
        """
        return self._run(tokens, ids, plan, None).view(*tokens.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]. One process only."""
        return self.heads.logits(self.final_layernorm(hidden), self.embedding.word_embeddings)

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (fp32 scalar, nats); without gradient, fp32 [objectives, 2]: loss sum and weight of each.

        Both are equal on all tensor-parallel ranks.
        """
        hidden = self._run(batch.tokens, batch.ids, batch.plan, batch.dropout)
        words = self.embedding.word_embeddings
        vectors, classes = self.heads(hidden, batch.loss_rows, self.final_layernorm)
        logits = self.heads.vocabulary_logits(vectors, words, len(batch.loss_rows.borders))
        losses = row_losses(logits, classes, batch.targets, words)
        return sum_losses(losses, batch.weights, batch.loss_rows.objectives, self.num_losses)


def build_model(config: Config, num_losses: int, parallel: TensorParallel | None = None) -> GLM:
    """The initialised fp32 model of a configuration; DeepSpeed casts it to the training precision."""
    recompute = config.training.recompute
    model = GLM(config.model, recompute=recompute, num_losses=num_losses, parallel=parallel)
    initialize_parameters(model.named_parameters(), config.model, config.training.seed, model.parallel)
    return model


_OUTPUT_PROJECTIONS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


@torch.no_grad()
def initialize_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    seed: int,
    parallel: TensorParallel | None = None,
) -> None:
    """Draw every parameter whole, as a pure function of (seed, name), and keep this rank's part.

    Weights are normal with mean 0 (`_deviation`), biases 0, LayerNorm 1 and 0; padding rows of the vocabulary 0.
    """
    group = (parallel or TensorParallel()).group
    for name, parameter in named:
        if "layernorm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            partition = partition_of(parameter)
            shape = whole_shape(tuple(parameter.shape), partition, group.size)
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            whole = torch.empty(shape)
            parts = whole.split(partition.part_rows(shape[0]))
            first, *others = (_deviation(name, index, part, config) for index, part in enumerate(parts))
            whole.normal_(0.0, first, generator=generator)
            for part, std in zip(parts[1:], others, strict=True):
                part *= std / first
            parameter.copy_(local_shard(whole, partition, group.rank, group.size, len(parameter)))


def _deviation(name: str, index: int, part: torch.Tensor, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a parameter's part, such as V of Q|K|V.

    init_std; with `init: gpt2` output projections over sqrt(2L) (GPT-2's scheme, as in the reference). DeepNorm: the
    matrices of blocks Xavier's, of values, output projections and FFN over sqrt(2L) (arXiv:2210.02414, section 2.1).
    """
    depth = math.sqrt(2 * config.num_layers)
    if config.init == "deepnorm" and name.startswith("layers."):
        is_query_or_key = name.endswith("query_key_value.weight") and index < 2
        return math.sqrt(2 / sum(part.shape)) / (1.0 if is_query_or_key else depth)
    is_output = config.init == "gpt2" and name.endswith(_OUTPUT_PROJECTIONS)
    return config.init_std / depth if is_output else config.init_std
