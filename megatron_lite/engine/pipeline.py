"""The model as a DeepSpeed PipelineModule, split over stages by cost.

Every stage has the step's batches and prepares them itself, so a stage sends the next one nothing but the hidden state.
The first and the last stage each hold a tied word embedding; the optimizer sums its gradients. With an encoder and a
decoder the rows of both travel through all stages in one tensor, [Te + Td, D] of one shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.deepspeed_engines import quiet_deepspeed
from megatron_lite.engine.engine import SHARED_BY_STAGES, Engine, StepResult
from megatron_lite.model.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.model.batch import Batch
from megatron_lite.model.block import Block
from megatron_lite.model.embedding import PositionEmbeddings
from megatron_lite.model.encoder_decoder import (
    DecoderBlock,
    DecoderContext,
    DecoderEmbedding,
    encoder_decoder_contexts,
    encoder_layernorm,
)
from megatron_lite.model.flops import layer_costs
from megatron_lite.model.forward_context import (
    BeforeBlock,
    ForwardContext,
    detached_memory,
    local_lengths,
    make_context,
    order_by_rank,
    with_bias,
)
from megatron_lite.model.fused_block import Hidden, Residual, materialize
from megatron_lite.model.init import initialize_parameters
from megatron_lite.model.lm_head import Heads
from megatron_lite.model.loss import ChunkedLogits, loss_logits, sum_losses
from megatron_lite.model.model_input import ModelInput
from megatron_lite.model.norms import final_layernorm
from megatron_lite.model.position_bias import Table, relative_tables
from megatron_lite.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
from megatron_lite.parallel.context import ParallelContext

_Rows = tuple[torch.Tensor, torch.Tensor]  # the vectors that predict tokens, class logits
_Logits = tuple[torch.Tensor | ChunkedLogits, torch.Tensor]  # of tokens, of classes
_Parts = tuple[torch.Tensor, torch.Tensor]  # the encoder's rows [Te, D], the decoder's [Td, D]


@dataclass
class _Current:
    """The micro-batch that a stage is computing. A stage computes them in order."""

    input: ModelInput
    context: ForwardContext
    parts: tuple[ForwardContext, DecoderContext] | None  # of encoder and decoder
    before_block: BeforeBlock | None
    loss_factor: float


class _Feed:
    """The micro-batches of a step, one after another."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, device: torch.device, has_memory: bool):
        self.config, self.parallel, self.device, self.has_memory = config, parallel, device, has_memory
        self.tables: dict[str, Table] = {}  # those that the stage's blocks read
        self._waiting: Iterator[tuple[ModelInput, float]] = iter(())

    def fill(self, micro_batches: Iterable[ModelInput], scale: float = 1.0) -> None:
        """Args: micro_batches: on the host. scale: multiplies their losses, in addition to the factor of each."""
        self._waiting = ((micro, micro.loss_factor * scale) for micro in micro_batches)

    def advance(self) -> None:
        # DeepSpeed's schedule runs the forward passes of a stage in order, so that a queue suffices; backward passes
        # use what autograd has kept.
        prepared, loss_factor = next(self._waiting)
        data = prepared.to(self.device)
        context = make_context(
            self.config, data.tokens.shape, data.ids, data.plan, data.dropout, self.parallel
        )
        parts = encoder_decoder_contexts(context, self.parallel) if self.config.decoder_layers else None
        table, positions = self.tables.get("relative_bias"), data.ids[0]
        if parts is None:
            # Each stage computes the bias of its own copy of the table: sending it would be many times the hidden
            # state.
            context = with_bias(context, table, positions)
        else:
            of_encoder, of_decoder = positions.split(data.plan.lengths)
            decoder = with_bias(parts[1], self.tables.get("decoder_relative_bias"), of_decoder)
            parts = with_bias(parts[0], table, of_encoder), cast(DecoderContext, decoder)
        before = detached_memory(data.ids, data.plan, self.parallel) if self.has_memory else None
        self.current = _Current(data, context, parts, before, loss_factor)

    def split(self, hidden: torch.Tensor) -> _Parts:
        """The rows of encoder and decoder."""
        plan = self.current.context.plan
        assert isinstance(plan, EncoderDecoderPlan)
        encoded, decoded = hidden.split(local_lengths(plan, self.parallel))
        return encoded, decoded


