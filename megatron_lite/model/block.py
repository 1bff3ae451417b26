"""The Transformer block: attention and MLP, each with its norm and residual.

Between blocks the hidden state is a token matrix [T, D]; under sequence parallelism each tensor-parallel rank holds
T / size of its tokens. Dropout is a pure function of each token and the place in the model (dropout.py), so every
layout gives the same, and so does a block that is computed again.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.activation_checkpoint import recomputed
from megatron_lite.model.adapter import Adapter
from megatron_lite.model.attention import Attention
from megatron_lite.model.forward_context import Flow
from megatron_lite.model.fused_block import Parts
from megatron_lite.model.kernels.dropout import FeatureDropout
from megatron_lite.model.kernels.fused import Biased, add, has_kernels
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import LayerNorm, RMSNorm, make_norm
from megatron_lite.model.tensor_parallel import TensorParallel


class Stream(NamedTuple):
    """The hidden state between blocks: hidden + dropout(x), [T, D]. The next norm's kernel makes the sum.

    A tuple, so that DeepSpeed finds the tensors in it.
    """

    hidden: torch.Tensor
    x: Biased | None = None
    dropout: FeatureDropout | None = None

    def summed(self) -> torch.Tensor:
        return self.hidden if self.x is None else add(self.hidden, self.x, self.dropout)


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
