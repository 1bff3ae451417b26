"""The working directory of a corpus build: its plan and its finished shards.

    PREFIX.build/plan.json       the inputs and options of the build; a build with others is refused
    PREFIX.build/shard-000017/   for each split its tokens, lengths (and others), and record.json
    PREFIX.build/committing      the dataset is complete on disk and is being renamed to the prefix
    PREFIX.build/done.json       the plan, renamed when the dataset is in place and the rest is to be removed

A shard is written under a unique name and renamed once all of it is on disk. So a shard that exists is complete, any
process may die at any moment, and two processes may make the same shard.

The price: until a build is finished, it needs twice the space of its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import DataError
from data_utils.common.files import (
    disk_errors,
    remove_directory,
    sync_directory,
    sync_file,
    write_atomically,
    write_synced,
)
from data_utils.common.untrusted import conform, parse_json, read_bounded
from data_utils.dataset.manifest import FURTHER
from data_utils.storage.objects import input_change

_PLAN, _COMMITTING, _DONE, _STOP, _RECORD = "plan.json", "committing", "done.json", "stop", "record.json"
_MAX_BYTES = 256 << 20  # of a plan or a record
_SHARD_NAME = re.compile(r"shard-(\d{6,})")
_BUILD_ENTRY = re.compile(r"shard-\d{6,}(\.[0-9a-f]{32})?|plan\.json(\.partial)?|committing|done\.json|stop")


class _Plan(TypedDict):
    """The fields of a plan that are read; the others are only compared."""

    inputs: NotRequired[list[Annotated[list[str | int | float | None], Field(min_length=1)]] | None]


class BuildDirectory:
    """The directory `PREFIX.build`. Raises DataError where it cannot be read or written."""

    def __init__(self, prefix: str | Path) -> None:
        self.path = Path(f"{prefix}.build")

    def open(self, plan: Mapping[str, Any], restart: bool) -> None:
        """Start a build, or continue the one that was started with the same plan.

        Raises: DataError if another build was started here, unless `restart` discards it; for too many inputs.
        """
        content = json.dumps(plan, indent=1).encode()
        if len(content) > _MAX_BYTES:  # now: what cannot be read back would end the build after its work
            raise DataError(
                f"{len(plan['inputs']):,} input files need a plan of {len(content):,} bytes, more than the "
                f"{_MAX_BYTES:,} that are read back; join files, or build several datasets and list them all in "
                "data.train."
            )
        with disk_errors(self.path):
            if restart:
                self.remove()
            started = _read_plan(self.path / _PLAN)
            if started is None:
                self.remove()
                self.path.mkdir(parents=True)
                write_atomically(self.path / _PLAN, content)
            # Shards of another plan would be mixed into this build without a word.
            elif (difference := _difference(started, _as_json_reads(plan))) is not None:
                raise DataError(
                    f"{self.path} holds an unfinished build that was started with {difference}; repeat the original "
                    "command, or discard the build with --restart."
                )
            for entry in self.path.iterdir():  # left by killed processes
                if "." in entry.name and _BUILD_ENTRY.fullmatch(entry.name) and entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
            (self.path / _STOP).unlink(missing_ok=True)

    def require_unchanged(self, plan: Mapping[str, Any]) -> None:
        """Raise DataError for input that changed while this build read it: its shards are of neither version."""
        with disk_errors(self.path):
            difference = _difference(_read_plan(self.path / _PLAN), _as_json_reads(plan))
        if difference is not None:
            self.remove()
            raise DataError(
                f"while the text was read there came {difference}; repeat the command when nothing writes to it."
            )

    def finished(self) -> set[int]:
        """The numbers of the shards that are finished."""
        with disk_errors(self.path):
            matches = [_SHARD_NAME.fullmatch(entry.name) for entry in self.path.iterdir()]
        return {int(match[1]) for match in matches if match}

    def shard(self, number: int) -> Path:
        return self.path / f"shard-{number:06}"

    def record(self, number: int) -> dict[str, Any]:
        """The record that `ShardWriter.commit` stored with a shard. Raises: DataError if it is missing or damaged."""
        try:
            record = parse_json(read_bounded(self.shard(number) / _RECORD, _MAX_BYTES))
            return conform(record, dict[str, Any])
        except (OSError, ValueError):
            raise self._damaged(number) from None

    def read(
        self, number: int, split: int, dtype: np.dtype, num_documents: int, num_tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [num_tokens], mapped, and lengths int32 [num_documents] of one split of a finished shard."""
        tokens = self._array(number, f"{split}.tokens", dtype, num_tokens)
        return tokens, self._array(number, f"{split}.lengths", np.dtype("<i4"), num_documents)

    def hashes(self, number: int, split: int, num_documents: int) -> np.ndarray:
        """Hashes of the documents of one split of a finished shard, uint64 [num_documents, 2]."""
        return self._array(number, f"{split}.hashes", np.dtype("<u8"), 2 * num_documents).reshape(-1, 2)

    def further(self, number: int, split: int, suffix: str, counts: Mapping[str, int]) -> np.ndarray:
        """The elements of a further file of one split of a finished shard.

        Args: suffix: of FURTHER. counts: of tokens, documents and records.
        """
        counted, dtype = FURTHER[suffix]
        return self._array(number, f"{split}{suffix}", np.dtype(dtype), counts[counted])

    def _array(self, number: int, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.shard(number) / name
        if not path.is_file() or path.stat().st_size != count * dtype.itemsize:
            raise self._damaged(number)
        return np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)

    def _damaged(self, number: int) -> DataError:
        return DataError(f"{self.shard(number)} is damaged; discard the build with --restart.")

    def request_stop(self) -> None:
        """Ask the other ranks to stop. On a full disk they do not learn of it."""
        with contextlib.suppress(OSError):
            (self.path / _STOP).touch()

    def stop_requested(self) -> bool:
        return (self.path / _STOP).exists()

    def mark_committing(self) -> None:
        """From now on the files under the prefix are this build's, or none."""
        with disk_errors(self.path):
            (self.path / _COMMITTING).touch()
            sync_directory(self.path)

    def is_committing(self) -> bool:
        return (self.path / _COMMITTING).exists() and (self.path / _PLAN).exists()

    def mark_done(self) -> None:
        """The datasets are in place: a start with this plan has only the directory to remove."""
        with disk_errors(self.path):
            os.replace(self.path / _PLAN, self.path / _DONE)
            sync_directory(self.path)

    def is_done(self, plan: Mapping[str, Any] | None = None) -> bool:
        """Whether a build, that of the plan if one is given, ended while it removed its directory."""
        with disk_errors(self.path):
            done = _read_plan(self.path / _DONE)
        return done is not None and (plan is None or _difference(done, _as_json_reads(plan)) is None)

    def remove(self) -> None:
        """Remove the build. Raises DataError, removing nothing, if the directory holds anything else."""
        with disk_errors(self.path):
            entries = list(self.path.iterdir()) if self.path.is_dir() else []
            foreign = sorted(entry.name for entry in entries if not _BUILD_ENTRY.fullmatch(entry.name))
            # Nothing is removed that a build did not write.
            if foreign:
                raise DataError(
                    f"{self.path} is the build directory, but it contains {foreign[0]}, which is not part of a build; "
                    "move that file away."
                )
            for name in (_PLAN, _COMMITTING):  # first: without them the rest is ignored
                (self.path / name).unlink(missing_ok=True)
            for entry in entries:  # before the plan of a build that is done
                if entry.is_dir():
                    remove_directory(entry)
            if self.path.is_dir():
                remove_directory(self.path)


