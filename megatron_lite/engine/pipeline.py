"""The model as a DeepSpeed PipelineModule, split over stages by cost.

Schedule: DeepSpeed's TrainSchedule, which is synchronous, non-interleaved 1F1B (PipeDream-Flush). After a warm-up a
stage alternates one forward and one backward pass, and keeps the activations of at most as many micro-batches as there
are stages from it to the last; all micro-batches end before the optimizer step. Evaluation runs forward passes alone
(InferenceSchedule).

Every stage reads and prepares the step's micro-batches itself, so a stage sends the next one nothing but the hidden
state. The first and the last stage each hold a tied word embedding; the optimizer sums its gradients. With an encoder
and a decoder the tokens of both travel through all stages in one tensor, [Te + Td, D] of one shape.

Shapes: T tokens, Te of the encoder and Td of the decoder, D hidden size.
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
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.embedding import PositionEmbeddings
from megatron_lite.transformer.encoder_decoder import (
    DecoderBlock,
    DecoderContext,
    DecoderEmbedding,
    encoder_decoder_contexts,
    encoder_layernorm,
)
from megatron_lite.transformer.flops import layer_costs
from megatron_lite.transformer.forward_context import (
    BeforeBlock,
    ForwardContext,
    detached_memory,
    local_lengths,
    make_context,
    order_by_rank,
    with_bias,
)
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.lm_head import Heads
from megatron_lite.transformer.loss import ChunkedLogits, loss_logits, sum_losses
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.norms import final_layernorm
from megatron_lite.transformer.position_bias import Table, relative_tables
from megatron_lite.transformer.residual import Hidden, Residual, materialize
from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding

_HeadOutputs = tuple[torch.Tensor, torch.Tensor]  # the vectors that predict tokens, class logits
_Logits = tuple[torch.Tensor | ChunkedLogits, torch.Tensor]  # of tokens, of classes
_TwoStacks = tuple[torch.Tensor, torch.Tensor]  # hidden states of the encoder [Te, D] and the decoder [Td, D]


@dataclass
class _Current:
    """The micro-batch that a stage computes, on the device, and what its layers read of it."""

    micro_batch: MicroBatch
    context: ForwardContext
    stack_contexts: tuple[ForwardContext, DecoderContext] | None  # of encoder and decoder; None = one stack
    before_block: BeforeBlock | None
    loss_factor: float


class _Queue:
    """The micro-batches of a step, one after another; all layers of a stage read the current one.

    A pipeline passes hidden states from layer to layer and no arguments besides them.
    """

    current: _Current

    def __init__(self, config: ModelConfig, parallel: TensorParallel, device: torch.device, has_memory: bool):
        self.config, self.parallel, self.device, self.has_memory = config, parallel, device, has_memory
        self.tables: dict[str, Table] = {}  # those of relative positions that the stage's blocks read
        self._waiting: Iterator[tuple[MicroBatch, float]] = iter(())

    def fill(self, micro_batches: Iterable[MicroBatch], scale: float = 1.0) -> None:
        """Args: micro_batches: on the host. scale: multiplies their losses, in addition to the factor of each."""
        self._waiting = ((micro_batch, micro_batch.loss_factor * scale) for micro_batch in micro_batches)

    def advance(self) -> None:
        """Make the next micro-batch the current one."""
        # 1F1B runs the forward passes of a stage in order, so that a queue suffices; backward passes use what autograd
        # has kept.
        on_host, loss_factor = next(self._waiting)
        micro_batch = on_host.to(self.device)
        context = make_context(
            self.config,
            micro_batch.tokens.shape,
            micro_batch.ids,
            micro_batch.plan,
            micro_batch.dropout,
            self.parallel,
        )
        # Each stage computes the bias of its own copy of a table: sending it would be many times the hidden state.
        table, positions = self.tables.get("relative_bias"), micro_batch.ids[0]
        stack_contexts = None
        if self.config.decoder_layers:
            encoder, decoder = encoder_decoder_contexts(context, self.parallel)
            encoder_positions, decoder_positions = positions.split(micro_batch.plan.lengths)
            decoder_table = self.tables.get("decoder_relative_bias")
            stack_contexts = (
                with_bias(encoder, table, encoder_positions),
                cast(DecoderContext, with_bias(decoder, decoder_table, decoder_positions)),
            )
        else:
            context = with_bias(context, table, positions)
        before_block = None
        if self.has_memory:
            before_block = detached_memory(micro_batch.ids, micro_batch.plan, self.parallel)
        self.current = _Current(micro_batch, context, stack_contexts, before_block, loss_factor)

    def split(self, hidden: torch.Tensor) -> _TwoStacks:
        """The hidden states of encoder and decoder, from [Te + Td, D]."""
        plan = self.current.context.plan
        assert isinstance(plan, EncoderDecoderPlan)
        encoded, decoded = hidden.split(local_lengths(plan, self.parallel))
        return encoded, decoded


class _Words(VocabParallelEmbedding):
    """First layer: nothing -> words."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, queue: _Queue):
        super().__init__(config, parallel)
        self.queue = queue

    def forward(self, nothing: torch.Tensor) -> torch.Tensor:
        current = self.queue.current
        return super().forward(order_by_rank(current.micro_batch.tokens, current.context.plan, self.parallel))

    @staticmethod
    def project(module: _Words, inputs: tuple[Heads, *_HeadOutputs]) -> _Logits:
        """Last layer, on the tied weight."""
        heads, vectors, classes = inputs
        boundaries = len(module.queue.current.micro_batch.loss_positions.boundaries)
        return loss_logits(heads, vectors, module, boundaries), classes


