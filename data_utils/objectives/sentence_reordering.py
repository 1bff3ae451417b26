"""Sentence reordering, along with masked words: what was the order of the segments of this text?

A chunk is cut at ends of sentences into n of 1 to `parts` segments, and these are put into one of the n! orders, all
equally likely; n is uniform, and at most the number of sentences. CLS predicts the order: the class is the sum of i!
for i < n, plus the rank of the order among all orders of n in lexicographic sequence.

Source: ERNIE 2.0, arXiv:1907.12412, section 4.2.2, whose text counts k = sum of n! classes for n from 1 to m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from data_utils.common.losses import CLASS_HEADS, Loss
from data_utils.common.random_streams import below, new_rng, seed_rng
from data_utils.common.settings import checked, setting
from data_utils.objectives import pairs
from data_utils.objectives.compiled import compiled, entry_point, maskable_length
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig, label_documents
from data_utils.objectives.registry import register


@compiled
def _cut(text, start, length, sentence_end, rng, cuts, max_segments):
    """Draw the number of segments, and the ends of all into `cuts`. Returns the number."""
    count = 0
    for i in range(length - 1):
        if sentence_end[text[start + i]]:
            cuts[count] = i + 1
            count += 1
    segments = 1 + below(rng, min(max_segments, count + 1))
    # Selection sampling: segments - 1 of the `count` ends of sentences, every choice equally likely.
    chosen = 0
    for i in range(count):
        if below(rng, count - i) < segments - 1 - chosen:
            cuts[chosen] = cuts[i]
            chosen += 1
    cuts[chosen] = length
    return segments


@compiled
def _reorder(text, reordered, start, length, sentence_end, rng, cuts, settings):
    """Write a chunk with its segments in a drawn order; eos stays last. Returns the class."""
    maskable = maskable_length(text, start, length, settings)
    for i in range(start + maskable, start + length):
        reordered[i] = text[i]
    segments = _cut(text, start, maskable, sentence_end, rng, cuts, settings.parts)
    first_class, orders = 0, 1  # of the orders of as many segments
    for n in range(1, segments):
        first_class += orders
        orders *= n + 1
    rank = below(rng, orders)
    label = first_class + rank
    # The order of this rank: its next segment is that number `skipped` of the segments that are not written yet.
    written, at = 0, start  # written: a bit for each segment
    for remaining in range(segments, 0, -1):
        orders //= remaining
        skipped = rank // orders
        rank -= skipped * orders
        segment = 0
        while skipped > 0 or written >> segment & 1:
            skipped -= 1 - (written >> segment & 1)
            segment += 1
        written |= 1 << segment
        for i in range(cuts[segment - 1] if segment > 0 else 0, cuts[segment]):
            reordered[at] = text[start + i]
            at += 1
    return label


@entry_point
def _reorder_all(
    text, reordered, lengths, counts, samples, first_chunk, sentence_end, rng, cuts, labels, record
):
    settings = record[0]
    chunk, start = 0, 0
    for i in range(len(samples)):
        for number in range(first_chunk, first_chunk + counts[i]):
            if lengths[chunk] > 0:
                seed_rng(rng, settings.key, samples[i], number, 2)
                labels[chunk] = _reorder(
                    text, reordered, start, lengths[chunk], sentence_end, rng, cuts, settings
                )
            start += lengths[chunk]
            chunk += 1


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("sentence_reordering")
class SentenceReorderingConfig(LabelledTextConfig):
    parts: int = setting(
        3, "Maximum number of segments a text is cut into: 3 give 9 orders, 4 give 33.", at_least=2, at_most=4
    )

    @property
    def class_heads(self) -> dict[str, int]:
        return {"sentence_reordering": sum(math.factorial(n) for n in range(1, self.parts + 1))}


@register
class SentenceReordering(LabelledText):
    name = "sentence_reordering"
    config_class = SentenceReorderingConfig
    losses = (Loss("masked_reordered", 30), Loss("sentence_reordering", 31))
    compiled_files = (__file__, pairs.__file__)

    def values(self):  # type: ignore[no-untyped-def]
        return {**super().values(), "parts": self.config.parts}

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> None:
        if not len(batch):
            return
        self._unit_starts(tokens, chunk_lengths)  # refuses tokens of another vocabulary
        reordered, labels = np.empty_like(tokens), np.zeros(len(chunk_lengths), np.int64)
        cuts = np.empty(chunk_lengths.max(initial=0) + 1, np.int64)
        chunks = (chunk_lengths, chunks_per_sample, sample_indices, first_chunk)
        _reorder_all(tokens, reordered, *chunks, self._sentence_end, new_rng(), cuts, labels, self._record)
        super()._fill(batch, reordered, *chunks)
        label_documents(batch, chunks_per_sample, labels, first_chunk, CLASS_HEADS["sentence_reordering"])
