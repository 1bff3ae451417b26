"""Hard negatives: for each query of a file of text pairs the documents nearest to it that do not belong to it.

The search is exact: the cosine of each query with each document, by blocks. Of equal texts the first counts. A query's
own text and the positives of all records with that query are no negatives of it, nor is a document less than `margin`
below the record's positive: it may well be another right one. Ties go to the earlier document, so the result is one.

Shapes: Q queries, D documents, E numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_utils.common.errors import DataError
from data_utils.common.progress import progress_bar

_QUERIES, _DOCUMENTS = 256, 16384  # of a block
_NONE = -(0x7F800000 << 32)  # the key of minus infinity


@dataclass(frozen=True)
class Texts:
    """Distinct texts and their vectors.

    Args: numbers: text -> its number. vectors: [D, E], of the first of equal texts, by `rows`, int64 [D].
    """

    numbers: Mapping[str, int]
    vectors: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str], vectors: np.ndarray) -> Texts:
        """Args: vectors: [len(texts), E]."""
        numbers: dict[str, int] = {}
        for text in texts:
            numbers.setdefault(text, len(numbers))
        found = np.array([numbers[text] for text in texts], np.int64)
        return cls(numbers, vectors, np.unique(found, return_index=True)[1])

    def block(self, start: int, stop: int) -> np.ndarray:
        """Vectors of the texts [start, stop), fp32, of length 1."""
        return unit(self.vectors[self.rows[start:stop]])


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1, fp32. Raises DataError for numbers that are not finite."""
    vectors = np.asarray(vectors, np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise DataError("the vectors have numbers that are not finite; make them again.")
    return vectors / np.maximum(norms, np.float32(1e-12))


def open_vectors(path: str, option: str, rows: int, of: str) -> np.ndarray:
    """Vectors of a .npy file, mapped, [rows, E]. Raises DataError unless it has a row for each of `rows` texts."""
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{option} {path}: not a readable .npy file ({error}); make it again.") from None
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or len(vectors) != rows:
        raise DataError(
            f"{option} {path} has {vectors.dtype} {vectors.shape}, but there are {rows} {of}; it must have a row of "
            "floats for each; make it again."
        )
    return vectors


def mine(
    queries: Sequence[str],
    query_vectors: np.ndarray,
    positives: Sequence[Sequence[str]],
    documents: Texts,
    count: int,
    margin: float,
) -> Iterator[tuple[list[int], list[float]]]:
    """The negatives of each record, at most `count`: numbers of documents and their cosines, the nearest first.

    Args: query_vectors: [Q, E]. positives: of each record, all among the documents.
    """
    belonging: dict[str, set[int]] = {}  # query -> documents that are no negatives of it
    for query, texts in zip(queries, positives, strict=True):
        own = documents.numbers.get(query)
        belonging.setdefault(query, set() if own is None else {own}).update(
            documents.numbers[text] for text in texts
        )
    total = len(documents.rows)
    for start in progress_bar(range(0, len(queries), _QUERIES), desc="mine", unit="block"):
        block = range(start, min(start + _QUERIES, len(queries)))
        vectors = unit(query_vectors[block.start : block.stop])
        limits = [
            min(
                float(vectors[number - start] @ documents.block(each, each + 1)[0])
                for each in (documents.numbers[text] for text in positives[number])
            )
            - margin
            for number in block
        ]
        excluded = [(number - start, document) for number in block for document in belonging[queries[number]]]
        rows, columns = np.array(excluded, np.int64).T
        best = np.full((len(block), count), _NONE)
        for first in range(0, total, _DOCUMENTS):
            scores = vectors @ documents.block(first, first + _DOCUMENTS).T
            scores[scores > np.array(limits, np.float32)[:, None]] = -np.inf
            is_here = (columns >= first) & (columns < first + _DOCUMENTS)
            scores[rows[is_here], columns[is_here] - first] = -np.inf
            keys = np.concatenate([best, _keys(scores, first)], axis=1)
            best = np.partition(keys, keys.shape[1] - count, axis=1)[:, -count:]
        for keys in -np.sort(-best, axis=1):
            found = [_of_key(key) for key in keys.tolist()]
            real = [(document, score) for document, score in found if np.isfinite(score)]
            yield [document for document, _ in real], [score for _, score in real]


def _keys(scores: np.ndarray, first: int) -> np.ndarray:
    """Integers in the order of scores fp32 [Q, D], the earlier document first among equal ones, int64 [Q, D]."""
    bits = scores.view(np.int32).astype(np.int64)
    # The bits of a negative float grow as it falls.
    ordered = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    documents = np.arange(first, first + scores.shape[1])
    return (ordered << 32) | (0xFFFFFFFF - documents)


def _of_key(key: int) -> tuple[int, float]:
    """Document and score of a key; minus infinity where there is none."""
    ordered = key >> 32
    bits = ordered if ordered >= 0 else -ordered | 0x80000000
    score = float(np.array(bits & 0xFFFFFFFF, np.uint32).view(np.float32))
    return 0xFFFFFFFF - (key & 0xFFFFFFFF), score if np.isfinite(score) else -np.inf
