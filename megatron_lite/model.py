"""GLM: one Transformer for every objective. It sees tokens, two position ids and an attention plan, nothing else.

Pre-LN blocks, learned position tables for both position ids, output projection tied to the word embedding without a
bias (arXiv:2103.10360). Module names are the conversion table's left column (docs/architecture.md).

Between layers the hidden state is a token matrix [T, D], T = B x S; under sequence parallelism each tensor-parallel
rank holds T / size of its rows. Dropout is a pure function of a seed per micro-batch, the layer and the place, so
recomputing a block or moving it to another pipeline stage repeats it.

Shapes: B rows, S row length, T tokens, D hidden size, H heads of this rank, K rows with loss, V vocabulary (unpadded).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from data_utils.objectives.base import (
    BLOCK_POSITION_IDS,
    DOC,
    GRP,
    OBJECTIVE,
    ORD,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.random_streams import derive_seed
from megatron_lite.attention import AttentionPlan, CallPlan, plan_attention
from megatron_lite.boxes import whole_shape
from megatron_lite.collectives import SINGLE, copy_to_group, gather_tokens
from megatron_lite.config import Config, ModelConfig
from megatron_lite.cross_entropy import cross_entropy
from megatron_lite.linear import linear
from megatron_lite.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    local_shard,
    partition_of,
)


@dataclass
class ModelInput:
    """A batch on the device, ready for the model."""

    tokens: torch.Tensor  # int32 [B, S]; without padding [1, T], the tokens of all rows
    position_ids: torch.Tensor  # as tokens
    block_position_ids: torch.Tensor  # as tokens
    plan: AttentionPlan
    loss_rows: torch.Tensor  # int64 [K], indices into the flattened tokens
    targets: torch.Tensor  # int64 [K]
    weights: torch.Tensor  # fp32 [K]
    objectives: torch.Tensor  # int64 [K], which objective made the row
    dropout_seed: int | None  # of this micro-batch; None = no dropout

    @staticmethod
    def from_batch(
        batch: np.ndarray,
        device: torch.device,
        *,
        dropout_seed: int | None = None,
        kernel: str = "auto",
        keep_padding: bool = False,
    ) -> ModelInput:
        """From the collator's int32 [B, fields, S] buffer (data_utils/objectives/base.py).

        Padding is dropped and tokens stand in the order of the attention plan's calls where the plan needs no rows,
        unless `keep_padding` asks for one shape for every batch.
        """
        plan = plan_attention(batch[:, DOC], batch[:, ORD], batch[:, GRP], device, kernel)
        planes = batch.swapaxes(0, 1)
        if isinstance(plan, CallPlan) and not keep_padding and plan.units:
            planes, plan = planes.reshape(len(planes), 1, -1)[:, :, plan.layout.rows], plan.laid_out()
        weights = np.ascontiguousarray(planes[WEIGHTS]).view(np.float32).reshape(-1)
        rows = np.flatnonzero(weights)
        targets, objectives = (
            planes[plane].reshape(-1)[rows].astype(np.int64) for plane in (TARGETS, OBJECTIVE)
        )
        inputs = torch.from_numpy(planes[[TOKENS, POSITION_IDS, BLOCK_POSITION_IDS]]).to(device)
        tokens, position_ids, block_position_ids = inputs.unbind(0)
        return ModelInput(
            tokens=tokens,
            position_ids=position_ids,
            block_position_ids=block_position_ids,
            plan=plan,
            loss_rows=torch.from_numpy(rows).to(device),
            targets=torch.from_numpy(targets).to(device),
            weights=torch.from_numpy(weights[rows]).to(device),
            objectives=torch.from_numpy(objectives).to(device),
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
    """What accompanies the hidden state of a micro-batch through the layers."""

    rows: int
    length: int
    plan: AttentionPlan
    dropout_seed: int | None
    rank: int = 0  # this process's place among the tensor-parallel ranks

    def seed_dropout(self, layer: int, place: str, is_split: bool) -> None:
        """Point torch's generator at the start of one dropout: equal on all tensor-parallel ranks, or one for each."""
        assert self.dropout_seed is not None
        torch.manual_seed(derive_seed(self.dropout_seed, layer, place, self.rank if is_split else 0))

    def dropout(self, x: torch.Tensor, p: float, layer: int, place: str, is_split: bool) -> torch.Tensor:
        if p == 0.0 or self.dropout_seed is None:
            return x
        self.seed_dropout(layer, place, is_split)
        return F.dropout(x, p)


