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
from data_utils.objectives.compiled import Chunks, compiled, entry_point, maskable_length
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig, label_documents
from data_utils.objectives.registry import register


@compiled
def _cut(text, sentence_end, rng, cuts, max_parts):
    """Draw the number of parts, and the ends of all into `cuts`. Returns the number."""
    count = 0
    for i in range(len(text) - 1):
        if sentence_end[text[i]]:
            cuts[count] = i + 1
            count += 1
    parts = 1 + below(rng, min(max_parts, count + 1))
    # Selection sampling: parts - 1 of the `count` ends of sentences, every choice equally likely.
    chosen = 0
    for i in range(count):
        if below(rng, count - i) < parts - 1 - chosen:
            cuts[chosen] = cuts[i]
            chosen += 1
    cuts[chosen] = len(text)
    return parts


@compiled
def _reorder(text, reordered, sentence_end, rng, cuts, max_parts, settings):
    """Write a chunk with its parts in a drawn order; eos stays last. Returns the class."""
    maskable = maskable_length(text, settings)
    for i in range(maskable, len(text)):
        reordered[i] = text[i]
    parts = _cut(text[:maskable], sentence_end, rng, cuts, max_parts)
    first_class, orders = 0, 1  # of the orders of as many parts
    for n in range(1, parts):
        first_class += orders
        orders *= n + 1
    rank = below(rng, orders)
    label = first_class + rank
    # The order of this rank: its next part is that number `skipped` of the parts that are not written yet.
    written, at = 0, 0  # written: a bit for each part
    for remaining in range(parts, 0, -1):
        orders //= remaining
        skipped = rank // orders
        rank -= skipped * orders
        part = 0
        while skipped > 0 or written >> part & 1:
            skipped -= 1 - (written >> part & 1)
            part += 1
        written |= 1 << part
        for i in range(cuts[part - 1] if part > 0 else 0, cuts[part]):
            reordered[at] = text[i]
            at += 1
    return label


@entry_point
def _reorder_all(chunks, reordered, sentence_end, rng, cuts, labels, max_parts, record):
    settings, chunks = record[0], Chunks(*chunks)
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(chunks.samples)):
        for document in range(chunks.first_document, chunks.first_document + chunks.counts[i]):
            end = start + chunks.lengths[k]
            if end > start:
                seed_rng(rng, settings.key, chunks.samples[i], document, 2)
                text, into = chunks.tokens[start:end], reordered[start:end]
                labels[k] = _reorder(text, into, sentence_end, rng, cuts, max_parts, settings)
            start = end
            k += 1


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

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        if not len(batch):
            return
        self._unit_starts(chunks.tokens, chunks.lengths)  # refuses tokens of another vocabulary
        reordered, labels = np.empty_like(chunks.tokens), np.zeros(len(chunks.lengths), np.int64)
        cuts = np.empty(chunks.lengths.max(initial=0) + 1, np.int64)
        settings = self.config.parts, self._record
        _reorder_all(tuple(chunks), reordered, self._sentence_end, new_rng(), cuts, labels, *settings)
        super()._fill(batch, chunks._replace(tokens=reordered))
        head = CLASS_HEADS["sentence_reordering"]
        label_documents(batch, chunks.counts, labels, chunks.first_document, head)
