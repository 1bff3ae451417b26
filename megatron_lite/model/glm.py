"""GLM: one Transformer for every objective. Input: tokens, their ids (positions, segment, task), an attention plan.

Pre-LN blocks, learned tables for both position ids, output projection tied to the word embedding without a bias
(arXiv:2103.10360). docs/architecture.md compares the module names with those of released checkpoints.

Between layers the hidden state is a token matrix [T, D], T = B x S; under sequence parallelism each tensor-parallel
rank holds T / size of its tokens. Dropout is a pure function of a seed per micro-batch, the layer and the place in it,
so recomputing a block, or moving it to another pipeline stage, gives the same dropout.

Shapes: B rows, S row length, T tokens, D hidden size, E embedding size (D unless factorised), H heads of this rank,
V vocabulary (unpadded); K, P, M as in heads.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_utils.base.random_streams import derive_seed
from data_utils.objectives.planes import (
    BLOCK_POSITION_IDS,
    OBJECTIVE,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
)
from data_utils.objectives.registry import TASKS
from megatron_lite.config.tree import Config, ModelConfig
from megatron_lite.model.attention import AttentionPlan, CallPlan, plan_attention
from megatron_lite.model.batch import Batch
from megatron_lite.model.heads import Heads, Linear, LossRows, find_loss_rows, row_losses, sum_losses
from megatron_lite.model.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    local_shard,
    partition_of,
    whole_shape,
)
from megatron_lite.parallel.collectives import SINGLE

ID_PLANES = (POSITION_IDS, BLOCK_POSITION_IDS, SEGMENT_IDS, OBJECTIVE)


@dataclass
class ModelInput:
    """A batch on the device, ready for the model."""

    tokens: torch.Tensor  # int32 [B, S]; without padding [1, T], the tokens of all rows
    ids: torch.Tensor  # int32 [len(ID_PLANES), B, S] or [.., 1, T]: for the other embeddings
    plan: AttentionPlan
    loss_rows: LossRows
    targets: torch.Tensor  # int64 [K + P + M], see LossRows
    weights: torch.Tensor  # fp32 [K + P + M]
    dropout_seed: int | None  # of this micro-batch; None = no dropout

    @staticmethod
    def from_batch(
        batch: Batch,
        device: torch.device,
        config: ModelConfig,
        *,
        dropout_seed: int | None = None,
        kernel: str = "auto",
        keep_padding: bool = False,
    ) -> ModelInput:
        """The parts of a batch that the model needs, on its device.

        With a CallPlan, padding is dropped and the tokens are in the order of its calls, unless `keep_padding` is set,
        which gives every batch the same shape.
        """
        plan = plan_attention(batch.layout, device, kernel)
        planes = batch.planes.swapaxes(0, 1)[[TOKENS, *ID_PLANES, TARGETS]]
        weights = batch.weights
        if isinstance(plan, CallPlan) and not keep_padding and plan.units:
            rows, plan = batch.layout.rows, plan.laid_out()
            planes, weights = planes.reshape(len(planes), 1, -1)[:, :, rows], weights.reshape(-1)[rows]
        inputs = torch.from_numpy(planes[:-1]).to(device)
        losses = (weights, planes[1 + ID_PLANES.index(OBJECTIVE)], planes[-1])
        weights_T, objectives_T, targets_T = (torch.from_numpy(plane.reshape(-1)) for plane in losses)
        loss_rows = find_loss_rows(weights_T, objectives_T, config)
        return ModelInput(
            tokens=inputs[0],
            ids=inputs[1:],
            plan=plan,
            loss_rows=loss_rows.to(device),
            targets=targets_T[loss_rows.labelled].long().to(device),
            weights=weights_T[loss_rows.labelled].to(device),
            dropout_seed=dropout_seed,
        )


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

    rows: int
    length: int
    plan: AttentionPlan
    dropout_seed: int | None
    rank: int = 0  # this process's place among the tensor-parallel ranks

    def seed_dropout(self, layer: int, place: str, is_split: bool) -> None:
        """Seed torch's generator for one dropout: equal on all tensor-parallel ranks, or one seed for each."""
        assert self.dropout_seed is not None
        torch.manual_seed(derive_seed(self.dropout_seed, layer, place, self.rank if is_split else 0))

    def dropout(self, x: torch.Tensor, p: float, layer: int, place: str, is_split: bool) -> torch.Tensor:
        if p == 0.0 or self.dropout_seed is None:
            return x
        self.seed_dropout(layer, place, is_split)
        return F.dropout(x, p)


