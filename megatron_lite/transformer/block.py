"""The Transformer block: attention and MLP, each with its norm and residual.

Between blocks the hidden state is a token matrix [T, D]; under sequence parallelism each tensor-parallel rank holds
T / size of its tokens. Dropout is a pure function of each token and the place in the model (dropout.py), so every
layout gives the same, and so does a block that is computed again.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.adapter import Adapter
from megatron_lite.transformer.attention import Attention
from megatron_lite.transformer.experts import Experts, feed_forward
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.fused_block import FusedParameters, fusible_plan
from megatron_lite.transformer.kernels.fused import has_kernels
from megatron_lite.transformer.lora import add_updates
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.norms import Norm, make_norm
from megatron_lite.transformer.residual import Hidden, Residual, materialize
from megatron_lite.transformer.tensor_parallel import DeferredBias, TensorParallel


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual: [T, D] -> [T, D].

    A sum and the norm that reads it are one kernel where kernels run: it adds a product's bias, drops out, adds the
    residual and norms. So there a product leaves its bias (`DeferredBias`), and a pre-norm block its last sum
    (`Residual`), to the next norm, which may be that of the next block. fused_block.py computes a plain block as one
    function.

    Args:
        recompute: "none", "selective" (attention) or "full": what the backward pass computes again.
        layer: its number in the model: the first may have no norm (`model.first_norm`), some have experts.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str, layer: int):
        super().__init__()

        def norm(exists: bool) -> Norm | nn.Identity:
            return make_norm(config, config.hidden_size, parallel) if exists else nn.Identity()

        self.is_pre_norm = config.norm == "pre"
        # Checkpoints name the norms by their place, so `post_attention_layernorm` lies before the MLP in a pre-norm
        # block, and after attention in a post-norm block.
        self.input_layernorm = norm(self.is_pre_norm and (config.first_norm or layer > 0))
        self.attention = Attention(config, parallel, recompute == "selective")
        self.post_attention_layernorm = make_norm(config, config.hidden_size, parallel)
        self.mlp: MLP | Experts = feed_forward(config, parallel, layer)
        self.output_layernorm = norm(not self.is_pre_norm)
        # Within the residual branches: adapters, and the norms of a sandwich.
        self.has_branch_layers = config.sandwich_norm or config.adapter_size > 0
        self.attention_adapter, self.mlp_adapter = (
            Adapter(config, parallel) if config.adapter_size else nn.Identity() for _ in range(2)
        )
        self.attended_layernorm, self.expanded_layernorm = (norm(config.sandwich_norm) for _ in range(2))
        add_updates(self, config)
        # DeepNorm, arXiv:2203.00555
        self.residual_scale = math.sqrt(2 * config.num_layers) if config.norm == "deepnorm" else 1.0
        self.dropout = config.output_dropout
        self.parallel, self.recompute = parallel, recompute == "full"
        # The one function covers plain pre-norm blocks without tensor parallelism; all others are several functions.
        is_plain = config.has_plain_blocks and not self.has_branch_layers
        self.may_fuse = is_plain and recompute == "none" and parallel.group.size == 1
        self.fused: FusedParameters | None = None  # of a block that is one function of autograd

    def accumulate_gradients(self, accumulate: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Let the backward pass give the gradients of parameters to an optimizer; a pass uses each parameter once.

        Called after `accumulate_in_backward` of the weights.

        Args: accumulate: takes a parameter of a bias or norm, and its gradient.
        """
        if self.may_fuse and has_kernels(next(self.parameters())):
            self.fused = FusedParameters.of(self, accumulate)

    def forward(self, x: Hidden, context: ForwardContext, layer: int) -> Hidden:
        """Where no kernels run, x is a tensor, and so is the result. Args: layer: its index, for dropout and caches."""
        if self.recompute and torch.is_grad_enabled():
            return recomputed(True, self._forward_whole, materialize(x), context, layer)
        residual = x if isinstance(x, Residual) else Residual(x)
        if self.fused is not None and torch.is_grad_enabled() and residual.hidden.requires_grad:
            plan = fusible_plan(context.plan, layer)
            if plan is not None and context.condition is None:
                return self.fused.forward(self, residual, context, layer, plan)
        # Without kernels an open sum gains nothing, and at ZeRO 3 this block's bias is gone when the next block runs.
        is_open = has_kernels(residual.hidden) and not self.parallel.sums_at_once
        out = self._forward(residual, context, layer)
        return out if is_open else materialize(out)

    def _forward_whole(self, x: torch.Tensor, context: ForwardContext, layer: int) -> torch.Tensor:
        return materialize(self._forward(Residual(x), context, layer))

    def _forward(self, residual: Residual, context: ForwardContext, layer: int) -> Hidden:
        total, normed = self.attend(residual, context, layer, self.post_attention_layernorm)
        return self.expand(total, normed, context, layer)

    def attend(
        self, residual: Residual, context: ForwardContext, layer: int, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum after attention and its norm, [T, D] each. Args: norm: that follows."""
        # Post-norm, and a first block without a norm: attention reads the sum itself.
        if isinstance(self.input_layernorm, nn.Identity):
            hidden = normed = materialize(residual)
        else:
            hidden, normed = residual.norm(self.input_layernorm)
        x = deferred(self.attention(normed, context, layer, skip_bias_add=has_kernels(normed)))
        if self.has_branch_layers:
            x = DeferredBias(self.after_attention(x.added()))
        dropout = context.features(self.dropout, layer, "attended")
        return Residual(self.scaled(hidden), x, dropout).norm(norm)

    def expand(
        self, total: torch.Tensor, normed: torch.Tensor, context: ForwardContext, layer: int
    ) -> Hidden:
        """The hidden state after the MLP. Args: total, normed: a sum and its norm, which the MLP reads."""
        x = deferred(self.mlp(normed, context, layer, skip_bias_add=has_kernels(normed)))
        if self.has_branch_layers:
            x = DeferredBias(self.after_mlp(x.added()))
        dropout = context.features(self.dropout, layer, "expanded")
        if isinstance(self.output_layernorm, nn.Identity):
            # Pre-norm: the sum is left to the next block's first norm.
            return Residual(total, x, dropout)
        return Residual(self.scaled(normed), x, dropout).norm(self.output_layernorm)[1]

    def after_attention(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of attention's branch: [T, D] -> [T, D]."""
        return self.attended_layernorm(self.attention_adapter(x))

    def after_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of the MLP's branch: [T, D] -> [T, D]."""
        return self.expanded_layernorm(self.mlp_adapter(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """The residual, times sqrt(2 L) under DeepNorm."""
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def deferred(x: torch.Tensor | DeferredBias) -> DeferredBias:
    """A product's output, whose bias may be added already."""
    return x if isinstance(x, DeferredBias) else DeferredBias(x)


def stack(config: ModelConfig, parallel: TensorParallel, recompute: str) -> nn.ModuleList:
    """The first `num_layers` blocks, or one to run again. What they share is a module of the first alone, named so."""
    count = 1 if config.share_layers == "all" else config.num_layers
    first, *others = blocks = [Block(config, parallel, recompute, layer) for layer in range(count)]
    for block in others if config.share_layers != "none" else ():
        # Through `__dict__`: as a submodule the shared module would appear in every block's names and be saved several
        # times.
        name = {"attention": "attention", "ffn": "mlp"}[config.share_layers]
        delattr(block, name)
        block.__dict__[name] = getattr(first, name)
    return nn.ModuleList(blocks)
