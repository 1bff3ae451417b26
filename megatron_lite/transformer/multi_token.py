"""Multi-token prediction (MTP): one further block that predicts the token after the next one.

    x_i = W [norm(Emb(t_{i+1})), norm(h_i)];  logits = head(norm(Block(x)_i)), of t_{i+2}

h_i is the model's output after its final norm, as the classes that draft with published weights have it; embedding and
head are the model's own. The block is the model's layer number `num_layers`, after those that a prediction runs, so
that checkpoints, biases of routers and optimizers know it as another block. Training alone computes it.

Shapes: T tokens, D hidden size.
Sources: DeepSeek-V3, arXiv:2412.19437, section 2.2; GLM-4.5, arXiv:2508.06471.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import copy_to_group
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.dense import Linear
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.lm_head import Heads
from megatron_lite.transformer.loss import loss_logits, sum_losses
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.norms import final_layernorm, make_norm
from megatron_lite.transformer.residual import materialize
from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding


class MultiTokenBlock(Block):
    """A block of the model's kind, and what joins its two inputs."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str):
        super().__init__(config, parallel, recompute, config.num_layers)
        self.layer = config.num_layers
        self.embedding_layernorm, self.hidden_layernorm = (
            make_norm(config, config.hidden_size, parallel) for _ in range(2)
        )
        self.projection = Linear(2 * config.hidden_size, config.hidden_size, has_bias=False)
        parallel.mark_replicated(self.projection.weight)
        self.final_layernorm = final_layernorm(config)

    def loss(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        batch: MicroBatch,
        words: VocabParallelEmbedding,
        heads: Heads,
        norm: nn.Module,
        num_losses: int,
        smoothing: float,
        z_loss: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_losses` of the further tokens.

        Args: hidden: of the last block, [T, D], or this rank's tokens of it. norm: the model's final norm.
        """
        further = batch.extra_inputs
        if self.parallel.sequence_parallel:
            # It norms this rank's tokens here and all tokens with a loss in the head, where its gradient is whole.
            group = self.parallel.group
            weights = {name: copy_to_group(p, group) for name, p in norm.named_parameters()}
            hidden = functional_call(norm, weights, hidden)
        else:
            hidden = norm(hidden)
        # A pipeline stage's words have another `forward`.
        embedded = VocabParallelEmbedding.forward(words, further.next_tokens)
        joined = torch.cat([self.embedding_layernorm(embedded), self.hidden_layernorm(hidden)], -1)
        x = materialize(self(self.projection(joined), context, self.layer))
        batch = replace(
            batch,
            loss_positions=further.loss_positions,
            targets=further.targets,
            weights=batch.extra_weights,
        )
        vectors, classes = heads(x, batch.loss_positions, self.final_layernorm, context.dropout)
        logits = loss_logits(heads, vectors, words, len(batch.loss_positions.boundaries))
        return sum_losses((logits, classes), batch, words, num_losses, smoothing, z_loss)