class PositionEmbeddings(nn.Module):
    """Adds the embeddings of `ID_PLANES` to those of the words, then dropout: [T, E] -> [T, D].

    Segment and task embeddings exist if the configuration has them. With a factorised embedding (ALBERT) all are of
    size E, and their sum is projected to D.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.position_embeddings = nn.Embedding(config.max_position + 1, size)
        self.block_position_embeddings = nn.Embedding(config.max_position + 1, size)
        self.segment_embeddings = nn.Embedding(config.segments, size) if config.segments else None
        self.task_embeddings = nn.Embedding(TASKS, size) if config.task_embedding else None
        self.projection = None if config.embedding_size is None else Linear(size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    def forward(self, words: torch.Tensor, ids: torch.Tensor, flow: Flow) -> torch.Tensor:
        """Args: words: [T, E], or this rank's tokens of it under sequence parallelism. ids: int [len(ID_PLANES), T]."""
        if self.gradient_shrink != 1.0:
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        if self.parallel.sequence_parallel:
            ids = ids.chunk(self.parallel.group.size, dim=1)[self.parallel.group.rank]
        hidden = words
        positions = (self.position_embeddings, self.block_position_embeddings)
        tables = (*positions, self.segment_embeddings, self.task_embeddings)
        for table, plane in zip(tables, ids, strict=True):
            if table is not None:
                hidden = hidden + F.embedding(plane, self.parallel.replicated(table.weight))
        if self.projection is not None:
            weight, bias = map(self.parallel.replicated, (self.projection.weight, self.projection.bias))
            hidden = linear(hidden, weight, bias)
        return flow.dropout(hidden, self.dropout, -1, "embedding", self.parallel.sequence_parallel)


