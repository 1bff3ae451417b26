"""Batches of a configuration's objectives over random documents, without a corpus or a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from data_utils.loader.loader import collate
from data_utils.loader.short_samples import Shortener
from data_utils.objectives import make_objective
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.tree import Config
from megatron_lite.transformer.batch import Batch

# Tokens of a document of the quickstart's corpus; lengths are log-normal.
MEDIAN_DOCUMENT, MEAN_DOCUMENT = 440, 870
SENTENCE_LENGTH, TOKENS_PER_WORD = 20, 4 / 3
SPECIAL_TOKENS = SpecialTokens(*range(11))


def _document_lengths(rng: np.random.Generator) -> Iterator[int]:
    sigma = math.sqrt(2 * math.log(MEAN_DOCUMENT / MEDIAN_DOCUMENT))
    while True:
        yield max(4, int(rng.lognormal(math.log(MEDIAN_DOCUMENT), sigma)))


def vocabulary(size: int, rng: np.random.Generator) -> Vocabulary:
    """Random word starts and sentence ends; the first ids are the special tokens."""
    ends = rng.random(size) < 1 / SENTENCE_LENGTH
    starts = rng.random(size) < 1 / TOKENS_PER_WORD
    sentinels = tuple(range(size - 1, max(0, size - 101), -1))
    return Vocabulary(SPECIAL_TOKENS, size, ends, starts, tuple(map(str, range(size))), sentinels=sentinels)


def random_batches(config: Config, count: int) -> list[Batch]:
    """The first `count` micro-batches of a rank: windows of data.sequence_length over documents, as in training."""
    rng = np.random.default_rng(config.training.seed)
    assert config.model.vocab_size is not None
    objective = make_objective(
        config.objective_choices,
        vocabulary(config.model.vocab_size, rng),
        config.training.seed,
        config.data.sequence_length,
        config.data.row_length,
    )
    shorten = Shortener(config.data.short_prob, config.training.seed) if config.data.short_prob else None
    source = _document_lengths(np.random.default_rng(0))  # as in benchmarks/attention.py
    rest, batches, micro = 0, [], config.batch.micro_batch_size
    for number in range(count):
        lengths: list[int] = []
        chunk_counts: list[int] = []
        for _ in range(micro):
            window, rest = _window(config.data.sequence_length, rest, source)
            lengths += window
            chunk_counts.append(len(window))
        low = len(vars(SPECIAL_TOKENS)) if config.model.vocab_size > 100 else 0
        tokens = rng.integers(low, config.model.vocab_size, sum(lengths)).astype(np.int32)
        samples = np.arange(number * micro, (number + 1) * micro)
        text = tokens, np.array(lengths), np.array(chunk_counts)
        if shorten is not None:
            text = shorten(*text, samples)
        batches.append(Batch(collate(objective, *text, samples)))
    return batches


def _window(length: int, rest: int, source: Iterator[int]) -> tuple[list[int], int]:
    """Lengths of the chunks of documents in a window of `length` tokens, and the tokens left of the last document."""
    left, chunks = length, []
    while left > DOCUMENT_OVERHEAD:
        if not rest:
            rest = next(source)
            left -= DOCUMENT_OVERHEAD
        chunk = min(rest, left)
        if chunk <= 0:
            break
        chunks.append(chunk)
        rest, left = rest - chunk, left - chunk
    return chunks, rest
