"""The parts of labelled samples that a loss reads: rows of the documents, and what is right there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_RIGHT = -1  # of a sample without a label


@dataclass(frozen=True)
class PartArrays:
    """The parts of all samples: P parts with N rows and M targets together, in the order of the samples.

    A part's rows and targets follow each other. `choices` and `tags` have a row for each target, `spans` two targets
    for each part, which are places among the part's rows; `classes` one of each; `sets` 0 or 1 for each class.
    """

    rows: np.ndarray  # int64 [N], index into the flattened [documents, longest]
    targets: np.ndarray  # int64 [M]
    row_part: np.ndarray  # int64 [N], the part of each row
    target_part: np.ndarray  # int64 [M], the part of each target
    sample: np.ndarray  # int64 [P], the sample of each part
    value: np.ndarray  # float32 [P]
    divisor: np.ndarray  # float32 [P]
    right: np.ndarray  # int64 [samples], number of the right part within its sample, or NO_RIGHT