class _Words(VocabParallelEmbedding):
    """First layer: nothing -> words."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, feed: _Feed):
        super().__init__(config, parallel)
        self.feed = feed

    def forward(self, nothing: torch.Tensor) -> torch.Tensor:
        current = self.feed.current
        return super().forward(order_by_rank(current.input.tokens, current.context.plan, self.parallel))

    @staticmethod
    def project(module: _Words, inputs: tuple[Heads, *_Rows]) -> _Logits:
        """Last layer, on the tied weight."""
        heads, vectors, classes = inputs
        boundaries = len(module.feed.current.input.loss_rows.borders)
        return loss_logits(heads, vectors, module, boundaries), classes


class _Positions(PositionEmbeddings):
    def __init__(self, config: ModelConfig, parallel: TensorParallel, feed: _Feed):
        super().__init__(config, parallel)
        self.decoder_embedding = DecoderEmbedding(config, parallel) if config.decoder_layers else None
        self.feed = feed

    def forward(self, words: torch.Tensor) -> torch.Tensor | _Parts:  # type: ignore[override]
        current = self.feed.current
        hidden = super().forward(words, current.input.ids, current.context, self.decoder_embedding)
        return hidden if current.parts is None else self.feed.split(hidden)


class _Block(Block):
    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str, feed: _Feed
    ):
        super().__init__(config, parallel, recompute, layer == 0)
        self.layer = layer
        self.feed = feed

    def forward(self, x: Hidden) -> Hidden:  # type: ignore[override]
        current = self.feed.current
        if current.before_block is not None:
            # Memory detaches at each block; a residual that is still a sum is finished for that.
            x = current.before_block(self.layer, materialize(x))
        return super().forward(x, current.context, self.layer)


class _EncoderBlock(_Block):
    """Rewrites the encoder's rows."""

    def forward(self, parts: _Parts) -> _Parts:  # type: ignore[override]
        assert self.feed.current.parts is not None
        context, _ = self.feed.current.parts
        # Finished: the stage may end here, and what it sends are tensors.
        return materialize(Block.forward(self, parts[0], context, self.layer)), parts[1]


class _DecoderBlock(DecoderBlock):
    """Rewrites the decoder's rows, the first one also the encoder's: by their norm."""

    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str, feed: _Feed
    ):
        super().__init__(config, parallel, recompute)
        is_first = layer == config.num_layers
        self.encoder_layernorm = encoder_layernorm(config, parallel) if is_first else None
        self.encoder_dropout = config.final_dropout if is_first else 0.0
        self.layer = layer
        self.feed = feed

    def forward(self, parts: _Parts) -> _Parts:  # type: ignore[override]
        assert self.feed.current.parts is not None
        encoded, decoded = parts
        if self.encoder_layernorm is not None:
            encoded = self.encoder_layernorm(encoded)
        # `layer - 1` is the encoder's last layer, as in the whole model: the mask's key is the same in both.
        encoded = self.feed.current.parts[0].last(encoded, self.encoder_dropout, self.layer - 1)
        return encoded, super().forward(decoded, encoded, self.feed.current.parts[1], self.layer)


class _Readout(nn.Module):
    """Final LayerNorm and heads; `_Words.project` applies the tied weight, `_Project` an untied one."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, feed: _Feed, loss_rows: int):
        super().__init__()
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, parallel, loss_rows)
        self.feed = feed

    def forward(self, given: Hidden | _Parts) -> tuple[Heads, *_Rows]:
        current = self.feed.current
        hidden = given[1] if current.parts is not None else materialize(cast(Hidden, given))  # the decoder's
        context = current.context if current.parts is None else current.parts[1]
        return self.heads, *self.heads(hidden, current.input.loss_rows, self.final_layernorm, context.dropout)


class _Project(nn.Module):
    """Last layer of models whose output projection is not the word embedding."""

    def __init__(self, feed: _Feed):
        super().__init__()
        self.feed = feed

    def forward(self, inputs: tuple[Heads, *_Rows]) -> _Logits:
        heads, vectors, classes = inputs
        assert heads.vocabulary is not None
        boundaries = len(self.feed.current.input.loss_rows.borders)
        return loss_logits(heads, vectors, heads.vocabulary, boundaries), classes


def stage_bounds(costs: list[float], stages: int) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1, for about equal costs."""
    # The head's two layers stay on one stage: the first one's result is not only tensors, which could be sent.
    joined = [*costs[:-2], costs[-2] + costs[-1]]
    # A little for every layer, so that layers without cost count in the balance too.
    bounds = [int(bound) for bound in partition_balanced([cost + 1e-3 for cost in joined], stages)]
    return [*bounds[:-1], bounds[-1] + 1]