class Embedding(PositionEmbeddings):
    """All embeddings: int [T], int [len(ID_PLANES), T] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.word_embeddings = VocabParallelEmbedding(config, parallel)

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, flow: Flow) -> torch.Tensor:
        return super().forward(self.word_embeddings(tokens), ids, flow)


class Attention(nn.Module):
    """Fused Q|K|V projection ([3D, D], contiguous thirds), the plan's kernel, output projection."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.parallel = parallel
        self.recompute = recompute
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, 3 * config.hidden_size, parallel, parts=3
        )
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, parallel)

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        qkv = self.query_key_value(hidden)
        q, k, v = qkv.view(flow.rows, flow.length, 3, -1, self.head_dim).unbind(2)
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(
                self._attend, q, k, v, flow, layer, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out = self._attend(q, k, v, flow, layer)
        return self.dense(out.reshape(flow.rows * flow.length, -1))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flow: Flow, layer: int
    ) -> torch.Tensor:
        dropout = 0.0 if flow.dropout_seed is None else self.dropout
        if dropout:
            flow.seed_dropout(layer, "attention", is_split=True)
        return flow.plan.attend(layer, q, k, v, dropout)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.parallel = parallel
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size, parallel)
        self.dense_4h_to_h = RowParallelLinear(4 * config.hidden_size, config.hidden_size, parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        expanded = self.dense_h_to_4h(hidden)
        return self.dense_4h_to_h(F.gelu(expanded, approximate=self.approximate))


class Block(nn.Module):
    """x + dropout(attention(LN(x))), then the same with the MLP. `layer` is its index, for dropout and caches."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str):
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layernorm_epsilon
        self.input_layernorm = LayerNorm(hidden, epsilon, parallel)
        self.attention = Attention(config, parallel, recompute == "selective")
        self.post_attention_layernorm = LayerNorm(hidden, epsilon, parallel)
        self.mlp = MLP(config, parallel)
        self.dropout = config.output_dropout
        self.is_split = parallel.sequence_parallel
        self.recompute = recompute == "full"

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self._forward, hidden, flow, layer, use_reentrant=False, preserve_rng_state=False
            )
        return self._forward(hidden, flow, layer)

    def _forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> torch.Tensor:
        attended = self.attention(self.input_layernorm(hidden), flow, layer)
        hidden = hidden + flow.dropout(attended, self.dropout, layer, "attended", self.is_split)
        expanded = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + flow.dropout(expanded, self.dropout, layer, "expanded", self.is_split)


def final_layernorm(config: ModelConfig) -> LayerNorm:
    """The LayerNorm before the heads. All ranks have all tokens with loss, so each has its whole gradient."""
    return LayerNorm(config.hidden_size, config.layernorm_epsilon, TensorParallel())


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

    def _run(
        self, tokens: torch.Tensor, ids: torch.Tensor, plan: AttentionPlan, dropout_seed: int | None
    ) -> torch.Tensor:
        rows, length = tokens.shape
        flow = Flow(rows, length, plan, dropout_seed, self.parallel.group.rank)
        hidden = self.embedding(tokens.flatten(), ids.flatten(1), flow)
        for layer in range(self.config.num_layers):
            hidden = self.layers[layer % len(self.layers)](hidden, flow, layer)
        return hidden

    def hidden_states(self, tokens: torch.Tensor, ids: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Output of the last block, before the final LayerNorm, without dropout: [B, S, D]. One process only.

        Args: tokens: int [B, S]. ids: int [len(ID_PLANES), B, S].
        """
        return self._run(tokens, ids, plan, None).view(*tokens.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]. One process only."""
        return self.heads.logits(self.final_layernorm(hidden), self.embedding.word_embeddings)

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (fp32 scalar, nats); without gradient, fp32 [objectives, 2]: loss sum and weight of each.

        Both are equal on all tensor-parallel ranks.
        """
        hidden = self._run(batch.tokens, batch.ids, batch.plan, batch.dropout_seed)
        words = self.embedding.word_embeddings
        vectors, classes = self.heads(hidden, batch.loss_rows, self.final_layernorm)
        losses = row_losses(self.heads.vocabulary_logits(vectors, words), classes, batch.targets, words)
        return sum_losses(losses, batch.weights, batch.loss_rows.objectives, self.num_losses)


def build_model(config: Config, num_losses: int, parallel: TensorParallel | None = None) -> GLM:
    """The initialised fp32 model of a configuration; DeepSpeed casts it to the training precision."""
    recompute = config.training.recompute
    model = GLM(config.model, recompute=recompute, num_losses=num_losses, parallel=parallel)
    initialize_parameters(model.named_parameters(), config.model, config.training.seed, model.parallel)
    return model


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the training model, without padding rows, as checkpoints hold them."""
    with torch.device("meta"):
        named = GLM(config).named_parameters()
    return {name: whole_shape(tuple(p.shape), partition_of(p), 1) for name, p in named}


@torch.no_grad()
def initialize_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    seed: int,
    parallel: TensorParallel | None = None,
) -> None:
    """Draw every parameter whole, as a pure function of (seed, name), and keep this rank's part.

    Weights N(0, init_std), output projections scaled by 1/sqrt(2L), biases 0, LayerNorm 1 and 0 (GPT-2's scheme, as in
    the reference); padding rows of the vocabulary 0.
    """
    group = (parallel or TensorParallel()).group
    for name, parameter in named:
        if "layernorm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            is_output = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            std = config.init_std / math.sqrt(2 * config.num_layers) if is_output else config.init_std
            partition = partition_of(parameter)
            shape = whole_shape(tuple(parameter.shape), partition, group.size)
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            whole = torch.empty(shape).normal_(0.0, std, generator=generator)
            parameter.copy_(local_shard(whole, partition, group.rank, group.size, len(parameter)))
