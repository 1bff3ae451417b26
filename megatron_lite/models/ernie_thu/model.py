"""ERNIE (Tsinghua): BERT with states of entities in addition to those of tokens (arXiv:1905.07129, thunlp/ERNIE).

There are three types of block. "sim" is BERT's. In "norm" the entities of an Example attend to each other; in "mix"
they do not yet. Both then fuse tokens and entities in the FFN: h = gelu(W a + b + V e + c) at every token, where e is 0
without an entity; the next states of tokens and entities are projections of h. Entity states are computed only where
there is an entity, and at CLS, whose vector is 0: the next block masks all others. Every tensor-parallel rank computes
the entity states whole, except its shard of the FFN.

Shapes: T tokens, D hidden size; N, M, L, C, E as in batch.py; R = N M.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.losses import ENTITIES
from data_utils.objectives.entities import EntitiesConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.models.ernie_thu.batch import EntityTaskInputs, Mentions
from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.dense import Linear, Transform
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.kernels.dropout import Dropout, FeatureDropout, hash_pairs, is_kept
from megatron_lite.transformer.kernels.fused import activated
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.norms import make_norm
from megatron_lite.transformer.residual import Hidden, materialize
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    Partition,
    RowParallelLinear,
    TensorParallel,
    sharded,
)
from megatron_lite.transformer.transformer import BeforeBlock, Transformer

_SALT = 0x3C6EF372  # makes the entities' dropout differ from their tokens': an int32


class EntityAttention(nn.Module):
    """Attention among the entities of an Example, whole on every rank: [R, E] -> [R, E]."""

    def __init__(self, config: EntitiesConfig, dropout: float):
        super().__init__()
        self.query_key_value = Linear(config.size, 3 * config.size)
        self.dense = Linear(config.size, config.size)
        self.heads, self.dropout = config.heads, dropout

    def forward(
        self, states: torch.Tensor, is_real: torch.Tensor, dropout: Dropout | None, layer: int
    ) -> torch.Tensor:
        """Args: is_real: bool [N, M]."""
        examples, most = is_real.shape
        qkv = self.query_key_value(states).view(examples, most, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [N, heads, M, E / heads]
        scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        # Not -inf: an Example without entities would have a softmax of NaN. Its rows are set to 0 later.
        scores = scores.masked_fill(~is_real[:, None, None], torch.finfo(torch.float32).min)
        shares = scores.softmax(-1)
        if self.dropout and dropout is not None:
            keys = dropout.keys.view(examples, 1, most)
            heads = torch.arange(self.heads, dtype=torch.int32, device=keys.device)[:, None, None]
            salt = dropout.attention(self.dropout, layer).salt
            kept = is_kept(hash_pairs(keys[..., None], keys[..., None, :], salt, heads), self.dropout)
            shares = shares * kept / (1.0 - self.dropout)
        out = (shares.to(value.dtype) @ value).transpose(1, 2)
        return self.dense(out.reshape(examples * most, -1))


class EntityBlock(Block):
    """A block that fuses tokens and entities. Args: attends: entities attend to each other ("norm")."""

    def __init__(
        self,
        config: ModelConfig,
        of_entities: EntitiesConfig,
        parallel: TensorParallel,
        recompute: str,
        attends: bool,
    ):
        super().__init__(config, parallel, recompute, 0)
        size, inner, alone = of_entities.size, config.inner_size, TensorParallel()
        # The one-function block computes BERT's FFN, without entities.
        self.may_fuse = False
        # Not split over ranks: entities are few and narrow, and a split would cost a sum over ranks in each
        # layer.
        self.entity_attention = EntityAttention(of_entities, config.attention_dropout) if attends else None
        self.attended_entity_layernorm = make_norm(config, size, alone) if attends else None
        self.entity_h_to_4h = ColumnParallelLinear(size, inner, parallel, has_bias=False)
        # Every token has this bias, also one without an entity.
        self.entity_bias = sharded(nn.Parameter(torch.empty(inner // parallel.group.size)), Partition(dim=0))
        self.entity_4h_to_h = RowParallelLinear(inner, size, parallel)
        self.entity_layernorm = make_norm(config, size, alone)

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        states: torch.Tensor,
        context: ForwardContext,
        layer: int,
        mentions: Mentions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next [T, D] and [R, E]."""
        return recomputed(self.recompute, self._joined, hidden, states, context, layer, mentions)

    def _joined(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor,
        context: ForwardContext,
        layer: int,
        mentions: Mentions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.after_attention(self.attention(hidden, context, layer))
        assert not isinstance(self.output_layernorm, nn.Identity), "a post-norm block"
        dropped = context.features(self.dropout, layer, "attended")
        _, attended = self.post_attention_layernorm.after_sum(hidden, x, dropout=dropped)
        is_real, rows = mentions.positions >= 0, mentions.positions.clamp(min=0).flatten()
        dropout = entity_dropout(context.dropout, rows)

        def features(place: str) -> FeatureDropout | None:
            return None if dropout is None else dropout.features(self.dropout, layer, place)

        if self.entity_attention is not None and self.attended_entity_layernorm is not None:
            x = self.entity_attention(states, is_real, dropout, layer)
            states = self.attended_entity_layernorm.after_sum(states, x, dropout=features("attended"))[1]
        # Padding entities point at row 0 (`clamp` above); zeros make their `index_add` below change nothing.
        states = states * is_real.flatten()[:, None].to(states.dtype)
        # [T, inner]; the entities' share is added at the token where each mention begins.
        assert isinstance(self.mlp, MLP), "configuration refuses experts"
        inner = self.mlp.dense_h_to_4h(attended) + self.entity_bias
        inner = inner.index_add(0, rows, self.entity_h_to_4h(states))
        inner = activated(inner, self.mlp.activation, gated=False, dropout=None)
        x = self.mlp.dense_4h_to_h(inner)
        dropped = context.features(self.dropout, layer, "expanded")
        hidden = self.output_layernorm.after_sum(attended, x, dropout=dropped)[1]
        more = self.entity_4h_to_h(inner.index_select(0, rows))
        return hidden, self.entity_layernorm.after_sum(states, more, dropout=features("expanded"))[1]


def entity_dropout(dropout: Dropout | None, rows: torch.Tensor) -> Dropout | None:
    """The dropout of entity states, which differs from their tokens'. Args: rows: int [R], token of each state."""
    if dropout is None:
        return None
    return replace(dropout, keys=dropout.keys.index_select(0, rows) ^ _SALT)


class EntityTransformer(Transformer):
    """BERT with entity states and three losses: masked tokens, next sentence, entities."""

    def __init__(self, config: ModelConfig, of_entities: EntitiesConfig, **options: Any):
        super().__init__(config, **options)
        for layer, kind in enumerate(of_entities.layer_types_for(config.num_layers)):
            if kind != "sim":
                recompute = options.get("recompute", "none")
                block = EntityBlock(config, of_entities, self.parallel, recompute, kind == "norm")
                self.layers[layer] = block
        self.entity_head = Transform(config.hidden_size, of_entities.size, config)

    def _hidden(self, batch: MicroBatch, before_block: BeforeBlock | None = None) -> torch.Tensor:
        assert isinstance(batch.extra_inputs, EntityTaskInputs)
        mentions: Any = batch.extra_inputs.mentions
        return self.run(batch.tokens, batch.ids, batch.plan, batch.dropout, before_block, mentions)

    def run_blocks(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        positions: torch.Tensor,
        before_block: BeforeBlock | None = None,
    ) -> torch.Tensor:
        # The entities come as the condition of a pass, so that the Transformer knows nothing of them; its
        # blocks get none.
        mentions: Any = context.condition
        context = replace(context, condition=None)
        states = mentions.input_vectors().flatten(0, 1).to(hidden.dtype)
        x: Hidden = hidden
        for layer in range(self.config.num_layers):
            if before_block is not None:
                x = before_block(layer, materialize(x))
            block = self._block(layer)
            if isinstance(block, EntityBlock):
                x, states = block(materialize(x), states, context, layer, mentions)
            else:
                x = block(x, context, layer)
        # No layer reads the last entity states. The empty sum makes the gradient of their weights zero instead of None.
        return materialize(x) + states[:0].sum()

    def forward(self, batch: MicroBatch, *, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses (fp32 scalar, nats); without gradient, fp32 [losses, 2]: sum and weight of each."""
        mentions = batch.extra_inputs
        if not isinstance(mentions, Mentions):
            return super().forward(batch, predict=predict)
        hidden = self.run(batch.tokens, batch.ids, batch.plan, batch.dropout, condition=mentions)
        loss, sums = self._token_loss(hidden, batch)
        wrong = F.cross_entropy(
            self.entity_logits(hidden, mentions),
            mentions.classes.flatten().long().clamp(min=0),
            reduction="none",
        )
        entity_loss = (wrong * batch.extra_weights).sum()
        sums[ENTITIES.number] = torch.stack([entity_loss.detach(), batch.extra_weights.sum()])
        return loss + entity_loss, sums

    def entity_logits(self, hidden: torch.Tensor, mentions: Mentions) -> torch.Tensor:
        """Logits of each Example's candidates at its entities, fp32 [N L, C]; -inf for padding."""
        self.before_use(self.entity_head)
        rows = mentions.predicted.clamp(min=0).flatten()
        vectors = self.entity_head(hidden.index_select(0, rows)).view(*mentions.predicted.shape, -1)
        candidates = mentions.vectors.to(vectors.dtype)
        scores = (vectors @ candidates.transpose(1, 2)).float()
        # Candidates are the entities of the Example, as in the source: a softmax over millions would need their
        # whole table.
        fills = torch.arange(scores.shape[2], device=scores.device) >= mentions.counts[:, None]
        return scores.masked_fill(fills[:, None], float("-inf")).flatten(0, 1)
