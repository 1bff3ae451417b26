"""The model as a DeepSpeed PipelineModule, split over stages by cost.

A stage sends the hidden state and two small integer tensors to the next one: the dropout seed, and the planes from
which every stage builds the attention plan and the last stage finds the tokens with loss. The first and the last stage
each hold the word embedding; DeepSpeed sums its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from data_utils.objectives.planes import DOC, GRP, OBJECTIVE, ORD, TARGETS, TOKENS
from megatron_lite.config.tree import Config, ModelConfig
from megatron_lite.model.attention import plan_attention
from megatron_lite.model.batch import Batch, make_layout
from megatron_lite.model.glm import (
    ID_PLANES,
    Block,
    Flow,
    PositionEmbeddings,
    final_layernorm,
    initialize_parameters,
)
from megatron_lite.model.heads import Heads, LossRows, find_loss_rows, row_losses, sum_losses
from megatron_lite.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.engine import Engine, MicroBatch, StepResult, without_chatter

_PLANES = (DOC, ORD, GRP, OBJECTIVE)  # sent with the hidden state, followed by the loss weights
_NO_DROPOUT = -1

# hidden [T, D], planes int32 [B, 5, S], seed int64 [1]
Carried = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Rows = tuple[torch.Tensor, LossRows, torch.Tensor]  # class logits, tokens with loss, their weights


class _Flows:
    """The `Flow` of a stage's current micro-batch, built once for all its layers."""

    def __init__(self, parallel: TensorParallel):
        self.rank = parallel.group.rank
        self._planes: torch.Tensor | None = None
        self._flow: Flow | None = None

    def of(self, planes: torch.Tensor, seed: torch.Tensor) -> Flow:
        if self._flow is None or self._planes is not planes:
            doc, order, grp = planes[:, :3].cpu().numpy().swapaxes(0, 1)
            plan = plan_attention(make_layout(doc, order, grp), planes.device)
            number = int(seed.item())
            dropout_seed = None if number == _NO_DROPOUT else number
            rows, length = doc.shape
            self._planes, self._flow = planes, Flow(rows, length, plan, dropout_seed, self.rank)
        return self._flow


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))  # only contiguous tensors can be sent


class _Words(VocabParallelEmbedding):
    """First layer: (tokens and ids int32 [B, 1 + len(ID_PLANES), S], planes, seed) -> words and the inputs."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ids, planes, seed = inputs
        return super().forward(ids[:, 0].flatten()), ids, planes, seed

    @staticmethod
    def project(module: _Words, inputs: tuple[Heads, torch.Tensor, *_Rows]) -> tuple[torch.Tensor, *_Rows]:
        """Last layer, on the tied weight."""
        heads, vectors, classes, rows, weights = inputs
        return heads.vocabulary_logits(vectors, module), classes, rows, weights


class _Positions(PositionEmbeddings):
    def __init__(self, config: ModelConfig, parallel: TensorParallel, flows: _Flows):
        super().__init__(config, parallel)
        self.flows = flows

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Carried:  # type: ignore[override]
        words, ids, planes, seed = inputs
        flow = self.flows.of(planes, seed)
        return super().forward(words, ids[:, 1:].transpose(0, 1).flatten(1), flow), planes, seed


class _Block(Block):
    def __init__(
        self, config: ModelConfig, layer: int, parallel: TensorParallel, recompute: str, flows: _Flows
    ):
        super().__init__(config, parallel, recompute)
        self.layer = layer
        self.flows = flows

    def forward(self, inputs: Carried) -> Carried:  # type: ignore[override]
        hidden, planes, seed = inputs
        return super().forward(hidden, self.flows.of(planes, seed), self.layer), planes, seed


class _Readout(nn.Module):
    """Final LayerNorm and heads; `_Words.project` applies the tied weight."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.config = config
        self.final_layernorm = final_layernorm(config)
        self.heads = Heads(config, parallel)

    def forward(self, inputs: Carried) -> tuple[Heads, torch.Tensor, *_Rows]:
        hidden, planes, _ = inputs
        objectives, weights = planes[:, -2].flatten(), planes[:, -1].flatten().view(torch.float32)
        rows = find_loss_rows(weights, objectives, self.config)
        vectors, classes = self.heads(hidden, rows, self.final_layernorm)
        return self.heads, vectors, classes, rows, weights[rows.labelled]


def layer_costs(model: ModelConfig, loss_share: float) -> list[float]:
    """FLOPs of words, positions, each block, final norm and output, in units of a block."""
    assert model.vocab_size is not None
    head = loss_share * model.vocab_size / (12 * model.hidden_size)  # only on tokens with loss
    return [0.0, 0.05, *[1.0] * model.num_layers, 0.0, head]


