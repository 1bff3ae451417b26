"""What every objective produces: the planes of a row, and the Examples that fill it.

An objective turns consecutive tokens of one document into an Example: integer arrays of equal length. The
Transformer and its attention see only these arrays, not the objective:

    tokens              input ids
    position_ids        pos0, the position in the (corrupted) text
    block_position_ids  pos1, 0 in the context, 1, 2, ... within a predicted span; 1 in XLNet's memory
    targets             the label of each token, 0 where the weight is 0
    weights             loss weight, 0.0 = no loss (float32 bits in the int32 plane)
    doc                 number of the packed document in the row, 0, 1, ...; padding has -1
    ord                 signed order (see megatron_lite/model/batch.py)
    grp                 0, or a private group whose members see each other
    objective           number of the loss that the token belongs to (see `Loss`)
    segment_ids         which of two texts a token belongs to, or which kind of model reads it (UniLM); else 0

A batch is one int32 array `[rows, len(FIELDS), row_length]`, so that a loader passes on a single buffer.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data_utils.text.vocabulary import Vocabulary

(
    TOKENS,
    POSITION_IDS,
    BLOCK_POSITION_IDS,
    TARGETS,
    WEIGHTS,
    DOC,
    ORD,
    GRP,
    OBJECTIVE,
    SEGMENT_IDS,
) = range(10)  # as in FIELDS

PADDING_DOC = -1
# Row tokens that a window reserves for each document that begins in it. CLS and one span of blank infilling need 3; no
# objective needs more than it reserves.
DOCUMENT_OVERHEAD = 4
ONE_AS_INT32 = 0x3F800000  # the bits of float32 1.0, the loss weight of a predicted token


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss as it is reported. Objectives that share a loss use the same object."""

    name: str
    number: int  # in the `objective` plane and in checkpoints (`model.task_rows`): it never changes
    sentence_level: bool = False  # predicted by a two-class head on CLS instead of the vocabulary


class ObjectiveConfig(ABC):
    """What a training run needs to know of an objective's section."""

    __slots__ = ()

    segments = 2  # segment ids are below this
    needed_roles: tuple[str, ...] = ()  # special tokens that the vocabulary must have
    has_span_boundaries = False  # whether spans are predicted again, from the tokens around them
    has_block_positions = False  # whether block_position_ids tell places that position_ids do not
    memory_length: int = 0  # first tokens of long texts: block_position_ids 1, no loss, no gradient (XLNet)
    whole_documents = False  # whether a sample is a row of whole documents, not a window over their stream
    sample_settings: tuple[str, ...] | None = None  # keys on which samples depend; None = the whole section

    @property
    def has_target(self) -> bool:
        """Whether all losses are of tokens with ord > 0, those of a decoder."""
        return False

    @property
    def has_sentence_label(self) -> bool:
        """Whether some CLS tokens have a class label, for which the model needs a sentence head."""
        return False

    @property
    @abstractmethod
    def loss_share(self) -> float:
        """Part of the row tokens that is predicted, on average, in long documents and without padding."""

    @abstractmethod
    def least_row_length(self, sequence_length: int) -> int:
        """A row length that every window fits, tokens."""

    @abstractmethod
    def row_length_for(self, sequence_length: int) -> int:
        """Row length for windows of `sequence_length` tokens where the configuration gives none, a multiple of 8."""

    @abstractmethod
    def max_position_needed(self, sequence_length: int) -> int:
        """Largest position id that can occur; the model needs one row more."""

    def check_vocabulary_size(self, size: int) -> None:  # noqa: B027  (most sections name no ids)
        """Raise ConfigError for token ids of the section that are not below `size`."""

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:  # noqa: B027  (most ask for nothing)
        """Raise ConfigError unless the vocabulary has what the section asks for."""


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
    def from_planes(cls, planes: np.ndarray) -> Example:
        """From an int32 array `[len(FIELDS), length]`; shares its memory."""
        arrays = dict(zip(FIELDS, planes, strict=True))
        arrays["weights"] = np.ascontiguousarray(planes[WEIGHTS]).view(np.float32)
        return cls(**arrays)

    def documents(self) -> list[Example]:
        """The packed documents of the row, in order, without padding."""
        planes = np.stack([getattr(self, name).view(np.int32) for name in FIELDS])
        numbers = range(self.doc.max(initial=PADDING_DOC) + 1)
        return [Example.from_planes(planes[:, self.doc == number]) for number in numbers]


FIELDS = tuple(field.name for field in dataclasses.fields(Example))


class Objective(Protocol):
    """What collation needs of an objective. Most are a `RowObjective` (rows.py)."""

    row_length: int  # tokens per row of the batch; every valid sample fits
    sequence_length: int  # source tokens per sample, at most

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        piece_lengths: np.ndarray,
        pieces_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """Write sample i to `batch[i]` (int32 `[len(FIELDS), row_length]`), padding included.

        Must be a pure function of (seed, sample index, text): the same sample gives the same row in
        any batch. Raises DataError for a sample that cannot fit.
        """
        ...
