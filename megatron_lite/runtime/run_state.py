"""The state of a run's directory, decided in one place: a start, `scripts/checkpoints.py` and the report all ask here.

A run that has not saved yet begins at step 0; a run whose checkpoints are out of sight, as on an unmounted disk, must
not. So a start reads the records as well, which have one of each save. Needs no torch.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from data_utils.common.errors import CheckpointError, system_problem, system_remedy
from megatron_lite.checkpoint.manifest import Checkpoint, list_checkpoints, none_is_valid
from megatron_lite.checkpoint.verify import WrongStepNameError, read_checkpoint
from megatron_lite.telemetry.writer import FILE, has_saved


class Condition(StrEnum):
    """The values are the keys of the table in docs/checkpoints.md."""

    NEVER_SAVED = "never saved"
    FIRST_SAVE_FAILED = "first save failed"
    SAVED = "saved"
    NEWEST_DAMAGED = "newest damaged"
    MISNAMED = "under another step's name"
    NONE_VALID = "none valid"
    LOST = "checkpoints lost"
    DANGLING = "dangling link"
    NOT_A_DIRECTORY = "not a directory"
    UNREADABLE = "unreadable"


class Start(StrEnum):
    """The effect of starting the same command again."""

    AT_STEP_0 = "starts at step 0, or from `checkpoint.initialize_from`"
    CONTINUES = "continues from the newest checkpoint"
    FALLS_BACK = "names the bad ones and continues from the newest good checkpoint"
    REFUSED = "is refused, and nothing is changed"


@dataclass(frozen=True)
class Meaning:
    sign: str  # what the directory shows
    start: Start
    rewind: bool  # whether `scripts/checkpoints.py rewind` can go back to a checkpoint; else it is refused
    note: bool  # whether the report has a note on it


MEANINGS = {
    Condition.NEVER_SAVED: Meaning(
        "there is no `checkpoints`, and no record of a save", Start.AT_STEP_0, False, False
    ),
    Condition.FIRST_SAVE_FAILED: Meaning(
        "`checkpoints` holds no checkpoint (perhaps a `.partial`), and no save is recorded",
        Start.AT_STEP_0,
        False,
        True,
    ),
    Condition.SAVED: Meaning("the newest checkpoint is good", Start.CONTINUES, True, False),
    Condition.NEWEST_DAMAGED: Meaning(
        "the newest checkpoint is damaged, an older one is good", Start.FALLS_BACK, True, True
    ),
    Condition.MISNAMED: Meaning(
        "the newest checkpoint has the name of another step, another one is good",
        Start.FALLS_BACK,
        True,
        True,
    ),
    Condition.NONE_VALID: Meaning("checkpoints are there, none is good", Start.REFUSED, False, True),
    Condition.LOST: Meaning(
        "`metrics.jsonl` records a save, but there is no checkpoint", Start.REFUSED, False, True
    ),
    Condition.DANGLING: Meaning(
        "`checkpoints`, the run's directory or one above it is a link to nothing", Start.REFUSED, False, True
    ),
    Condition.NOT_A_DIRECTORY: Meaning(
        "`checkpoints`, the run's directory or one above it is a file", Start.REFUSED, False, True
    ),
    Condition.UNREADABLE: Meaning(
        "the user or the file system does not let it be read", Start.REFUSED, False, True
    ),
}


@dataclass(frozen=True)
class RunState:
    run: Path
    condition: Condition
    problem: str = ""  # a sentence with path and remedy; "" where there is none
    newest: Checkpoint | None = None  # the newest whose manifest and file sizes are right

    def require_start(self) -> None:
        """Raise CheckpointError unless a run can start here."""
        if MEANINGS[self.condition].start is Start.REFUSED:
            raise CheckpointError(self.problem)

    def require_checkpoints(self) -> None:
        """Raise CheckpointError unless the run can go back to a checkpoint."""
        if not MEANINGS[self.condition].rewind:
            raise CheckpointError(
                self.problem or f"{self.run} holds no checkpoint: the run has not saved yet."
            )


def read_run_state(run: Path) -> RunState:
    """The state of a run's directory, as this process sees it. Reads manifests only; raises and changes nothing."""
    checkpoints = run / "checkpoints"
    try:
        blocked = _blocked(checkpoints)
        if blocked is not None:
            return RunState(run, *blocked)
        paths = list_checkpoints(checkpoints)
        if not paths:
            return _without_checkpoint(run, checkpoints)
    except OSError as error:
        remedy = system_remedy(error, "change its permissions, or choose another run.directory")
        return RunState(run, Condition.UNREADABLE, f"{system_problem(error)}; {remedy}.")
    # The newest checkpoint's error decides the condition; a start falls back to the newest of the older good ones.
    newest_error: CheckpointError | None = None
    for path in reversed(paths):
        try:
            newest = read_checkpoint(path)
        except CheckpointError as error:
            newest_error = newest_error or error
            continue
        if newest_error is None:
            return RunState(run, Condition.SAVED, newest=newest)
        condition = (
            Condition.MISNAMED if isinstance(newest_error, WrongStepNameError) else Condition.NEWEST_DAMAGED
        )
        return RunState(run, condition, str(newest_error), newest)
    return RunState(run, Condition.NONE_VALID, str(none_is_valid(checkpoints, len(paths))))


def _blocked(checkpoints: Path) -> tuple[Condition, str] | None:
    """Why a directory neither exists nor can be created; None if it exists or can be. Raises OSError."""
    # Upwards to the first that exists: a link to an unmounted disk anywhere above must not look like a new run.
    for path in (checkpoints, *checkpoints.absolute().parents):
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                return None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            if not os.path.islink(path):
                continue  # absent
            target = os.readlink(path)
            problem = (
                f"{path} is a link to {target}, which does not exist; mount or create it, or remove the link."
            )
            return Condition.DANGLING, problem
        problem = f"{path} is not a directory; move it away, or choose another run.directory."
        return Condition.NOT_A_DIRECTORY, problem
    return None


def _without_checkpoint(run: Path, checkpoints: Path) -> RunState:
    """Raises OSError."""
    if has_saved(run):
        problem = (
            f"{run / FILE} records a save, but {checkpoints} holds no checkpoint; restore the checkpoints, choose "
            f"another run.directory, or move {run / FILE} away to start at step 0."
        )
        return RunState(run, Condition.LOST, problem)
    if checkpoints.exists():
        problem = f"{checkpoints} holds no checkpoint: the run's first save failed, was interrupted, or is in progress."
        return RunState(run, Condition.FIRST_SAVE_FAILED, problem)
    return RunState(run, Condition.NEVER_SAVED)
