"""The fields of a row, which every objective fills and every model reads, and the Examples that fill them.

An objective turns consecutive tokens of one document into an Example: integer arrays of equal length. The
Transformer and its attention see only these arrays, not the objective:

    tokens              input ids
    position_ids        pos0, the position in the (corrupted) text
    block_position_ids  pos1, 0 in the context, 1, 2, ... within a predicted span; 1 in XLNet's memory; an entity
    targets             the label of each token, 0 where the weight is 0
    weights             loss weight, 0.0 = no loss (float32 bits in the int32 field)
    doc                 number of the packed document in the row, 0, 1, ...; padding has -1
    ord                 signed order (see megatron_lite/transformer/attention_backends/layout.py)
    grp                 0, or a private group whose members see each other
    objective           number of the loss that the token belongs to (see losses.py)
    segment_ids         which of two texts a token belongs to, or which kind of model reads it (UniLM); else 0

A batch is one int32 array `[rows, len(FIELDS), row_length]`, so that a loader passes on a single buffer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

(TOKENS, POSITION_IDS, BLOCK_POSITION_IDS, TARGETS, WEIGHTS, DOC, ORD, GRP, OBJECTIVE, SEGMENT_IDS) = range(
    10
)  # as in FIELDS

# The fields that layers read beside the token ids, in the order of `ids`.
ID_FIELDS = (POSITION_IDS, BLOCK_POSITION_IDS, SEGMENT_IDS, OBJECTIVE, ORD)

PADDING_DOC = -1
ONE_AS_INT32 = 0x3F800000  # the bits of float32 1.0, the loss weight of a predicted token


@dataclass(frozen=True)
class Example:
    """A row, or a part of one, in readable form: arrays of one length, int32 (weights: float32)."""

    tokens: np.ndarray
    position_ids: np.ndarray
    block_position_ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    doc: np.ndarray
    ord: np.ndarray
    grp: np.ndarray
    objective: np.ndarray
    segment_ids: np.ndarray

    @classmethod
    def from_fields(cls, fields: np.ndarray) -> Example:
        """From an int32 array `[len(FIELDS), length]`; shares its memory."""
        arrays = dict(zip(FIELDS, fields, strict=True))
        arrays["weights"] = np.ascontiguousarray(fields[WEIGHTS]).view(np.float32)
        return cls(**arrays)

    def documents(self) -> list[Example]:
        """The packed documents of the row, in order, without padding."""
        fields = np.stack([getattr(self, name).view(np.int32) for name in FIELDS])
        numbers = range(self.doc.max(initial=PADDING_DOC) + 1)
        return [Example.from_fields(fields[:, self.doc == number]) for number in numbers]


FIELDS = tuple(field.name for field in dataclasses.fields(Example))
