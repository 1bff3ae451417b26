"""Rendezvous before the process group exists: ranks compare configurations, and none waits for one that has exited.

It uses the store that later serves torch's process group, at MASTER_ADDR and MASTER_PORT. Rank 0 writes its facts, and
each other rank compares its own. A rank that refuses the start writes its reason to the store, where waiting ranks find
it. Torch is imported when the store is opened, so mistakes are printed before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from data_utils.common.errors import ConfigError, ExitStatus, UserError, print_error
from data_utils.common.setting_files import one_line, shorten
from data_utils.common.untrusted import conform_to, parse_json
from megatron_lite.parallel.launch import (
    Launch,
    attempt,
    check_port_is_free,
    rendezvous_address,
    report_status,
)

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

# How long an exiting rank waits for the others to notice: they may still be importing libraries.
PATIENCE_SECONDS = 60.0
# After which a rank prints its error itself, if the first rank of its node, which usually has the same, has not.
SILENCE_SECONDS = 15.0
NAMED_SECONDS = 60.0  # after which rank 0 logs the ranks it waits for
_SHOWN = 6  # differences in a message
_VALUE_LENGTH = 80
_REASON_LENGTH = 600  # longest reason of another rank in a message
_TICK_SECONDS = (0.02, 0.5)  # pause between polls of the store, growing: a thousand ranks poll it


@dataclass(frozen=True)
class Leaver:
    """A rank that exits before all ranks have met."""

    rank: int
    local_rank: int
    host: str
    status: int
    reason: str


class RankLeftError(UserError):
    """Another rank has stopped this start; `status` is that rank's exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = ExitStatus(status)  # type: ignore[misc]  # of the instance, not of the class


