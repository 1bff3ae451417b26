"""What the engine knows of a micro-batch of text pairs: the record of each text in the global batch.

Shapes: N records of the global batch, k texts of each; B sequences of the micro-batch, with G texts in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_lite.transformer.pooling import PooledTokens


@dataclass(frozen=True)
class PairRecords:
    """The records of a global batch, equal on all ranks: one object for all micro-batches of a step."""

    first_sample: int  # the sample that is record 0
    texts: np.ndarray  # uint64 [N, k]: equal numbers are equal texts
    is_text: np.ndarray  # bool [N, k]: False for negatives that a record lacks
    is_counted: np.ndarray  # bool [N]: False for records that are left out
    scores: np.ndarray  # fp32 [N]; 0 where the corpus has none


@dataclass(frozen=True)
class PairInputs(PooledTokens):
    """The texts of a micro-batch, whose loss is the engine's (engine/vector_loss.py)."""

    slots: (
        torch.Tensor
    )  # int32 [G]: which text of the micro-batch, k times its sequence plus its number in the record
    numbers: np.ndarray  # int64 [B]: the record of each sequence; -1 for padding
    records: PairRecords
    targets: (
        np.ndarray | None
    )  # fp32 [B, D]: the teacher's vector of each sequence's record, if the loss has one