_FIRST_BLOCK = 2  # layers before it: words, positions
# Parts that a layer, or a stage, holds under the model's own names.
_WHOLE_MODELS = ("decoder_embedding.", "encoder_layernorm.")


class _Stages(PipelineModule):
    """Stages with about equal shares of the model's FLOPs, embedding and head counted."""

    def __init__(
        self, config: Config, context: ParallelContext, parallel: TensorParallel, feed: _Feed, loss_fn
    ):  # type: ignore[no-untyped-def]
        model = config.model
        encoder = _EncoderBlock if model.decoder_layers else _Block
        kinds = [encoder] * model.num_layers + [_DecoderBlock] * model.decoder_layers
        blocks = [
            LayerSpec(kind, model, i, parallel, config.training.recompute, feed)
            for i, kind in enumerate(kinds)
        ]
        words, project = LayerSpec(_Words, model, parallel, feed), LayerSpec(_Project, feed)
        if model.tie_word_embeddings:
            # The same specification twice: DeepSpeed builds one module for each stage that has it, under one name.
            words, project = (
                TiedLayerSpec("words", _Words, model, parallel, feed, forward_fn=function)
                for function in (None, _Words.project)
            )
        positions = LayerSpec(_Positions, model, parallel, feed)
        readout = LayerSpec(_Readout, model, parallel, feed, config.training.loss_rows)
        layers = [words, positions, *blocks, readout, project]
        self.costs = layer_costs(model, config.loss_share)
        topology = PipeModelDataParallelTopology(
            num_pp=context.pp.size, num_mp=context.tp.size, num_dp=context.dp.size
        )
        super().__init__(layers, topology=topology, loss_fn=loss_fn, partition_method="cost")
        self._feed = feed
        # Each stage has a copy of the tables that all its layers share; the optimizer sums their gradients.
        begin, end = self._local_start - _FIRST_BLOCK, self._local_stop - _FIRST_BLOCK  # the stage's blocks
        is_used = {
            "relative_bias": begin < model.num_layers and end > 0,
            "decoder_relative_bias": begin < model.total_layers and end > model.num_layers,
        }
        for name, table in relative_tables(model, parallel).items():
            setattr(self, name, table)
            if is_used[name]:
                feed.tables[name] = table

    def forward(self, hidden: torch.Tensor) -> Any:
        self._feed.advance()
        if self._feed.current.parts is None:
            out = super().forward(hidden)
            # DeepSpeed sends one tensor of one shape between stages.
            return materialize(out) if isinstance(out, Residual) else out  # what a stage sends is one tensor
        out = super().forward(self._feed.split(hidden) if self._local_start >= _FIRST_BLOCK else hidden)
        is_last = self._local_stop == len(self._layer_specs)
        return out if is_last or isinstance(out, torch.Tensor) else torch.cat(out)

    def get_tied_weights_and_groups(self) -> list[Any]:
        """Nothing that DeepSpeed sums: a gradient that still waits for its bucket would be summed twice."""
        return []

    def _partition_layers(self, method: str = "cost") -> None:
        stages, stage = self._topo.get_dim("pipe"), self._topo.get_coord(self.global_rank).pipe
        self.parts = stage_bounds(self.costs, stages)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def output_words(self) -> VocabParallelEmbedding:
        """On the last stage: the module whose weight predicts tokens."""
        if "words" in self.tied_modules:
            return self.tied_modules["words"]
        (readout,) = (function for function in self.forward_funcs if isinstance(function, _Readout))
        vocabulary = readout.heads.vocabulary
        assert vocabulary is not None
        return vocabulary

    def global_names(self, num_layers: int) -> dict[str, nn.Parameter]:
        """This stage's parameters under their names in the whole model. Args: num_layers: blocks."""
        # DeepSpeed numbers layers; checkpoints have the names of the whole model, whatever the stages.
        prefixes = dict.fromkeys(("tied_modules.words", "0"), "embedding.word_embeddings.")
        prefixes |= {"1": "embedding."}
        prefixes |= {str(_FIRST_BLOCK + i): f"layers.{i}." for i in range(num_layers)}
        prefixes |= {str(_FIRST_BLOCK + num_layers): ""}  # final_layernorm and heads
        named = {}
        for name, parameter in self.named_parameters():
            if name.startswith(SHARED_BY_STAGES):
                named[name] = parameter
                continue
            layer = "tied_modules.words" if name.startswith("tied_modules.") else name.split(".")[0]
            inner = name[len(layer) + 1 :]
            named[inner if inner.startswith(_WHOLE_MODELS) else prefixes[layer] + inner] = parameter
        return named