class _Positions(PositionEmbeddings):
    def __init__(self, config: ModelConfig, parallel: TensorParallel, queue: _Queue):
        super().__init__(config, parallel)
        self.decoder_embedding = DecoderEmbedding(config, parallel) if config.decoder_layers else None
        self.queue = queue

    def forward(self, words: torch.Tensor) -> torch.Tensor | _TwoStacks:  # type: ignore[override]
        current = self.queue.current
        hidden = super().forward(words, current.micro_batch.ids, current.context, self.decoder_embedding)
        return hidden if current.stack_contexts is None else self.queue.split(hidden)


class _Block(Block):
    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str, queue: _Queue
    ):
        super().__init__(config, parallel, recompute, layer == 0)
        self.layer = layer
        self.queue = queue

    def forward(self, x: Hidden) -> Hidden:  # type: ignore[override]
        current = self.queue.current
        if current.before_block is not None:
            # Memory detaches at each block; a residual that is still a sum is finished for that.
            x = current.before_block(self.layer, materialize(x))
        return super().forward(x, current.context, self.layer)


class _EncoderBlock(_Block):
    """A block of the encoder; the decoder's tokens pass it unchanged."""

    def forward(self, hidden: _TwoStacks) -> _TwoStacks:  # type: ignore[override]
        assert self.queue.current.stack_contexts is not None
        context, _ = self.queue.current.stack_contexts
        encoded, decoded = hidden
        # The residual is summed up here: the stage may end with this block, and it sends tensors.
        return materialize(Block.forward(self, encoded, context, self.layer)), decoded


class _DecoderBlock(DecoderBlock):
    """A block of the decoder. The first one also normalises the encoder's output."""

    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str, queue: _Queue
    ):
        super().__init__(config, parallel, recompute)
        is_first = layer == config.num_layers
        self.encoder_layernorm = encoder_layernorm(config, parallel) if is_first else None
        self.encoder_dropout = config.final_dropout if is_first else 0.0
        self.layer = layer
        self.queue = queue

    def forward(self, hidden: _TwoStacks) -> _TwoStacks:  # type: ignore[override]
        assert self.queue.current.stack_contexts is not None
        encoder_context, decoder_context = self.queue.current.stack_contexts
        encoded, decoded = hidden
        if self.encoder_layernorm is not None:
            encoded = self.encoder_layernorm(encoded)
        # `layer - 1` is the encoder's last layer, as in the whole model: the mask's key is the same in both.
        encoded = encoder_context.last(encoded, self.encoder_dropout, self.layer - 1)
        return encoded, super().forward(decoded, encoded, decoder_context, self.layer)


