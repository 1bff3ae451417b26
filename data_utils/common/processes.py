"""Worker processes: forks of a command, which end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import TypeVar

from data_utils.common.files import leave_locks

_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def submit(
    pool: ProcessPoolExecutor, work: Callable[[_Item], _Result], items: Iterable[_Item]
) -> list[Future[_Result]]:
    """Submit work to a pool, which starts its workers. They call `begin_worker`."""
    # A worker has the handlers of the command until its own are set, and would print a traceback, or go on where
    # Python ignores exceptions: it inherits that signals are blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return [pool.submit(work, item) for item in items]
    except OSError as error:  # the first workers died, and the pool has closed its pipes
        raise BrokenProcessPool from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_worker() -> None:
    """What a worker of `submit` does first."""
    leave_locks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End with the parent: a killed parent cannot end its workers, which would wait without end. For a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    # Without cleaning up: the main thread may be in native code.
    os._exit(1)
