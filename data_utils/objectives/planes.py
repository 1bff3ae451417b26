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
    segment_ids         which of two texts a token belongs to, or which kind of model reads it (UniLM); else 0

A batch is one int32 array `[rows, len(FIELDS), row_length]`, so that a loader hands over a single buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from data_utils.special_tokens import SpecialTokens

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
    "segment_ids",
)
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
) = range(len(FIELDS))

# The `objective` plane holds an index into these names. Append only: the order is part of every log and test.
LOSS_NAMES = (
    *("token", "sentence", "document"),  # blank infilling
    *("causal", "prefix"),
    *("masked", "masked_spans", "masked_ngrams", "masked_units"),  # BERT and RoBERTa, SpanBERT, ALBERT, ERNIE
    *("next_sentence", "sentence_order"),  # the row of CLS: its target is a class, 0 or 1, and not a token
    *("bidirectional", "seq2seq", "left_to_right", "right_to_left"),  # UniLM
    *("span_corruption", "denoising", "fragment"),  # T5, BART, MASS
    *("autoencoding", "partially_autoregressive"),  # UniLMv2
    "permutation",  # XLNet
    "span_boundary",  # SpanBERT's second loss; no token has it in its plane (megatron_lite/heads.py)
)
TOKEN, SENTENCE, DOCUMENT = range(3)
# Objectives whose rows go to a two-class head on CLS instead of the vocabulary.
SENTENCE_LEVEL = ("next_sentence", "sentence_order")
PADDING_DOC = -1
# Row tokens that a window reserves for each document that begins in it. CLS and one span of blank infilling
# need 3; every objective keeps to it.
DOCUMENT_OVERHEAD = 4
ONE_AS_INT32 = 0x3F800000  # the bits of float32 1.0, the loss weight of a predicted token


@dataclass(frozen=True)
class Vocabulary:
    """What objectives need to know of a vocabulary; `data_utils/vocabulary.py` makes it from a tokenizer."""

    special: SpecialTokens
    size: int
    sentence_end: np.ndarray | None = None  # bool [size]: tokens that end a sentence; None: not known
    word_start: np.ndarray | None = None  # bool [size]: tokens that begin a word; None: not known
    token_texts: tuple[str, ...] | None = None  # text of every id, for segmenters; None: not known


@dataclass(frozen=True)
class Example:
    """A row, or a stretch of one, in readable form: arrays of one length, int32 (weights: float32)."""

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


class Objective(Protocol):
    """What the collator needs of an objective. One file each; see blank_infilling.py."""

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
        any batch. Raises DataError for a sample that can not fit.
        """
        ...
