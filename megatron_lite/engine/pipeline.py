"""The model as a DeepSpeed PipelineModule, split over stages by cost.

Schedule: DeepSpeed's TrainSchedule, which is synchronous, non-interleaved 1F1B (PipeDream-Flush). After a warmup a
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from megatron_lite.engine.engine import Engine, StepResult
from megatron_lite.engine.parameter_groups import SHARED_BY_STAGES, has_words_on_last_stage
from megatron_lite.parallel.collectives import gather_tokens
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
    only_vectors,
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
from megatron_lite.transformer.multi_token import MultiTokenBlock
from megatron_lite.transformer.norms import final_layernorm
from megatron_lite.transformer.pair_records import PairInputs
from megatron_lite.transformer.pooling import PlacedVectors, pool
from megatron_lite.transformer.position_bias import Table, relative_tables
from megatron_lite.transformer.residual import Hidden, Residual, materialize
from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding

_HeadOutputs = tuple[torch.Tensor, torch.Tensor]  # the vectors that predict tokens, class logits
_Logits = tuple[torch.Tensor | ChunkedLogits, torch.Tensor]  # of tokens, of classes
_TwoStacks = tuple[torch.Tensor, torch.Tensor]  # hidden states of the encoder [Te, D] and the decoder [Td, D]


@dataclass(frozen=True)
class _Inputs:
    """What the layers of a stage read in a pass besides the hidden state."""

    micro_batch: MicroBatch  # on the device
    context: ForwardContext
    stack_contexts: tuple[ForwardContext, DecoderContext] | None  # of encoder and decoder; None = one stack
    before_block: BeforeBlock | None
    parallel: TensorParallel

    @staticmethod
    def of(
        micro_batch: MicroBatch,
        config: ModelConfig,
        parallel: TensorParallel,
        tables: Mapping[str, Table],
        has_memory: bool,
    ) -> _Inputs:
        """Args: tables: of relative positions, those that the stage's blocks read."""
        ids, plan = micro_batch.ids, micro_batch.plan
        context = make_context(
            config, micro_batch.tokens.shape, ids, plan, micro_batch.dropout, parallel,
            routed=micro_batch.routed,
        )  # fmt: skip
        # Each stage computes the bias of its own copy of a table: sending it would be many times the hidden state.
        table, positions, stack_contexts = tables.get("relative_bias"), ids[0], None
        if config.decoder_layers:
            assert isinstance(plan, EncoderDecoderPlan)
            encoder, decoder = encoder_decoder_contexts(context, parallel)
            encoder_positions, decoder_positions = positions.split(plan.lengths)
            decoder_table = tables.get("decoder_relative_bias")
            stack_contexts = (
                with_bias(encoder, table, encoder_positions),
                cast(DecoderContext, with_bias(decoder, decoder_table, decoder_positions)),
            )
        else:
            context = with_bias(context, table, positions)
        before_block = detached_memory(ids, plan, parallel) if has_memory else None
        return _Inputs(micro_batch, context, stack_contexts, before_block, parallel)

    def split(self, hidden: torch.Tensor) -> _TwoStacks:
        """The hidden states of encoder and decoder, from [Te + Td, D]."""
        assert isinstance(self.context.plan, EncoderDecoderPlan)
        encoded, decoded = hidden.split(local_lengths(self.context.plan, self.parallel))
        return encoded, decoded

    @property
    def boundaries(self) -> int:
        """Predictions of span boundaries, which have a bias of their own."""
        return len(self.micro_batch.loss_positions.boundaries)


class _Words(VocabParallelEmbedding):
    """First layer: nothing -> words."""

    def forward(self, nothing: torch.Tensor, inputs: _Inputs) -> torch.Tensor:  # type: ignore[override]
        tokens = inputs.micro_batch.tokens
        return super().forward(order_by_rank(tokens, inputs.context.plan, inputs.parallel))

    @staticmethod
    def project(module: _Words, outputs: tuple[Heads, *_HeadOutputs], inputs: _Inputs) -> _Logits:
        """Last layer, on the tied weight."""
        heads, vectors, classes = outputs
        return loss_logits(heads, vectors, module, inputs.boundaries), classes


class _Positions(PositionEmbeddings):
    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.decoder_embedding = DecoderEmbedding(config, parallel) if config.decoder_layers else None

    def forward(self, words: torch.Tensor, inputs: _Inputs) -> torch.Tensor | _TwoStacks:  # type: ignore[override]
        hidden = super().forward(words, inputs.micro_batch.ids, inputs.context, self.decoder_embedding)
        return hidden if inputs.stack_contexts is None else inputs.split(hidden)


