"""The engine without pipeline stages, and the choice between it and the engine of pipeline.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine, StepResult
from megatron_lite.engine.vector_loss import vector_groups
from megatron_lite.optim.lr_multipliers import LrMultipliers
from megatron_lite.parallel.context import Mpu, ParallelContext
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.pair_records import PairInputs
from megatron_lite.transformer.task_batch import TaskBatch
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

_MicroBatchLoss = tuple[MicroBatch, torch.Tensor, torch.Tensor]  # loss sum, and sum and weight of each loss


class PlainEngine(Engine):
    """Every process holds all layers: data parallelism, ZeRO and tensor parallelism."""

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        num_losses: int,
        multipliers: Mapping[str, LrMultipliers] | None = None,
    ):
        """Args: multipliers: as for `Engine`."""
        # At ZeRO 3 DeepSpeed's hooks reduce a gradient as soon as it exists, so its sum over the tensor-parallel ranks
        # has to be part of the backward pass.
        parallel = TensorParallel(
            context.tp,
            config.parallel.sequence_parallel,
            sums_at_once=config.parallel.zero_stage == 3,
            expert_group=context.ep,
        )
        self._model = build_model(config, num_losses, parallel)
        super().__init__(
            self._model, dict(self._model.named_parameters()), config, context, Mpu(context), multipliers
        )
        self._model.before_use = self._zero.wait_for_weights
        # Empty until a batch needs it: its size follows from the batches.
        self._buffer = torch.empty(0, dtype=torch.int32, device=context.device)

    @property
    def model(self) -> Transformer:
        """The model with the weights of the last step, where it is one Transformer."""
        self._zero.wait_for_weights()
        assert isinstance(self._model, Transformer)
        return self._model

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """As `Engine.train_step`. Gradients are summed in the optimizer's buckets, and over ranks during backward.

        DeepSpeed calls the optimizer's `step`: global norm, clipping, the check for gradients that are not finite, the
        update, all on the device (`ShardedOptimizer.step`).
        """
        self._begin_step(len(micro_batches), lr)  # learning rates, empty buckets
        micro_batches = self._scaled(micro_batches)
        objective_sums = self._zero_sums()
        has_pairs = isinstance(micro_batches[0].extra_inputs, PairInputs)
        losses = (self._vector_losses if has_pairs else self._losses)(micro_batches)
        for number, (micro_batch, loss_sum, sums) in enumerate(losses, start=1):
            # Said, not counted by DeepSpeed: a batch ramp changes the number of micro-batches.
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            # The normalizer's factor, and the loss scale of fp16.
            loss = loss_sum * (micro_batch.loss_factor * self._zero.loss_factor)
            # The loss has its factor already; DeepSpeed would divide by its own count of micro-batches.
            self._engine.backward(loss, scale_wrt_gas=False)
            objective_sums[:, : sums.shape[1]] += sums
        self._engine.step()
        return self._result(objective_sums)

    def _losses(self, micro_batches: Sequence[MicroBatch]) -> Iterator[_MicroBatchLoss]:
        for micro_batch in micro_batches:
            yield micro_batch, *self._engine(self._on_device(micro_batch))

    def _vector_losses(self, micro_batches: Sequence[MicroBatch]) -> Iterator[_MicroBatchLoss]:
        """As `_losses`, of batches of pairs: the product of vectors and their gradients has the loss's gradient."""
        for group in vector_groups(micro_batches):
            is_only = len(group) == 1  # its first pass keeps the graph, and there is no second one
            with torch.set_grad_enabled(is_only):
                vectors = [self._engine(self._on_device(micro_batch))[0] for micro_batch in group]
            sums, gradients = self._vector_sums(vectors, group, self._model.num_losses)
            for micro_batch, gradient in zip(group, gradients, strict=True):
                again = vectors[0] if is_only else self._engine(self._on_device(micro_batch))[0]
                yield micro_batch, (again * gradient).sum(), sums
                sums = torch.zeros_like(sums)

    def _on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch.to(self.context.device, self._buffer_for(micro_batch))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        sums = self._zero_sums()
        pairs: dict[int, list[tuple[torch.Tensor, MicroBatch]]] = {}  # of each global batch of pairs
        self._model.begin_evaluation()
        try:
            for batch in batches:
                micro_batch = self.prepared(batch, None)
                output, per_objective = self._model(micro_batch.to(self.context.device))
                if isinstance(micro_batch.extra_inputs, PairInputs):
                    records = id(micro_batch.extra_inputs.records)
                    pairs.setdefault(records, []).append((output, micro_batch))
                else:
                    # Evaluation has no z-loss, so its third column stays 0.
                    sums[:, :2] += per_objective
            for outputs in pairs.values():
                vectors, micro_batches = zip(*outputs, strict=True)
                sums[:, :2] += self._vector_sums(vectors, micro_batches, len(sums))[0]
        finally:
            self._model.end_evaluation()
        return sums

    def set_step(self, step: int) -> None:
        super().set_step(step)
        self._model.set_step(step, self._config.training.steps)

    def more_measures(self, loss: float) -> dict[str, float]:
        return self._model.measures(self.context, loss)

    @property
    def annealed(self) -> dict[str, float]:
        return self._model.annealed

    @torch.no_grad()
    def predict(self, batch: TaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's predictions for a task, without dropout, on all ranks of a replica. See `GLM.forward`."""
        return self._model(self._input(batch, None), predict=True)

    def _input(self, batch: Batch, dropout_seed: int | None) -> MicroBatch:
        return self.prepared(batch, dropout_seed).to(self.context.device)

    def _buffer_for(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Where CUDA graphs read their batches; None = anywhere."""
        if not self._has_graphs:
            return None
        size = len(micro_batch.buffer.data)
        if len(self._buffer) < size:  # graphs of the smaller one are not used again
            self._buffer = torch.empty(2 * size, dtype=torch.int32, device=self.context.device)
        return self._buffer

    def _zero_sums(self) -> torch.Tensor:
        return torch.zeros(self._model.num_losses, 3, dtype=torch.float64, device=self.context.device)


def make_engine(config: Config, context: ParallelContext, num_losses: int) -> Engine:
    """Build, initialize and shard the model of a configuration for its layout."""
    if context.pp.size == 1:
        return PlainEngine(config, context, num_losses)
    from megatron_lite.engine.pipeline import (
        PipelineEngine,  # imports DeepSpeed's pipeline, which takes seconds
    )

    return PipelineEngine(config, context, num_losses)