class _Readout(nn.Module):
    """Final LayerNorm and heads; `_Words.project` applies the tied weight, `_Project` an untied one."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, queue: _Queue, loss_rows: int):
        super().__init__()
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, parallel, loss_rows)
        self.queue = queue

    def forward(self, inputs: Hidden | _TwoStacks) -> tuple[Heads, *_HeadOutputs]:
        current = self.queue.current
        if current.stack_contexts is None:
            hidden, context = materialize(cast(Hidden, inputs)), current.context
        else:
            _, hidden = cast(_TwoStacks, inputs)  # only the decoder's tokens have predictions
            _, context = current.stack_contexts
        positions = current.micro_batch.loss_positions
        return self.heads, *self.heads(hidden, positions, self.final_layernorm, context.dropout)


class _Project(nn.Module):
    """Last layer of models whose output projection is not the word embedding."""

    def __init__(self, queue: _Queue):
        super().__init__()
        self.queue = queue

    def forward(self, inputs: tuple[Heads, *_HeadOutputs]) -> _Logits:
        heads, vectors, classes = inputs
        assert heads.vocabulary is not None
        boundaries = len(self.queue.current.micro_batch.loss_positions.boundaries)
        return loss_logits(heads, vectors, heads.vocabulary, boundaries), classes


def stage_bounds(costs: list[float], stages: int) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1, for about equal costs."""
    # The head's two layers stay on one stage: the first one's result is not only tensors, which could be sent.
    joined = [*costs[:-2], costs[-2] + costs[-1]]
    # A little for every layer, so that layers without cost count in the balance too.
    bounds = [int(bound) for bound in partition_balanced([cost + 1e-3 for cost in joined], stages)]
    return [*bounds[:-1], bounds[-1] + 1]


_FIRST_BLOCK = 2  # layers before it: words, positions
# Prefixes of modules that a layer of the pipeline holds under the names that they have in the whole model.
_GLOBAL_PREFIXES = ("decoder_embedding.", "encoder_layernorm.")


class _Stages(PipelineModule):
    """Stages with about equal shares of the model's FLOPs, embedding and head counted."""

    def __init__(
        self, config: Config, context: ParallelContext, parallel: TensorParallel, queue: _Queue, loss_fn
    ):  # type: ignore[no-untyped-def]
        model = config.model
        encoder = _EncoderBlock if model.decoder_layers else _Block
        block_types = [encoder] * model.num_layers + [_DecoderBlock] * model.decoder_layers
        blocks = [
            LayerSpec(block_type, model, i, parallel, config.training.recompute, queue)
            for i, block_type in enumerate(block_types)
        ]
        words, project = LayerSpec(_Words, model, parallel, queue), LayerSpec(_Project, queue)
        if model.tie_word_embeddings:
            # The same specification twice: DeepSpeed builds one module for each stage that has it, under one name.
            words, project = (
                TiedLayerSpec("words", _Words, model, parallel, queue, forward_fn=function)
                for function in (None, _Words.project)
            )
        positions = LayerSpec(_Positions, model, parallel, queue)
        readout = LayerSpec(_Readout, model, parallel, queue, config.training.loss_rows)
        layers = [words, positions, *blocks, readout, project]
        self.costs = layer_costs(model, config.loss_share)
        topology = PipeModelDataParallelTopology(
            num_pp=context.pp.size, num_mp=context.tp.size, num_dp=context.dp.size
        )
        super().__init__(layers, topology=topology, loss_fn=loss_fn, partition_method="cost")
        self._queue = queue
        # Each stage has a copy of the tables that all its layers share; the optimizer sums their gradients.
        begin, end = self._local_start - _FIRST_BLOCK, self._local_stop - _FIRST_BLOCK  # the stage's blocks
        is_used = {
            "relative_bias": begin < model.num_layers and end > 0,
            "decoder_relative_bias": begin < model.total_layers and end > model.num_layers,
        }
        for name, table in relative_tables(model, parallel).items():
            setattr(self, name, table)
            if is_used[name]:
                queue.tables[name] = table

    def forward(self, hidden: torch.Tensor) -> Any:
        self._queue.advance()
        # DeepSpeed sends one tensor of one shape between stages.
        if self._queue.current.stack_contexts is None:
            out = super().forward(hidden)
            return materialize(out) if isinstance(out, Residual) else out
        out = super().forward(self._queue.split(hidden) if self._local_start >= _FIRST_BLOCK else hidden)
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
            named[inner if inner.startswith(_GLOBAL_PREFIXES) else prefixes[layer] + inner] = parameter
        return named


