"""Scores of a model without some heads: the metrics of a task, or the loss on the run's validation data.

`write_pruned` writes the model that remains as a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from data_utils.common.files import new_directory
from data_utils.loader.loader import SampleLoader, open_datasets
from data_utils.tasks.metrics.metrics_by_task import compared_by
from megatron_lite.analysis.heads import Examples, Head, loss_sum
from megatron_lite.checkpoint.manifest import CHECKPOINTS
from megatron_lite.checkpoint.merge import write_weights
from megatron_lite.finetune.checkpoints import make_predict, task_of
from megatron_lite.finetune.data import make_task_batch
from megatron_lite.finetune.evaluation import Evaluation, Model
from megatron_lite.finetune.setup import Task
from megatron_lite.finetune.writing import writer
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch


class HeadScorer(Protocol):
    """Scores a model as it is now, and yields the examples over which importance is measured."""

    measure: str  # name of the score, as printed

    def examples(self) -> Iterator[Examples]: ...

    def score(self) -> float:
        """Higher is better."""
        ...


def make_head_scorer(
    run: OpenRun, tree: Mapping[str, Any], path: Path, samples: int, size: int
) -> tuple[HeadScorer, Run]:
    """A scorer, and the run with its weights.

    Args:
        tree: sections of a task; {}: the run's own task, or its validation data if it has none.
        samples: maximum number of samples. size: samples in a forward pass.
    Raises: ConfigError without a task or validation data.
    """
    if run.config.task is not None or tree:
        task = task_of(run, tree, path)
        loaded = run.with_model()
        return TaskScorer(loaded, task, samples, size), loaded
    if not run.config.data.validation:
        raise ConfigError(
            f"{path} has neither a task nor data.validation to score heads with; give a task with --task FILE."
        )
    data = open_datasets(
        run.config.data, run.config.objective_choices, run.tokenizer, run.config.training.seed
    )
    assert data.validation is not None
    loaded = run.with_model()
    return LossScorer(loaded, data.validation, samples, size), loaded


@dataclass(frozen=True)
class LossScorer:
    """The negative mean loss of validation samples. An example is a sample."""

    run: Run
    loader: SampleLoader
    samples: int
    size: int  # samples in a forward pass
    measure = "validation loss, negative (nats)"

    def examples(self) -> Iterator[Examples]:
        for start in range(0, self.samples, self.size):
            numbers = np.arange(start, min(start + self.size, self.samples))
            yield Examples(Batch(self.loader.batch(numbers), numbers), np.arange(len(numbers)))

    @torch.no_grad()
    def score(self) -> float:
        device = next(self.run.model.parameters()).device
        loss = weight = 0.0
        for examples in self.examples():
            micro_batch = MicroBatch.from_batch(examples.batch, device, self.run.config.model)
            loss -= float(loss_sum(self.run.model, micro_batch))
            weight += examples.batch.loss_divisor
        return loss / weight


class TaskScorer:
    """A task's metrics on its validation files, their mean over files. An example is a labelled sample."""

    def __init__(self, run: Run, task: Task, samples: int, size: int):
        self._run, self._task, self._size = run, task, size
        metrics = compared_by(task.settings, task.config.finetune.best)
        self.measure = " and ".join(metrics.compared or metrics.names)
        self._score = metrics.score
        if not task.validation:
            raise ConfigError("heads are scored on labelled samples; set task.validation.")
        one_process = ParallelContext.alone()
        self._evaluations = [
            Evaluation(task.settings, task.renderer, [*records[:samples]], one_process, size)
            for records in task.validation.values()
        ]
        self._records = [record for evaluation in self._evaluations for record in evaluation.records]

    def examples(self) -> Iterator[Examples]:
        renderer = self._task.renderer
        samples = [renderer.sample(record, number) for number, record in enumerate(self._records)]
        for start in range(0, len(samples), self._size):
            chosen = samples[start : start + self._size]
            batch = make_task_batch(chosen, range(start, start + len(chosen)), renderer)
            yield Examples(batch, np.repeat(np.arange(len(chosen)), [len(each.documents) for each in chosen]))

    def score(self) -> float:
        run = self._run
        write = writer(
            run.model, self._task.config, self._task.tokenizer, run.objectives, str(run.checkpoint.path)
        )
        model = Model(make_predict(run), write)
        scores = [self._score(evaluation.run(model).metrics) for evaluation in self._evaluations]
        return sum(scores) / len(scores)


def write_pruned(run: Run, removed: Sequence[Head], output: Path) -> Path:
    """Write the present weights of a run as a checkpoint of the run directory `output`. Returns the checkpoint."""
    parameters, shapes = dict(run.model.named_parameters()), run.checkpoint.shapes
    # Checkpoints have no rows that pad the vocabulary.
    weights = (parameters[name].detach()[: shape[0]] for name, shape in shapes.items())
    described = {"removed_heads": [list(head) for head in removed]}
    with new_directory(output) as directory:
        path = write_weights(run.checkpoint, weights, directory / CHECKPOINTS, described)
    return output / path.relative_to(directory)
