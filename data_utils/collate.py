"""Samples of packed pieces -> one int32 batch of fixed shape.

The collator checks that the arrays it is given belong together, owns the buffer, and leaves every row to
the objective's compiled code. It knows no objective. Fixed shapes mean padding: 1 to 2 % of a row
(benchmarks/padding.py); in return kernels, compilers and pipeline buffers see one shape.
"""

from __future__ import annotations

import numpy as np

from data_utils.objectives.planes import FIELDS, Objective
from megatron_lite.errors import DataError


class Collator:
    """Makes batches `[samples, len(FIELDS), row_length]` with one objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.row_length = objective.row_length

    def __call__(
        self,
        tokens: np.ndarray,
        piece_lengths: np.ndarray,
        pieces_per_sample: np.ndarray,
        sample_indices: np.ndarray,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The batch of the given samples.

        Args:
            tokens: int32, the pieces of all samples one after the other, without CLS.
            piece_lengths: int64, tokens per piece.
            pieces_per_sample: int64 [B].
            sample_indices: int64 [B], >= 0, the address of each sample's random numbers.
            out: int32 [B, len(FIELDS), row_length], C-contiguous, to be reused; None: a new array.
        Returns: int32 [B, len(FIELDS), row_length]; the weights plane holds float32 bits.
        Raises: DataError if the arrays do not belong together or a sample does not fit a row.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        piece_lengths = np.ascontiguousarray(piece_lengths, np.int64)
        pieces_per_sample = np.ascontiguousarray(pieces_per_sample, np.int64)
        sample_indices = np.ascontiguousarray(sample_indices, np.int64)
        _check_lengths(tokens, piece_lengths, pieces_per_sample, sample_indices)
        shape = (len(sample_indices), len(FIELDS), self.row_length)
        if out is None:
            out = np.empty(shape, np.int32)
        elif out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise DataError(
                f"the batch buffer is {out.dtype} {out.shape}; it must be contiguous int32 {shape}."
            )
        self.objective.fill(out, tokens, piece_lengths, pieces_per_sample, sample_indices)
        return out


def _check_lengths(
    tokens: np.ndarray, piece_lengths: np.ndarray, pieces_per_sample: np.ndarray, sample_indices: np.ndarray
) -> None:
    """The compiled code reads without bounds checks, so the counts must add up."""
    total = piece_lengths.sum()
    if piece_lengths.min(initial=0) < 0 or total != len(tokens):
        raise DataError(
            f"piece lengths sum to {total} for {len(tokens)} tokens; they must be >= 0 and equal their "
            "number: the dataset's index and its data disagree, verify the dataset."
        )
    total = pieces_per_sample.sum()
    if pieces_per_sample.min(initial=0) < 0 or total != len(piece_lengths):
        raise DataError(
            f"pieces per sample sum to {total} for {len(piece_lengths)} pieces; they must be >= 0 and equal "
            "their number: the sampler's windows are inconsistent."
        )
    if len(sample_indices) != len(pieces_per_sample) or sample_indices.min(initial=0) < 0:
        raise DataError(
            f"{len(sample_indices)} sample indices for {len(pieces_per_sample)} samples; give each sample "
            "one index, 0 or more."
        )
