"""Summary of a corpus build: documents and tokens written, records left out, and signs of an unusual corpus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.build.contamination import NGRAM_WORDS
from data_utils.corpus.documents import RecordCounts

SHORT_DOCUMENT = 64  # tokens; a median below it is worth a warning
MANY_DUPLICATES = 0.05
_MAX_HASHES = 1 << 20  # distinct documents that are compared; of more, a sample
_MAX_PENDING = 1 << 18
_MAX_LENGTH = 1 << 16  # longer documents are not told apart


@dataclass(frozen=True, slots=True)
class Shape:
    """The documents of a build in figures."""

    median_tokens: int  # of a document; the lower of two
    duplicates: float  # share of the documents that equal an earlier one
    compared: int  # documents among which they were looked for: all, or a sample


class DocumentStatistics:
    """Lengths and duplicates of documents as they pass; memory does not grow with their number.

    Duplicates are compared by 64-bit hashes. Beyond `max_hashes` distinct documents only those whose hash begins with a
    zero bit stay, then with two, ...: a sample that holds every copy of the documents in it.
    """

    entities = 0  # how many tokens have an annotation (annotations.py)

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._lengths = np.zeros(_MAX_LENGTH + 1, np.int64)
        self._hashes, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)  # distinct, and how often
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._zero_bits = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Take documents: their tokens one after the other [sum(lengths)], and lengths [documents]."""
        self._lengths += np.bincount(np.minimum(lengths, _MAX_LENGTH), minlength=_MAX_LENGTH + 1)
        hashes = _document_hashes(tokens, lengths)
        self._pending.append(hashes[self._in_sample(hashes)])
        self._num_pending += len(self._pending[-1])
        if self._num_pending > _MAX_PENDING:
            self._compact()

    def shape(self) -> Shape:
        """Median length and share of duplicates of the documents so far; there must be at least one."""
        self._compact()
        middle = (int(self._lengths.sum()) + 1) // 2
        compared = int(self._counts.sum())
        return Shape(
            median_tokens=int(np.searchsorted(np.cumsum(self._lengths), middle)),
            duplicates=1 - len(self._hashes) / compared if compared else 0.0,
            compared=compared,
        )

    def _in_sample(self, hashes: np.ndarray) -> np.ndarray:
        return hashes <= np.uint64((1 << (64 - self._zero_bits)) - 1)

    def _compact(self) -> None:
        """Count the pending hashes, and halve the sample until it fits."""
        hashes = np.concatenate([self._hashes, *self._pending])
        counts = np.concatenate([self._counts, np.ones(len(hashes) - len(self._hashes), np.int64)])
        self._hashes, indices = np.unique(hashes, return_inverse=True)
        self._counts = np.zeros(len(self._hashes), np.int64)
        np.add.at(self._counts, indices, counts)
        self._pending, self._num_pending = [], 0
        while len(self._hashes) > self._max_hashes:
            self._zero_bits += 1
            in_sample = self._in_sample(self._hashes)
            self._hashes, self._counts = self._hashes[in_sample], self._counts[in_sample]


