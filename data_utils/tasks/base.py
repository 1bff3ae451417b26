"""Records and samples of tasks: a Record is a line of a file, a TaskSample the model's input made from it.

    file --reader--> Record --kind of task, form of the model--> TaskSample --collate--> batch

A reader knows one format, and nothing of models or tokenizers. A kind of task turns a Record into a TaskSample:
documents in the fields of pretraining's batches (data_utils/common/batch_fields.py), and the tokens of them that the
task's loss and metrics read. Both are pure functions. Where a task masks at random, the seed, the sample and the epoch
decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import DataError

# Kinds of predictions, which say how the loss and the scores of a TaskSample's parts are computed.
#   tokens    tokens, by the documents' own targets and weights; there are no parts
#   choices   which part is right: a part's score is the log probability of its targets, over its divisor
#   classes   the class of each part, by a head on its one row
#   sets      which classes hold of each part, by a head on its one row
#   values    a number for each part, by a head on its one row
#   tags      a tag for each row of a part, by a head
#   spans     the first and the last row of an answer among the rows of each part, by a head
HEADS = ("tokens", "choices", "classes", "sets", "values", "tags", "spans")


@dataclass(frozen=True)
class Record:
    """One sample of a task's file.

    Args:
        index: the sample's name in predictions: what the file gives it (`idx`, `id`), else its number from 0.
        fields: its texts by the names of the format ("premise", "hypothesis"); lists where a sample has several.
        label: a class's name, the number of a choice, a number, a text, a list of classes, tags or answers, as the
            format has it; None where the file has no labels.
        group: what samples are counted together by a metric (MultiRC's question, ReCoRD's query); None: itself alone.
        place: "file:line" for messages.
    """

    index: Any
    fields: Mapping[str, Any]
    label: Any = None
    group: Any = None
    place: str = ""

    def needed(self, name: str) -> Any:
        """The record's field of this name. Raises DataError if it has none."""
        if name not in self.fields:
            raise DataError(
                f"{self.place}: the task needs the field {name!r}, but the sample has {', '.join(self.fields)}; "
                "correct the file, or choose the task.reader or task.name that go with it."
            )
        return self.fields[name]

    def with_fields(self, **fields: Any) -> Record:
        """A copy of the record with these fields added or replaced."""
        return replace(self, fields={**self.fields, **fields})


@dataclass(frozen=True)
class Part:
    """The rows of one document from which a score or a loss is computed.

    Args:
        document: index among the sample's documents.
        rows: int32 [n], places in the document.
        targets: int32 [n] tokens (choices) or tags; [1] a class; [classes] 1
            for each that holds (sets), else 0; [2] first and last row of the answer as places among
            `rows` (spans); empty where there is no label, except for choices.
        value: the label of `values`.
        divisor: of the sum of the targets' log probabilities (choices).
    """

    document: int
    rows: np.ndarray
    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    value: float = 0.0
    divisor: float = 1.0


def part_with_loss(example: Example, document: int = 0) -> Part:
    """The rows of a document that have a loss, with their targets."""
    rows = np.flatnonzero(example.weights).astype(np.int32)
    return Part(document, rows, example.targets[rows])


@dataclass(frozen=True)
class TaskSample:
    """The model's input for one Record.

    Args:
        documents: each becomes a document of the batch; all of a sample are in one micro-batch.
        parts: see HEADS; empty for `tokens`.
        right: the number of the right part (choices); None where there is no label. Several right ones are not told.
        cut: tokens that were cut off, so that the sample fits.
    """

    documents: Sequence[Example]
    parts: Sequence[Part] = ()
    right: int | None = None
    cut: int = 0
