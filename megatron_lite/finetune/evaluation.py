"""Evaluation of a task during training and of a checkpoint: records, samples, outputs, predictions, metrics."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import DataError
from data_utils.tasks.base import TaskRecord, TaskSample, target_group_with_loss
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.decode_outputs import positive_label, prediction, probabilities, references
from data_utils.tasks.metrics.metrics import measure
from data_utils.tasks.metrics.metrics_by_task import LOSS, task_metrics
from data_utils.tasks.readers.source_target import sentences_on_lines
from data_utils.tasks.templates.render import Renderer
from megatron_lite.finetune.data import make_task_batch
from megatron_lite.finetune.writing import Write
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.gather import gather_arrays
from megatron_lite.transformer.task_batch import TaskBatch

Predict = Callable[[TaskBatch], tuple[torch.Tensor, torch.Tensor]]  # PlainEngine.predict, or of a model alone


@dataclass(frozen=True)
class Model:
    """The model to evaluate. Args: write: None where no rank holds the whole model: losses only are measured."""

    predict: Predict
    write: Write | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics and predictions of one file."""

    metrics: dict[str, float]  # {} for a file without labels
    records: list[TaskRecord]
    predictions: list[Any]  # one for each record; [] where only losses are measured
    cut: int  # truncated samples
    # Further fields of the predictions' file, by name: a value for each record.
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    skipped: int = 0  # lines that could not be read, with task.skip_bad_lines


