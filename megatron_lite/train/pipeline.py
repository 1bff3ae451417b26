"""The same list of layers as a DeepSpeed PipelineModule, split over stages by cost.

Between stages travel the hidden state and two small integer tensors: the planes from which every stage rebuilds the
attention plan and the last one finds the rows with loss, and the dropout seed. The word embedding lives on the first
and the last stage; DeepSpeed sums its gradients.
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

_PLANES = (DOC, ORD, GRP, OBJECTIVE)  # what travels with the hidden state, and the weights after them
_NO_DROPOUT = -1

Carried = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # hidden [T, D], planes int32 [B, 5, S], seed int64 [1]
_Found = tuple[torch.Tensor, LossRows, torch.Tensor]  # class logits, rows with loss, their weights


class _Flows:
    """The `Flow` of the micro-batch that a stage's layers are working on, built once for all of them."""

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
    """First layer: (tokens and ids int32 [B, 1 + len(ID_PLANES), S], planes, seed) -> words, and the rest handed on."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ids, planes, seed = inputs
        return super().forward(ids[:, 0].flatten()), ids, planes, seed

    @staticmethod
    def project(module: _Words, inputs: tuple[Heads, torch.Tensor, *_Found]) -> tuple[torch.Tensor, *_Found]:
        """Last layer, on the tied weight."""
        heads, vectors, classes, found, weights = inputs
        return heads.vocabulary_logits(vectors, module), classes, found, weights


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

    def forward(self, inputs: Carried) -> tuple[Heads, torch.Tensor, *_Found]:
        hidden, planes, _ = inputs
        objectives, weights = planes[:, -2].flatten(), planes[:, -1].flatten().view(torch.float32)
        found = find_loss_rows(weights, objectives, self.config)
        vectors, classes = self.heads(hidden, found, self.final_layernorm)
        return self.heads, vectors, classes, found, weights[found.labelled]


def layer_costs(model: ModelConfig, loss_share: float) -> list[float]:
    """FLOPs of words, positions, each block, final norm and output, in blocks. The output works on rows with loss."""
    assert model.vocab_size is not None
    head = loss_share * model.vocab_size / (12 * model.hidden_size)
    return [0.0, 0.05, *[1.0] * model.num_layers, 0.0, head]


def stage_bounds(costs: list[float], stages: int) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1, for about equal costs."""
    # The head's two layers belong together: what passes between them is no tensor that could be sent.
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
        """This stage's parameters under the names they have in a model that is not split."""
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
        # Without gradients: DeepSpeed broadcasts the tied weight, and autograd would warn of it in every backward pass.
        with without_chatter(), torch.no_grad():
            stages = _Stages(config, context, parallel, self._loss)
        named = stages.global_names(config.model.num_layers)
        initialize_parameters(named.items(), config.model, config.training.seed, parallel)
        super().__init__(stages, named, config, context, mpu=None)
        self._stages = stages

    def _no_sums(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(self.num_losses, 2, dtype=torch.float64, device=device)

    def _loss(self, outputs: tuple[torch.Tensor, *_Found], labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """On the last stage: this micro-batch's share of the step's loss; keeps the objectives' sums aside."""
        plane, factor = labels
        logits, classes, found, weights = outputs
        targets = plane.flatten()[found.labelled].long()
        losses = row_losses(logits, classes, targets, self._stages.tied_modules["words"])
        total, per_objective = sum_losses(losses, weights, found.objectives, self.num_losses)
        self._sums += per_objective
        return total * factor

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        self._set_lr(lr)
        self._sums = self._no_sums(self.context.device)
        scale = self.context.dp.size * len(micro_batches)  # DeepSpeed divides by both
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
        """What the first stage takes as inputs and the last as labels."""
        for batch, seed, factor in items:
            planes, weights = batch.planes, batch.weights[:, None].view(np.int32)
            carried = np.concatenate([planes[:, _PLANES], weights], axis=1)
            inputs = (planes[:, [TOKENS, *ID_PLANES]], carried, np.array([seed], np.int64))
            labels = (planes[:, TARGETS], np.array([factor], np.float32))
            yield tuple(map(_tensor, inputs)), tuple(map(_tensor, labels))
