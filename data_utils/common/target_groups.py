"""The target groups of labelled samples as arrays: positions of documents that a loss reads, and their targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_RIGHT = -1  # `right` of a sample without a label


@dataclass(frozen=True)
class TargetGroups:
    """The target groups of a micro-batch: G groups with N positions and M targets in all, in the order of the samples.

    The positions and targets of a group are contiguous. `choices` and `tags` have one position per target; `spans`
    two targets per group, which index the group's positions; `classes` one of each; `sets` 0 or 1 for each class.
    """

    positions: np.ndarray  # int64 [N], index into the flattened [documents, longest]
    targets: np.ndarray  # int64 [M]
    position_group: np.ndarray  # int64 [N], the group of each position
    target_group: np.ndarray  # int64 [M], the group of each target
    sample: np.ndarray  # int64 [G], the sample of each group
    value: np.ndarray  # float32 [G]
    divisor: np.ndarray  # float32 [G]
    right: np.ndarray  # int64 [samples], index of the right group within its sample, or NO_RIGHT