class _Block(Block):
    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str):
        super().__init__(config, parallel, recompute, layer)
        self.layer = layer

    def forward(self, x: Hidden, inputs: _Inputs) -> Hidden:  # type: ignore[override]
        if inputs.before_block is not None:
            # Memory detaches at each block; a residual that is still a sum is finished for that.
            x = inputs.before_block(self.layer, materialize(x))
        return super().forward(x, inputs.context, self.layer)


class _EncoderBlock(_Block):
    """A block of the encoder; the decoder's tokens pass it unchanged."""

    def forward(self, hidden: _TwoStacks, inputs: _Inputs) -> _TwoStacks:  # type: ignore[override]
        assert inputs.stack_contexts is not None
        context, _ = inputs.stack_contexts
        encoded, decoded = hidden
        # The residual is summed up here: the stage may end with this block, and it sends tensors.
        return materialize(Block.forward(self, encoded, context, self.layer)), decoded


class _DecoderBlock(DecoderBlock):
    """A block of the decoder. The first one also normalizes the encoder's output, or makes vectors of it."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str):
        super().__init__(config, parallel, recompute, layer)
        self.is_first = layer == config.num_layers
        self.encoder_layernorm = encoder_layernorm(config, parallel) if self.is_first else None
        self.encoder_dropout = config.final_dropout if self.is_first else 0.0
        self.layer = layer

    def forward(self, hidden: _TwoStacks, inputs: _Inputs) -> _TwoStacks:  # type: ignore[override]
        assert inputs.stack_contexts is not None
        encoder_context, decoder_context = inputs.stack_contexts
        encoded, decoded = hidden
        if self.encoder_layernorm is not None:
            encoded = self.encoder_layernorm(encoded)
        # `layer - 1` is the encoder's last layer, as in the whole model: the mask's key is the same in both.
        encoded = encoder_context.last(encoded, self.encoder_dropout, self.layer - 1)
        vectors = inputs.micro_batch.extra_inputs
        if self.is_first and isinstance(vectors, PlacedVectors):
            encoded = only_vectors(encoded, vectors, inputs.parallel)
        return encoded, super().forward(decoded, encoded, decoder_context, self.layer)


class _Readout(nn.Module):
    """Final LayerNorm and heads; `_Words.project` applies the tied weight, `_Project` an untied one."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, loss_rows: int, recompute: str):
        super().__init__()
        # Under its name in the whole model.
        blocks = [MultiTokenBlock(config, parallel, recompute) for _ in range(config.mtp_layers)]
        self.layers = nn.ModuleDict({str(block.layer): block for block in blocks})
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, parallel, loss_rows)

    def forward(self, x: Hidden | _TwoStacks, inputs: _Inputs) -> tuple[Heads, *_HeadOutputs] | torch.Tensor:
        """Of pairs of texts their vectors, fp32 [G, D]."""
        if inputs.stack_contexts is None:
            hidden, context = materialize(cast(Hidden, x)), inputs.context
        else:
            _, hidden = cast(_TwoStacks, x)  # only the decoder's tokens have predictions
            _, context = inputs.stack_contexts
        if isinstance(pairs := inputs.micro_batch.extra_inputs, PairInputs):
            parallel = inputs.parallel
            hidden = gather_tokens(hidden, parallel.group) if parallel.sequence_parallel else hidden
            return pool(self.final_layernorm(hidden), pairs)
        positions = inputs.micro_batch.loss_positions
        return self.heads, *self.heads(hidden, positions, self.final_layernorm, context.dropout)


