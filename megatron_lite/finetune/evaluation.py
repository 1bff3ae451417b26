"""Evaluation of a task during training and of a checkpoint: records, samples, outputs, predictions, metrics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import DataError
from data_utils.tasks.base import TaskRecord, TaskSample, target_group_with_loss
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.decode_outputs import positive_label, prediction, probabilities, references
from data_utils.tasks.metrics.metrics import measure
from data_utils.tasks.metrics.metrics_by_task import LOSS, perplexities, task_metrics
from data_utils.tasks.readers.pairs import sentences_on_lines
from data_utils.tasks.templates.render import Renderer
from data_utils.tasks.templates.windows import Lambada
from megatron_lite.finetune.data import make_task_batch
from megatron_lite.finetune.writing import Write
from megatron_lite.model.task_batch import TaskBatch
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.gather import gather_arrays

Predict = Callable[[TaskBatch], tuple[torch.Tensor, torch.Tensor]]  # PlainEngine.answers, or of a model alone


@dataclass(frozen=True)
class Model:
    """The model to evaluate. Args: write: None where no rank holds the whole model: losses only are measured."""

    predict: Predict
    write: Write | None = None


@dataclass(frozen=True)
class EvaluationResult:
    measured: dict[str, float]  # metrics; {} for a file without labels
    records: list[TaskRecord]
    predictions: list[Any]  # one a record; [] where only losses are measured
    cut: int  # truncated samples
    extra: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # more fields of the predictions, by name
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
        self._whole = list(records)
        self._skipped = getattr(records, "skipped", 0)
        self.records = renderer.prepare(records, training=False)
        # Made once: evaluation draws nothing, so every evaluation sees the same samples.
        self._samples = [renderer.sample(record, number) for number, record in enumerate(self.records)]
        if renderer.head == "tokens":
            self._samples = [with_targets(sample) for sample in self._samples]
        self.cut = sum(sample.cut > 0 for sample in self._samples)

    def run(self, model: Model) -> EvaluationResult:
        """Evaluate the file. Every rank calls this and gets the same result."""
        return replace(self._run(model), skipped=self._skipped)

    def _run(self, model: Model) -> EvaluationResult:
        if self._renderer.head == "tokens":
            return self._of_texts(model)
        answers = self._answers(model.predict, self._samples)
        if self._task.kind == "lambada":
            return self._of_last_words(np.concatenate(answers), model.write)
        found = [
            prediction(self._renderer, record, sample, given)
            for record, sample, given in zip(self.records, self._samples, answers, strict=True)
        ]
        scores = [
            probabilities(self._renderer, sample, given)
            for sample, given in zip(self._samples, answers, strict=True)
        ]
        extra = {} if None in scores else {"scores": scores}
        return EvaluationResult(self.measured(found), self.records, found, self.cut, extra)

    def measured(self, predictions: Sequence[Any]) -> dict[str, float]:
        """The task's metrics of predictions for all records; {} where these have no labels."""
        # Test files of benchmarks have no labels: predictions are written, nothing is measured.
        if any(record.label is None for record in self.records):
            return {}
        return measure(
            task_metrics(self._task).names,
            predictions,
            references(self.records),
            groups=[record.group for record in self.records],
            positive=positive_label(self._renderer),
            negative=self._task.negative,
        )

    def _of_last_words(self, answers: np.ndarray, write: Write | None) -> EvaluationResult:
        """LAMBADA: accuracy, perplexity and the generated words (None without `write`). Args: answers: [samples, 2]."""
        right = [bool(flag) for flag in answers[:, 1]]
        word_perplexity = math.exp(min(-answers[:, 0].mean(), 700.0))
        measured = {"accuracy": sum(right) / len(right), "word_perplexity": word_perplexity}
        words: list[str | None] = [None] * len(right)
        if write is not None:
            kind, texts = self._renderer.task_type, self._written(write)
            assert isinstance(kind, Lambada)
            found = zip(self.records, texts, right, strict=True)
            words = [kind.predicted(record, text, is_right=flag) for record, text, flag in found]
        return EvaluationResult(measured, self.records, words, self.cut, {"right": right})

    def _of_texts(self, model: Model) -> EvaluationResult:
        """Losses and metrics of tasks that are trained by the documents' own targets."""
        labelled = [sample for sample in self._samples if sample.target_groups]
        answers = self._answers(model.predict, labelled)
        total = -sum(float(given[:, 0].sum()) for given in answers)
        tokens = sum(len(part.targets) for sample in labelled for part in sample.target_groups)
        if self._task.kind == "language_modelling":
            return EvaluationResult(self._perplexities(total, tokens), self._whole, [], self.cut)
        losses = {LOSS: total / tokens} if tokens else {}
        if model.write is None:
            return EvaluationResult(losses, self.records, [], self.cut)
        found = self._written(model.write)
        compared = found
        if any(name.startswith("rougeLsum") for name in task_metrics(self._task).names):
            compared = [sentences_on_lines(text) for text in found]  # as references have it
        return EvaluationResult({**self.measured(compared), **losses}, self.records, found, self.cut)

    def _perplexities(self, nll: float, tokens: int) -> dict[str, float]:
        """Perplexities. The first word and the bytes of the first token of each text are not predicted."""
        texts = [record.fields["text"] for record in self._whole]
        counts = [
            record.fields.get("word_count", len(text.split())) - 1
            for record, text in zip(self._whole, texts, strict=True)
        ]
        size = sum(len(self._predicted(text).encode("utf-8")) for text in texts)
        return perplexities(nll, tokens, max(1, sum(counts)), size)

    def _predicted(self, text: str) -> str:
        """A text without its first token."""
        _, places = self._renderer.inputs.tokenizer.encode_with_offsets(text)
        return text[places[0][1] :]

    @functools.cached_property
    def _prompts(self) -> list[list[int]]:
        return [self._renderer.prompt(record, number) for number, record in enumerate(self.records)]

    def _written(self, write: Write) -> list[str]:
        """The text that the model generates for each record. Each data-parallel rank generates its share."""
        dp, renderer, prompts = self._context.dp, self._renderer, self._prompts
        mine = prompts[dp.rank :: dp.size]
        spans: list[np.ndarray] = []
        for start in range(0, len(mine), self._size):
            for found in write(mine[start : start + self._size]):
                # [tokens, 2]: the number of the blank, and the token id.
                tokens = [(blank, token) for blank, span in enumerate(found) for token in span]
                spans.append(np.array(tokens, np.float64).reshape(-1, 2))
        by_record: list[str] = [""] * len(prompts)
        for rank, theirs in enumerate(gather_arrays(self._context, spans)):
            for number, rows in zip(range(len(prompts))[rank :: dp.size], theirs, strict=True):
                blanks, ids = rows.astype(int).T
                answers = [ids[blanks == blank].tolist() for blank in range(blanks.max(initial=0) + 1)]
                by_record[number] = renderer.written(prompts[number], answers)
        return by_record

    def _answers(self, answer: Predict, samples: Sequence[TaskSample]) -> list[np.ndarray]:
        """The model's outputs for each sample (see decode_outputs.py), on all ranks. Raises: DataError for NaN."""
        dp, mine = self._context.dp, []
        per_pass = self._size * dp.size
        for start in range(0, len(samples), per_pass):
            own = range(len(samples))[start : start + per_pass][dp.rank :: dp.size]
            # ZeRO 3 gathers weights collectively: a rank without a sample computes another's.
            numbers = list(own) or [start]
            chosen = [samples[number] for number in numbers]
            answered = answer(make_task_batch(chosen, numbers, self._renderer, self._head))
            mine += self._split(chosen, *answered)[: len(own)]
        everyone = gather_arrays(self._context, mine)
        by_sample: list[np.ndarray] = [np.zeros(0)] * len(samples)
        for rank, theirs in enumerate(everyone):
            # A pass has a multiple of dp.size samples, so sample i is on rank i % size.
            by_sample[rank :: dp.size] = theirs
        for number, given in enumerate(by_sample):
            if np.isnan(given).any():
                raise DataError(
                    f"the model predicts NaN for sample {number}: its training has diverged; lower optimizer.lr and "
                    "start from an earlier checkpoint."
                )
        return by_sample

    @property
    def _head(self) -> str:
        return "choices" if self._renderer.head == "tokens" else self._renderer.head

    def _split(
        self, samples: Sequence[TaskSample], outputs: torch.Tensor, likeliest: torch.Tensor
    ) -> list[np.ndarray]:
        if self._head == "choices":
            outputs = torch.stack([outputs, likeliest.to(outputs)], dim=1)
        of_rows = self._head in ("tags", "spans")
        counts = [
            sum(len(part.positions) for part in sample.target_groups)
            if of_rows
            else len(sample.target_groups)
            for sample in samples
        ]
        parts = outputs.double().cpu().split(counts)
        return [part.numpy() for part in parts]


def with_targets(sample: TaskSample) -> TaskSample:
    """A sample of the kind `tokens` as parts: its documents' targets, to be scored."""
    parts = []
    for number, example in enumerate(sample.documents):
        part = target_group_with_loss(example, number)
        if len(part.positions):
            parts.append(part)
    return replace(sample, target_groups=parts)
