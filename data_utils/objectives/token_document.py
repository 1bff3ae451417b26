"""Token-document relation, along with masked words: does a token also occur in the other half of its document?

A chunk is cut at an end of a sentence into two documents that do not see each other. Each ordinary token that is not
masked predicts whether it is also in the other half, 1, or not, 0: frequent and topical words are.

Source: ERNIE 2.0, arXiv:1907.12412, section 4.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import DOC, OBJECTIVE, TOKENS, WEIGHTS
from data_utils.common.losses import CLASS_HEADS, Loss
from data_utils.common.random_streams import seed_rng
from data_utils.common.settings import checked
from data_utils.objectives.compiled import Chunks, entry_point, predict, with_scratch
from data_utils.objectives.cut_pairs import split_point
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig
from data_utils.objectives.masking import is_special
from data_utils.objectives.registry import register


@entry_point
def _halve(chunks, tables, halves, record):
    """Lengths of both halves of each chunk, int64 [2 chunks]; a chunk of one token has an empty second half."""
    settings, chunks, tables = record[0], Chunks(*chunks), with_scratch(tables)
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(chunks.samples)):
        for document in range(chunks.first_document, chunks.first_document + chunks.counts[i]):
            text = chunks.tokens[start : start + chunks.lengths[k]]
            split = len(text)
            if split > 1:
                seed_rng(tables.rng, settings.key, chunks.samples[i], document, 2)
                split = split_point(tables.rng, tables.scratch.positions, text, tables.sentence_end)
            halves[2 * k] = split
            halves[2 * k + 1] = len(text) - split
            start += len(text)
            k += 1


@entry_point
def _label(batch, halves, seen, objective, record):
    """Label the tokens of each half: 1 for those that the other half has too.

    Args:
        halves: Chunks. seen: int64 zeros, one for each id of the vocabulary; the last half whose other half has the
            token, plus 1.
    """
    settings, halves = record[0], Chunks(*halves)
    half, start = 0, 0
    for i in range(len(batch)):
        row, at = batch[i], 0
        for document in range(halves.first_document, halves.first_document + halves.counts[i]):
            is_second = (document - halves.first_document) % 2
            other = half - 1 if is_second else half + 1
            other_start = start - halves.lengths[other] if is_second else start + halves.lengths[half]
            for token in halves.tokens[other_start : other_start + halves.lengths[other]]:
                seen[token] = half + 1
            while at < row.shape[1] and row[DOC, at] == document:
                token = row[TOKENS, at]
                if row[WEIGHTS, at] == 0 and not is_special(token, settings):
                    predict(row, at, 1 if seen[token] == half + 1 else 0)
                    row[OBJECTIVE, at] = objective
                at += 1
            start += halves.lengths[half]
            half += 1


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("token_document")
class TokenDocumentConfig(LabelledTextConfig):
    @property
    def overhead(self) -> int:
        """Two CLS and two SEP."""
        return 4

    @property
    def loss_share(self) -> float:
        return 1.0

    @property
    def class_heads(self) -> dict[str, int]:
        return {"token_document": 2}


@register
class TokenDocument(LabelledText):
    name = "token_document"
    config_class = TokenDocumentConfig
    losses = (Loss("masked_parts", 34), Loss("token_document", 35))

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        if not len(batch):
            return
        self._unit_starts(chunks.tokens, chunks.lengths)  # refuses tokens of another vocabulary
        lengths = np.zeros(2 * len(chunks.lengths), np.int64)
        _halve(tuple(chunks), self._tables(chunks.lengths.max(initial=0)), lengths, self._record)
        halves = chunks._replace(lengths=lengths, counts=2 * chunks.counts)
        super()._fill(batch, halves)
        seen = np.zeros(self.vocabulary.size, np.int64)
        _label(batch, tuple(halves), seen, CLASS_HEADS["token_document"], self._record)
