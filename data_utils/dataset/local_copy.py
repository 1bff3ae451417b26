"""Copies of datasets on node-local storage: of shared file systems that are slow at random reads, and of stores.

All ranks of a node may call `local_copy` at once: one copies under a lock, and the others wait. The name of the copy
contains the checksum of the manifest, so a dataset that was built again is copied again and never mixed with an old
copy. Old copies are not removed. The manifest is written last, as in a build. A copy from a store that was stopped goes
on with what is there (transfer.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_utils.common.checksums import FileChecksums, difference
from data_utils.common.errors import DataError
from data_utils.common.files import disk_errors, new_file, open_locked, write_atomically
from data_utils.common.progress import progress_bar
from data_utils.common.urls import is_url
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import POSSIBLE_SUFFIXES, dataset_path, manifest_bytes, read_manifest
from data_utils.dataset.transfer import begun_bytes, fetch_file

_CHUNK = 8 << 20


def local_copy(prefix: str | Path, directory: str | Path) -> Path:
    """The prefix of a copy of the dataset in `directory`, which is made if it does not exist.

    The copied bytes are checked against the checksums of the manifest.
    Raises: DataError for a dataset that cannot be opened, too little space, or a damaged copy.
    """
    manifest = read_manifest(prefix) if is_url(prefix) else IndexedDataset(prefix).manifest
    directory = Path(directory)
    # The name has the content's checksum, so that a rebuilt dataset gets a copy of its own.
    target = directory / f"{Path(prefix).name}-{manifest['checksum'][:16]}"
    with disk_errors(target, "data.local_directory"):
        directory.mkdir(parents=True, exist_ok=True)
        # A whole copy, which its last file marks, is only read: it may be another user's.
        if not dataset_path(target, ".json").exists():
            # The ranks of a node: one copies, the others wait and find it.
            with open(open_locked(Path(f"{target}.lock"), wait=True), "w"):
                if not dataset_path(target, ".json").exists():
                    _refuse_links(target)
                    _copy_all(prefix, target, manifest)
        _refuse_links(target)
    if IndexedDataset(target).manifest["checksum"] != manifest["checksum"]:
        raise DataError(
            f"{target} has the name of a copy of {prefix} but different content; remove it or choose another "
            "data.local_directory."
        )
    return target


def _refuse_links(target: Path) -> None:
    """Raise DataError for a link under a name of the copy: others may write into a node's temporary directory."""
    for suffix in POSSIBLE_SUFFIXES:
        if dataset_path(target, suffix).is_symlink():
            raise DataError(
                f"{dataset_path(target, suffix)} is a symbolic link, which a local copy must not contain; remove it "
                "or choose another data.local_directory."
            )


def _copy_all(prefix: str | Path, target: Path, manifest: Mapping[str, Any]) -> None:
    files = manifest["files"].items()
    total = sum(entry["bytes"] for _, entry in files)
    needed = total - sum(begun_bytes(dataset_path(target, suffix)) for suffix, _ in files)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise DataError(
            f"a copy of dataset {prefix} needs {needed:,} bytes, but {target.parent} has {free:,} free; free some "
            "space or choose another data.local_directory."
        )
    with progress_bar(total=total, unit="B", unit_scale=True, desc=f"copy {prefix}") as bar:
        for suffix, recorded in files:
            if is_url(prefix):
                fetch_file(f"{prefix}{suffix}", dataset_path(target, suffix), recorded, bar)
            else:
                _copy(dataset_path(prefix, suffix), dataset_path(target, suffix), recorded, bar)
    # Last: without a manifest a copy that was interrupted does not open, and is made again.
    write_atomically(dataset_path(target, ".json"), manifest_bytes(manifest))


def _copy(source: Path, target: Path, recorded: Mapping[str, Any], bar: tqdm) -> None:
    checksums = FileChecksums(recorded["block_bytes"])
    target.unlink(missing_ok=True)  # of a stopped copy: there may be no space for both
    with open(source, "rb") as reader, new_file(target) as writer:
        while chunk := reader.read(_CHUNK):
            writer.write(chunk)
            checksums.update(chunk)
            bar.update(len(chunk))
        if problem := difference(recorded, checksums):
            raise DataError(f"{source} {problem}; rebuild the dataset, or copy it again.")
