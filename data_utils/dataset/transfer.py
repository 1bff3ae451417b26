"""Datasets in stores: fetched block by block, checked, and pushed; each block is compared with the manifest's checksum.

A file is fetched into NAME.partial, by several ranges at a time. What a stopped copy left there is read again, and the
blocks that agree with the manifest stay; so no list of finished blocks can be wrong. A dataset is pushed with its
manifest last, as it is written to disk: without one it opens to nobody.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_utils.common.checksums import FileChecksums, damage_at, difference, first_difference
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.files import remove_files, sync_descriptor, sync_directory
from data_utils.common.progress import progress_bar
from data_utils.common.urls import is_url
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import dataset_path, manifest_bytes, read_manifest, require_public
from data_utils.storage import objects
from data_utils.storage.buckets import SCHEMES, BucketStore, parse_bucket
from data_utils.storage.listing import object_named
from data_utils.storage.objects import RANGE_BYTES, StoredObject

_THREADS = 8  # ranges at a time
_TRIES = 3  # of a range whose bytes are not those of the manifest
_PART_BYTES = 64 << 20  # at least; of an upload in parts, of which a store takes 10,000
_MOST_PARTS = 9000


def fetch_file(url: str, target: Path, recorded: Mapping[str, Any], bar: tqdm) -> None:
    """Make `target` a copy of a stored file of a dataset, whose entry in the manifest is `recorded`.

    Raises: DataError if the object is missing, refused or differs from the manifest: what is right of it stays in
        TARGET.partial; OSError of the disk, after which nothing stays.
    """
    source = _source(url, recorded)
    partial = target.with_name(f"{target.name}.partial")
    # A copy was stopped after this file and before its manifest.
    if target.is_file() and not partial.exists():
        os.replace(target, partial)
    try:
        with _opened(partial) as descriptor:
            is_begun = os.fstat(descriptor).st_size == source.size
            os.ftruncate(descriptor, source.size)

            def is_there(start: int, stop: int) -> bool:
                return is_begun and _is_there(descriptor, recorded, start, stop)

            _read_blocks(source, recorded, bar, lambda data, at: _write(descriptor, data, at), is_there)
            sync_descriptor(descriptor)
        os.replace(partial, target)
    except OSError:
        remove_files(partial)
        raise
    sync_directory(target.parent)


def begun_bytes(target: Path) -> int:
    """Bytes of the disk that a stopped copy of a file has, and that another one uses again."""
    for path in (target.with_name(f"{target.name}.partial"), target):
        with contextlib.suppress(OSError):
            return os.lstat(path).st_blocks * 512
    return 0


def verify_stored(prefix: str) -> dict[str, Any]:
    """Read all files of a dataset in a store and compare their blocks with the manifest, which is returned.

    Raises: DataError at the first difference.
    """
    manifest = read_manifest(prefix)
    files = manifest["files"].items()
    total = sum(entry["bytes"] for _, entry in files)
    with progress_bar(total=total, unit="B", unit_scale=True, desc=f"verify {prefix}") as bar:
        for suffix, recorded in files:
            _read_blocks(_source(f"{prefix}{suffix}", recorded), recorded, bar)
    return manifest


def push_dataset(prefix: str, url: str, overwrite: bool) -> str:
    """Write a dataset into a bucket, under the prefix `url`, or `url` and its own name if that ends with /.

    Returns: the prefix in the bucket. Raises: ConfigError, DataError.
    """
    dataset = IndexedDataset(prefix, sequential=True)
    require_public(url)
    if url.partition("://")[0].lower() not in SCHEMES or not is_url(url):
        raise ConfigError(
            f"{url} is no bucket to write to; give s3://, gs:// or az://. For the hub: hf upload ORG/NAME "
            f"{prefix}.bin --repo-type dataset, and so on."
        )
    bucket, key = parse_bucket(url)
    if url.endswith("/"):
        url, key = url + dataset.prefix.name, key + dataset.prefix.name
    if not key:
        raise ConfigError(f"{url} is a bucket without a name in it; give {url}/{dataset.prefix.name}")
    store, files = BucketStore(bucket, objects.RETRY_POLICY), dataset.manifest["files"]
    if store.find(f"{key}.json") is not None:
        if not overwrite and read_manifest(url)["checksum"] == dataset.manifest["checksum"]:
            return url
        if not overwrite:
            raise DataError(f"{url} is another dataset; choose another name, or pass --overwrite.")
        store.delete(f"{key}.json")  # first: what is left of the old dataset must open to nobody
    total = sum(entry["bytes"] for entry in files.values())
    with progress_bar(total=total, unit="B", unit_scale=True, desc=f"push {prefix}") as bar:
        for suffix, recorded in files.items():
            path = dataset_path(prefix, suffix)
            store.write(f"{key}{suffix}", lambda path=path, recorded=recorded: _checked(path, recorded, bar))  # type: ignore[misc]
            _source(f"{url}{suffix}", recorded)
    store.write(f"{key}.json", lambda: [manifest_bytes(dataset.manifest)])
    return url


def _source(url: str, recorded: Mapping[str, Any]) -> StoredObject:
    """The object of a file of a dataset. Raises DataError unless it has the bytes that the manifest records."""
    source = object_named(url)
    if source is None:
        raise DataError(f"{url} does not exist, though its manifest does; push the dataset again.")
    if source.size != recorded["bytes"]:
        raise DataError(
            f"{url} has {source.size:,} bytes, but the manifest records {recorded['bytes']:,}; push the dataset again."
        )
    return source


def _read_blocks(
    source: StoredObject,
    recorded: Mapping[str, Any],
    bar: tqdm,
    write: Callable[[bytes, int], None] = lambda data, at: None,
    is_there: Callable[[int, int], bool] = lambda start, stop: False,
) -> None:
    """Read ranges of whole blocks of an object, several at a time, and hand them to `write(data, position)`.

    Args: is_there: whether the blocks of [start, stop) are not needed. Raises: DataError for blocks that stay wrong.
    """
    size, block = recorded["bytes"], recorded["block_bytes"]
    step = max(RANGE_BYTES // block, 1) * block
    is_closed = threading.Event()

    def fetch(start: int) -> int:
        stop = min(start + step, size)
        damage = None
        for _ in range(0 if is_there(start, stop) else _TRIES):
            sums = FileChecksums(block)
            for at in range(start, stop, RANGE_BYTES):
                data = source.read(at, min(at + RANGE_BYTES, stop), is_closed)
                sums.update(data)
                write(data, at)
            damage = first_difference(recorded, start // block, sums)
            if damage is None:
                break
        if damage is not None:
            raise DataError(f"{source} {damage_at(damage)}; push the dataset again.")
        return stop - start

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for count in pool.map(fetch, range(0, size, step)):
            bar.update(count)
    finally:
        is_closed.set()  # a thread that waits for another attempt would delay the end
        pool.shutdown(cancel_futures=True)


def _is_there(descriptor: int, recorded: Mapping[str, Any], start: int, stop: int) -> bool:
    """Whether blocks of an open file are those of the manifest."""
    sums = FileChecksums(recorded["block_bytes"])
    for at in range(start, stop, RANGE_BYTES):
        sums.update(os.pread(descriptor, min(RANGE_BYTES, stop - at), at))
    with contextlib.suppress(ValueError):  # a file that ends early has fewer checksums
        return first_difference(recorded, start // recorded["block_bytes"], sums) is None
    return False


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file to read and write; no link is followed. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it exists and is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _checked(path: Path, recorded: Mapping[str, Any], bar: tqdm) -> Iterator[bytes]:
    """The content of a file in parts. Raises DataError at its end if it is not what the manifest records."""
    sums = FileChecksums(recorded["block_bytes"])
    part = max(_PART_BYTES, recorded["bytes"] // _MOST_PARTS)
    with open(path, "rb") as file:
        while chunk := file.read(part):
            sums.update(chunk)
            yield chunk
            bar.update(len(chunk))
    if problem := difference(recorded, sums):
        raise DataError(f"{path} {problem}; rebuild the dataset, or copy it again.")
