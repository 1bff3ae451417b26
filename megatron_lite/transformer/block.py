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
from megatron_lite.transformer import fused_block
from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.adapter import Adapter
from megatron_lite.transformer.attention import Attention
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.fused_block import FusedParameters, Hidden, Residual
from megatron_lite.transformer.kernels.fused import dropout_add, has_kernels
from megatron_lite.transformer.lora import add_updates
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.norms import Norm, make_norm
from megatron_lite.transformer.tensor_parallel import TensorParallel


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual: [T, D] -> [T, D].

    Where Triton's kernels run, fused_block.py computes the same: there a kernel adds bias and residual, drops out and
    norms at once. Tests compare the two.

    Args:
        recompute: "none", "selective" (attention) or "full": what the backward pass computes again.
        is_first: whether it is the model's first block, which may have no norm (`model.first_norm`).
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str, is_first: bool = False):
        super().__init__()

        def norm(exists: bool) -> Norm | nn.Identity:
            return make_norm(config, config.hidden_size, parallel) if exists else nn.Identity()

        self.is_pre_norm = config.norm == "pre"
        # Checkpoints name the norms by their place, so `post_attention_layernorm` lies before the MLP in a pre-norm
        # block, and after attention in a post-norm block.
        self.input_layernorm = norm(self.is_pre_norm and (config.first_norm or not is_first))
        self.attention = Attention(config, parallel, recompute == "selective")
        self.post_attention_layernorm = make_norm(config, config.hidden_size, parallel)
        self.mlp = MLP(config, parallel)
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
        if isinstance(x, Residual) or has_kernels(x):
            return fused_block.forward(self, x, context, layer)
        return recomputed(self.recompute, self._forward, x, context, layer)

    def _forward(self, x: torch.Tensor, context: ForwardContext, layer: int) -> torch.Tensor:
        def drop_add(branch: torch.Tensor, residual: torch.Tensor, site: str) -> torch.Tensor:
            return dropout_add(branch, residual, context.features(self.dropout, layer, site))

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self.after_attention(self.attention(x, context, layer))

        def mlp(x: torch.Tensor) -> torch.Tensor:
            return self.after_mlp(self.mlp(x, context, layer))

        if self.is_pre_norm:
            x = drop_add(attention(self.input_layernorm(x)), x, "attended")
            return drop_add(mlp(self.post_attention_layernorm(x)), x, "expanded")
        x = self.post_attention_layernorm(drop_add(attention(x), self.scaled(x), "attended"))
        return self.output_layernorm(drop_add(mlp(x), self.scaled(x), "expanded"))

    def after_attention(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of attention's branch: [T, D] -> [T, D]."""
        return self.attended_layernorm(self.attention_adapter(x))

    def after_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """The rest of the MLP's branch: [T, D] -> [T, D]."""
        return self.expanded_layernorm(self.mlp_adapter(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """The residual, times sqrt(2 L) under DeepNorm."""
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def stack(config: ModelConfig, parallel: TensorParallel, recompute: str) -> nn.ModuleList:
    """The first `num_layers` blocks, or one to run again. What they share is a module of the first alone, named so."""
    count = 1 if config.share_layers == "all" else config.num_layers
    first, *others = blocks = [Block(config, parallel, recompute, layer == 0) for layer in range(count)]
    for block in others if config.share_layers != "none" else ():
        # Through `__dict__`: as a submodule the shared module would appear in every block's names and be saved several
        # times.
        name = {"attention": "attention", "ffn": "mlp"}[config.share_layers]
        delattr(block, name)
        block.__dict__[name] = getattr(first, name)
    return nn.ModuleList(blocks)