class Rendezvous:
    """The rendezvous of one process with the other ranks of this start."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._launch: Launch | None = None
        self._is_over = False

    def open(self, launch: Launch, timeout_seconds: float) -> Store:
        """The store of this start, opened at the first call.

        Raises: ConfigError if the port is in use, or no address is set.
        """
        self._launch = launch
        if self._store is None:
            self._store = _open(launch, timeout_seconds)
        return self._store

    def over(self) -> None:
        """No rank waits for this process: all have met, or it does not train."""
        self._is_over = True

    def compare(self, facts: Mapping[str, str]) -> None:
        """Return when all ranks have equal facts: name -> value, as printed.

        Raises: ConfigError on a rank whose facts differ from rank 0's; RankLeftError if another rank has exited.
        """
        assert self._store is not None and self._launch is not None, "the store is open"
        written = json.dumps(dict(facts), sort_keys=True)
        # A thousand ranks read 64 bytes; only a rank that differs fetches the text to name what differs.
        digest = sha256(written.encode()).hexdigest()
        if self._launch.rank == 0:
            self._store.set("facts", written)
            # After the facts: a rank that sees the digest can read them.
            self._store.set("digest", digest)
        # Polled and not `store.wait`: a rank that has refused the start must be noticed meanwhile.
        self._wait(lambda store: store.check(["digest"]))
        if self._store.get("digest").decode() != digest:
            raise self._differs(facts, parse_json(self._store.get("facts")))
        # Nobody goes on alone: a difference on one rank stops all before data are copied.
        self.gather("compared")

    def _differs(self, own: Mapping[str, str], first: Mapping[str, str]) -> ConfigError:
        assert self._launch is not None
        absent = "absent"
        keys = [key for key in sorted({*own, *first}) if own.get(key, absent) != first.get(key, absent)]
        values = [
            [shorten(its.get(key, absent), _VALUE_LENGTH) for its in (own, first)] for key in keys[:_SHOWN]
        ]
        shown = [
            f"{key} is {here} here and {there} on rank 0"
            for key, (here, there) in zip(keys, values, strict=False)
        ]
        more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        error = ConfigError(
            f"rank {self._launch.rank} on {socket.gethostname()} differs from rank 0: "
            f"{'; '.join(shown)}{more}. Start all ranks with the same arguments, files and version of the program."
        )
        error.only_here = True
        return error

    def gather(self, point: str) -> None:
        """A barrier with a name. Raises: RankLeftError if a rank has exited."""
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
            raise RankLeftError(
                f"rank 0, at {rendezvous_address(self._launch)[0]}, exited before all ranks met; see its messages.",
                ExitStatus.CRASHED,
            ) from error

    def _left(self, leavers: list[Leaver]) -> RankLeftError:
        assert self._launch is not None
        first = leavers[0]
        others = sorted({leaver.rank for leaver in leavers[1:]} - {first.rank})
        more = f", and so have ranks {others[:8]}" if others else ""
        error = RankLeftError(
            f"rank {first.rank} on {first.host} has stopped this start{more}: {first.reason}", first.status
        )
        # One line per node, from its first rank, unless that is the rank that exited.
        is_first_of_node = first.host == socket.gethostname() and first.local_rank == 0
        error.only_here = self._launch.local_rank == (1 if is_first_of_node else 0)
        return error

    def leave(self, status: int, error: UserError | None = None, is_printed: bool = True) -> None:
        """The last call of a process: report its exit status, and tell the other ranks if they have not all met yet.

        It waits until all know: launchers kill the other ranks as soon as one exits.

        Args: is_printed: the error has been printed. Else this prints it, unless the node's first rank has the same.
        """
        # First: telling the others may take a minute, and the launcher may kill this process before.
        report_status(status)
        if self._is_over or error is None:
            return
        is_printed = is_printed or isinstance(error, RankLeftError)  # which one rank of each node prints
        try:
            launch = self._launch or Launch.from_environment()
            if launch.world_size > 1:
                store = self._store or _open(launch, PATIENCE_SECONDS, patient=False)
                reason = one_line(str(error), _REASON_LENGTH)
                own = Leaver(launch.rank, launch.local_rank, socket.gethostname(), int(status), reason)
                store.set(f"left/{store.add('leavers', 1)}", json.dumps(asdict(own)))
                if not is_printed and _must_print(store, own, launch.world_size):
                    _print_error(error, own)
                is_printed = True
                _wait_for_all_to_exit(store, launch.world_size)
        except (UserError, RuntimeError, OSError, ValueError):
            if not is_printed:  # no other rank was reached
                _print_error(error)


def _must_print(store: Store, own: Leaver, world_size: int) -> bool:
    """Wait until it is known whether the first rank of this node exits for the same reason, which it then prints."""
    for _ in _ticks(SILENCE_SECONDS):
        leavers = _leavers(store)
        if any((it.host, it.local_rank, it.reason) == (own.host, 0, own.reason) for it in leavers):
            return False
        if store.check(["digest"]) or len(leavers) >= world_size:
            break
    return True


def _wait_for_all_to_exit(store: Store, world_size: int) -> None:
    """Wait until all ranks exit and have printed their errors, so that no launcher kills them before."""
    store.add("done", 1)
    for _ in _ticks(PATIENCE_SECONDS):
        if store.add("done", 0) >= world_size:
            break


def _print_error(error: UserError, own: Leaver | None = None) -> None:
    print_error(error, "" if own is None else f"rank {own.rank} on {own.host}: ")


def _ticks(seconds: float = float("inf")) -> Iterator[None]:
    """Yield at once and then after pauses, for `seconds`."""
    begin, pause = time.monotonic(), _TICK_SECONDS[0]
    while time.monotonic() - begin < seconds:
        yield
        time.sleep(pause)
        # Growing, since a thousand ranks poll one server.
        pause = min(1.5 * pause, _TICK_SECONDS[1])


def _leavers(store: Store) -> list[Leaver]:
    """The ranks that have exited, in that order."""
    leavers: list[Leaver] = []
    while store.check([f"left/{len(leavers) + 1}"]):
        record = parse_json(store.get(f"left/{len(leavers) + 1}"))
        leavers.append(conform_to(record, Leaver))
    return leavers


def _open(launch: Launch, timeout_seconds: float, patient: bool = True) -> Store:
    """Args: patient: torch waits until rank 0 listens, and logs many lines; else this function waits."""
    address, port, hosted_here = rendezvous_address(launch)
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
