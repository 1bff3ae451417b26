"""GLM: one Transformer for every objective. It sees tokens, two position ids and an attention plan, nothing else.

Pre-LN blocks, learned position tables for both position ids, output projection tied to the word embedding without a
bias (arXiv:2103.10360). Module names are the conversion table's left column (docs/architecture.md).

Shapes: B rows, S row length, D hidden size, H heads, K rows with loss, V vocabulary (unpadded).
"""

from __future__ import annotations

import math
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
from megatron_lite.attention import AttentionPlan, PrefixPlan, plan_attention
from megatron_lite.config import Config, ModelConfig, padded_vocab_size
from megatron_lite.cross_entropy import cross_entropy
from megatron_lite.linear import linear


@dataclass
class ModelInput:
    """A batch on the device, ready for the model."""

    tokens: torch.Tensor  # int32 [B, S]; without padding [1, T], all rows' tokens one after the other
    position_ids: torch.Tensor  # as tokens
    block_position_ids: torch.Tensor  # as tokens
    plan: AttentionPlan
    loss_rows: torch.Tensor  # int64 [K], indices into the flattened tokens
    targets: torch.Tensor  # int64 [K]
    weights: torch.Tensor  # fp32 [K]
    objectives: torch.Tensor  # int64 [K], which objective made the row

    @staticmethod
    def from_batch(
        batch: np.ndarray, device: torch.device, kernel: str = "auto", keep_padding: bool = False
    ) -> ModelInput:
        """From the collator's int32 [B, fields, S] buffer (data_utils/objectives/base.py).

        Padding is dropped where the attention plan needs no rows (4 % of the token objective), unless
        `keep_padding` asks for one shape for every batch.
        """
        plan = plan_attention(batch[:, DOC], batch[:, ORD], batch[:, GRP], device, kernel)
        planes = batch.swapaxes(0, 1)
        if isinstance(plan, PrefixPlan) and not keep_padding:
            planes, plan = planes[:, None, batch[:, DOC] >= 0], plan.without_padding()
        weights = np.ascontiguousarray(planes[WEIGHTS]).view(np.float32).reshape(-1)
        rows = np.flatnonzero(weights)
        targets, objectives = (planes[plane].reshape(-1)[rows].astype(np.int64) for plane in (TARGETS, OBJECTIVE))
        inputs = torch.from_numpy(planes[[TOKENS, POSITION_IDS, BLOCK_POSITION_IDS]]).to(device)
        tokens, position_ids, block_position_ids = inputs.unbind(0)
        loss = [torch.from_numpy(x).to(device) for x in (rows, targets, weights[rows], objectives)]
        return ModelInput(tokens, position_ids, block_position_ids, plan, *loss)


class _ShrinkGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):  # type: ignore[no-untyped-def]
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.alpha, None


class Linear(nn.Module):
    """Weight [out, in] and bias [out]; initialised by `initialize_parameters`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Word + position + block position embeddings, then dropout: int [B, S] x 3 -> [B, S, D]."""

    def __init__(self, config: ModelConfig, padded_vocab: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(padded_vocab, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position + 1, config.hidden_size)
        self.block_position_embeddings = nn.Embedding(config.max_position + 1, config.hidden_size)
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor) -> torch.Tensor:
        words = self.word_embeddings(tokens)
        if self.gradient_shrink != 1.0:
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        hidden = words + self.position_embeddings(position_ids) + self.block_position_embeddings(block_position_ids)
        return F.dropout(hidden, self.dropout, self.training)


class Attention(nn.Module):
    """Fused Q|K|V projection ([3D, D], contiguous thirds), the plan's kernel, output projection."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.query_key_value = Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        rows, length, _ = hidden.shape
        q, k, v = self.query_key_value(hidden).view(rows, length, 3, -1, self.head_dim).unbind(2)
        out = plan.attend(self.layer, q, k, v, self.dropout if self.training else 0.0)
        return self.dense(out.reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.approximate = "tanh" if config.gelu == "tanh" else "none"
        self.dense_h_to_4h = Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden), approximate=self.approximate))


class Block(nn.Module):
    """x + dropout(attention(LN(x))), then the same with the MLP."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.attention = Attention(config, layer)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config)
        self.dropout = config.output_dropout

    def forward(self, hidden: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        attended = self.attention(self.input_layernorm(hidden), plan)
        hidden = hidden + F.dropout(attended, self.dropout, self.training)
        expanded = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + F.dropout(expanded, self.dropout, self.training)


class GLM(nn.Module):
    """The list of layers embedding, blocks, final norm, output, run in order."""

    def __init__(self, config: ModelConfig, *, recompute: str = "none", num_objectives: int = 1):
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.recompute = recompute
        self.num_objectives = num_objectives
        self.embedding = Embedding(config, padded_vocab_size(config.vocab_size))
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)

    def hidden_states(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, block_position_ids: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Output of the last block, before the final LayerNorm: [B, S, D]."""
        hidden = self.embedding(tokens, position_ids, block_position_ids)
        for block in self.layers:
            if self.recompute == "full" and self.training:
                hidden = checkpoint(block, hidden, plan, use_reentrant=False)
            else:
                hidden = block(hidden, plan)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]; the padding rows of the vocabulary do not take part."""
        return linear(self.final_layernorm(hidden), self.embedding.word_embeddings.weight[: self.config.vocab_size])

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (fp32 scalar, nats) and, without gradient, fp32 [objectives, 2]: loss sum and weight of each.

        The head runs only on rows that carry loss.
        """
        hidden = self.hidden_states(batch.tokens, batch.position_ids, batch.block_position_ids, batch.plan)
        rows = hidden.flatten(0, 1).index_select(0, batch.loss_rows)
        losses = cross_entropy(self.logits(rows), batch.targets) * batch.weights
        per_objective = torch.zeros(self.num_objectives, 2, device=losses.device)
        per_objective.index_add_(0, batch.objectives, torch.stack([losses.detach(), batch.weights], dim=1))
        return losses.sum(), per_objective


def build_model(config: Config, num_objectives: int) -> GLM:
    """The initialised fp32 model of a configuration; DeepSpeed casts it to the training precision."""
    model = GLM(config.model, recompute=config.training.recompute, num_objectives=num_objectives)
    initialize_parameters(model, config.training.seed)
    return model


@torch.no_grad()
def initialize_parameters(model: GLM, seed: int) -> None:
    """Draw every parameter as a pure function of (seed, name): weights N(0, init_std), output projections scaled by
    1/sqrt(2L), biases 0, LayerNorm 1 and 0 (GPT-2's scheme, as in the reference)."""
    config = model.config
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            is_output = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            std = config.init_std / math.sqrt(2 * config.num_layers) if is_output else config.init_std
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            values = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.copy_(values)