def stage_bounds(costs: list[float], stages: int) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1, for about equal costs."""
    # The head's two layers stay on one stage: the first one's result is not only tensors, which could be sent.
    joined = [*costs[:-2], costs[-2] + costs[-1]]
    bounds = [int(bound) for bound in partition_balanced([cost + 1e-3 for cost in joined], stages)]
    return [*bounds[:-1], bounds[-1] + 1]


class _Stages(PipelineModule):
    """Stages with about equal shares of the model's FLOPs, embedding and head counted."""

    def __init__(self, config: Config, context: ParallelContext, parallel: TensorParallel, loss_fn):  # type: ignore[no-untyped-def]
        model = config.model
        flows = _Flows(parallel)
        blocks = [
            LayerSpec(_Block, model, i, parallel, config.training.recompute, flows)
            for i in range(model.num_layers)
        ]
        layers = [
            TiedLayerSpec("words", _Words, model, parallel),
            LayerSpec(_Positions, model, parallel, flows),
            *blocks,
            LayerSpec(_Readout, model, parallel),
            TiedLayerSpec("words", _Words, model, parallel, forward_fn=_Words.project),
        ]
        self.costs = layer_costs(model, config.loss_share)
        topology = PipeModelDataParallelTopology(
            num_pp=context.pp.size, num_mp=context.tp.size, num_dp=context.dp.size
        )
        super().__init__(layers, topology=topology, loss_fn=loss_fn, partition_method="cost")

    def _partition_layers(self, method: str = "cost") -> None:
        stages, stage = self._topo.get_dim("pipe"), self._topo.get_coord(self.global_rank).pipe
        self.parts = stage_bounds(self.costs, stages)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def global_names(self, num_layers: int) -> dict[str, nn.Parameter]:
        """This stage's parameters under their names in the whole model."""
        prefixes = {"tied_modules.words": "embedding.word_embeddings.", "1": "embedding."}
        prefixes |= {str(2 + i): f"layers.{i}." for i in range(num_layers)}
        prefixes |= {str(2 + num_layers): ""}  # final_layernorm and heads
        named = {}
        for name, parameter in self.named_parameters():
            layer = "tied_modules.words" if name.startswith("tied_modules.") else name.split(".")[0]
            named[prefixes[layer] + name[len(layer) + 1 :]] = parameter
        return named


class PipelineEngine(Engine):
    """Pipeline stages, each with data and tensor parallelism, under ZeRO 1."""

    def __init__(self, config: Config, context: ParallelContext, num_losses: int):
        parallel = TensorParallel(context.tp, config.parallel.sequence_parallel)
        self.num_losses = num_losses
        self._sums = self._no_sums(context.device)
        # no_grad: DeepSpeed broadcasts the tied weight, of which autograd would warn in every backward pass.
        assert context.process_groups is not None
        with without_chatter(), torch.no_grad(), context.process_groups.lent_to_deepspeed():
            stages = _Stages(config, context, parallel, self._loss)
        named = stages.global_names(config.model.num_layers)
        initialize_parameters(named.items(), config.model, config.training.seed, parallel)
        super().__init__(stages, named, config, context, mpu=None)
        self._stages = stages

    def _no_sums(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_losses, 2, dtype=torch.float64, device=device)

    def _loss(self, outputs: tuple[torch.Tensor, *_Rows], labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """On the last stage: this micro-batch's share of the step's loss; adds to the objectives' sums."""
        plane, factor = labels
        logits, classes, rows, weights = outputs
        targets = plane.flatten()[rows.labelled].long()
        losses = row_losses(logits, classes, targets, self._stages.tied_modules["words"])
        total, per_objective = sum_losses(losses, weights, rows.objectives, self.num_losses)
        self._sums += per_objective
        return total * factor

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        self._begin_step(len(micro_batches), lr)
        self._sums = self._no_sums(self.context.device)
        scale = len(micro_batches) * self._zero.loss_factor  # DeepSpeed divides by their number
        self._engine.train_batch(
            self._feed(
                (micro.batch, micro.dropout_seed, micro.loss_factor * scale) for micro in micro_batches
            )
        )
        return self._result(self._sums)

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._sums = self._no_sums(self.context.device)
        self._engine.eval_batch(
            self._feed((batch, _NO_DROPOUT, 1.0) for batch in batches), num_micro_batches=len(batches)
        )
        return self._sums

    def _feed(self, items: Iterator[tuple[Batch, int, float]]) -> Iterator[tuple]:
        """(inputs of the first stage, labels of the last) for each micro-batch."""
        for batch, seed, factor in items:
            planes, weights = batch.planes, batch.weights[:, None].view(np.int32)
            carried = np.concatenate([planes[:, _PLANES], weights], axis=1)
            inputs = (planes[:, [TOKENS, *ID_PLANES]], carried, np.array([seed], np.int64))
            labels = (planes[:, TARGETS], np.array([factor], np.float32))
            yield tuple(map(_tensor, inputs)), tuple(map(_tensor, labels))
