"""Evaluation within a run: the loss of validation samples and filled blanks, or the scores of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_lite.config.plan import Plan
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.metrics.reports import scores_line, validation_line
from megatron_lite.metrics.standstill import Standstill
from megatron_lite.metrics.writer import Metrics, is_recorded
from megatron_lite.model.batch import Samples
from megatron_lite.model.transformer import GLM
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.lr_schedule import step_rate
from megatron_lite.train.step import LossShares, same_passes

log = logging.getLogger(__name__)


class Judge(Protocol):
    """Evaluates a run by other scores than the validation loss, on every rank at the same point, with equal answers."""

    @property
    def ends_training(self) -> bool:
        """Whether no better score is to be expected."""
        ...

    def resume(self, step: int) -> int:
        """The run goes on after this step: what was found later is forgotten. Returns the last evaluated step, or 0."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores of the model as it is now, which is saved as this step's checkpoint."""
        ...


class Evaluation:
    """Args: as those of the trainer. data: of validation."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        context: ParallelContext,
        engine: Engine,
        data: Samples | None,
        shares: LossShares,
        judge: Judge | None,
        fill: Callable[[GLM], dict[str, Any]] | None,
    ):
        self._config, self._plan, self._context, self._engine = config, plan, context, engine
        self._data, self._shares, self._fill = data, shares, fill
        self.judge = judge
        self._standstill = Standstill()
        self.last_step = 0  # the last step that is known to be evaluated

    @property
    def ends_training(self) -> bool:
        """Whether no better score is to be expected."""
        return self.judge is not None and self.judge.ends_training

    def resume(self, step: int, is_own: bool) -> None:
        """The run goes on after `step` steps, its own or (not `is_own`) those of the run from which it branches."""
        if self.judge is not None:
            self.last_step = self.judge.resume(step)
            return
        missing = step >= self._config.training.steps
        if is_own:  # all ranks get the main rank's answer
            directory = Path(self._config.run.directory)
            unrecorded = self._context.is_main and not is_recorded(directory, "validation", step)
            (answer,) = self._context.sum_of_hosts([float(unrecorded)])
            missing = answer > 0
        if not missing:
            self.last_step = step

    def run(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Loss and perplexity on the first `training.eval_samples` validation samples, or the scores of a task."""
        self.last_step = step
        if self.judge is not None:
            values = self.judge.evaluate(step)
            metrics.write("scores", step, values, scores_line(step, values))
            return values
        if self._data is None:
            return {}
        config, context, engine = self._config, self._context, self._engine
        samples, size = config.training.eval_samples, config.batch.micro_batch_size
        batches = same_passes(self._data, samples, size, context)
        with engine.averaged_weights():
            sums = context.sum_of_losses(engine.evaluate(batches))
            own = [batch.loss_weights(len(sums)) * context.counts_samples for batch in batches]
            sums = self._shares.divided(sums, context.sum_of_hosts(np.sum(own, axis=0).tolist()))
            losses = self._shares.means(sums.cpu().numpy(), step)
            values = {**losses, **engine.more_measures(losses["loss"])}
            if config.training.loss_normalization == "per_objective":  # a sum of means
                values.pop("perplexity", None)
            metrics.write("validation", step, values, validation_line(step, values))
            self._record_fillings(step, metrics)
        rate_share = step_rate(config, self._plan, step) / config.optimizer.lr
        advice = self._standstill.advice(step, values["loss"], rate_share)
        if advice and context.is_main:
            log.warning("%s", advice)
        return values

    def _record_fillings(self, step: int, metrics: Metrics) -> None:
        if self._fill is not None and self._context.is_main and isinstance(self._engine, PlainEngine):
            filled = self._fill(self._engine.model)
            line = f"fillings at step {step} | {filled['exact']} of {filled['blanks']} blanks as in the text"
            metrics.write("fillings", step, filled, line)
