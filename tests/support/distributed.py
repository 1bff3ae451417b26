"""Run a function on several ranks on this machine: torch and DeepSpeed are imported once, then the ranks are forked.

An eight-rank test costs seconds instead of the half minute that eight fresh interpreters need. Every rank runs on one
thread; when one fails its peers are killed at once, and a hang ends at a hard limit.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import deepspeed
import deepspeed.runtime.pipe.engine
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401
import torch

from megatron_lite.config.sections import ParallelConfig
from megatron_lite.parallel.context import initialize
from megatron_lite.parallel.launch import Launch
from support.waiting import HANG_SECONDS

_FORK, _SPAWN = (multiprocessing.get_context(method) for method in ("fork", "spawn"))


_held: collections.deque[socket.socket] = collections.deque(maxlen=64)


def free_port() -> int:
    """A port that the system gives to nobody else: bound here until 64 more were asked for, never listened on.

    A process that reuses addresses, as torch's store does, may listen there. One that was found free and let go could
    be another process's by the time when rank 0 of a launcher listens, seconds later.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]


def _rank_main(
    connection: Connection,
    function: Callable,
    rank: int,
    world_size: int,
    port: int,
    parallel: ParallelConfig,
    args: tuple,
    stays: bool,
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
        )
        os.environ["LOCAL_RANK"] = str(rank)
        context = initialize(Launch(rank, world_size, rank), parallel, timeout_seconds=HANG_SECONDS)
        result = function(context, *args)
        connection.send_bytes(pickle.dumps(("result", result)))  # by value, not by file descriptor
    except BaseException:
        with contextlib.suppress(OSError):  # nobody listens to ranks that a test kills
            connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    connection.close()
    while (
        stays
    ):  # rank 0 has the store, which others may need when it is done; the test process kills them all
        signal.pause()
    os._exit(0)  # skip exit handlers inherited from the test process


def _start(
    function: Callable,
    world_size: int,
    args: tuple,
    parallel: ParallelConfig | None,
    fresh: bool = False,
    stays: bool = False,
) -> tuple[list[Connection], list[Any]]:
    port = free_port()
    methods: Any = _SPAWN if fresh else _FORK
    connections, processes = [], []
    for rank in range(world_size):
        ours, theirs = methods.Pipe(duplex=False)
        process = methods.Process(
            target=_rank_main,
            args=(theirs, function, rank, world_size, port, parallel or ParallelConfig(), args, stays),
            daemon=True,
        )
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    return connections, processes


def start_ranks(
    function: Callable, world_size: int, *args: Any, parallel: ParallelConfig | None = None
) -> list[Any]:
    """As `run_ranks`, but returns the processes at once, for a test that kills them; results are not collected."""
    return _start(function, world_size, args, parallel)[1]


def run_ranks(
    function: Callable,
    world_size: int,
    *args: Any,
    parallel: ParallelConfig | None = None,
    limit_seconds: float = HANG_SECONDS,
    fresh: bool = False,
) -> list[Any]:
    """`function(context, *args)` on every rank of the layout; returns the ranks' results in order.

    Args: fresh: in new interpreters, each of which imports everything. CUDA does not work in forked processes.
    Raises AssertionError with the traceback of the first rank that fails, dies or outlasts the limit.
    """
    connections, processes = _start(function, world_size, args, parallel, fresh, stays=True)
    try:
        return _collect(connections, time.monotonic() + limit_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(connections))) - set(results))
            raise AssertionError(f"ranks {missing} did not finish in time")
        for connection in ready:
            rank = connections.index(connection)  # type: ignore[arg-type]
            try:
                kind, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without a traceback") from None
            if kind == "error":
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]
