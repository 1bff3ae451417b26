"""Errors that every rank raises together: a rank that failed alone would leave the others waiting in a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from data_utils.common.errors import MESSAGE_LENGTH, CheckpointError, system_problem
from data_utils.common.setting_files import one_line
from megatron_lite.checkpoint.manifest import checkpoint_step, list_checkpoints
from megatron_lite.parallel.context import ParallelContext


@contextlib.contextmanager
def raise_on_all_ranks(context: ParallelContext, what: str) -> Iterator[None]:
    """Run a section on every rank; if it fails on one, all raise CheckpointError.

    Args: what: names the section in messages.
    """
    failure = ""
    try:
        yield
    except (OSError, ValueError, CheckpointError) as error:
        failure = describe_error(error)
    # A sum, and not an exception of a collective: all ranks reach it, those that failed too.
    failed = int(context.sum(torch.tensor([float(bool(failure))], device=context.device)).item())
    if failed:
        raise collective_error(what, failure, failed, context)


def steps_seen_by_rank_0(directory: Path, context: ParallelContext) -> list[int]:
    """Steps of the checkpoints in `directory` as rank 0 lists them, on every rank.

    Ranks must not list for themselves: another node may see an older state of a shared file system.
    """
    steps: list[int] = []
    with raise_on_all_ranks(context, f"reading {directory}"):
        if context.is_main:
            steps = [checkpoint_step(path) for path in list_checkpoints(directory)]
    count = int(context.sum(torch.tensor([len(steps)], device=context.device)).item())
    # A sum with zeros from the other ranks is the broadcast of rank 0's list.
    shared = torch.zeros(count, dtype=torch.int64, device=context.device)
    if context.is_main:
        shared += torch.tensor(steps, dtype=torch.int64, device=context.device)
    return context.sum(shared).tolist() if count else []


def collective_error(what: str, failure: str, failed: int, context: ParallelContext) -> CheckpointError:
    """The error that every rank raises after `failed` ranks failed. Args: failure: this rank's reason or ""."""
    error = CheckpointError(f"{what}: {failure or f'{failed} other rank(s) failed; see their messages.'}")
    # A mistake that all ranks find is printed once per node; one that some find is printed where it is.
    error.only_here = bool(failure) and failed < context.world_size
    return error


def describe_error(error: Exception) -> str:
    """One line: what went wrong, and with which file. Untrusted names in it are escaped."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{system_problem(error)}."
    else:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return one_line(text, MESSAGE_LENGTH)