def _document_hashes(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A hash of the tokens of each document, uint64 [documents]. Each process has its own: Python salts it."""
    data = tokens.tobytes()
    ends = (np.cumsum(lengths, dtype=np.int64) * tokens.itemsize).tolist()
    hashes = [hash(data[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return np.array(hashes, np.int64).view(np.uint64)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build, for the summary."""

    documents: dict[str, int]  # prefix -> number
    tokens: dict[str, int]
    counts: RecordCounts
    text_bytes: int
    seconds: float
    shards: int
    finished_before: int  # shards that an earlier, stopped run had finished
    built_text_bytes: int  # text of the others
    duplicates: int | None  # documents left out; None: not looked for
    contamination: dict[str, Any] | None  # as in the manifest
    shape: Shape | None = None  # None: nothing was joined
    whole_files: int = 0  # .txt files that became one document each
    per_record: int = 1  # documents of a record of text pairs

    def lines(self) -> Iterator[str]:
        speed = self.built_text_bytes / 1e6 / max(self.seconds, 1e-9)
        work = f"from {self.text_bytes / 1e6:,.1f} MB of text in {self.seconds:,.1f} s ({speed:,.1f} MB/s)"
        yield f"{sum(self.documents.values()):,} documents, {sum(self.tokens.values()):,} tokens {work}"
        if self.finished_before:
            yield f"  {self.finished_before:,} of {self.shards:,} shards were finished by an earlier run"
        for prefix, documents in self.documents.items():
            yield f"  {prefix}: {documents:,} documents, {self.tokens[prefix]:,} tokens"
        yield from self._shape_lines()
        yield from self._skipped_lines()
        yield from self._contamination_lines()
        yield from self.warnings()

    def _shape_lines(self) -> Iterator[str]:
        if self.whole_files:
            yield f"  each of the {self.whole_files:,} .txt files is one document; --text-split splits them"
        if self.shape is None:
            return
        documents = sum(self.documents.values())
        sample = "" if self.shape.compared == documents else f" (in a sample of {self.shape.compared:,})"
        yield (
            f"  tokens per document: median {self.shape.median_tokens:,}, mean "
            f"{sum(self.tokens.values()) / documents:,.0f}; {100 * self.shape.duplicates:.1f} % are exact "
            f"duplicates of another{sample}"
        )

    def _skipped_lines(self) -> Iterator[str]:
        if self.counts.empty_documents or self.counts.blank_lines:
            empty, blank = self.counts.empty_documents, self.counts.blank_lines
            yield f"  skipped: {empty:,} empty documents, {blank:,} blank lines"
        if self.duplicates is not None:
            yield f"  skipped: {self.duplicates:,} exact duplicates"
        mentions = self.counts.mentions
        if "records" in mentions:
            yield (
                f"  text pairs: {mentions['records']:,} records of {self.per_record} documents; negatives: "
                f"{mentions['missing_negatives']:,} missing, {mentions['cut_negatives']:,} cut"
            )
        elif len(mentions) == 1:
            yield f"  words with stored capitalization: {mentions['kept']:,}"
        elif "without" in mentions:
            yield f"  labelled pairs: {mentions['kept']:,}; {mentions['without']:,} texts have no pair"
        elif mentions and "unknown" not in mentions:
            yield f"  spans: {mentions['kept']:,}; skipped: {mentions['low_score']:,} with a low score"
        elif mentions:
            yield (
                f"  entities: {mentions['kept']:,} mentions; skipped: {mentions['unknown']:,} of unknown entities, "
                f"{mentions['low_score']:,} with a low score"
            )
        for kind, count in sorted(self.counts.bad.items()):
            yield f"  skipped: {count:,} bad records ({kind})"
        for example in self.counts.examples:
            yield f"    {example}"

    def _contamination_lines(self) -> Iterator[str]:
        if not self.contamination:
            return
        matched = self.contamination["evaluation_texts_found"]
        yield (
            f"  contamination: {self.contamination['documents']:,} documents share word sequences with "
            f"{matched:,} of {self.contamination['evaluation_texts']:,} evaluation texts"
        )
        if short := self.contamination["evaluation_texts_too_short"]:
            yield f"    {short:,} of these texts have fewer than {NGRAM_WORDS} words and are not searched for"
        for example in self.contamination["examples"]:
            yield f"    {example}"

    def warnings(self) -> Iterator[str]:
        if self.shape is None:
            return
        if self.shape.median_tokens < SHORT_DOCUMENT and "without" not in self.counts.mentions:
            yield (
                f"warning: half of the documents have {self.shape.median_tokens} tokens or fewer, so a sample "
                "consists of many unrelated texts. Is each record a whole document? --text-split blank_lines and "
                "lines make every paragraph or line a document. (The objectives optimus and tsdae do need short texts.)"
            )
        if self.shape.duplicates > MANY_DUPLICATES:
            yield (
                f"warning: {100 * self.shape.duplicates:.0f} % of the documents are exact duplicates, which a model "
                "memorizes; --deduplicate keeps the first of each."
            )