class Evaluation:
    """The samples of one file, made once. Args: size: samples of a forward pass and rank."""

    def __init__(
        self,
        task: TaskConfig,
        renderer: Renderer,
        records: Sequence[TaskRecord],
        context: ParallelContext,
        size: int,
    ):
        self._task, self._renderer, self._context, self._size = task, renderer, context, size
        self._skipped = getattr(records, "skipped", 0)
        self.records = renderer.prepare(records, training=False)
        # Evaluation draws nothing at random, so every evaluation sees the same samples.
        self._samples = [renderer.sample(record, number) for number, record in enumerate(self.records)]
        if renderer.head == "tokens":
            self._samples = [with_targets(sample) for sample in self._samples]
        self.cut = sum(sample.cut > 0 for sample in self._samples)

    def run(self, model: Model) -> EvaluationResult:
        """Evaluate the file. Every rank calls this and gets the same result."""
        evaluate = self._evaluate_texts if self._renderer.head == "tokens" else self._evaluate_head
        return replace(evaluate(model), skipped=self._skipped)

    def _evaluate_head(self, model: Model) -> EvaluationResult:
        """The predictions of a head, or of scored choices, and their metrics."""
        outputs = self._outputs(model.predict, self._samples)
        predictions = [
            prediction(self._renderer, record, sample, output)
            for record, sample, output in zip(self.records, self._samples, outputs, strict=True)
        ]
        scores = [
            probabilities(self._renderer, sample, output)
            for sample, output in zip(self._samples, outputs, strict=True)
        ]
        extra = {} if None in scores else {"scores": scores}
        metrics = self.compute_metrics(predictions)
        return EvaluationResult(metrics, self.records, predictions, self.cut, extra)

    def compute_metrics(self, predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics of a prediction for each record; {} if a record has no label."""
        # Test files of benchmarks have no labels: predictions are written, nothing is measured.
        if any(record.label is None for record in self.records):
            return {}
        return self._measure(predictions)

    def _measure(self, predictions: Sequence[Any]) -> dict[str, float]:
        return measure(
            task_metrics(self._task).names,
            predictions,
            references(self.records),
            groups=[record.group for record in self.records],
            positive=positive_label(self._renderer),
            negative=self._task.negative,
        )

    def guesses(self) -> list[dict[str, float]]:
        """The metrics of answers that read no sample, the best ones for this file: one label for all; and of texts the
        loss by the frequency of each token.
        """
        labels = [record.label for record in self.records]
        kind = self._renderer.prediction_type
        if kind in ("entities", "tags"):
            tags = _commonest(tag for label in labels for tag in label)
            return [self._measure([[tag] * len(label) for label in labels]) for tag in tags]
        if kind == "numbers":
            candidates: list[Any] = [0.0]
        elif kind == "texts":  # "" says that there is no answer
            first = (label if isinstance(label, str) else (*label, "")[0] for label in labels)
            candidates = ["", *_commonest(first)[:1]]
        else:
            candidates = _commonest(labels)
        losses = {}
        if self._renderer.head == "tokens":
            targets = [group.targets for sample in self._samples for group in sample.target_groups]
            losses[LOSS] = frequency_loss(np.concatenate(targets)) if targets else 0.0
        return [{**self._measure([guess] * len(labels)), **losses} for guess in candidates]

    def _evaluate_texts(self, model: Model) -> EvaluationResult:
        """Losses and metrics of tasks that are trained by the documents' own targets."""
        labelled = [sample for sample in self._samples if sample.target_groups]
        outputs = self._outputs(model.predict, labelled)
        total = -sum(float(output[:, 0].sum()) for output in outputs)
        tokens = sum(len(group.targets) for sample in labelled for group in sample.target_groups)
        losses = {LOSS: total / tokens} if tokens else {}
        if model.write is None:
            return EvaluationResult(losses, self.records, [], self.cut)
        predictions = self._generate(model.write)
        compared = predictions
        if any(name.startswith("rougeLsum") for name in task_metrics(self._task).names):
            compared = [sentences_on_lines(text) for text in predictions]  # as the references are
        metrics = {**self.compute_metrics(compared), **losses}
        return EvaluationResult(metrics, self.records, predictions, self.cut)

    @functools.cached_property
    def _prompts(self) -> list[list[int]]:
        return [self._renderer.prompt(record, number) for number, record in enumerate(self.records)]

    def _generate(self, write: Write) -> list[str]:
        """The text that the model generates for each record. Each data-parallel rank generates its share."""
        dp, renderer, prompts = self._context.dp, self._renderer, self._prompts
        mine = prompts[dp.rank :: dp.size]
        spans: list[np.ndarray] = []
        for start in range(0, len(mine), self._size):
            for blank_spans in write(mine[start : start + self._size]):
                # [tokens, 2]: the number of the blank, and the token id.
                tokens = [(blank, token) for blank, span in enumerate(blank_spans) for token in span]
                spans.append(np.array(tokens, np.float64).reshape(-1, 2))
        texts: list[str] = [""] * len(prompts)
        for rank, rank_spans in enumerate(gather_arrays(self._context, spans)):
            for number, pairs in zip(range(len(prompts))[rank :: dp.size], rank_spans, strict=True):
                blanks, ids = pairs.astype(int).T
                completions = [ids[blanks == blank].tolist() for blank in range(blanks.max(initial=0) + 1)]
                texts[number] = renderer.written(prompts[number], completions)
        return texts

    def _outputs(self, predict: Predict, samples: Sequence[TaskSample]) -> list[np.ndarray]:
        """The model's outputs for each sample (see data_utils/tasks/metrics/decode_outputs.py), on all ranks.

        Raises: DataError for NaN.
        """
        dp, mine = self._context.dp, []
        samples_per_pass = self._size * dp.size
        for start in range(0, len(samples), samples_per_pass):
            rank_numbers = range(len(samples))[start : start + samples_per_pass][dp.rank :: dp.size]
            # ZeRO 3 gathers weights collectively, and ranks with experts compute each other's tokens: a rank without a
            # sample computes another rank's.
            numbers = list(rank_numbers) or [start]
            batch_samples = [samples[number] for number in numbers]
            batch = make_task_batch(batch_samples, numbers, self._renderer, self._head)
            mine += self._split(batch_samples, *predict(batch))[: len(rank_numbers)]
        outputs: list[np.ndarray] = [np.zeros(0)] * len(samples)
        for rank, rank_outputs in enumerate(gather_arrays(self._context, mine)):
            # A pass has a multiple of dp.size samples, so sample i is on rank i % size.
            outputs[rank :: dp.size] = rank_outputs
        for number, output in enumerate(outputs):
            if np.isnan(output).any():
                raise DataError(
                    f"the model predicts NaN for sample {number}: in fp16 set training.precision=bf16; otherwise its "
                    "training has diverged: lower optimizer.lr and start from an earlier checkpoint."
                )
        return outputs

    @property
    def _head(self) -> str:
        return "choices" if self._renderer.head == "tokens" else self._renderer.head

    def _split(
        self, samples: Sequence[TaskSample], outputs: torch.Tensor, likeliest: torch.Tensor
    ) -> list[np.ndarray]:
        """A batch's outputs, fp64, by sample. Args: likeliest: whether all tokens of a choice are the likeliest."""
        if self._head == "choices":
            outputs = torch.stack([outputs, likeliest.to(outputs)], dim=1)
        # Heads on tokens have an output for each position of a target group, the others one for the whole group.
        if self._head in ("tags", "spans"):
            counts = [sum(len(group.positions) for group in sample.target_groups) for sample in samples]
        else:
            counts = [len(sample.target_groups) for sample in samples]
        return [output.numpy() for output in outputs.double().cpu().split(counts)]


def _commonest(labels: Iterable[Any]) -> list[Any]:
    """The labels that may be the best guess; of thousands of sets of labels not all are tried."""
    return [label for label, _ in Counter(labels).most_common(50)]


def frequency_loss(labels: Sequence[Any] | np.ndarray) -> float:
    """The loss of guessing labels by their frequency: their entropy, nats."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log(shares)).sum())


def with_targets(sample: TaskSample) -> TaskSample:
    """A sample whose target groups are its documents' own targets, to be scored."""
    groups = [target_group_with_loss(example, number) for number, example in enumerate(sample.documents)]
    return replace(sample, target_groups=[group for group in groups if len(group.positions)])
