"""Token datasets on disk: Megatron-LM's .bin/.idx pair plus a manifest, written safely, read memory-mapped.

    PREFIX.bin   the tokens of all documents, one document after another, little-endian
    PREFIX.idx   Megatron-LM's index: magic, version, dtype code, counts, then sequence lengths (int32),
                 byte pointers of the sequences (int64), document boundaries (int64)
    PREFIX.ent   optional: for each token the entity, capitals, span or label that begins there (int32, -1 = none)
    PREFIX.hash  text pairs: for each document a hash of its text (uint64, 0 = no text)
    PREFIX.score text pairs with scores: for each record its score (float32)
    PREFIX.json  the manifest: sizes and checksums of the files, counts, tokenizer, sources; see manifest.py

One sequence is one document. A dataset without a manifest does not open, so the writer works under `.partial` names:
`finish` removes the old manifest first, then the old index and tokens, renames the new tokens and index, and renames
the new manifest last. A crash leaves the old dataset, the new one, or none that opens.

Opening reads a few pages whatever the size, because the index is memory-mapped. The price: only `verify` checks
everything (checksums, every pointer, every token id); `verify_some` checks a few blocks. In an adopted dataset of
another program the tokenizer is not known, and a document may have several sequences, such as sentences. These are
joined when the dataset opens: lengths and pointers of documents, 12 bytes each, follow from the document boundaries.

Tokens are read at random, so the kernel is advised not to read ahead. `prefetch` announces reads, so that a cold disk
serves many at once.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.checksums import damage_at, damaged_block
from data_utils.common.errors import DataError
from data_utils.dataset.manifest import (
    ENTITIES,
    FURTHER,
    SCORES,
    SUFFIXES,
    TEXT_HASHES,
    damaged,
    dataset_path,
    documents_per_record,
    existing_files,
    read_manifest,
    require_finished,
    require_local,
    tokenizer_name,
)

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
INDEX_VERSION = 1
DTYPE_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CHUNK = 1 << 20
_OPEN_CHECKS = 64  # neighbouring pointers compared at every open


def file_sizes(prefix: str | Path, suffixes: Sequence[str] = (".bin", ".idx")) -> dict[str, int]:
    """Bytes of the .bin and the .idx file, or others. Raises DataError if one is missing."""
    require_local(prefix)
    sizes = {}
    for suffix in suffixes:
        path = dataset_path(prefix, suffix)
        if not path.is_file():
            require_finished(prefix)
            raise DataError(f"dataset {prefix}: {path} does not exist; {_other_prefix(Path(prefix))}.")
        sizes[suffix] = path.stat().st_size
    return sizes


def _other_prefix(prefix: Path) -> str:
    """The remedy for a prefix without a dataset; another spelling or one of its splits may have one."""
    if prefix.suffix in SUFFIXES and existing_files(prefix.with_suffix("")):
        return f"give the prefix without {prefix.suffix}: {prefix.with_suffix('')}"
    splits = sorted(prefix.parent.glob(f"{glob.escape(prefix.name)}_*.json"))
    if splits:
        return f"there are {', '.join(str(path.with_suffix('')) for path in splits[:5])}; give one of these"
    where = "" if prefix.is_absolute() else f" (relative to {Path.cwd()})"
    return f"check the prefix{where} or build the dataset"


def read_header(prefix: str | Path) -> tuple[np.dtype, int, int]:
    """The header of the .idx file: dtype, sequences, document boundaries. Raises DataError for damage."""
    path = dataset_path(prefix, ".idx")
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise damaged(prefix, ".idx", "does not start with the Megatron-LM index magic")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != INDEX_VERSION or code not in DTYPE_CODES:
        raise damaged(prefix, ".idx", f"has version {version} and dtype code {code}, which are not supported")
    # A damaged count such as 2^60 would fail as an allocation.
    if max(num_sequences, num_boundaries) > path.stat().st_size:
        raise damaged(prefix, ".idx", "is cut off")
    return np.dtype(DTYPE_CODES[code]), num_sequences, num_boundaries


def document_starts(prefix: str | Path, num_sequences: int, num_boundaries: int) -> np.ndarray:
    """The first sequence of each document with sequences, int64, from the end of the .idx file. Raises: DataError."""
    path = dataset_path(prefix, ".idx")
    boundaries = np.fromfile(path, "<i8", num_boundaries, offset=HEADER.size + 12 * num_sequences)
    if (
        num_boundaries < 2
        or boundaries[0] != 0
        or boundaries[-1] != num_sequences
        or np.any(boundaries[1:] < boundaries[:-1])
    ):
        raise damaged(
            prefix, ".idx", f"has document boundaries that do not increase from 0 to {num_sequences}"
        )
    return np.unique(boundaries[:-1][boundaries[:-1] < num_sequences])


class IndexedDataset:
    """A memory-mapped dataset. Opening is O(1); an instance pickles as its prefix and reopens.

    Args:
        sequential: the files will be read from start to end, not at random.
        manifest: of files whose manifest is not yet written; None: it is read.
    Attributes:
        num_documents, num_tokens: counts.
        tokens: [num_tokens], memory-mapped, the stored dtype.
        pointers: int64 [num_documents], memory-mapped (of joined sequences in memory): byte position of each document
            in the .bin file.
        lengths: int32 [num_documents], memory-mapped like pointers: tokens of each document.
        entities: int32 [num_tokens], like tokens: the content of PREFIX.ent; None: there is no such file.
        text_hashes: uint64 [num_documents], memory-mapped like pointers: the content of PREFIX.hash; or None.
        scores: float32 [records], memory-mapped like pointers: the content of PREFIX.score; or None.
        manifest: the manifest's tree (see data_utils/dataset/manifest.py).
    Raises: DataError when files are missing, damaged, or do not belong together.
    """

    def __init__(
        self, prefix: str | Path, sequential: bool = False, manifest: Mapping[str, Any] | None = None
    ) -> None:
        require_local(prefix)
        self.prefix = Path(prefix)
        # Windows are read in a random order, for which read-ahead would load pages that are not used.
        self._advice = mmap.MADV_SEQUENTIAL if sequential else mmap.MADV_RANDOM
        sizes = file_sizes(self.prefix)
        self.manifest = read_manifest(prefix) if manifest is None else dict(manifest)
        sizes |= file_sizes(prefix, [suffix for suffix in FURTHER if suffix in self.manifest["files"]])
        # Sizes are compared at every open, because it costs nothing; checksums are for `verify_some` and `verify`.
        for suffix, size in sizes.items():
            if size != (recorded := self.manifest["files"][suffix]["bytes"]):
                raise self.damaged(suffix, f"has {size} bytes, but the manifest records {recorded}")
        self.dtype, self.num_documents, num_boundaries = read_header(prefix)
        self.num_tokens = sizes[".bin"] // self.dtype.itemsize
        expected = HEADER.size + 12 * self.num_documents + 8 * num_boundaries
        if sizes[".idx"] != expected:
            raise self.damaged(".idx", f"has {sizes['.idx']} bytes, but its header requires {expected}")
        if not self.num_documents or not self.num_tokens:
            raise self.damaged(".idx", "holds no tokens")
        if sizes[".bin"] % self.dtype.itemsize:
            token = f"the {self.dtype.itemsize} bytes of a token ({self.dtype.name})"
            raise self.damaged(
                ".bin", f"has {sizes['.bin']} bytes, which is not a multiple of {token}; it is truncated"
            )
        self._maps: list[tuple[mmap.mmap, int]] = []  # files for `prefetch`, and bytes of an element
        self.tokens: Any = self._open_tokens(".bin", self.dtype)
        self._check_further_sizes(sizes)
        self.entities: Any = None
        if ENTITIES in sizes:
            self.entities = self._open_tokens(ENTITIES, np.dtype("<i4"))
        self.text_hashes, self.scores = (self._open_further(suffix) for suffix in (TEXT_HASHES, SCORES))
        self.lengths, self.pointers = self._open_index()
        self._check_pointers(sizes[".bin"])
        self._joined = self.manifest.get("num_sequences") is not None
        if self._joined:
            self._join_sequences(num_boundaries, sizes[".bin"])
        # Unmap what the checks read; it stays in the page cache.
        self._index_map.madvise(mmap.MADV_DONTNEED)
        self._check_manifest_counts()

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.prefix,)

    def __len__(self) -> int:
        return self.num_documents

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, int [length], a view of the mapped file."""
        if not 0 <= index < self.num_documents:
            raise DataError(
                f"document {index} of {self.prefix} does not exist; it has {self.num_documents} documents."
            )
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def read_lengths(self, first: int, stop: int) -> np.ndarray:
        """The lengths of documents [first, stop), int32, by one read: the memory map has no read-ahead."""
        if self._joined:
            return self.lengths[first:stop]
        count, start = max(min(stop, self.num_documents) - first, 0), HEADER.size + 4 * first
        return np.fromfile(dataset_path(self.prefix, ".idx"), "<i4", count, offset=start)

    def prefetch(self, starts: np.ndarray, num_tokens: int) -> None:
        """Ask the kernel to read `num_tokens` tokens from each of `starts`, int64 [n], without waiting."""
        for mapped, itemsize in self._maps:
            first = starts * itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            stop = np.minimum(starts + num_tokens, self.num_tokens) * itemsize
            advise, advice = mapped.madvise, mmap.MADV_WILLNEED
            for begin, size in zip(first.tolist(), (stop - first).tolist(), strict=True):
                advise(advice, begin, size)

    def require_tokenizer(self, fingerprint: str, vocab_size: int, eos: int) -> None:
        """Raise DataError unless the dataset was built with the tokenizer of this fingerprint and size."""
        if self.manifest.get("adopted"):
            largest = self.manifest["largest_id"]
            if largest >= vocab_size:
                raise DataError(
                    f"dataset {self.prefix} contains the id {largest}, but the tokenizer has only {vocab_size} ids; "
                    "set the section tokenizer to the tokenizer that built the dataset."
                )
            logger.warning("dataset %s was adopted, so its tokenizer cannot be checked", self.prefix)
            return
        tokenizer = self.manifest.get("tokenizer") or {}
        recorded = (tokenizer.get("fingerprint"), self.manifest.get("vocab_size"), self.manifest.get("eos"))
        if recorded != (fingerprint, vocab_size, eos):
            raise DataError(
                f"dataset {self.prefix} was built with another tokenizer ({tokenizer_name(tokenizer)}, "
                f"{recorded[1]} ids, eos {recorded[2]}) than the configured one ({fingerprint[:12]}, {vocab_size} "
                f"ids, eos {eos}); set the section tokenizer to that of {self.prefix}.json, or rebuild the dataset."
            )

    def verify_some(self, blocks: int) -> None:
        """Check `blocks` random blocks (1 MiB each) of every file. Raises: DataError that names file and offset."""
        for suffix, recorded in self.manifest["files"].items():
            count = -(-recorded["bytes"] // recorded["block_bytes"])
            numbers = np.random.default_rng().choice(count, min(blocks, count), replace=False)
            at = damaged_block(dataset_path(self.prefix, suffix), recorded, sorted(numbers.tolist()))
            if at is not None:
                raise self.damaged(suffix, damage_at(at))

    def _map(self, suffix: str) -> mmap.mmap:
        """The memory map of a file, which lives as long as an array uses it."""
        path = dataset_path(self.prefix, suffix)
        with open(path, "rb") as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:  # as on some network file systems
                raise DataError(
                    f"{path} cannot be memory-mapped ({error.strerror}); copy the dataset to another file system, such "
                    "as a local disk."
                ) from None
        mapped.madvise(self._advice)
        return mapped

    def _open_tokens(self, suffix: str, dtype: np.dtype) -> Any:
        """Map a file with an element for each token."""
        mapped = self._map(suffix)
        self._maps.append((mapped, dtype.itemsize))
        return np.frombuffer(mapped, dtype)

    def _check_further_sizes(self, sizes: Mapping[str, int]) -> None:
        records = self.num_documents // documents_per_record(self.manifest)
        counts = {"token": self.num_tokens, "document": self.num_documents, "record": records}
        for suffix, (counted, dtype) in FURTHER.items():
            size, count = np.dtype(dtype).itemsize, counts[counted]
            if suffix in sizes and sizes[suffix] != size * count:
                raise self.damaged(suffix, f"does not have {size} bytes for each of {count} {counted}s")

    def _open_further(self, suffix: str) -> np.ndarray | None:
        """Map a file with an element for each document or record; None: the dataset has none."""
        if suffix not in self.manifest["files"]:
            return None
        return np.frombuffer(self._map(suffix), FURTHER[suffix][1])

    def _open_index(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the index. Returns: lengths and byte pointers of the documents."""
        self._index_map = mapped = self._map(".idx")
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)  # otherwise each page that is read takes 2 MiB
        count, start = self.num_documents, HEADER.size
        lengths = np.frombuffer(mapped, "<i4", count, start)
        return lengths, np.frombuffer(mapped, "<i8", count, start + 4 * count)

    def _check_pointers(self, bin_size: int) -> None:
        """First, last and some neighbouring pointers must agree with the lengths and the size of .bin."""
        last = self.num_documents - 1
        if (
            int(self.pointers[0])
            or int(self.pointers[last]) + int(self.lengths[last]) * self.dtype.itemsize != bin_size
        ):
            raise self.damaged(".idx", "does not match the .bin file: its pointers do not cover all tokens")
        at = (
            np.unique(np.linspace(0, last - 1, _OPEN_CHECKS, dtype=np.int64))
            if last
            else np.empty(0, np.int64)
        )
        gaps = self.pointers[at + 1] - self.pointers[at]
        if np.any(gaps != self.lengths[at].astype(np.int64) * self.dtype.itemsize):
            raise self.damaged(".idx", "has pointers that do not match its lengths")

    def _join_sequences(self, num_boundaries: int, bin_size: int) -> None:
        """Join the sequences of each document. Documents without a token are left out."""
        if self.manifest["num_sequences"] != self.num_documents:
            problem = (
                f"records {self.manifest['num_sequences']} sequences, but the index has {self.num_documents}"
            )
            raise self.damaged(".json", problem)
        starts = document_starts(self.prefix, self.num_documents, num_boundaries)
        begins = self.pointers[starts]
        sizes = np.diff(begins, append=bin_size) // self.dtype.itemsize
        if int(sizes.max()) > np.iinfo(np.int32).max:
            raise self.damaged(".idx", f"has a document of {int(sizes.max())} tokens, more than 2^31 - 1")
        self.pointers, self.lengths = begins[sizes > 0], sizes[sizes > 0].astype(np.int32)
        for array in (self.pointers, self.lengths):
            array.flags.writeable = False  # as memory-mapped ones, so that numba compiles its functions once
        self.num_documents = len(self.lengths)

    def _check_manifest_counts(self) -> None:
        ours = {"num_documents": self.num_documents, "num_tokens": self.num_tokens, "dtype": self.dtype.name}
        for key, value in ours.items():
            if self.manifest.get(key) != value:
                raise self.damaged(
                    ".json", f"records {key} {self.manifest.get(key)}, but the index has {value}"
                )

    def damaged(self, suffix: str, problem: str) -> DataError:
        return damaged(self.prefix, suffix, problem)
