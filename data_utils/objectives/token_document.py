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
from data_utils.common.random_streams import new_rng, seed_rng
from data_utils.common.settings import checked
from data_utils.objectives import masking, pairs
from data_utils.objectives.compiled import WORK_LINES, entry_point, predict
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig
from data_utils.objectives.masking import is_special
from data_utils.objectives.pairs import split_point
from data_utils.objectives.registry import register


@entry_point
def _halve(text, lengths, counts, samples, first_chunk, sentence_end, rng, scratch, halves, record):
    """Lengths of both halves of each chunk, int64 [2 chunks]; a chunk of one token has an empty second half."""
    settings = record[0]
    chunk, start = 0, 0
    for i in range(len(samples)):
        for number in range(first_chunk, first_chunk + counts[i]):
            split = lengths[chunk]
            if split > 1:
                seed_rng(rng, settings.key, samples[i], number, 2)
                split = split_point(rng, scratch, text, start, lengths[chunk], sentence_end)
            halves[2 * chunk] = split
            halves[2 * chunk + 1] = lengths[chunk] - split
            start += lengths[chunk]
            chunk += 1


@entry_point
def _label(batch, text, halves, counts, first_chunk, seen, objective, record):
    """Label the tokens of each half: 1 for those that the other half has too.

    Args: seen: int64 zeros, one for each id of the vocabulary; the last half whose other half has the token, plus 1.
    """
    settings = record[0]
    half, start = 0, 0
    for i in range(len(batch)):
        row, at = batch[i], 0
        for number in range(first_chunk, first_chunk + counts[i]):
            is_second = (number - first_chunk) % 2
            other_start = start - halves[half - 1] if is_second else start + halves[half]
            other_length = halves[half - 1] if is_second else halves[half + 1]
            for k in range(other_start, other_start + other_length):
                seen[text[k]] = half + 1
            while at < row.shape[1] and row[DOC, at] == number:
                token = row[TOKENS, at]
                if row[WEIGHTS, at] == 0 and not is_special(token, settings):
                    predict(row, at, 1 if seen[token] == half + 1 else 0)
                    row[OBJECTIVE, at] = objective
                at += 1
            start += halves[half]
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
    compiled_files = (__file__, pairs.__file__, masking.__file__)

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> None:
        if not len(batch):
            return
        self._unit_starts(tokens, chunk_lengths)  # refuses tokens of another vocabulary
        halves = np.zeros(2 * len(chunk_lengths), np.int64)
        scratch = np.empty((WORK_LINES, chunk_lengths.max(initial=0) + 2), np.int64)
        chunks = (chunk_lengths, chunks_per_sample, sample_indices, first_chunk)
        _halve(tokens, *chunks, self._sentence_end, new_rng(), scratch, halves, self._record)
        counts = 2 * chunks_per_sample
        super()._fill(batch, tokens, halves, counts, sample_indices, first_chunk)
        seen = np.zeros(self.vocabulary.size, np.int64)
        _label(batch, tokens, halves, counts, first_chunk, seen, CLASS_HEADS["token_document"], self._record)
