"""TaskSamples of one micro-batch -> the fields of their documents, and the target groups to score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_utils.common.batch_fields import DOC, FIELDS, PADDING_DOC
from data_utils.common.target_groups import NO_RIGHT, TargetGroups
from data_utils.tasks.base import TargetGroup, TaskSample


def collate(samples: Sequence[TaskSample]) -> tuple[np.ndarray, TargetGroups]:
    """The documents of the samples, one per sequence of the batch, and their target groups.

    Returns: int32 fields [documents, len(FIELDS), longest]; padding has doc -1 and zeros elsewhere.
    """
    examples = [example for sample in samples for example in sample.documents]
    longest = max(len(example.tokens) for example in examples)
    fields = np.zeros((len(examples), len(FIELDS), longest), np.int32)
    fields[:, DOC] = PADDING_DOC
    for sequence, example in zip(fields, examples, strict=True):
        for field, name in enumerate(FIELDS):
            values = getattr(example, name)
            sequence[field, : len(values)] = values.view(np.int32)  # weights too, bit for bit
    return fields, _joined_groups(samples, longest)


def _joined_groups(samples: Sequence[TaskSample], longest: int) -> TargetGroups:
    """The target groups of a batch, whose positions are indices into [documents * longest]."""
    groups: list[TargetGroup] = []
    positions: list[np.ndarray] = []
    first_document = 0
    for sample in samples:
        for group in sample.target_groups:
            assert 0 <= group.document < len(sample.documents)
            assert len(group.positions) == 0 or group.positions.max() < len(
                sample.documents[group.document].tokens
            )
            groups.append(group)
            positions.append(group.positions.astype(np.int64) + (first_document + group.document) * longest)
        first_document += len(sample.documents)
    group_numbers = np.arange(len(groups))
    empty = np.zeros(0, np.int64)  # concatenate takes no empty list
    return TargetGroups(
        positions=np.concatenate([empty, *positions]),
        targets=np.concatenate([empty, *(group.targets for group in groups)]),
        position_group=np.repeat(group_numbers, [len(group.positions) for group in groups]),
        target_group=np.repeat(group_numbers, [len(group.targets) for group in groups]),
        sample=np.repeat(np.arange(len(samples)), [len(sample.target_groups) for sample in samples]),
        value=np.array([group.value for group in groups], np.float32),
        divisor=np.array([group.divisor for group in groups], np.float32),
        right=np.array([NO_RIGHT if sample.right is None else sample.right for sample in samples], np.int64),
    )
