"""Copies of datasets on node-local storage, for when the shared file system is slow at random reads.

All ranks of a node may call `local_copy` at once: one copies, under a lock, and the others wait for it. The
copy's name carries the checksum of the tokens, so a dataset that was rebuilt is copied again and never mixed
with an old copy. Old copies are not removed. The manifest goes last, as in a build.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from tqdm import tqdm

from data_utils.checksums import checksums_like, difference, identity
from data_utils.indexed_dataset import (
    SUFFIXES,
    IndexedDataset,
    dataset_path,
    disk_errors,
    sync_directory,
    sync_file,
)
from megatron_lite.errors import DataError

_CHUNK = 8 << 20


def local_copy(prefix: str | Path, directory: str | Path) -> Path:
    """The prefix of a copy of the dataset in `directory`, made now if it is not there yet.

    The copied bytes are checked against the checksums of the manifest.
    Raises: DataError for a dataset without a manifest, too little space, or damage on the way.
    """
    source, directory = IndexedDataset(prefix), Path(directory)
    if source.manifest is None:
        raise DataError(f"dataset {prefix} has no manifest, so a copy cannot be checked; use it where it is.")
    files = source.manifest["files"]
    target = directory / f"{source.prefix.name}-{identity(files['.bin'])[:16]}"
    with disk_errors(target, "data.local_directory"):
        directory.mkdir(parents=True, exist_ok=True)
        with open(f"{target}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not dataset_path(target, ".json").exists():
                _copy_all(prefix, target, files)
    IndexedDataset(target)
    return target


def _copy_all(prefix: str | Path, target: Path, files: dict) -> None:
    needed = sum(entry["bytes"] for entry in files.values())
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise DataError(
            f"a copy of dataset {prefix} needs {needed:,} bytes but {target.parent} has {free:,} free; free "
            f"some, or use the dataset where it is."
        )
    with tqdm(total=needed, unit="B", unit_scale=True, desc=f"copy {prefix}", disable=None) as bar:
        for suffix in SUFFIXES:  # the manifest is the last of them
            _copy(dataset_path(prefix, suffix), dataset_path(target, suffix), files.get(suffix), bar)


def _copy(source: Path, target: Path, recorded: dict | None, bar: tqdm) -> None:
    partial = Path(f"{target}.partial")
    checksums = None if recorded is None else checksums_like(recorded)
    with open(source, "rb") as reader, open(partial, "wb") as writer:
        while chunk := reader.read(_CHUNK):
            writer.write(chunk)
            if checksums is not None:
                checksums.update(chunk)
            bar.update(len(chunk))
        sync_file(writer)
    if recorded is not None and checksums is not None and (problem := difference(recorded, checksums)):
        partial.unlink()
        raise DataError(f"{source} {problem}; rebuild the dataset, or copy it again.")
    os.replace(partial, target)
    sync_directory(target.parent)