class PositionEmbeddings(nn.Module):
    """Adds position and block position embeddings to those of the words, then dropout: [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.position_embeddings = nn.Embedding(config.max_position + 1, config.hidden_size)
        self.block_position_embeddings = nn.Embedding(config.max_position + 1, config.hidden_size)
        self.parallel = parallel
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    def forward(
        self, words: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor, flow: Flow
    ) -> torch.Tensor:
        if self.gradient_shrink != 1.0:
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        hidden = (
            words
            + self._positions(position_ids, self.position_embeddings.weight)
            + self._positions(block_position_ids, self.block_position_embeddings.weight)
        )
        return flow.dropout(hidden, self.dropout, -1, "embedding", self.parallel.sequence_parallel)

    def _positions(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if self.parallel.sequence_parallel:
            ids = ids.chunk(self.parallel.group.size)[self.parallel.group.rank]
        return F.embedding(ids, self.parallel.replicated(table))


class Embedding(PositionEmbeddings):
    """All three embeddings and dropout: int [T] x 3 -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.word_embeddings = VocabParallelEmbedding(config, parallel)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor, flow: Flow
    ) -> torch.Tensor:
        return super().forward(self.word_embeddings(tokens), position_ids, block_position_ids, flow)


class Attention(nn.Module):
    """Fused Q|K|V projection ([3D, D], contiguous thirds), the plan's kernel, output projection."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: bool):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.parallel = parallel
        self.recompute = recompute
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, 3 * config.hidden_size, parallel, parts=3
        )
        self.dense = RowParallelLinear(config.hidden_size, config.hidden_size, parallel)

    def forward(self, hidden: torch.Tensor, flow: Flow) -> torch.Tensor:
        qkv = self.query_key_value(self.parallel.enter(hidden))
        q, k, v = qkv.view(flow.rows, flow.length, 3, -1, self.head_dim).unbind(2)
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(self._attend, q, k, v, flow, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._attend(q, k, v, flow)
        return self.dense(out.reshape(flow.rows * flow.length, -1))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flow: Flow) -> torch.Tensor:
        dropout = 0.0 if flow.dropout_seed is None else self.dropout
        if dropout:
            flow.seed_dropout(self.layer, "attention", is_split=True)
        return flow.plan.attend(self.layer, q, k, v, dropout)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.parallel = parallel
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size, parallel)
        self.dense_4h_to_h = RowParallelLinear(4 * config.hidden_size, config.hidden_size, parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        expanded = self.dense_h_to_4h(self.parallel.enter(hidden))
        return self.dense_4h_to_h(F.gelu(expanded, approximate=self.approximate))


class Block(nn.Module):
    """x + dropout(attention(LN(x))), then the same with the MLP."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str):
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layernorm_epsilon
        self.layer = layer
        self.input_layernorm = LayerNorm(hidden, epsilon, parallel)
        self.attention = Attention(config, layer, parallel, recompute == "selective")
        self.post_attention_layernorm = LayerNorm(hidden, epsilon, parallel)
        self.mlp = MLP(config, parallel)
        self.dropout = config.output_dropout
        self.is_split = parallel.sequence_parallel
        self.recompute = recompute == "full"

    def forward(self, hidden: torch.Tensor, flow: Flow) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward, hidden, flow, use_reentrant=False, preserve_rng_state=False)
        return self._forward(hidden, flow)

    def _forward(self, hidden: torch.Tensor, flow: Flow) -> torch.Tensor:
        attended = self.attention(self.input_layernorm(hidden), flow)
        hidden = hidden + flow.dropout(attended, self.dropout, self.layer, "attended", self.is_split)
        expanded = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + flow.dropout(expanded, self.dropout, self.layer, "expanded", self.is_split)


