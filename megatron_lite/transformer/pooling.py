"""One vector for each packed document: the mean of the hidden states of some of its tokens.

    mean   all tokens, special tokens too; those of a prompt may be left out
    cls    the first token
    last   the last token

Documents are those of the field `doc`, so any number of them is packed in a sequence, and no padding is computed or
averaged. All is differentiable: a loss of vectors trains through `pool`.

Shapes: T tokens of a micro-batch, N pooled tokens, G documents, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data_utils.common.batch_fields import DOC, PADDING_DOC
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch, ExtraInputs


@dataclass(frozen=True)
class PooledTokens:
    """The tokens of which the vectors of a micro-batch are the means."""

    positions: torch.Tensor  # int32 [N], indices into the encoder's [T], document after document
    counts: torch.Tensor  # int32 [G]: how many of them each document has


@dataclass(frozen=True)
class PlacedVectors(PooledTokens):
    """The same where a decoder reads the vectors (TSDAE)."""

    slots: torch.Tensor  # int32 [G], index of the encoder's token in whose place each vector is


class TextBatch(Batch):
    """A batch whose documents have vectors, in the order of the sequences and of the documents in each.

    Args:
        fields, samples: as of `Batch`.
        pooling: one of POOLINGS.
        skipped: int [G], first tokens of each document that the mean leaves out; None = none.
    """

    def __init__(
        self,
        fields: np.ndarray,
        samples: np.ndarray | None = None,
        *,
        pooling: str,
        skipped: np.ndarray | None = None,
    ):
        super().__init__(fields, samples)
        self.pooling, self.skipped = pooling, skipped

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`PooledTokens`."""
        positions, counts = self._pooled_tokens()
        places = places_in(order, self.fields[:, DOC].size)
        arrays = {"positions": places[positions], "counts": counts}
        return ExtraInputs(arrays=arrays, make=lambda tensors: PooledTokens(**tensors))

    @property
    def has_part(self) -> np.ndarray:
        """The tokens that are the documents', bool [B * S]."""
        return self.fields[:, DOC].ravel() != PADDING_DOC

    def _pooled_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices into the flattened batch, document after document, and their number in each document."""
        doc = self.fields[:, DOC].reshape(-1).astype(np.int64)
        tokens = np.flatnonzero(self.has_part)
        # Numbers of documents begin again in each sequence; these are unique in the batch and ascending.
        numbers = tokens // self.fields.shape[2] * (doc.max(initial=0) + 1) + doc[tokens]
        assert (np.diff(numbers) >= 0).all(), "the tokens of a document follow each other"
        _, first, document, lengths = np.unique(
            numbers, return_index=True, return_inverse=True, return_counts=True
        )
        place = np.arange(len(tokens)) - first[document]  # of a token in its document
        if self.pooling == "mean":
            skipped = np.zeros(len(lengths), np.int64) if self.skipped is None else self.skipped
            chosen = place >= skipped[document]
        else:
            chosen = place == (0 if self.pooling == "cls" else lengths[document] - 1)
        return tokens[chosen], np.bincount(document[chosen], minlength=len(lengths))


def places_in(order: np.ndarray, size: int) -> np.ndarray:
    """The index of each token of a flattened batch in an attention plan's order, int64 [size]; -1 = it is not there."""
    places = np.full(size, -1)
    places[order[order >= 0]] = np.flatnonzero(order >= 0)
    return places


def pool(hidden: torch.Tensor, tokens: PooledTokens) -> torch.Tensor:
    """The mean of each document's pooled tokens, [T, D] -> fp32 [G, D]; 0 for a document without one."""
    chosen = hidden.index_select(0, tokens.positions).float()
    if not len(tokens.counts):
        return chosen  # which torch's sum of no segments refuses
    # Not `index_add`, whose order of addition differs from run to run on a GPU.
    sums = torch.segment_reduce(chosen, "sum", lengths=tokens.counts.long(), axis=0)
    return sums / tokens.counts.clamp(min=1)[:, None]


def finished(vectors: torch.Tensor, normalize: bool, dimensions: int | None = None) -> torch.Tensor:
    """Pooled vectors as users get them: [G, D] -> [G, dimensions or D].

    Args: dimensions: the first numbers alone (Matryoshka, arXiv:2205.13147), normalized after the cut.
    """
    vectors = vectors[:, :dimensions]
    return F.normalize(vectors, dim=-1) if normalize else vectors
