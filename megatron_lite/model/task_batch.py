"""Batches of tasks: documents as in pretraining, and the parts of them that the task's loss reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, TOKENS
from data_utils.common.target_groups import TargetGroups
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.batch import Batch
from megatron_lite.model.micro_batch import LossPositions, few_count


@dataclass(frozen=True)
class Parts:
    """The parts of a micro-batch on the device, and how they are judged. Integers are int32."""

    head: str  # of data_utils.tasks.base.HEADS, not `tokens`
    loss: str  # of CHOICE_LOSSES, for choices
    # [N or more], indices into [T]; what follows the first N are fillers, see `few_counts`.
    rows: torch.Tensor
    position_group: torch.Tensor  # [N]
    targets: (
        torch.Tensor
    )  # choices, tags: [N]; classes: [P]; sets: [P K]; spans: [2 P], places in [N]; without labels [0]
    sample: torch.Tensor  # [P]
    right: torch.Tensor  # [S]: number of the right part, in [P]; choices with labels, else [0]
    value: torch.Tensor  # fp32 [P]
    divisor: torch.Tensor  # fp32 [P]
    weight: torch.Tensor  # fp32 [1]: samples, parts or rows with a label, see `TaskBatch.loss_divisor`
    has_language: bool = False  # tokens have a loss beside, that of pretraining
    task: str = ""  # the name of its head among several
    place: int = -1  # of its loss among all losses


class TaskBatch(Batch):
    """Args:
    fields: int32 [documents, fields, S].
    samples: int64 [documents], from which dropout follows: different for the documents of one sample.
    head: of data_utils.tasks.base.HEADS. With `tokens` the documents' own weights are the loss.
    loss: of CHOICE_LOSSES, for choices.
    has_language: the documents' own weights are losses beside the one of a head.
    task, place: as in `Parts`.
    """

    def __init__(
        self,
        fields: np.ndarray,
        samples: np.ndarray,
        parts: TargetGroups,
        head: str,
        loss: str = "cross_entropy",
        has_language: bool = False,
        task: str = "",
        place: int = -1,
    ):
        super().__init__(fields, samples)
        self.parts, self.head, self.loss, self.has_language = parts, head, loss, has_language
        self.task, self.place = task, place

    @property
    def divisors(self) -> np.ndarray:  # type: ignore[override]
        return self.weights

    @property
    def loss_divisor(self) -> float:
        """Samples (choices), parts (classes, sets, values, spans), rows (tags) or tokens with a label."""
        parts = self.parts
        if self.head == "tokens":
            return super().loss_divisor
        # What the loss of a head is a mean over; heads that are not listed count their targets.
        counts = {
            "choices": int((parts.right >= 0).sum()),
            **dict.fromkeys(("values", "sets"), len(parts.sample)),
            "spans": len(parts.targets) // 2,
        }
        return float(counts.get(self.head, len(parts.targets)))

    @property
    def loss_rows(self) -> int:
        """Rows on which the vocabulary's head runs; others cost next to nothing."""
        if self.head == "tokens" or self.has_language:
            return super().loss_rows
        return len(self.parts.positions) if self.head == "choices" else 0

    def loss_weights(self, num_losses: int) -> np.ndarray:
        if self.head == "tokens":
            return super().loss_weights(num_losses)
        weights = super().loss_weights(num_losses) if self.has_language else np.zeros(num_losses)
        weights[self.place] = self.loss_divisor
        return weights

    def host_parts(
        self, order: np.ndarray, first: int, predicted: np.ndarray, few_counts: bool, config: ModelConfig
    ) -> HostTaskParts | None:
        if self.head == "tokens":
            return None
        return HostTaskParts(self, order, first, few_counts, config.has_task_pool)


def with_documents(batch: TaskBatch) -> TargetGroups:
    """Parts of one row each -> the same with the other tokens of their documents, padding left out, after it."""
    doc = batch.fields[:, DOC]
    chosen = []
    for row in batch.parts.positions.tolist():
        number, place = divmod(row, doc.shape[1])
        members = np.flatnonzero(doc[number] == doc[number, place])
        chosen.append(np.r_[row, members[members != place] + number * doc.shape[1]])
    owner = np.repeat(batch.parts.position_group, [len(rows) for rows in chosen])
    return replace(
        batch.parts, positions=np.concatenate([batch.parts.positions[:0], *chosen]), position_group=owner
    )


class HostTaskParts:
    """The parts of a batch in the order of its attention plan.

    Args:
        order: int64 [T], the plan's: index of each token into the flattened batch, -1 for padding.
        first: token of [T] from which rows are counted: with a decoder its first.
        few_counts: rows are filled up to one of few counts, see `few_count`. The first token fills.
        pools: the head of a part reads its row and then all others of its document.
    """

    ARRAYS = 8

    def __init__(
        self,
        batch: TaskBatch,
        order: np.ndarray,
        first: int = 0,
        few_counts: bool = False,
        pools: bool = False,
    ):
        parts = with_documents(batch) if pools else batch.parts
        places = np.full(batch.fields[:, TOKENS].size, -1)
        # The inverse of the plan's order: from an index of the batch to one of the head's tokens.
        places[order[order >= 0]] = np.flatnonzero(order >= 0) - first
        self._head, self._batch = batch.head, batch
        targets = parts.targets
        if batch.head == "spans":  # places among the rows of the part -> places among all rows
            # Groups are ascending, so a binary search gives the first row of each.
            targets = targets + np.searchsorted(parts.position_group, parts.target_group)
        rows = places[parts.positions]
        assert (rows >= 0).all(), "parts are made of tokens that the head computes"
        self._fillers = few_count(len(rows)) - len(rows) if few_counts else 0
        self._rows, self._targets = self._filled(rows), targets
        # From a number within the sample to one among all parts; samples without a label (-1) are left out below.
        right = parts.right + np.searchsorted(parts.sample, np.arange(len(parts.right)))
        self._integers = (self._rows, parts.position_group, targets, parts.sample, right[parts.right >= 0])
        self._numbers = (parts.value, parts.divisor, np.array([batch.loss_divisor]))

    def _filled(self, of_rows: np.ndarray) -> np.ndarray:
        return np.pad(of_rows, (0, self._fillers))

    def loss_rows(self) -> tuple[LossPositions, np.ndarray] | None:
        """For choices: the rows whose targets are tokens, and these targets. None for other kinds of tasks."""
        if self._head != "choices":
            return None
        none = self._rows[:0]
        rows = LossPositions(self._rows, np.stack([none] * 3, axis=1), none, np.zeros_like(self._rows))
        return rows, self._filled(self._targets)

    def arrays(self) -> list[np.ndarray]:
        """int32, floats by their bits."""
        return [
            *(array.astype(np.int32) for array in self._integers),
            # Floats by their bits: all arrays share one int32 buffer (micro_batch.py).
            *(array.astype(np.float32).view(np.int32) for array in self._numbers),
        ]

    def on_device(self, arrays: list[torch.Tensor]) -> Parts:
        """Args: arrays: as `arrays` gave them."""
        rows, position_group, targets, sample, right, value, divisor, weight = arrays
        named: dict[str, Any] = {
            "position_group": position_group,
            "targets": targets,
            "sample": sample,
            "right": right,
        }
        return Parts(
            head=self._head,
            loss=self._batch.loss,
            rows=rows,
            value=value.view(torch.float32),
            divisor=divisor.view(torch.float32),
            weight=weight.view(torch.float32),
            has_language=self._batch.has_language,
            task=self._batch.task,
            place=self._batch.place,
            **named,
        )
