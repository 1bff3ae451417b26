"""All ranks decide together whether something succeeded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from data_utils.common.errors import MESSAGE_LENGTH, CheckpointError
from data_utils.common.setting_files import one_line
from megatron_lite.checkpoint.manifest import list_checkpoints, step_of
from megatron_lite.parallel.context import ParallelContext


@contextlib.contextmanager
def agreement(context: ParallelContext, what: str) -> Iterator[None]:
    """Run a section on every rank. If one fails, all raise CheckpointError, so that none waits forever."""
    failure = ""
    try:
        yield
    except (OSError, ValueError, CheckpointError) as error:
        failure = describe_error(error)
    failed = int(context.sum(torch.tensor([float(bool(failure))], device=context.device)).item())
    if failed:
        raise failed_together(what, failure, failed, context)


def agreed_steps(directory: Path, context: ParallelContext) -> list[int]:
    """Steps of the checkpoints that rank 0 sees: another node may see an older state of a shared file system."""
    steps: list[int] = []
    with agreement(context, f"reading {directory}"):
        if context.is_main:
            steps = [step_of(path) for path in list_checkpoints(directory)]
    count = int(context.sum(torch.tensor([len(steps)], device=context.device)).item())
    shared = torch.zeros(count, dtype=torch.int64, device=context.device)
    if context.is_main:
        shared += torch.tensor(steps, dtype=torch.int64, device=context.device)
    return context.sum(shared).tolist() if count else []


def failed_together(what: str, failure: str, failed: int, context: ParallelContext) -> CheckpointError:
    """The error that every rank raises when `failed` ranks have failed. Args: failure: this rank's reason or ""."""
    error = CheckpointError(f"{what}: {failure or f'{failed} other rank(s) failed; their messages say why.'}")
    error.only_here = bool(failure) and failed < context.world_size
    return error


def describe_error(error: Exception) -> str:
    """One line: what went wrong, and with which file. Foreign names in it are escaped."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    else:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return one_line(text, MESSAGE_LENGTH)