class _Project(nn.Module):
    """Last layer of models whose output projection is not the word embedding."""

    def forward(self, outputs: tuple[Heads, *_HeadOutputs], inputs: _Inputs) -> _Logits:
        heads, vectors, classes = outputs
        assert heads.vocabulary is not None
        return loss_logits(heads, vectors, heads.vocabulary, inputs.boundaries), classes


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
    """Stages with about equal shares of the model's FLOPs, embedding and head counted.

    DeepSpeed calls `forward` once for each micro-batch, with the hidden state that the stage before has sent and no
    other argument. 1F1B runs the forward passes of a stage in the order of the micro-batches, so that each call takes
    the next one of `waiting`; backward passes use what autograd has kept.
    """

    def __init__(self, config: Config, context: ParallelContext, parallel: TensorParallel, num_losses: int):
        model = config.model
        encoder = _EncoderBlock if model.decoder_layers else _Block
        block_types = [encoder] * model.num_layers + [_DecoderBlock] * model.decoder_layers
        blocks = [
            LayerSpec(block_type, model, i, parallel, config.training.recompute)
            for i, block_type in enumerate(block_types)
        ]
        words, project = LayerSpec(_Words, model, parallel), LayerSpec(_Project)
        if has_words_on_last_stage(model):
            # The same specification twice: DeepSpeed builds one module for each stage that has it, under one name.
            words, project = (
                TiedLayerSpec("words", _Words, model, parallel, forward_fn=function)
                for function in (None, _Words.project)
            )
        positions = LayerSpec(_Positions, model, parallel)
        readout = LayerSpec(_Readout, model, parallel, config.training.loss_rows, config.training.recompute)
        layers = [words, positions, *blocks, readout, project]
        self.costs = layer_costs(model, config.loss_share)
        topology = PipeModelDataParallelTopology(
            num_pp=context.pp.size, num_mp=context.tp.size, num_dp=context.dp.size
        )
        super().__init__(layers, topology=topology, partition_method="cost")
        self.config, self.parallel, self.device = config, parallel, context.device
        self.options = model  # of the phase
        self.num_losses = num_losses
        # Each stage has a copy of the tables that all its layers share; the optimizer sums their gradients.
        begin, end = self._local_start - _FIRST_BLOCK, self._local_stop - _FIRST_BLOCK  # the stage's blocks
        is_used = {
            "relative_bias": begin < model.num_layers and end > 0,
            "decoder_relative_bias": begin < model.total_layers and end > model.num_layers,
        }
        self.used_tables: dict[str, Table] = {}
        for name, table in relative_tables(model, parallel).items():
            setattr(self, name, table)
            if is_used[name]:
                self.used_tables[name] = table
        self.fill([])

    def fill(
        self,
        micro_batches: Iterable[MicroBatch],
        scale: float = 1.0,
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """The micro-batches that are computed next, on the host; `objective_sums` begins at zero.

        Args:
            scale: multiplies their losses, in addition to the factor of each.
            gradients: of pairs, for the vectors of each on the last stage; None: the vectors are kept, without a loss.
        """
        self.vectors: list[torch.Tensor] = []
        self.gradients = None if gradients is None else iter(gradients)
        self.waiting = ((micro_batch, micro_batch.loss_factor * scale) for micro_batch in micro_batches)
        self.objective_sums = torch.zeros(self.num_losses, 3, dtype=torch.float64, device=self.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state for the next stage; on the last stage, the micro-batch's share of the step's loss."""
        micro_batch, loss_factor = next(self.waiting)
        inputs = _Inputs.of(
            micro_batch.to(self.device), self.options, self.parallel, self.used_tables, self.config.has_memory
        )
        has_two = inputs.stack_contexts is not None and self._local_start >= _FIRST_BLOCK
        x: Any = inputs.split(hidden) if has_two else hidden
        is_last = self._local_stop == len(self._layer_specs)
        has_vectors = is_last and isinstance(micro_batch.extra_inputs, PairInputs)
        # The vectors of texts predict no tokens.
        for layer in self.forward_funcs[:-1] if has_vectors else self.forward_funcs:
            if isinstance(layer, _Readout) and layer.layers:
                x = last = materialize(x)
            x = layer(x, inputs)
        if has_vectors:
            return self.vector_loss(x) * loss_factor
        if is_last:
            loss = self.sum_losses(x, inputs.micro_batch)
            if self.options.mtp_layers and torch.is_grad_enabled():
                loss = loss + self.further_loss(last, inputs)
            return loss * loss_factor
        # DeepSpeed sends one tensor of one shape.
        return materialize(x) if isinstance(x, torch.Tensor | Residual) else torch.cat(x)

    def sum_losses(self, logits: _Logits, micro_batch: MicroBatch) -> torch.Tensor:
        """The sum of a micro-batch's losses; adds to `objective_sums`."""
        loss_sum, per_objective = sum_losses(logits, micro_batch, self.output_words(), *self.loss_settings)
        self.objective_sums[:, : per_objective.shape[1]] += per_objective
        return loss_sum

    @property
    def loss_settings(self) -> tuple[int, float, float]:
        training = self.config.training
        return self.num_losses, training.label_smoothing, training.z_loss

    def further_loss(self, hidden: torch.Tensor, inputs: _Inputs) -> torch.Tensor:
        """As `sum_losses`, of the further tokens. Args: hidden: of the last block."""
        readout = self.readout()
        (block,) = readout.layers.values()
        words, norm = self.tied_modules["words"], readout.final_layernorm
        loss_sum, sums = cast(MultiTokenBlock, block).loss(
            hidden, inputs.context, inputs.micro_batch, words, readout.heads, norm, *self.loss_settings
        )
        self.objective_sums[:, : sums.shape[1]] += sums
        return loss_sum

    def readout(self) -> _Readout:
        (readout,) = (function for function in self.forward_funcs if isinstance(function, _Readout))
        return readout

    def vector_loss(self, vectors: torch.Tensor) -> torch.Tensor:
        """A number whose gradient is that of the loss; in a first pass, which needs none, 0."""
        if self.gradients is None:
            self.vectors.append(vectors)
            return vectors.sum() * 0.0
        return (vectors * next(self.gradients)).sum()

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
        vocabulary = self.readout().heads.vocabulary
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
        parallel = TensorParallel(context.tp, config.parallel.sequence_parallel, expert_group=context.ep)
        # no_grad: DeepSpeed broadcasts the tied weight, of which autograd would warn in every backward pass.
        assert context.process_groups is not None
        with quiet_deepspeed(), torch.no_grad(), context.process_groups.shared_with_deepspeed():
            self._stages = _Stages(config, context, parallel, num_losses)
        named = self._stages.global_names(config.model.total_layers)
        initialize_parameters(named.items(), config.model, config.training.seed, parallel)
        super().__init__(self._stages, named, config, context, mpu=None)
        self._tokens = 0  # of the micro-batch whose shape the stages know

    def _set_options(self, model: ModelConfig) -> None:
        super()._set_options(model)
        self._stages.options = model

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        self._begin_step(len(micro_batches), lr)
        micro_batches = self._scaled(micro_batches)
        of_pairs, gradients = self._vector_pass(micro_batches)
        per_pass = self._engine.train_micro_batch_size_per_gpu() * self._engine.dp_world_size
        # Its number of micro-batches follows from the batch size, which a ramp changes between steps.
        self._engine.set_train_batch_size(len(micro_batches) * per_pass)
        scale = len(micro_batches) * self._zero.loss_factor  # DeepSpeed divides by their number
        self._stages.fill(micro_batches, scale, gradients)
        # All at once: a stage has no call between its layers where it could wait for each.
        self._zero.wait_for_weights()
        self._expect(micro_batches)
        self._engine.train_batch(self._nothing())
        return self._result(self._stages.objective_sums + of_pairs)

    def _vector_pass(self, micro_batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The losses of pairs, fp64 [losses, 3], and the gradients of their vectors on the last stage."""
        stages, gradients = self._stages, list[torch.Tensor]()
        sums = torch.zeros_like(stages.objective_sums)
        if isinstance(micro_batches[0].extra_inputs, PairInputs):
            self._evaluate(micro_batches)
            if stages.vectors:
                sums[:, :2], gradients = self._vector_sums(stages.vectors, micro_batches, stages.num_losses)
        return sums, gradients

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        by_records: dict[int | None, list[MicroBatch]] = {}  # None: batches without pairs
        for micro_batch in (self.prepared(batch, None) for batch in batches):
            inputs = micro_batch.extra_inputs
            records = inputs.records.first_sample if isinstance(inputs, PairInputs) else None
            by_records.setdefault(records, []).append(micro_batch)
        sums = torch.zeros_like(self._stages.objective_sums)
        for records, micro_batches in by_records.items():
            if records is None:
                self._evaluate(micro_batches)
                sums += self._stages.objective_sums
            else:
                sums += self._vector_pass(micro_batches)[0]
        return sums

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._stages.fill(micro_batches)
        self._zero.wait_for_weights()
        self._expect(micro_batches)
        self._engine.eval_batch(self._nothing(), num_micro_batches=len(micro_batches))

    def _expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Let stages exchange the shape of hidden states anew where it is another: of a phase, or in an evaluation."""
        tokens = len(micro_batches[0].tokens)
        if tokens != self._tokens:
            self._engine.reset_activation_shape()
            self._tokens = tokens

    def _nothing(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Placeholders for DeepSpeed's inputs and labels of each micro-batch: the stages get theirs elsewhere."""
        nothing = torch.zeros(1, device=self.context.device)
        return itertools.repeat((nothing, nothing))