class PipelineEngine(Engine):
    """Pipeline stages, each with data and tensor parallelism, under ZeRO 1."""

    def __init__(self, config: Config, context: ParallelContext, num_losses: int):
        parallel = TensorParallel(context.tp, config.parallel.sequence_parallel)
        self.num_losses = num_losses
        self._sums = self._no_sums(context.device)
        self._feed = _Feed(config.model, parallel, context.device, config.has_memory)
        # no_grad: DeepSpeed broadcasts the tied weight, of which autograd would warn in every backward pass.
        assert context.process_groups is not None
        with quiet_deepspeed(), torch.no_grad(), context.process_groups.lent_to_deepspeed():
            stages = _Stages(config, context, parallel, self._feed, self._loss)
        named = stages.global_names(config.model.total_layers)
        initialize_parameters(named.items(), config.model, config.training.seed, parallel)
        super().__init__(stages, named, config, context, mpu=None)
        self._stages = stages

    def _no_sums(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_losses, 3, dtype=torch.float64, device=device)

    def _loss(self, outputs: _Logits, nothing: torch.Tensor) -> torch.Tensor:
        """On the last stage: this micro-batch's share of the step's loss; adds to the objectives' sums."""
        current = self._feed.current
        data, words = current.input, self._stages.output_words()
        smoothing, z_loss = self._config.training.label_smoothing, self._config.training.z_loss
        total, per_objective = sum_losses(outputs, data, words, self.num_losses, smoothing, z_loss)
        self._sums[:, : per_objective.shape[1]] += per_objective
        return total * current.loss_factor

    def train_step(self, micro_batches: Sequence[ModelInput], lr: float) -> StepResult:
        self._begin_step(len(micro_batches), lr)
        self._sums = self._no_sums(self.context.device)
        per_pass = self._engine.train_micro_batch_size_per_gpu() * self._engine.dp_world_size
        # Its number of micro-batches follows from the batch size, which a ramp changes between steps.
        self._engine.set_train_batch_size(len(micro_batches) * per_pass)
        scale = len(micro_batches) * self._zero.loss_factor  # DeepSpeed divides by their number
        self._feed.fill(micro_batches, scale)
        # All at once: a stage has no call between its layers where it could wait for each.
        self._zero.await_weights()
        self._engine.train_batch(self._nothing())
        return self._result(self._sums)

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._sums = self._no_sums(self.context.device)
        self._feed.fill(self.prepared(batch, None) for batch in batches)
        self._zero.await_weights()
        self._engine.eval_batch(self._nothing(), num_micro_batches=len(batches))
        return self._sums

    def _nothing(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Placeholders for DeepSpeed's inputs and labels of each micro-batch: the stages get theirs elsewhere."""
        nothing = torch.zeros(1, device=self.context.device)
        return itertools.repeat((nothing, nothing))
