"""Counts the documents of a corpus that share long word sequences with evaluation texts.

This is a report, not a filter: documents stay in the corpus. Two texts share an n-gram when a passage of NGRAM_WORDS
consecutive words agrees (13 words, as in the analysis of GPT-3, arXiv:2005.14165, appendix C; what words are is in
data_utils/common/words.py). A Chinese character counts as a word, and a letter of kana, Thai and the like as a third of
one. N-grams are compared by 64-bit hashes: with a billion evaluation n-grams about one lookup in twenty billion is
wrong. Evaluation texts shorter than an n-gram are counted, because no match is possible.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.common.errors import DataError
from data_utils.common.words import separated, thirds
from data_utils.corpus.documents import Document, read_document_files
from data_utils.corpus.stored_files import InputFile

NGRAM_WORDS = 13

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))


def ngram_hashes(text: str) -> np.ndarray:
    """Hashes of all n-grams of a text, uint64 [n-grams], empty for a shorter text.

    The n-gram of a word is the shortest passage from it on that counts NGRAM_WORDS: so many words, or more letters.
    """
    text = separated(text)
    words = np.fromiter(map(zlib.crc32, text.encode().split()), np.uint64)
    lengths = thirds(text)
    if lengths is None:
        starts = np.arange(max(len(words) - NGRAM_WORDS + 1, 0))
        stops = starts + NGRAM_WORDS
    else:
        before = np.r_[0, lengths.cumsum()]
        starts = np.flatnonzero(before[:-1] + 3 * NGRAM_WORDS <= before[-1])
        stops = np.searchsorted(before, before[starts] + 3 * NGRAM_WORDS)
    # A polynomial: sums from the start of the text give that of each passage, of any length. uint64 arithmetic wraps.
    words = (words ^ (words >> np.uint64(29)) ^ _MULTIPLIER) * _MULTIPLIER
    words ^= words >> np.uint64(32)
    sums = np.r_[np.uint64(0), (words * _powers(_MULTIPLIER, len(words))).cumsum()]
    hashes = (sums[stops] - sums[starts]) * _powers(_INVERSE, len(words))[starts]
    return hashes ^ (hashes >> np.uint64(32))


def _powers(base: np.uint64, count: int) -> np.ndarray:
    return np.full(count, base, np.uint64).cumprod()


class EvaluationTexts:
    """The n-grams of evaluation texts, for lookups.

    Attributes:
        num_texts, num_too_short: evaluation texts, and how many of them have no n-gram.
        hashes: uint64 [n-grams], sorted, each once.
        fingerprint: of the n-grams.
    Raises: DataError without any text.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise DataError(
                "the files of --decontaminate have no document; give texts, or leave the option out."
            )
        text_hashes = [ngram_hashes(document.text) for document in documents]
        self.num_texts = len(text_hashes)
        self.num_too_short = sum(not len(hashes) for hashes in text_hashes)
        self.hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *text_hashes]))
        self.fingerprint = hashlib.sha256(self.hashes.astype("<u8").tobytes()).hexdigest()
        # Of each text's n-grams.
        self._indices = [np.searchsorted(self.hashes, hashes) for hashes in text_hashes]

    def shared(self, text: str) -> np.ndarray:
        """The n-grams that a text shares with the evaluation texts: indices of `hashes`, int64, each once."""
        hashes = np.unique(ngram_hashes(text))
        indices = np.searchsorted(self.hashes, hashes)
        # searchsorted gives the length for what is beyond the last.
        indices = np.minimum(indices, max(len(self.hashes) - 1, 0))
        return indices[self.hashes[indices] == hashes] if len(self.hashes) else indices[:0]

    def num_matched(self, matched: np.ndarray) -> int:
        """How many evaluation texts have an n-gram among `matched`, bool [n-grams]."""
        return sum(bool(matched[indices].any()) for indices in self._indices)


def read_evaluation_texts(config: BuildConfig, paths: Sequence[InputFile]) -> EvaluationTexts:
    """Read evaluation texts with the corpus's own text key, text split and policy for bad records."""
    documents = read_document_files(
        paths,
        config.text_key,
        config.text_split,
        config.on_bad_record,
        config.max_bad_records,
    )
    try:
        return EvaluationTexts(list(documents))
    except MemoryError:
        texts = " ".join(config.evaluation_inputs)
        raise DataError(f"--decontaminate {texts}: these texts do not fit in memory; give fewer.") from None
