"""What every objective produces: the planes of a row, and the Example that fills a stretch of it.

An objective turns a stretch of tokens of one document into an Example: integer arrays of equal length. The
Transformer and its attention know nothing of objectives, they see only these arrays:

    tokens              input ids
    position_ids        pos0, the position in the (corrupted) text
    block_position_ids  pos1, 0 in the context, 1, 2, ... within a predicted span
    targets             the label of each row, 0 where the weight is 0
    weights             loss weight, 0.0 = no loss (float32 bits in the int32 plane)
    doc                 number of the packed document in the row, 0, 1, ...; padding has -1
    ord                 signed order (see megatron_lite/attention.py)
    grp                 0, or a private group whose members see each other
    objective           index of the objective that made the token (for per-objective losses)

A batch is one int32 array `[rows, len(FIELDS), row_length]`, so that a loader hands over a single buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIELDS = (
    "tokens",
    "position_ids",
    "block_position_ids",
    "targets",
    "weights",
    "doc",
    "ord",
    "grp",
    "objective",
)
TOKENS, POSITION_IDS, BLOCK_POSITION_IDS, TARGETS, WEIGHTS, DOC, ORD, GRP, OBJECTIVE = range(len(FIELDS))


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens GLM adds to a vocabulary. `smask`, `gmask` may equal `mask` where a released model has one."""

    cls: int
    sep: int
    mask: int
    smask: int
    gmask: int
    sop: int
    eop: int
    eos: int
    pad: int
    unk: int
    dblock: int