def _read_plan(path: Path) -> dict[str, Any] | None:
    try:
        plan: dict[str, Any] = parse_json(read_bounded(path, _MAX_BYTES))
        conform(plan, _Plan)
        return plan
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise DataError(f"{path} is damaged; discard the build with --restart.") from None


def _as_json_reads(plan: Mapping[str, Any]) -> Any:
    """The plan as it comes back from its file: tuples are lists."""
    return json.loads(json.dumps(plan))


def _difference(started: Any, plan: Any) -> str | None:
    """A description of how the started build differs from `plan`; None if they agree."""
    for key in {**plan, **(started if isinstance(started, dict) else {})}:
        old_value, new_value = (tree.get(key) if isinstance(tree, dict) else None for tree in (started, plan))
        if old_value == new_value:
            continue
        if key == "tokenizer":
            return f"another tokenizer ({old_value})"
        if key != "inputs":
            return f"{key} {old_value!r} instead of {new_value!r}"
        return input_change(old_value or [], new_value or [], "input files")
    return None


class ShardWriter:
    """Write one shard: `add` documents, then `commit`. Leaving the context without it removes the files."""

    def __init__(self, directory: BuildDirectory, number: int, num_splits: int, names: Sequence[str]) -> None:
        self._directory = directory
        self._final = directory.shard(number)
        self._partial = self._final.with_name(f"{self._final.name}.{uuid.uuid4().hex}")
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._partial, ignore_errors=True)
        with disk_errors(directory.path):
            self._partial.mkdir()
            self._files = [
                {
                    name: self._stack.enter_context((self._partial / f"{split}{name}").open("wb"))
                    for name in names
                }
                for split in range(num_splits)
            ]

    def add(self, split: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Append documents to a split: arrays as they are stored, by the names of their files."""
        with disk_errors(self._directory.path):
            for name, array in arrays.items():
                self._files[split][name].write(np.ascontiguousarray(array).data)

    def commit(self, record: Mapping[str, Any]) -> None:
        with disk_errors(self._directory.path):
            for files in self._files:
                for file in files.values():
                    sync_file(file)
            write_synced(self._partial / _RECORD, json.dumps(record).encode())
            sync_directory(self._partial)
            try:
                os.rename(self._partial, self._final)
            except OSError:
                if not self._final.is_dir():  # otherwise another process was faster, with the same bytes
                    raise
            sync_directory(self._directory.path)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails a second time
            self._stack.close()
