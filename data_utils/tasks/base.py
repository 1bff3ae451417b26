"""TaskRecords and samples of tasks: a TaskRecord is a line of a file, a TaskSample the model's input made from it.

    file --reader--> TaskRecord --kind of task, form of the model--> TaskSample --collate--> batch

A reader knows one format, and nothing of models or tokenizers. A kind of task turns a TaskRecord into a TaskSample:
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

# Types of heads: how the loss and the scores of a TaskSample's target groups are computed.
#   tokens    language modelling, by the documents' own targets and weights; there are no target groups
#   choices   which group is right: the score of a group is the log probability of its targets, over its divisor
#   classes   one class per group, by a head at its one position
#   sets      any number of classes per group, by a head at its one position
#   values    one number per group, by a head at its one position
#   tags      one tag per position of a group, by a head
#   spans     the first and the last position of an answer within each group, by a head
HEADS = ("tokens", "choices", "classes", "sets", "values", "tags", "spans")


@dataclass(frozen=True)
class TaskRecord:
    """One labelled sample, as a reader found it in a task's file.

    Args:
        index: the sample's name in files of predictions: the file's own (`idx`, `id`), else its number from 0.
        fields: its texts by the names of the format ("premise", "hypothesis"); lists where a sample has several.
        label: a class's name, the number of a choice, a number, a text, a list of classes, tags or answers, as the
            format has it; None where the file has no labels.
        group: samples of one group are scored together (MultiRC's question, ReCoRD's query); None: on its own.
        location: "file:line" for messages.
    """

    index: Any
    fields: Mapping[str, Any]
    label: Any = None
    group: Any = None
    location: str = ""

    def needed(self, name: str) -> Any:
        """The record's field of this name. Raises DataError if it has none."""
        if name not in self.fields:
            raise DataError(
                f"{self.location}: the task needs the field {name!r}, but the sample has {', '.join(self.fields)}; "
                "correct the file, or set task.reader and task.name to match it."
            )
        return self.fields[name]

    def with_fields(self, **fields: Any) -> TaskRecord:
        """A copy of the record with these fields added or replaced."""
        return replace(self, fields={**self.fields, **fields})


@dataclass(frozen=True)
class TargetGroup:
    """The positions of one document from which one score or one loss is computed.

    Args:
        document: index among the sample's documents.
        positions: int32 [n], indices into the document.
        targets: int32 [n] tokens (choices) or tags; [1] a class; [classes] 1 for each class that holds, else 0 (sets);
            [2] the first and the last position of the answer, as indices into `positions` (spans); empty where there
            is no label, except for choices.
        value: the label of `values`.
        divisor: of the sum of the targets' log probabilities (choices).
    """

    document: int
    positions: np.ndarray
    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    value: float = 0.0
    divisor: float = 1.0


def target_group_with_loss(example: Example, document: int = 0) -> TargetGroup:
    """The positions of a document that have a loss, with their targets."""
    positions = np.flatnonzero(example.weights).astype(np.int32)
    return TargetGroup(document, positions, example.targets[positions])


@dataclass(frozen=True)
class TaskSample:
    """The model's input for one TaskRecord.

    Args:
        documents: each becomes a document of the batch; all of a sample are in one micro-batch.
        target_groups: see HEADS; empty for `tokens`.
        right: the index of the right group (choices); None where there is no label. Only one is named.
        cut: number of tokens that were cut off to make the sample fit.
    """

    documents: Sequence[Example]
    target_groups: Sequence[TargetGroup] = ()
    right: int | None = None
    cut: int = 0