class Head(LayerNorm):
    """Final LayerNorm and, after it, the output projection tied to the word embedding."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        # As a LayerNorm it stands alone: all ranks have all rows with loss, so no part of its gradients is missing.
        super().__init__(config.hidden_size, config.layernorm_epsilon, TensorParallel())
        self.region = parallel

    def rows(self, hidden: torch.Tensor, loss_rows: torch.Tensor) -> torch.Tensor:
        """The rows that carry loss, int64 [K], out of the last block's [T, D]: the head runs on no others."""
        if self.region.sequence_parallel:
            hidden = gather_tokens(hidden, self.region.group, reduce_backward=False)
        return hidden.index_select(0, loss_rows)

    def logits(self, rows: torch.Tensor, embedding: VocabParallelEmbedding) -> torch.Tensor:
        """[..., D] -> [..., local V]; the padding rows of the vocabulary do not take part."""
        normed = copy_to_group(self(rows), self.region.group)
        return linear(normed, embedding.weight[: embedding.local_vocab])

    def losses(
        self, rows: torch.Tensor, targets: torch.Tensor, embedding: VocabParallelEmbedding
    ) -> torch.Tensor:
        """Cross entropy of each row in nats, fp32 [K], equal on all tensor-parallel ranks."""
        return cross_entropy(self.logits(rows, embedding), targets, self.region.group, embedding.first)


def sum_losses(
    losses: torch.Tensor, weights: torch.Tensor, objectives: torch.Tensor, num_objectives: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss sum; without gradient, fp32 [objectives, 2]: loss sum and weight of each objective."""
    weighted = losses * weights
    per_objective = torch.zeros(num_objectives, 2, device=losses.device)
    per_objective.index_add_(0, objectives, torch.stack([weighted.detach(), weights], dim=1))
    return weighted.sum(), per_objective


class GLM(nn.Module):
    """The list of layers embedding, blocks, final norm, output, run in order.

    Args:
        parallel: None = one process holds every layer whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: str = "none",
        num_objectives: int = 1,
        parallel: TensorParallel | None = None,
    ):
        super().__init__()
        self.config = config
        self.num_objectives = num_objectives
        self.parallel = parallel or TensorParallel(SINGLE)
        self.embedding = Embedding(config, self.parallel)
        self.layers = nn.ModuleList(
            [Block(config, i, self.parallel, recompute) for i in range(config.num_layers)]
        )
        self.final_layernorm = Head(config, self.parallel)

    def _run(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        block_position_ids: torch.Tensor,
        plan: AttentionPlan,
        dropout_seed: int | None,
    ) -> torch.Tensor:
        rows, length = tokens.shape
        flow = Flow(rows, length, plan, dropout_seed, self.parallel.group.rank)
        hidden = self.embedding(tokens.flatten(), position_ids.flatten(), block_position_ids.flatten(), flow)
        for block in self.layers:
            hidden = block(hidden, flow)
        return hidden

    def hidden_states(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        block_position_ids: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Output of the last block, before the final LayerNorm, without dropout: [B, S, D]. One process only."""
        hidden = self._run(tokens, position_ids, block_position_ids, plan, None)
        return hidden.view(*tokens.shape, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]. One process only."""
        return self.final_layernorm.logits(hidden, self.embedding.word_embeddings)

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (fp32 scalar, nats); without gradient, fp32 [objectives, 2]: loss sum and weight of each.

        Both are equal on all tensor-parallel ranks.
        """
        hidden = self._run(
            batch.tokens, batch.position_ids, batch.block_position_ids, batch.plan, batch.dropout_seed
        )
        rows = self.final_layernorm.rows(hidden, batch.loss_rows)
        losses = self.final_layernorm.losses(rows, batch.targets, self.embedding.word_embeddings)
        return sum_losses(losses, batch.weights, batch.objectives, self.num_objectives)


def build_model(config: Config, num_objectives: int, parallel: TensorParallel | None = None) -> GLM:
    """The initialised fp32 model of a configuration; DeepSpeed casts it to the training precision."""
    model = GLM(
        config.model,
        recompute=config.training.recompute,
        num_objectives=num_objectives,
        parallel=parallel,
    )
    initialize_parameters(model.named_parameters(), config.model, config.training.seed, model.parallel)
    return model


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
