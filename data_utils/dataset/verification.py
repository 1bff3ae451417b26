"""A dataset read as a whole: checksums, pointers, ids, ends of documents."""

from __future__ import annotations

import numpy as np

from data_utils.common.checksums import FileChecksums, difference
from data_utils.common.progress import progress_bar
from data_utils.dataset.indexed_dataset import CHUNK, IndexedDataset
from data_utils.dataset.manifest import ENTITIES, SCORES, TEXT_HASHES, dataset_path


def verify(dataset: IndexedDataset) -> int:
    """Read everything: checksums, pointers, ids, document ends. Raises DataError at the first damage.

    Returns: the largest id.
    """
    _verify_pointers(dataset)
    entries = dataset.manifest["files"].items()
    checksums = {suffix: FileChecksums(entry["block_bytes"]) for suffix, entry in entries}
    largest = _verify_tokens(dataset, checksums[".bin"])
    for suffix in checksums.keys() - {".bin"}:
        with open(dataset_path(dataset.prefix, suffix), "rb") as file:
            while chunk := file.read(CHUNK):
                checksums[suffix].update(chunk)
    for suffix, recorded in entries:
        if problem := difference(recorded, checksums[suffix]):
            raise dataset.damaged(suffix, problem)
    _verify_entities(dataset)
    _verify_text_pairs(dataset)
    if dataset.manifest.get("documents_end_with_eos"):
        _verify_document_ends(dataset, dataset.manifest["eos"])
    return largest


def _verify_pointers(dataset: IndexedDataset) -> None:
    end = 0
    for start in range(0, dataset.num_documents, CHUNK):
        sizes = dataset.lengths[start : start + CHUNK].astype(np.int64) * dataset.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if not np.array_equal(dataset.pointers[start : start + CHUNK], ends - sizes) or sizes.min() < 0:
            problem = f"has pointers that do not match its lengths near document {start}"
            raise dataset.damaged(".idx", problem)
        end = int(ends[-1])


def _verify_tokens(dataset: IndexedDataset, checksums: FileChecksums) -> int:
    """Returns: the largest id."""
    vocab_size, largest = dataset.manifest.get("vocab_size"), -1
    # Without a vocabulary as well: rows of samples are int32, in which 2^33 + 5 would become 5.
    limit, rule = vocab_size or 1 << 31, f"the vocabulary ({vocab_size})" if vocab_size else "0 to 2^31 - 1"
    chunks = range(0, dataset.num_tokens, CHUNK)
    for start in progress_bar(chunks, desc=f"verify {dataset.prefix}", unit="Mtoken"):
        chunk = dataset.tokens[start : start + CHUNK]
        checksums.update(chunk.data)
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= limit:
            at = start + int(np.argmax((chunk < 0) | (chunk >= limit)))
            raise dataset.damaged(".bin", f"has the id {chunk[at - start]} at token {at}, outside {rule}")
        largest = max(largest, high)
    return largest


def _verify_entities(dataset: IndexedDataset) -> None:
    for start in range(0, dataset.num_tokens if dataset.entities is not None else 0, CHUNK):
        chunk, count = dataset.entities[start : start + CHUNK], dataset.manifest["entities"]["count"]
        if int(chunk.max()) >= count or int(chunk.min()) < -1:
            raise dataset.damaged(ENTITIES, f"has an entity id that is not below {count} after token {start}")


def _verify_text_pairs(dataset: IndexedDataset) -> None:
    hashes, scores = dataset.text_hashes, dataset.scores
    if hashes is None:
        return
    for start in range(0, dataset.num_documents, CHUNK):
        stop = start + CHUNK
        if np.any((hashes[start:stop] != 0) != (dataset.lengths[start:stop] != 0)):
            raise dataset.damaged(
                TEXT_HASHES, f"does not have a hash of each text, and 0 of none, after {start}"
            )
    for start in range(0, 0 if scores is None else len(scores), CHUNK):
        assert scores is not None
        if not np.isfinite(scores[start : start + CHUNK]).all():
            raise dataset.damaged(SCORES, f"has a score that is no number after record {start}")


def _verify_document_ends(dataset: IndexedDataset, eos: int) -> None:
    for start in range(0, dataset.num_documents, CHUNK):
        ends = (
            dataset.pointers[start : start + CHUNK] // dataset.dtype.itemsize
            + dataset.lengths[start : start + CHUNK]
        )
        if np.any(dataset.tokens[ends - 1] != eos):
            raise dataset.damaged(
                ".bin", f"has a document that does not end with eos ({eos}) after document {start}"
            )
