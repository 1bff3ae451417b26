"""Ranks meet before they form a process group: they compare what they begin with, and none waits for one that has left.

They meet in the store that later serves torch's process group, at MASTER_ADDR and MASTER_PORT. Rank 0 writes down what
it begins with, and each other rank compares its own. A rank that refuses the start leaves its reason in the store,
where those that wait find it. Torch is imported when the store is opened, so a mistake is printed before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from data_utils.common.errors import ConfigError, ExitStatus, UserError
from data_utils.common.setting_files import one_line, shorten
from data_utils.common.untrusted import conform_to, parse_json
from megatron_lite.parallel.launch import Launch, attempt, check_port_is_free, meeting_place, report_status

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

PATIENCE_SECONDS = (
    60.0  # that a rank which leaves waits until the others know: they may still import libraries
)
SILENCE_SECONDS = (
    15.0  # until a rank speaks whose node's first rank, which usually says the same, has not spoken
)
NAMED_SECONDS = 60.0  # until rank 0 names the ranks for which it waits
_SHOWN = 6  # differences in a message
_VALUE_LENGTH = 80
_REASON_LENGTH = 600  # of another rank's reason in a message
_TICK_SECONDS = (0.02, 0.5)  # between two looks at the store, growing: a thousand ranks look


@dataclass(frozen=True)
class Leaver:
    """A rank that ends before all have met."""

    rank: int
    local_rank: int
    host: str
    status: int
    reason: str


class LeftError(UserError):
    """Another rank has ended this start, with that rank's status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = ExitStatus(status)  # type: ignore[misc]  # of the instance, not of the class


