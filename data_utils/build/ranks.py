"""The MPI ranks that share a job through the file system; without MPI there is one rank.

Errors that a user can cause are raised on all ranks together, so that no rank waits in vain. Waiting ranks sleep: an
MPI barrier would keep a core busy, perhaps for hours while another rank works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from data_utils.common.errors import UserError

_POLL_SECONDS = 0.02
_Result = TypeVar("_Result")


class Ranks:
    """This process among the ranks of `communicator` (of mpi4py); without one, it is the only rank."""

    def __init__(self, communicator: Any = None) -> None:
        self._communicator = communicator
        self.rank = communicator.Get_rank() if communicator is not None else 0
        self.size = communicator.Get_size() if communicator is not None else 1

    def on_first(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on rank 0 and return its result on every rank. Raises its UserError on every rank."""
        result: Any = None
        error = None
        if self.rank == 0:
            result, error = _attempt(work)
        if self._communicator is not None:
            self._meet()
            result, error = self._communicator.bcast((result, error))
        if error is not None:
            raise error
        return result

    def on_each(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on every rank and return this rank's result.

        Raises: the UserError of the lowest rank that has one, on every rank.
        """
        result: Any
        result, error = _attempt(work)
        errors = [error]
        if self._communicator is not None:
            self._meet()
            errors = self._communicator.allgather(error)
        for error in errors:
            if error is not None:
                raise error
        return result

    def _meet(self) -> None:
        """Wait, asleep, until all ranks are here."""
        request = self._communicator.Ibarrier()
        while not request.Test():
            time.sleep(_POLL_SECONDS)


def _attempt(work: Callable[[], Any]) -> tuple[Any, UserError | None]:
    try:
        return work(), None
    except UserError as error:
        return None, error
