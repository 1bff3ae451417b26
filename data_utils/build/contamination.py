"""Counts the documents of a corpus that share long word sequences with evaluation texts.

This is a report, not a filter: documents stay in the corpus. Two texts share an n-gram when NGRAM_WORDS consecutive
words agree, apart from letter case and punctuation (13 words, as in the analysis of GPT-3, arXiv:2005.14165, appendix
C). A Chinese character counts as a word. N-grams are compared by 64-bit hashes: with a billion evaluation n-grams about
one lookup in twenty billion is wrong. Evaluation texts shorter than an n-gram are counted, because no match is
possible.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.common.errors import DataError
from data_utils.corpus.documents import Document, read_document_files
from data_utils.corpus.stored_files import InputFile

NGRAM_WORDS = 13

_WORD = re.compile(r"[\u3400-\u9fff\U00020000-\U0003ffff]|[^\W\u3400-\u9fff\U00020000-\U0003ffff]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def ngram_hashes(text: str) -> np.ndarray:
    """Hashes of all n-grams of a text, uint64 [words - NGRAM_WORDS + 1], empty for a shorter text."""
    words = np.array(
        [zlib.crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text.lower())], np.uint64
    )
    count = len(words) - NGRAM_WORDS + 1
    if count < 1:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for offset in range(NGRAM_WORDS):  # uint64 arithmetic wraps, as a hash should
        # All n-grams at once, word by word: 13 passes over an array instead of a loop over n-grams.
        hashes = (hashes ^ (hashes >> np.uint64(29)) ^ words[offset : offset + count]) * _MULTIPLIER
    return hashes ^ (hashes >> np.uint64(32))


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
