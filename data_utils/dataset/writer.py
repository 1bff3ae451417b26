"""Writing a token dataset: `add` batches of documents, then `finish`. indexed_dataset.py describes the files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from data_utils.common.checksums import FileChecksums
from data_utils.common.errors import DataError
from data_utils.common.files import (
    disk_errors,
    open_locked,
    open_new,
    remove_files,
    sync_directory,
    sync_file,
    write_synced,
)
from data_utils.dataset.indexed_dataset import CHUNK, DTYPE_CODES, HEADER, INDEX_VERSION, MAGIC
from data_utils.dataset.manifest import FURTHER, POSSIBLE_SUFFIXES, dataset_path, manifest_bytes

_UINT16_VOCAB_LIMIT = 65500  # Megatron-LM's own limit, so that both choose the same dtype


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that stores the ids of a vocabulary: uint16 below 65500 ids, else int32 (as Megatron-LM)."""
    return np.dtype("<u2" if vocab_size < _UINT16_VOCAB_LIMIT else "<i4")


def to_token_dtype(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Cast ids to the storage dtype. Raises DataError for an id outside [0, vocab_size), which would wrap."""
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} ids; check that the "
                "vocabulary size belongs to the tokenizer."
            )
    return ids.astype(token_dtype(vocab_size), copy=False)


def index_chunks(lengths: np.ndarray, dtype: np.dtype) -> Iterator[bytes]:
    """The bytes of the .idx file for documents of `lengths` [documents] and tokens of `dtype`."""
    count = len(lengths)
    code = next(code for code, known in DTYPE_CODES.items() if np.dtype(known) == dtype)
    # Megatron-LM's format: its tools read our datasets.
    yield HEADER.pack(MAGIC, INDEX_VERSION, code, count, count + 1)
    for start in range(0, count, CHUNK):
        yield lengths[start : start + CHUNK].astype("<i4").tobytes()
    end = 0
    for start in range(0, count, CHUNK):
        size = lengths[start : start + CHUNK].astype("<i8") * dtype.itemsize
        ends = end + np.cumsum(size)
        yield (ends - size).tobytes()
        end = int(ends[-1])
    for start in range(0, count + 1, CHUNK):
        yield np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").tobytes()


def remove_dataset(prefix: str | Path) -> None:
    """Remove a dataset, the manifest first: if interrupted, the rest does not open."""
    for suffix in reversed(POSSIBLE_SUFFIXES):
        dataset_path(prefix, suffix).unlink(missing_ok=True)
        sync_directory(dataset_path(prefix, suffix).parent)


class IndexedDatasetWriter:
    """Write one dataset: `add` batches of documents, then `finish`. Leaving the context without it aborts.

    Memory use does not grow with the dataset. Ids must lie in [0, vocab_size).
    Args: further: suffixes of FURTHER, the files that the dataset has besides.
    Raises: DataError for a path that cannot be written, an id out of range, or another active writer.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, further: Sequence[str] = ()) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_documents = 0
        self.num_tokens = 0
        self._sealed = False
        self._finished = False
        self._renamed: list[Path] = []
        self._checksums = {suffix: FileChecksums() for suffix in (".bin", ".idx", *further)}
        with disk_errors(self.prefix), contextlib.ExitStack() as opened:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = opened.enter_context(_create_exclusively(self._partial(".bin")))
            # In a file: the index begins with their number, and memory must not grow with the corpus.
            self._lengths = opened.enter_context(open_new(self._partial(".lengths")))
            self._further = {
                suffix: opened.enter_context(open_new(self._partial(suffix))) for suffix in further
            }
            self._files = opened.pop_all()

    def add(self, tokens: np.ndarray, lengths: np.ndarray, *further: np.ndarray) -> None:
        """Append documents.

        Args: tokens: int [sum(lengths)]. lengths: int [documents]. further: the elements of each further file.
        """
        assert not self._sealed and int(lengths.sum()) == len(tokens)
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise DataError(f"a document has {int(lengths.max())} tokens, more than 2^31 - 1; split it.")
        data = np.ascontiguousarray(to_token_dtype(tokens, self.vocab_size)).data
        with disk_errors(self.prefix):
            self._bin.write(data)
            self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self._checksums[".bin"].update(data)
        for (suffix, file), array in zip(self._further.items(), further, strict=True):
            counted, dtype = FURTHER[suffix]
            assert counted == "record" or len(array) == len(tokens if counted == "token" else lengths)
            data = np.ascontiguousarray(array, dtype).data
            with disk_errors(self.prefix):
                file.write(data)
            self._checksums[suffix].update(data)
        self.num_documents += len(lengths)
        self.num_tokens += len(tokens)

    def seal(self) -> None:
        """Complete all files and force them to disk, still under their partial names."""
        if self._sealed:
            return
        with disk_errors(self.prefix):
            self._lengths.close()
            sync_file(self._bin)
            for file in self._further.values():
                sync_file(file)
            with open_new(self._partial(".idx")) as index:
                lengths = (
                    np.memmap(self._partial(".lengths"), "<i4", "r") if self.num_documents else np.empty(0)
                )
                for chunk in index_chunks(lengths, self.dtype):
                    index.write(chunk)
                    self._checksums[".idx"].update(chunk)
                sync_file(index)
            self._partial(".lengths").unlink()
        self._sealed = True

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Replace the dataset under the prefix by the new one. `manifest` adds entries to the writer's own."""
        if not self.num_documents:
            raise DataError(f"dataset {self.prefix} would contain no document; check the input.")
        self.seal()
        with disk_errors(self.prefix):
            # The order decides what a crash leaves: without a manifest nothing opens, so it is removed first
            # and renamed last.
            self._write_manifest(manifest)
            remove_dataset(self.prefix)
            for suffix in (*self._checksums, ".json"):
                if suffix == ".json":  # last, when the names of the other files are on disk
                    sync_directory(self.prefix.parent)
                os.replace(self._partial(suffix), dataset_path(self.prefix, suffix))
                self._renamed.append(dataset_path(self.prefix, suffix))
            sync_directory(self.prefix.parent)
        self._finished = True
        self._files.close()

    def abort(self) -> None:
        """Remove the unfinished files. An old dataset stays, unless `finish` failed while replacing it.

        After `finish` this does nothing.
        """
        if self._finished:
            return
        remove_files(*reversed(self._renamed), *map(self._partial, (*self._checksums, ".lengths", ".json")))
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails a second time
            self._files.close()  # last: it releases the lock

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _partial(self, suffix: str) -> Path:
        return dataset_path(self.prefix, f"{suffix}.partial")

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest under its partial name."""
        sums = self._checksums.items()
        facts = {
            "files": {
                suffix: {"bytes": self._partial(suffix).stat().st_size, **s.tree()} for suffix, s in sums
            },
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            **manifest,
        }
        write_synced(self._partial(".json"), manifest_bytes(facts))


@contextlib.contextmanager
def _create_exclusively(path: Path) -> Iterator[Any]:
    """Open an empty file that only this process writes. The file of a dead process is reused."""
    with open(open_locked(path), "wb", closefd=True) as file:
        file.truncate(0)
        yield file
