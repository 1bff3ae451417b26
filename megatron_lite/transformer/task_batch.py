"""Batches of tasks: documents as in pretraining, and the target groups that the task's loss reads.

Shapes: G target groups with N positions in all, S samples, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, TOKENS
from data_utils.common.target_groups import TargetGroups
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch, ExtraInputs
from megatron_lite.transformer.loss_positions import LossPositions, few_count


@dataclass(frozen=True)
class TaskInputs:
    """The target groups of a micro-batch on the device, and how they are scored. Integers are int32."""

    head: str  # of data_utils.tasks.base.HEADS, not `tokens`
    loss: str  # of CHOICE_LOSSES, for choices
    # [N or more], indices into [T], of the decoder's tokens if there is one; those after the first N are padding.
    positions: torch.Tensor
    position_group: torch.Tensor  # [N]
    targets: (
        torch.Tensor
    )  # choices, tags: [N]; classes: [G]; sets: [G K]; spans: [2 G], indices into [N]; without labels [0]
    sample: torch.Tensor  # [G]
    right: torch.Tensor  # [S]: number of the right group, in [G]; choices with labels, else [0]
    value: torch.Tensor  # fp32 [G]
    divisor: torch.Tensor  # fp32 [G]
    weight: torch.Tensor  # fp32 [1]: what the loss is divided by, see `TaskBatch.loss_divisor`
    has_language: bool = False  # tokens have the loss of pretraining too
    task: str = ""  # the name of its head among several
    loss_number: int = -1  # of the task's loss among all losses


class TaskBatch(Batch):
    """Args:
    fields: int32 [documents, fields, length].
    samples: int64 [documents], from which dropout follows: different for the documents of one sample.
    head: of data_utils.tasks.base.HEADS. With `tokens` the documents' own weights are the loss.
    loss: of CHOICE_LOSSES, for choices.
    has_language: the documents' own weights are losses besides the one of a head.
    task, loss_number: as in `TaskInputs`.
    """

    def __init__(
        self,
        fields: np.ndarray,
        samples: np.ndarray,
        target_groups: TargetGroups,
        head: str,
        loss: str = "cross_entropy",
        has_language: bool = False,
        task: str = "",
        loss_number: int = -1,
    ):
        super().__init__(fields, samples)
        self.target_groups, self.head, self.loss = target_groups, head, loss
        self.has_language, self.task, self.loss_number = has_language, task, loss_number

    @property
    def token_divisors(self) -> np.ndarray:  # type: ignore[override]
        return self.weights

    @property
    def loss_divisor(self) -> float:
        """Samples (choices), groups (classes, sets, values, spans), positions (tags) or tokens with a label."""
        groups = self.target_groups
        if self.head == "tokens":
            return super().loss_divisor
        # What the loss of a head is a mean over; heads that are not listed count their targets.
        counts = {
            "choices": int((groups.right >= 0).sum()),
            **dict.fromkeys(("values", "sets"), len(groups.sample)),
            "spans": len(groups.targets) // 2,
        }
        return float(counts.get(self.head, len(groups.targets)))

    @property
    def loss_tokens(self) -> int:
        """Positions on which the vocabulary's head runs; other heads cost next to nothing."""
        if self.head == "tokens" or self.has_language:
            return super().loss_tokens
        return len(self.target_groups.positions) if self.head == "choices" else 0

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        if self.head == "tokens":
            return super().loss_divisors(num_losses)
        divisors = super().loss_divisors(num_losses) if self.has_language else np.zeros(num_losses)
        divisors[self.loss_number] = self.loss_divisor
        return divisors

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`TaskInputs`, but for the head `tokens`. For choices also the positions and tokens that they score."""
        if self.head == "tokens":
            return ExtraInputs()
        # A head with a pool reads the position of a group and then all others of its document.
        groups = with_documents(self) if config.task_head.has_pool else self.target_groups
        # Index in the flattened batch -> index among the tokens that the head reads: the inverse of the plan's order.
        index_in_order = np.full(self.fields[:, TOKENS].size, -1)
        index_in_order[order[order >= 0]] = np.flatnonzero(order >= 0) - decoder_start
        positions = index_in_order[groups.positions]
        assert (positions >= 0).all(), "target groups are of tokens that the head computes"
        # The first token pads.
        padding = (0, few_count(len(positions)) - len(positions) if few_counts else 0)
        positions = np.pad(positions, padding)
        targets = groups.targets
        if self.head == "spans":  # indices into the group's positions -> into all positions
            # Groups are ascending, so a binary search gives the first position of each.
            targets = targets + np.searchsorted(groups.position_group, groups.target_group)
        # From a number within the sample to one among all groups; samples without a label (-1) are left out.
        right = groups.right + np.searchsorted(groups.sample, np.arange(len(groups.right)))
        predictions = None
        if self.head == "choices":
            empty = positions[:0]
            choice_tokens = LossPositions(
                positions, np.stack([empty] * 3, axis=1), empty, np.zeros_like(positions)
            )
            predictions = choice_tokens, np.pad(targets, padding)
        return ExtraInputs(
            arrays={
                "positions": positions,
                "position_group": groups.position_group,
                "targets": targets,
                "sample": groups.sample,
                "right": right[groups.right >= 0],
                "value": groups.value,
                "divisor": groups.divisor,
                "weight": np.array([self.loss_divisor]),
            },
            make=self._task_inputs,
            predictions=predictions,
        )

    def _task_inputs(self, tensors: dict[str, torch.Tensor]) -> TaskInputs:
        return TaskInputs(
            head=self.head,
            loss=self.loss,
            has_language=self.has_language,
            task=self.task,
            loss_number=self.loss_number,
            **tensors,  # type: ignore[arg-type]
        )


def with_documents(batch: TaskBatch) -> TargetGroups:
    """Groups of one position each -> the same with the other tokens of their documents, padding left out, after it."""
    doc, groups = batch.fields[:, DOC], batch.target_groups
    positions = []
    for first in groups.positions.tolist():
        sequence, index = divmod(first, doc.shape[1])
        members = np.flatnonzero(doc[sequence] == doc[sequence, index])
        positions.append(np.r_[first, members[members != index] + sequence * doc.shape[1]])
    position_group = np.repeat(groups.position_group, [len(of_group) for of_group in positions])
    return replace(
        groups,
        positions=np.concatenate([groups.positions[:0], *positions]),
        position_group=position_group,
    )