class Meeting:
    """Of one process with the others of its start."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._launch: Launch | None = None
        self._is_over = False

    def open(self, launch: Launch, timeout_seconds: float) -> Store:
        """The store of this start, opened at the first call.

        Raises: ConfigError if the port is taken, or nobody said where the ranks meet.
        """
        self._launch = launch
        if self._store is None:
            self._store = _open(launch, timeout_seconds)
        return self._store

    def over(self) -> None:
        """Nobody waits for this process any more: all have met, or it does not train."""
        self._is_over = True

    def compare(self, facts: Mapping[str, str]) -> None:
        """Return when all ranks are here with equal facts: name -> value, both in words.

        Raises: ConfigError on a rank whose facts are not rank 0's; LeftError where another rank has left.
        """
        assert self._store is not None and self._launch is not None, "the store is open"
        written = json.dumps(dict(facts), sort_keys=True)
        digest = sha256(written.encode()).hexdigest()
        if self._launch.rank == 0:
            self._store.set("facts", written)
            self._store.set("digest", digest)
        self._wait(lambda store: store.check(["digest"]))
        if self._store.get("digest").decode() != digest:
            raise self._differs(facts, parse_json(self._store.get("facts")))
        self.gather("compared")

    def _differs(self, own: Mapping[str, str], first: Mapping[str, str]) -> ConfigError:
        assert self._launch is not None
        absent = "absent"
        keys = [key for key in sorted({*own, *first}) if own.get(key, absent) != first.get(key, absent)]
        values = [
            [shorten(its.get(key, absent), _VALUE_LENGTH) for its in (own, first)] for key in keys[:_SHOWN]
        ]
        shown = [
            f"{key} is {here}, and {there} there" for key, (here, there) in zip(keys, values, strict=False)
        ]
        more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        error = ConfigError(
            f"rank {self._launch.rank} on {socket.gethostname()} does not begin with what rank 0 has: "
            f"{'; '.join(shown)}{more}. Start all ranks with the same arguments, files and program."
        )
        error.only_here = True
        return error

    def gather(self, point: str) -> None:
        """Return when all ranks have come to a point. Raises: LeftError if one has left."""
        assert self._store is not None and self._launch is not None, "the store is open"
        size = self._launch.world_size
        self._store.set(f"{point}/{self._launch.rank}", "here")
        self._store.add(point, 1)
        begin, named = time.monotonic(), self._launch.rank != 0

        def all_here(store: Store) -> bool:
            nonlocal named
            if not named and time.monotonic() - begin > NAMED_SECONDS:
                named = True
                away = [rank for rank in range(size) if not store.check([f"{point}/{rank}"])]
                log.warning("waiting for %d of %d ranks, the first of them %s", len(away), size, away[:8])
            return store.add(point, 0) >= size

        self._wait(all_here)

    def _wait(self, is_reached: Callable[[Store], bool]) -> None:
        assert self._store is not None and self._launch is not None
        try:
            for _ in _ticks():
                if self._store.check(["left/1"]):
                    raise self._left(_leavers(self._store))
                if is_reached(self._store):
                    return
        except RuntimeError as error:  # torch's errors of a connection: rank 0 or its launcher has ended
            raise LeftError(
                f"rank 0, at {meeting_place(self._launch)[0]}, has ended before all ranks met; its own lines say why.",
                ExitStatus.CRASHED,
            ) from error

    def _left(self, leavers: list[Leaver]) -> LeftError:
        assert self._launch is not None
        first = leavers[0]
        others = sorted({leaver.rank for leaver in leavers[1:]} - {first.rank})
        more = f", and so have ranks {others[:8]}" if others else ""
        error = LeftError(
            f"rank {first.rank} on {first.host} has ended this start{more}: {first.reason}", first.status
        )
        # One line for each node; the rank that has left may be the one that speaks for its node.
        speaks_for_node = first.host == socket.gethostname() and first.local_rank == 0
        error.only_here = self._launch.local_rank == (1 if speaks_for_node else 0)
        return error

    def leave(self, status: int, error: UserError | None = None, is_said: bool = True) -> None:
        """The last call of a process: report its status, and let the others know if it ends before all have met.

        It stays until all know: launchers kill the others as soon as one ends.

        Args: is_said: the error is printed. Else it is printed here, unless the first rank of this node has the same.
        """
        report_status(status)
        if self._is_over or error is None:
            return
        is_said = is_said or isinstance(error, LeftError)  # which one rank of each node prints
        try:
            launch = self._launch or Launch.from_environment()
            if launch.world_size > 1:
                store = self._store or _open(launch, PATIENCE_SECONDS, patient=False)
                reason = one_line(str(error), _REASON_LENGTH)
                own = Leaver(launch.rank, launch.local_rank, socket.gethostname(), int(status), reason)
                store.set(f"left/{store.add('leavers', 1)}", json.dumps(asdict(own)))
                if not is_said and _is_to_be_said(store, own, launch.world_size):
                    _say(error, own)
                is_said = True
                _see_off(store, launch.world_size)
        except (UserError, RuntimeError, OSError, ValueError):
            if not is_said:  # nobody was met
                _say(error)


def _is_to_be_said(store: Store, own: Leaver, world_size: int) -> bool:
    """Wait until it is known whether the first rank of this node leaves for the same reason, which it prints."""
    for _ in _ticks(SILENCE_SECONDS):
        leavers = _leavers(store)
        if any((it.host, it.local_rank, it.reason) == (own.host, 0, own.reason) for it in leavers):
            return False
        if store.check(["digest"]) or len(leavers) >= world_size:
            break
    return True


def _see_off(store: Store, world_size: int) -> None:
    """Wait until all ranks leave and have said what they say, so that no launcher ends them before."""
    store.add("done", 1)
    for _ in _ticks(PATIENCE_SECONDS):
        if store.add("done", 0) >= world_size:
            break


def _say(error: UserError, own: Leaver | None = None) -> None:
    place = "" if own is None else f"rank {own.rank} on {own.host}: "
    print(f"error: {place}{error}", file=sys.stderr, flush=True)


def _ticks(seconds: float = float("inf")) -> Iterator[None]:
    """Yield at once and again after pauses, for some seconds."""
    begin, pause = time.monotonic(), _TICK_SECONDS[0]
    while time.monotonic() - begin < seconds:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, _TICK_SECONDS[1])


def _leavers(store: Store) -> list[Leaver]:
    """In the order in which they left."""
    leavers: list[Leaver] = []
    while store.check([f"left/{len(leavers) + 1}"]):
        record = parse_json(store.get(f"left/{len(leavers) + 1}"))
        leavers.append(conform_to(record, Leaver))
    return leavers


def _open(launch: Launch, timeout_seconds: float, patient: bool = True) -> Store:
    """Args: patient: torch waits until rank 0 listens, and says so in many lines; else this function waits."""
    address, port, hosted_here = meeting_place(launch)
    if not patient and not hosted_here:
        for _ in _ticks(timeout_seconds):
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
                break
        else:
            raise ConnectionError
    if hosted_here and port == launch.master_port:
        check_port_is_free(port)
    from torch.distributed import DistNetworkError, PrefixStore, TCPStore

    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = TCPStore(address, port, None, hosted_here, timeout, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {port} is in use on {socket.gethostname()}, perhaps by another run; choose one with --master_port "
            "of the launcher, or MASTER_PORT."
        ) from None
    return PrefixStore(f"start {attempt()}", store)