class PipelineEngine(Engine):
    """Pipeline stages, each with data and tensor parallelism, under ZeRO 1."""

    def __init__(self, config: Config, context: ParallelContext, num_losses: int):
        parallel = TensorParallel(context.tp, config.parallel.sequence_parallel)
        self.num_losses = num_losses
        self._sums = self._zero_sums(context.device)
        self._queue = _Queue(config.model, parallel, context.device, config.has_memory)
        # no_grad: DeepSpeed broadcasts the tied weight, of which autograd would warn in every backward pass.
        assert context.process_groups is not None
        with quiet_deepspeed(), torch.no_grad(), context.process_groups.shared_with_deepspeed():
            stages = _Stages(config, context, parallel, self._queue, self._loss)
        named = stages.global_names(config.model.total_layers)
        initialize_parameters(named.items(), config.model, config.training.seed, parallel)
        super().__init__(stages, named, config, context, mpu=None)
        self._stages = stages

    def _zero_sums(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_losses, 3, dtype=torch.float64, device=device)

    def _loss(self, outputs: _Logits, nothing: torch.Tensor) -> torch.Tensor:
        """On the last stage: this micro-batch's share of the step's loss; adds to the objectives' sums."""
        current = self._queue.current
        words, training = self._stages.output_words(), self._config.training
        loss_sum, per_objective = sum_losses(
            outputs,
            current.micro_batch,
            words,
            self.num_losses,
            training.label_smoothing,
            training.z_loss,
        )
        self._sums[:, : per_objective.shape[1]] += per_objective
        return loss_sum * current.loss_factor

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        self._begin_step(len(micro_batches), lr)
        self._sums = self._zero_sums(self.context.device)
        per_pass = self._engine.train_micro_batch_size_per_gpu() * self._engine.dp_world_size
        # Its number of micro-batches follows from the batch size, which a ramp changes between steps.
        self._engine.set_train_batch_size(len(micro_batches) * per_pass)
        scale = len(micro_batches) * self._zero.loss_factor  # DeepSpeed divides by their number
        self._queue.fill(micro_batches, scale)
        # All at once: a stage has no call between its layers where it could wait for each.
        self._zero.wait_for_weights()
        self._engine.train_batch(self._nothing())
        return self._result(self._sums)

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._sums = self._zero_sums(self.context.device)
        self._queue.fill(self.prepared(batch, None) for batch in batches)
        self._zero.wait_for_weights()
        self._engine.eval_batch(self._nothing(), num_micro_batches=len(batches))
        return self._sums

    def _nothing(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Placeholders for DeepSpeed's inputs and labels of each micro-batch: the stages get theirs elsewhere."""
        nothing = torch.zeros(1, device=self.context.device)
        return itertools.repeat((nothing, nothing))
