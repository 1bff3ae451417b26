"""One Transformer for every system. Input: tokens, their ids (positions, segment, task), an attention plan.

By default it is GLM: pre-LN blocks, learned tables for both position ids, output projection tied to the word embedding
without a bias (arXiv:2103.10360). The options of `ModelConfig` make it the Transformer of the other systems.
docs/huggingface_glm.md compares the module names with the names in released checkpoints.

Shapes: T tokens, D hidden size, V vocabulary (unpadded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import SINGLE, gather_tokens
from megatron_lite.transformer.attention_backends.interface import AttentionPlan, EncoderDecoderPlan
from megatron_lite.transformer.batch import FurtherTokens
from megatron_lite.transformer.block import stack
from megatron_lite.transformer.embedding import Embedding
from megatron_lite.transformer.encoder_decoder import (
    DecoderBlock,
    DecoderContext,
    DecoderEmbedding,
    encoder_decoder_contexts,
    encoder_layernorm,
    only_vectors,
)
from megatron_lite.transformer.forward_context import (
    BeforeBlock,
    Condition,
    ForwardContext,
    detached_memory,
    local_lengths,
    make_context,
    with_bias,
)
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.lm_head import Heads
from megatron_lite.transformer.loss import ChunkedLogits, loss_logits, prediction_losses, sum_losses
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.multi_token import MultiTokenBlock
from megatron_lite.transformer.norms import LayerNorm, RMSNorm, final_layernorm
from megatron_lite.transformer.pair_records import PairInputs
from megatron_lite.transformer.pooling import PlacedVectors, pool
from megatron_lite.transformer.position_bias import Table, relative_tables
from megatron_lite.transformer.predictions import task_outputs, token_scores
from megatron_lite.transformer.residual import Hidden, materialize
from megatron_lite.transformer.routed_tokens import RoutedTokens
from megatron_lite.transformer.task_batch import TaskInputs
from megatron_lite.transformer.task_losses import choice_scores, group_sums, task_loss, task_sums
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.trained_model import TrainedModel


class Transformer(TrainedModel):
    """Embedding, blocks, final LayerNorm and heads. With `decoder_layers` the last blocks are a decoder's.

    Args:
        parallel: None = one process holds every layer whole.
        label_smoothing: part of the targets' probability that training spreads over the vocabulary.
        z_loss: see `sum_losses`.
        loss_rows: predictions whose logits exist at a time in the loss, 0 for all, see loss.py.
        has_memory: whether batches hold tokens that are a memory, see `detached_memory`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: str = "none",
        num_losses: int = 1,
        parallel: TensorParallel | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_rows: int = 0,
        has_memory: bool = False,
    ):
        super().__init__()
        self.config = config
        self.num_losses = num_losses
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.has_memory = has_memory
        self.parallel = parallel or TensorParallel(SINGLE)
        self.embedding = Embedding(config, self.parallel)
        # Encoder and decoder blocks are one list, so that layer numbers (dropout, checkpoint names) are unique over
        # both.
        self.layers = stack(config, self.parallel, recompute)
        if config.mtp_layers:
            self.layers.append(MultiTokenBlock(config, self.parallel, recompute))
        # Modules that a model lacks are None, not empty: `state_dict` then has exactly the parameters of the model.
        self.decoder_embedding: DecoderEmbedding | None = None
        self.encoder_layernorm: LayerNorm | RMSNorm | None = None
        if config.decoder_layers:
            self.layers.extend(
                DecoderBlock(config, self.parallel, recompute, layer)
                for layer in range(config.num_layers, config.total_layers)
            )
            self.decoder_embedding = DecoderEmbedding(config, self.parallel)
            self.encoder_layernorm = encoder_layernorm(config, self.parallel)
        self.relative_bias: Table | None = None
        self.decoder_relative_bias: Table | None = None
        if config.relative != "none":
            for name, table in relative_tables(config, self.parallel).items():
                setattr(self, name, table)
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, self.parallel, loss_rows)
        # The engine sets it to wait for a module's weights, which other ranks send while the modules before it run.
        # Hooks of modules would need no line here, but compiled blocks do not take them.
        self.before_use: Callable[[nn.Module], None] = lambda module: None

    def run(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        plan: AttentionPlan | EncoderDecoderPlan,
        dropout: Dropout | None,
        before_block: BeforeBlock | None = None,
        condition: Condition | None = None,
        routed: RoutedTokens | None = None,
        vectors: PlacedVectors | None = None,
    ) -> torch.Tensor:
        """Output of the last block: [T, D], or [Td, D].

        Args: condition: what the texts depend on. routed: the tokens that routers count; None: without their losses.
            vectors: that a decoder reads in place of the encoder's states; None: it reads those.
        """
        hidden, context = self._embed(tokens, ids, plan, dropout, condition, routed)
        if self.config.decoder_layers:
            hidden = self._run_encoder_decoder(hidden, context, ids[0].flatten(), vectors)
        else:
            if self.has_memory and before_block is None:
                before_block = detached_memory(ids.flatten(1), plan, self.parallel)
            hidden = self.run_blocks(hidden, context, ids[0].flatten(), before_block)
        self.before_use(self.final_layernorm)
        self.before_use(self.heads)
        return hidden

    def _embed(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        plan: AttentionPlan | EncoderDecoderPlan,
        dropout: Dropout | None,
        condition: Condition | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[torch.Tensor, ForwardContext]:
        """Input of the first block, [T, D], and the inputs of all blocks besides it."""
        # tokens [B, S] or [T], ids [len(ID_FIELDS), B, S] -> [len(ID_FIELDS), T]: the blocks know one list of tokens.
        context = make_context(
            self.config, tokens.shape, ids.flatten(1), plan, dropout, self.parallel, condition, routed
        )
        self.before_use(self.embedding)
        if self.decoder_embedding is not None:
            self.before_use(self.decoder_embedding)
        # [T, D]; under sequence parallelism [T / ranks, D] from here to the final norm.
        hidden = self.embedding(tokens.flatten(), ids.flatten(1), context, self.decoder_embedding)
        return hidden, context

    def _block(self, layer: int) -> nn.Module:
        # ALBERT's shared layers are one block called again, so that names and checkpoints need no exception.
        block = self.layers[layer % len(self.layers)]
        self.before_use(block)
        return block

    def _biased(
        self, context: ForwardContext, table: Table | None, positions: torch.Tensor
    ) -> ForwardContext:
        """See `with_bias`."""
        if table is not None:
            self.before_use(table)
        return with_bias(context, table, positions)

    def run_blocks(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        positions: torch.Tensor,
        before_block: BeforeBlock | None = None,
    ) -> torch.Tensor:
        """The first `num_layers` blocks: [T, D] -> [T, D]. Args: positions: int, of the plan's tokens."""
        context = self._biased(context, self.relative_bias, positions)
        x: Hidden = hidden
        for layer in range(self.config.num_layers):
            if before_block is not None:
                # A block may return its sum unfinished, for the next norm's kernel to finish; here the sum itself is
                # wanted.
                x = before_block(layer, materialize(x))
            x = self._block(layer)(x, context, layer)
        return materialize(x)

    def _run_encoder_decoder(
        self,
        hidden: torch.Tensor,
        context: ForwardContext,
        positions: torch.Tensor,
        vectors: PlacedVectors | None = None,
    ) -> torch.Tensor:
        """The encoder's blocks, then the decoder's: [Te + Td, D], int [Te + Td] -> [Td, D]."""
        encoder, decoder = encoder_decoder_contexts(context, self.parallel)
        plan = cast(EncoderDecoderPlan, context.plan)
        # Two matrices [Te, D] and [Td, D] between layers: in one, each block would copy the other's tokens.
        encoded, decoded = hidden.split(local_lengths(plan, self.parallel))
        encoder_positions, decoder_positions = positions.split(plan.lengths)
        encoded = self._run_encoder(encoded, encoder, encoder_positions)
        if vectors is not None:
            encoded = only_vectors(encoded, vectors, self.parallel)
        return self.run_decoder(decoded, encoded, decoder, decoder_positions)

    def _run_encoder(
        self, encoded: torch.Tensor, context: ForwardContext, positions: torch.Tensor
    ) -> torch.Tensor:
        """The encoder's blocks and what follows them: [Te, D], int [Te] -> [Te, D]."""
        encoded = self.run_blocks(encoded, context, positions)
        if self.encoder_layernorm is not None:
            self.before_use(self.encoder_layernorm)
            encoded = self.encoder_layernorm(encoded)
        # T5 drops out the output of both stacks; the layer number keys the mask.
        return context.last(encoded, self.config.final_dropout, self.config.num_layers - 1)

    def run_decoder(
        self, decoded: torch.Tensor, encoded: torch.Tensor, context: DecoderContext, positions: torch.Tensor
    ) -> torch.Tensor:
        """The decoder's blocks: [Td, D], [Te, D] -> [Td, D]. Args: positions: int, of the plan's tokens."""
        context = cast(DecoderContext, self._biased(context, self.decoder_relative_bias, positions))
        for layer in range(self.config.num_layers, len(self.layers)):
            decoded = self._block(layer)(decoded, encoded, context, layer)
        return decoded

    def hidden_states(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        plan: AttentionPlan | EncoderDecoderPlan,
        before_block: BeforeBlock | None = None,
    ) -> torch.Tensor:
        """Output of the last block, before the final norm and without dropout: [..., D], or [Td, D]. One process.

        Args: tokens: int [...]. ids: int [len(ID_FIELDS), ...]. before_block: not with a decoder.
        """
        hidden = self.run(tokens, ids, plan, None, before_block)
        return hidden if self.config.decoder_layers else hidden.view(*tokens.shape, -1)

    def text_vectors(self, batch: MicroBatch) -> torch.Tensor:
        """The vector of each document of a TextBatch, fp32 [documents, D], see pooling.py; equal on all TP ranks.

        Of the hidden states after the last norm; in a model with a decoder those of the encoder.
        """
        if self.config.decoder_layers:
            hidden, context = self._embed(batch.tokens, batch.ids, batch.plan, batch.dropout)
            encoder, _ = encoder_decoder_contexts(context, self.parallel)
            encoded, _ = hidden.split(local_lengths(batch.plan, self.parallel))
            positions, _ = batch.ids[0].flatten().split(batch.plan.lengths)
            hidden = self._run_encoder(encoded, encoder, positions)
        else:
            hidden = self._hidden(batch)
        if self.parallel.sequence_parallel:
            hidden = gather_tokens(hidden, self.parallel.group)
        if not self.config.decoder_layers:
            hidden = self.final_layernorm(hidden)
        return pool(hidden, batch.extra_inputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]. One process only."""
        return self.heads.logits(self.final_layernorm(hidden), self.embedding.word_embeddings)

    def forward(self, batch: MicroBatch, *, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss sum (fp32 scalar, nats); without gradient, [objectives, 2 or 3], see `sum_losses`.

        Both are equal on all tensor-parallel ranks. The loss of a task is the last of the objectives.

        Args: predict: return the predictions of a task instead, see `_predictions`.
        For pairs of texts the vectors, fp32 [G, D], and an empty tensor: their loss is the engine's (vector_loss.py).
        """
        if isinstance(batch.extra_inputs, PairInputs):
            vectors = self.text_vectors(batch)
            return vectors, vectors.new_empty(0)
        if predict:
            return self._predictions(batch)
        if batch.extra_inputs is None or isinstance(batch.extra_inputs, FurtherTokens | PlacedVectors):
            return self._token_loss(self._hidden(batch), batch)
        if batch.extra_inputs.head == "choices":
            # A choice is scored by the likelihood of its tokens: by the vocabulary's logits, not by a task head.
            losses = self._losses(self._hidden(batch), batch)
            count = len(batch.extra_inputs.position_group)  # without padding
            return self._task_loss(choice_scores(losses[:count], batch.extra_inputs), batch.extra_inputs)
        layers = self._layers(batch)
        loss, sums = self._task_loss(
            self._head_outputs(layers, batch, batch.extra_inputs), batch.extra_inputs
        )
        if batch.extra_inputs.has_language:
            token_loss, token_sums = self._token_loss(layers[-1], batch)
            # Columns 0 and 1 are loss and weight; the third is the z-loss, which tasks lack.
            token_sums[:, :2] += sums
            return loss + token_loss, token_sums
        return loss, sums

    def _token_loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, words = self._logits_and_classes(hidden, batch), self.embedding.word_embeddings
        settings = self.num_losses, self.label_smoothing, self.z_loss
        loss, sums = sum_losses(logits, batch, words, *settings)
        if not self.config.mtp_layers or not torch.is_grad_enabled():
            return loss, sums
        shape, ids = batch.tokens.shape, batch.ids
        context = make_context(
            self.config, shape, ids, batch.plan, batch.dropout, self.parallel, routed=batch.routed
        )
        block = cast(MultiTokenBlock, self._block(self.config.num_layers))
        further_loss, further_sums = block.loss(
            hidden, context, batch, words, self.heads, self.final_layernorm, *settings
        )
        return loss + further_loss, sums + further_sums

    def _task_loss(self, outputs: torch.Tensor, groups: TaskInputs) -> tuple[torch.Tensor, torch.Tensor]:
        loss = task_loss(outputs, groups)
        return loss, task_sums(loss, groups, self.num_losses)

    def _predictions(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions of a task.

        Returns: of choices, the log probability of each target group, fp32 [G], and whether all its targets are the
            likeliest tokens, bool [G]. Of other tasks the outputs of the head, see `task_loss`, and an empty tensor.
        """
        groups = batch.extra_inputs
        assert groups is not None
        if groups.head != "choices":
            outputs = self._head_outputs(self._layers(batch), batch, groups).float()
            return outputs, outputs.new_empty(0)
        logits, _ = self._logits_and_classes(self._hidden(batch), batch, whole=True)
        count = len(groups.position_group)
        assert isinstance(logits, torch.Tensor), "whole=True gives all logits"
        log_p, is_likeliest = token_scores(
            logits[:count], batch.targets[:count], self.embedding.word_embeddings
        )
        return group_sums(log_p, groups), group_sums(~is_likeliest, groups) == 0

    def _hidden(self, batch: MicroBatch, before_block: BeforeBlock | None = None) -> torch.Tensor:
        inputs = batch.extra_inputs
        return self.run(
            batch.tokens, batch.ids, batch.plan, batch.dropout, before_block, routed=batch.routed,
            vectors=inputs if isinstance(inputs, PlacedVectors) else None,
        )  # fmt: skip

    def _layers(self, batch: MicroBatch) -> list[torch.Tensor]:
        """[T, D] of the last block; for a mix of the embeddings and of all blocks."""
        layers: list[torch.Tensor] = []

        def keep(layer: int, hidden: torch.Tensor) -> torch.Tensor:
            layers.append(hidden)
            return hidden

        layers.append(self._hidden(batch, keep if self.config.task_head.mix else None))
        return layers

    def _head_outputs(
        self, layers: list[torch.Tensor], batch: MicroBatch, groups: TaskInputs
    ) -> torch.Tensor:
        norm, dropout = self.final_layernorm, batch.dropout
        outputs = task_outputs(self.heads, layers, groups.positions, norm, dropout, groups)
        return outputs[: len(groups.position_group)]

    def losses(self, batch: MicroBatch, condition: Condition | None = None) -> torch.Tensor:
        """Cross entropies of the predictions, fp32 [K + P + M], see loss.py. Args: condition: as for `run`."""
        hidden = self.run(batch.tokens, batch.ids, batch.plan, batch.dropout, condition=condition)
        return self._losses(hidden, batch)

    def _losses(self, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Cross entropies, fp32 [K + P + M], see loss.py."""
        return prediction_losses(
            *self._logits_and_classes(hidden, batch), batch.targets, self.embedding.word_embeddings
        )

    def _logits_and_classes(
        self, hidden: torch.Tensor, batch: MicroBatch, whole: bool = False
    ) -> tuple[torch.Tensor | ChunkedLogits, torch.Tensor]:
        """Logits of tokens [K + P, local V with padding] and of classes [M, classes]. Args: whole: no ChunkedLogits."""
        words = self.embedding.word_embeddings
        dropout = batch.dropout
        if dropout is not None and isinstance(batch.plan, EncoderDecoderPlan):
            # Only the decoder's tokens have predictions.
            dropout = replace(dropout, keys=dropout.keys.split(batch.plan.lengths)[1])
        vectors, classes = self.heads(hidden, batch.loss_positions, self.final_layernorm, dropout)
        boundaries = len(batch.loss_positions.boundaries)
        if whole or not self.heads.loss_rows:
            return self.heads.vocabulary_logits(vectors, words, boundaries), classes
        return loss_logits(self.heads, vectors, words, boundaries), classes
