"""The engine of layouts without pipeline stages, and the choice between it and the engine of pipeline.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_lite.config.tree import Config
from megatron_lite.model.input.batch import Batch
from megatron_lite.model.input.model_input import MicroBatch, ModelInput
from megatron_lite.model.input.task_batch import TaskBatch
from megatron_lite.model.layers.tensor_parallel import TensorParallel
from megatron_lite.model.optimus import Optimus
from megatron_lite.model.trunk.build import build_model
from megatron_lite.model.trunk.glm import GLM
from megatron_lite.parallel.context import Mpu, ParallelContext
from megatron_lite.train.engine.engine import Engine, StepResult
from megatron_lite.train.engine.parameter_rates import Rate
from megatron_lite.train.loop.annealing import beta
from megatron_lite.train.loop.latent_measures import LatentMeasures


class PlainEngine(Engine):
    """Every process holds all layers: data parallelism, ZeRO and tensor parallelism."""

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        num_losses: int,
        rates: Mapping[str, Rate] | None = None,
    ):
        """Args: rates: as of `Engine`."""
        parallel = TensorParallel(
            context.tp, config.parallel.sequence_parallel, sums_at_once=config.parallel.zero_stage == 3
        )
        self._model = build_model(config, num_losses, parallel)
        super().__init__(
            self._model, dict(self._model.named_parameters()), config, context, Mpu(context), rates
        )
        self._model.before_use = self._zero.await_weights

    @property
    def model(self) -> GLM:
        """The model with the weights of the last step, where it is one Transformer."""
        self._zero.await_weights()
        assert isinstance(self._model, GLM)
        return self._model

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        self._begin_step(len(micro_batches), lr)
        sums = self._no_sums()
        for micro in micro_batches:
            batch = self._host_input(micro).to(self.context.device)
            loss_sum, per_objective = self._engine(batch)
            self._engine.backward(loss_sum * micro.loss_factor * self._zero.loss_factor, scale_wrt_gas=False)
            self._engine.step()
            sums += per_objective
        return self._result(sums)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        sums = self._no_sums()
        for batch in batches:
            sums += self._model(self._input(batch, None))[1]
        return sums

    @torch.no_grad()
    def answers(self, batch: TaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model answers to a task's parts, without dropout; on all ranks of a replica. See `GLM.forward`."""
        return self._model(self._input(batch, None), answers=True)

    def _input(self, batch: Batch, dropout_seed: int | None) -> ModelInput:
        return self.prepared(batch, dropout_seed).to(self.context.device)

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(self._model.num_losses, 2, dtype=torch.float64, device=self.context.device)


class LatentEngine(PlainEngine):
    """Of two stacks and a latent vector: OPTIMUS."""

    _measures: LatentMeasures  # of the last evaluation

    @property
    def optimus(self) -> Optimus:
        assert isinstance(self._model, Optimus)
        return self._model

    def set_step(self, step: int) -> None:
        super().set_step(step)
        latent = self.optimus.config
        self.optimus.beta = beta(
            step - 1,
            self._config.training.steps,
            peak=latent.beta,
            cycles=latent.cycles,
            zero_share=latent.zero_share,
            rise_share=latent.rise_share,
        )

    @property
    def annealed(self) -> dict[str, float]:
        return {"beta": self.optimus.beta}

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._measures = LatentMeasures()
        self.optimus.observe = self._measures.add
        try:
            return super().evaluate(batches)
        finally:
            self.optimus.observe = None

    def more_measures(self, loss: float) -> dict[str, float]:
        return self._measures.summary(self.context, loss)


def make_engine(config: Config, context: ParallelContext, num_losses: int) -> Engine:
    """Build, initialise and shard the model of a configuration for its layout."""
    if context.pp.size == 1:
        kind = PlainEngine if config.latent is None else LatentEngine
        return kind(config, context, num_losses)
    from megatron_lite.train.engine.pipeline import PipelineEngine

    return PipelineEngine(config, context, num_losses)
