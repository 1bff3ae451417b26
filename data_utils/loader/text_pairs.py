"""Corpora of text pairs: a sample is a record, that is a query, a text that belongs to it, and negatives.

Record i is the documents k i to k (i + 1) - 1 of the dataset (data_utils/build/text_pairs.py), so the index is the
dataset's own, which is mapped: a corpus of 10^9 records opens at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_utils.common.errors import DataError
from data_utils.common.setting_files import one_line, shown
from data_utils.common.settings import check
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import TEXT_HASHES, dataset_path, documents_per_record
from data_utils.loader.config import CorpusConfig
from data_utils.loader.sampler import WindowIndex


class TextPairIndex(WindowIndex):
    """The records of a dataset of text pairs, each a sample whose chunks are its texts; 0 tokens where there is none.

    Args:
        window_length: sequence_length of the run, which pairs do not read.
        negatives: that are read of a record, at most.
        vectors: .npy of a teacher's vectors, a row a record; then a query that is its own positive is read once.
    Attributes:
        texts: of a record that are read.
        vectors: fp32 [records, numbers], memory-mapped; or None.
        prompt_tokens: of the query, and of the other texts.
    """

    def __init__(
        self, dataset: IndexedDataset, window_length: int, negatives: int, vectors: str | None = None
    ) -> None:
        super().__init__(dataset, window_length)
        self.negatives, self._vectors = negatives, vectors
        self._per_record = documents_per_record(dataset.manifest)
        self.texts = self.max_chunks = min(2 + negatives, self._per_record)
        self.num_windows = len(dataset) // self._per_record
        self.vectors = None if vectors is None else _mapped_vectors(vectors, self)
        columns = dataset.manifest["text_pairs"].get("columns", {})
        if vectors is not None and columns and columns["query"] == columns["positive"]:
            self.texts = self.max_chunks = 1
        prompts = dataset.manifest["text_pairs"]["prompts"]
        self.prompt_tokens: tuple[int, int] = prompts["query"]["tokens"], prompts["document"]["tokens"]

    def __reduce__(self) -> tuple[type, tuple[IndexedDataset, int, int, str | None]]:  # type: ignore[override]
        return type(self), (self.dataset, self.window_length, self.negatives, self._vectors)

    def __str__(self) -> str:
        """Number of records and negatives, for the log."""
        return (
            f"{self.dataset.prefix}: {self.num_windows:,} text pairs, with {max(0, self.texts - 2)} of their "
            f"{self._per_record - 2} negatives"
        )

    def documents(self, records: np.ndarray) -> np.ndarray:
        """The documents of records [n], int64 [n, texts]."""
        return records[:, None] * self._per_record + np.arange(self.texts)

    def hashes(self, records: np.ndarray) -> np.ndarray:
        """The hashes of the texts of records [n], uint64 [n, texts]; 0 = no text."""
        assert self.dataset.text_hashes is not None
        return self.dataset.text_hashes[self.documents(records)]

    def scores(self, records: np.ndarray) -> np.ndarray:
        """The scores of records [n], fp32; 0 where the dataset has none."""
        scores = self.dataset.scores
        return np.zeros(len(records), np.float32) if scores is None else scores[records]

    def costs(self, windows: Any) -> tuple[Any, Any]:
        return windows, windows + 1

    def plan(
        self,
        starts: np.ndarray,
        stops: np.ndarray,
        samples: np.ndarray,
        first_tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        documents = self.documents(starts)
        first_tokens[samples] = self.dataset.pointers[documents[:, 0]] >> self._shift
        chunk_lengths[samples, : self.texts] = self.dataset.lengths[documents]
        counts[samples] = self.texts

    def prefetch(self, windows: np.ndarray) -> None:
        first = self.dataset.pointers[windows * self._per_record] >> self._shift
        self.dataset.prefetch(first, self.dataset.num_tokens // self.num_windows)


def _mapped_vectors(path: str, index: TextPairIndex) -> np.ndarray:
    """Raises: DataError for what is no array of floating-point vectors, one for each record."""
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"vectors {path} cannot be read ({one_line(error)}); give a .npy of scripts/embed.py."
        ) from None
    if getattr(vectors, "ndim", 0) != 2 or vectors.dtype.kind != "f" or len(vectors) != index.num_windows:
        described = f"{getattr(vectors, 'dtype', 'no array')} {list(getattr(vectors, 'shape', ()))}"
        raise DataError(
            f"vectors {path} is {described}, but needs a vector for each of the {index.num_windows} records of "
            f"{index.dataset.prefix}; embed the queries of the file that it was built of, without a split and with no "
            "record left out."
        )
    return vectors


def _require_same_texts(vectors: str, index: TextPairIndex) -> None:
    """Raises: DataError for vectors of other texts than the queries, by the hashes that scripts/embed.py writes."""
    path = dataset_path(vectors, TEXT_HASHES)
    if not path.exists():  # vectors of another program
        return
    queries = np.asarray(index.dataset.text_hashes)[:: documents_per_record(index.dataset.manifest)]
    if not np.array_equal(np.fromfile(path, "<u8"), queries):
        raise DataError(
            f"vectors {vectors} are of other texts than the queries of {index.dataset.prefix}, by {path}; embed the "
            "queries of the file that the dataset was built of."
        )


def open_text_pairs(
    corpus: CorpusConfig, dataset: IndexedDataset, length: int, section: Any
) -> TextPairIndex:
    """The records of a corpus. Args: section: of its objective.

    Raises: DataError for a dataset without text pairs, or without what the loss needs; ConfigError for texts
        that would be cut within their prompt.
    """
    if "text_pairs" not in dataset.manifest:
        raise DataError(
            f"dataset {corpus.prefix} has no text pairs, which {corpus.objective} reads; build it with "
            "scripts/preprocess_data.py --text-pairs."
        )
    if section.needs_scores and dataset.scores is None:
        raise DataError(
            f"dataset {corpus.prefix} has no scores, which {corpus.objective}.loss {section.loss} needs; build it "
            "with --score-column."
        )
    if section.needs_vectors != (corpus.vectors is not None):
        remedy = "remove it" if corpus.vectors else "write them with scripts/embed.py and name the .npy"
        raise DataError(
            f"vectors of the corpus {corpus.prefix} is {shown(corpus.vectors)}, but {corpus.objective}.loss is "
            f"{section.loss}, and mse alone reads and needs the vectors of a teacher; {remedy}."
        )
    index = TextPairIndex(dataset, length, section.negatives_read, corpus.vectors)
    if corpus.vectors is not None:
        _require_same_texts(corpus.vectors, index)
    sides = zip(("query", "document"), index.prompt_tokens, section.text_lengths, strict=True)
    for side, tokens, longest in sides:
        check(
            tokens + section.overhead < longest,
            f"{corpus.objective}.{side}_length is {longest}, but the {side} prompt of {corpus.prefix} has {tokens} "
            f"tokens and {section.overhead} special tokens are added; raise it.",
        )
    return index
