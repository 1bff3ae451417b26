"""Evaluation within a run: the loss of validation samples and filled blanks, or the scores of a task."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry.reports import scores_line, validation_line
from megatron_lite.telemetry.standstill import Standstill
from megatron_lite.telemetry.writer import Metrics, is_recorded
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.train.step import read_batch
from megatron_lite.transformer.batch import Batch, Samples
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)


class TaskEvaluator(Protocol):
    """Evaluates a run by a task's scores instead of the validation loss. All ranks call it and get equal results."""

    @property
    def ends_training(self) -> bool:
        """True when early stopping triggers."""
        ...

    def resume(self, step: int) -> int:
        """Drop the scores after this step, from which the run continues. Returns the last evaluated step, or 0."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores of the model as it is now, which is saved as this step's checkpoint."""
        ...


class Evaluation:
    """Evaluates the model as it is when called.

    Args: as for `Trainer`; data: validation samples.
    """

    def __init__(
        self,
        config: Config,
        phase_plan: PhasePlan,
        context: ParallelContext,
        engine: Engine,
        data: Samples | None,
        loss_normalizer: LossNormalizer,
        task_evaluator: TaskEvaluator | None,
        fill: Callable[[Transformer], dict[str, Any]] | None,
    ):
        self._config, self._phase_plan, self._context, self._engine = config, phase_plan, context, engine
        self._data, self._loss_normalizer, self._fill = data, loss_normalizer, fill
        self.task_evaluator = task_evaluator
        self._standstill = Standstill()
        self.last_step = 0  # the last step that is known to be evaluated

    @property
    def ends_training(self) -> bool:
        """True when early stopping triggers."""
        return self.task_evaluator is not None and self.task_evaluator.ends_training

    def resume(self, step: int, is_own: bool) -> None:
        """The run continues after `step` steps. Args: is_own: of this run, not of one that it branches from."""
        if self.task_evaluator is not None:
            # It knows the last evaluated step itself, so the records are not asked.
            self.last_step = self.task_evaluator.resume(step)
            return
        # Not a run's own checkpoint: its first step counts as evaluated, unless the run ends there.
        missing = step >= self._config.training.steps
        if is_own:  # the main rank decides: other nodes may see an older state of a shared file system
            directory = Path(self._config.run.directory)
            unrecorded = self._context.is_main and not is_recorded(directory, "validation", step)
            (missing_on_main,) = self._context.sum_on_hosts([float(unrecorded)])
            missing = missing_on_main > 0
        if not missing:
            self.last_step = step

    def run(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Loss and perplexity on the first `training.eval_samples` validation samples, or the scores of a task."""
        self.last_step = step
        if self.task_evaluator is not None:
            values = self.task_evaluator.evaluate(step)
            metrics.write("scores", step, values, scores_line(step, values))
            return values
        if self._data is None:
            return {}
        config, context, engine = self._config, self._context, self._engine
        samples, size = config.training.eval_samples, config.batch.micro_batch_size
        batches = evaluation_batches(self._data, samples, size, context)
        with engine.averaged_weights():
            # Each sample once over all ranks, so that the loss does not depend on the parallel sizes.
            sums = context.sum_losses(engine.evaluate(batches))
            divisors = [batch.loss_divisors(len(sums)) * context.counts_samples for batch in batches]
            loss_divisors = context.sum_on_hosts(np.sum(divisors, axis=0).tolist())
            sums = self._loss_normalizer.with_token_counts(sums, loss_divisors)
            losses = self._loss_normalizer.means(sums.cpu().numpy(), step)
            values = {**losses, **engine.more_measures(losses["loss"])}
            if config.training.loss_normalization == "per_objective":  # a sum of means
                # exp of a sum of several means is no perplexity of anything.
                values.pop("perplexity", None)
            metrics.write("validation", step, values, validation_line(step, values))
            if self._fill is not None and context.is_main and isinstance(engine, PlainEngine):
                filled = self._fill(engine.model)
                line = (
                    f"fillings at step {step} | {filled['exact']} of {filled['blanks']} blanks as in the text"
                )
                metrics.write("fillings", step, filled, line)
        # Near the end of a decay the loss stands still because the rate does: the advice takes that into account.
        rate_share = self._phase_plan.learning_rate(step) / config.optimizer.lr
        advice = self._standstill.advice(step, values["loss"], rate_share)
        if advice and context.is_main:
            log.warning("%s", advice)
        return values


def evaluation_batches(data: Samples, count: int, size: int, context: ParallelContext) -> list[Batch]:
    """This rank's batches of the first `count` samples. All ranks get equally many, each of `size` sequences."""
    samples, dp = np.arange(count), context.dp
    per_pass = size * dp.size
    return [
        # Padded to `size` sequences, without documents: every rank computes as many passes of one shape, each with the
        # same collectives.
        read_batch(data, samples[start : start + per_pass][dp.rank :: dp.size]).padded(size)
        for start in range(0, count, per_pass)
    ]
