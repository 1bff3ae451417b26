"""Objects of a store (a web server, a bucket, the hub): pinned when they are listed, then read by ranges.

An object's name, size and identity are noted once; every range that is read later is of this identity, or there is an
error. A read that is cut goes on at its byte. What the store refuses (no right, no such object) ends the work at once.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol, TypeVar

from data_utils.common.errors import DataError

RANGE_BYTES = 8 << 20  # the most that one request asks for
_SMALLEST_RANGE = 64 << 10

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TemporaryError(Exception):
    """A failure that the next attempt may not have. Its message is a few words for the user."""


class RefusedError(DataError):
    """The store does not give an object: it has none of this name, or we have no right to it."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often in a row a request is tried again, and after how long."""

    attempts: int = 10  # in a row that bring nothing
    first_wait: float = 1.0  # seconds; doubled by each failure
    longest_wait: float = 60.0

    def wait(self, failures: int) -> float:
        """Seconds before the next attempt. Args: failures: that brought nothing, in a row; 0 after a cut answer."""
        return min(self.first_wait * 2 ** max(failures - 1, 0), self.longest_wait)


RETRY_POLICY = RetryPolicy()  # of what is listed from now on


class Store(Protocol):
    """Where objects are. It is sent to worker processes, so it holds settings and opens connections later."""

    @property
    def retry_policy(self) -> RetryPolicy: ...

    def stream(self, stored: StoredObject, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop) of an object; they may end early.

        Raises: TemporaryError; DataError if the object is refused or another one than was listed.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was when it was listed. It stands where readers take a path."""

    label: str  # its URL without secrets, for plans, manifests and messages
    size: int  # bytes
    identity: str  # of its content: an ETag, a time of change, a checksum
    key: str = field(repr=False)  # its name in the store; that of https:// may hold secrets
    store: Store = field(repr=False)

    def __str__(self) -> str:
        return self.label

    @property
    def name(self) -> str:
        return self.label.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def read(self, start: int, stop: int, is_closed: threading.Event | None = None) -> bytes:
        """The bytes [start, stop). Args: is_closed: ends the wait for another attempt.

        Raises: DataError where attempts in a row bring nothing, the object is refused, or it is another one.
        """
        retry_policy, data, failures = self.store.retry_policy, bytearray(), 0
        while len(data) < stop - start:
            before, begin = len(data), start + len(data)
            # Less after a failure: of a cut answer some stores give nothing.
            end = min(stop, begin + max(RANGE_BYTES >> failures, _SMALLEST_RANGE))
            try:
                for chunk in self.store.stream(self, begin, end):
                    data += chunk
                    if len(data) > end - start:  # at once: it may be the rest of a large object
                        raise self.changed()
                problem = "the answer ended early"
            except TemporaryError as error:
                problem = str(error)
            if len(data) - before >= end - begin:
                failures = 0
                continue
            failures = 0 if len(data) > before else failures + 1
            _back_off(self.label, retry_policy, failures, problem, is_closed)
        return bytes(data)

    def changed(self) -> DataError:
        return DataError(
            f"{self.label} is not what it was when it was listed (its size or identity is another); repeat the "
            "command, with --restart if it has begun to build from the former object."
        )


def input_change(before: Iterable[Sequence[Any]], now: Iterable[Sequence[Any]], files: str) -> str:
    """How the inputs of a plan that was begun differ from those of now.

    Args: before, now: [name, size, identity] of each; files: what they are called, such as "input files".
    """
    old, new = ({entry[0]: list(entry) for entry in entries} for entries in (before, now))
    for name, entry in old.items():
        if new.get(name, entry) != entry:
            return f"another version of input {name}"
    for names, others, difference in ((new, old, "without"), (old, new, "with")):
        for name in names:
            if name not in others:  # named: among a million nobody finds it
                return f"other {files}, {difference} {name}"
    return f"other {files}, in another order"


def with_retries(label: str, retry_policy: RetryPolicy, attempt: Callable[[], _Result]) -> _Result:
    """The result of a request that brings all or nothing. Raises DataError after the last attempt."""
    failures = 0
    while True:
        try:
            return attempt()
        except TemporaryError as error:
            failures += 1
            _back_off(label, retry_policy, failures, str(error), None)


def _back_off(
    label: str, retry_policy: RetryPolicy, failures: int, problem: str, is_closed: threading.Event | None
) -> None:
    """Wait before another attempt. Raises DataError if there is none."""
    if failures >= retry_policy.attempts:
        raise DataError(
            f"{label}: {failures} attempts in a row brought nothing ({problem}); check the network and the store, and "
            "repeat the command, which goes on with what is finished."
        )
    seconds = retry_policy.wait(failures)
    if failures:
        log.warning(
            "%s: %s; attempt %d of %d in %.0f s", label, problem, failures + 1, retry_policy.attempts, seconds
        )
    if (is_closed or threading.Event()).wait(seconds):
        raise DataError(f"{label} was closed.")


class RangeReader(io.RawIOBase):
    """An object as a file to read. Between the positions given to `expect` it reads ahead, else what is asked for."""

    def __init__(self, stored: StoredObject) -> None:
        super().__init__()
        self.stored = stored
        self._position = 0
        self._stop = 0  # up to here it reads ahead
        self._begin, self._data = 0, b""  # what was read ahead, and where it begins
        self._next: _Ahead | None = None
        self._is_closed = threading.Event()

    def expect(self, start: int, stop: int) -> None:
        """Go to `start`, from where all bytes up to `stop` will be read in order."""
        self._position, self._stop = start, min(stop, self.stored.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.stored.size}[whence]
        )
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for, unless the object ends."""
        left = max(self.stored.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        if self._position >= self._stop:
            data = self.stored.read(self._position, self._position + size, self._is_closed)
            self._position += size
            return data
        parts = []
        while size:
            part = self._ahead(size)
            parts.append(part)
            self._position += len(part)
            size -= len(part)
        return b"".join(parts)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._is_closed.set()
        self._data, self._next = b"", None
        super().close()

    def _ahead(self, size: int) -> bytes:
        """Up to `size` bytes at the position, of what was read ahead."""
        at = self._position - self._begin
        if not 0 <= at < len(self._data):
            self._begin, at = self._position, 0
            fetched = self._next
            if fetched is None or fetched.start != self._position:
                fetched = self._fetch(self._position, max(self._stop, self._position + size))
            self._data = fetched.result()
            stop = self._begin + len(self._data)
            # While these bytes are used the next ones are on their way.
            self._next = self._fetch(stop, self._stop) if stop < self._stop else None
        return self._data[at : at + size]

    def _fetch(self, start: int, stop: int) -> _Ahead:
        return _Ahead(self.stored, start, min(start + RANGE_BYTES, stop), self._is_closed)


class _Ahead:
    """A range that a thread reads."""

    def __init__(self, stored: StoredObject, start: int, stop: int, is_closed: threading.Event) -> None:
        self.start = start
        self._data = b""
        self._error: BaseException | None = None
        # A daemon: a process that ends does not wait for a store.
        self._thread = threading.Thread(target=self._read, args=(stored, stop, is_closed), daemon=True)
        self._thread.start()

    def _read(self, stored: StoredObject, stop: int, is_closed: threading.Event) -> None:
        try:
            self._data = stored.read(self.start, stop, is_closed)
        except BaseException as error:
            self._error = error

    def result(self) -> bytes:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._data
