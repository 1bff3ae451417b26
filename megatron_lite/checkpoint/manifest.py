"""Checkpoints without pickle that load under any tensor, pipeline and data parallel sizes and ZeRO stage.

    DIRECTORY/step_00000100/
        rank_00000.safetensors   the slices of parameters that this rank owned: fp32 weights and Adam moments
        manifest.json            every slice, size and checksums of every file, parameter shapes, training state
        manifest.json.sha256     the manifest's own checksum; `sha256sum -c` reads it

Every rank writes what it owns. A slice (shard_slices.py) says which rows and columns of the whole parameter its
elements are, not who owned them: readers of any parallel sizes take what overlaps theirs. In the JSON a stored slice is
a "piece" with a "box", and "kind" is the name of the state. Padding rows of the vocabulary are left out, since their
number depends on the tensor-parallel size.

Rank 0 writes the manifest last, and an atomic rename gives the directory its name after everything is on disk, so files
are under that name only when complete. There is no "latest" pointer: the newest checkpoint is the newest directory
whose manifest and checksums are right. All ranks decide together whether a save or load succeeded.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.common.files import write_synced
from megatron_lite.checkpoint.shard_slices import ShardSlice
from megatron_lite.checkpoint.trainer_state import TrainerState

FORMAT = "megatron-lite-checkpoint"
FORMAT_VERSION = 2
# State names of a parameter under AdamW. The manifest's "kinds" names those of parameters that have others.
ADAM_STATE = ("weight", "exp_avg", "exp_avg_sq")
# Directories in a run's directory: its checkpoints, and the checkpoint with the best scores of a task.
CHECKPOINTS, BEST = "checkpoints", "best"
RESULTS = "results.json"  # of fine-tuning: in the directory of each seed, and of all seeds together
NAME = re.compile(r"step_(\d{8,})(\.replaced)?")
# In the names of parameters that fine-tuning adds to a model.
TASK_HEAD = "heads.task."
ADAPTER = "_adapter."
ROUTER = ".mlp.router."  # of a mixture of experts


@dataclass(frozen=True)
class StoredSlice:
    """A slice of one state (weight, exp_avg, ...) of a parameter, and the tensor that stores it, as a matrix."""

    file: str
    key: str
    name: str
    state_name: str
    slice: ShardSlice
    is_added: bool = False  # to what the slices before it hold, or the model, instead of replacing it


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, its manifest read and checked for shape, its files not yet read."""

    path: Path
    step: int
    shapes: dict[str, tuple[int, ...]]
    slices: tuple[StoredSlice, ...]
    files: dict[str, dict[str, Any]]  # name -> size and checksums, as checksums.py has them
    optimizer: dict[str, Any]
    state: dict[str, Any]  # of a training run: TrainerState.to_json
    saved_at: str | None  # UTC, ISO 8601

    @property
    def bytes(self) -> int:
        return sum(described["bytes"] for described in self.files.values())

    def trainer_state(self) -> TrainerState:
        """The trainer's state of a checkpoint. Raises CheckpointError if it is not from a training run."""
        return TrainerState.from_json(self.state, self.path)

    def stack(self, prefix: str) -> Checkpoint:
        """The parameters of one stack of several: those whose names begin with `prefix`, without the prefix."""
        return self._renamed(lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)

    def with_task_head(self, task: str) -> Checkpoint:
        """The checkpoint with the head of one of several tasks as its only task head; without a head if it has none."""
        prefix = f"{TASK_HEAD}{task}."
        return self._renamed(
            lambda name: (
                None
                if name.startswith(TASK_HEAD) and not name.startswith(prefix)
                else name.replace(prefix, TASK_HEAD)
            )
        )

    def as_stack(self, prefix: str) -> Checkpoint:
        """The checkpoint with `prefix` before every parameter name, to load it as one stack of a model of several."""
        return self._renamed(lambda name: prefix + name)

    def _renamed(self, rename: Callable[[str], str | None]) -> Checkpoint:
        """Args: rename: old name -> new name; None leaves the parameter out."""
        names = {name: rename(name) for name in self.shapes}
        shapes = {new: self.shapes[old] for old, new in names.items() if new is not None}
        renamed = [(names[stored.name], stored) for stored in self.slices]
        slices = tuple(dataclasses.replace(stored, name=new) for new, stored in renamed if new is not None)
        return dataclasses.replace(self, shapes=shapes, slices=slices)


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def checkpoint_step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a path is one checkpoint, valid or damaged, and not a directory of several."""
    return bool(NAME.fullmatch(path.name)) or (path / "manifest.json").exists()


def list_checkpoints(directory: Path) -> list[Path]:
    """Committed checkpoint directories, oldest first.

    `step_N.replaced` counts where `step_N` is absent: a save of the same step was killed between its two renames.
    """
    if not directory.is_dir():
        return []
    paths: dict[int, Path] = {}
    # The last path of a step stays, so a complete `step_N` hides the `.replaced` that a killed save left.
    for path in sorted(directory.iterdir(), reverse=True):  # step_N comes after step_N.replaced
        if match := NAME.fullmatch(path.name):
            paths[int(match[1])] = path
    return [path for _, path in sorted(paths.items())]


def checkpoints_at_steps(directory: Path, steps: Iterable[int]) -> list[Path]:
    """The checkpoints of these steps in `directory`. Raises CheckpointError naming the steps that are absent."""
    paths = {checkpoint_step(path): path for path in list_checkpoints(directory)}
    wanted = list(steps)
    if absent := [step for step in wanted if step not in paths]:
        raise CheckpointError(
            f"{directory} holds no checkpoint of step {', '.join(map(str, absent))}; it holds steps "
            f"{', '.join(map(str, paths)) or 'none'}."
        )
    return [paths[step] for step in wanted]


def manifest_header(step: int, optimizer: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """A manifest without shapes, slices and files, dated now. Args: optimizer: StateOwner.scalar_state."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "optimizer": optimizer,
        "state": state,
    }


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json and its checksum."""
    content = json.dumps(manifest).encode()
    write_synced(directory / "manifest.json", content)
    write_synced(directory / "manifest.json.sha256", checksum_line(content))


def checksum_line(content: bytes) -> bytes:
    """The line that `sha256sum manifest.json` prints."""
    return f"{hashlib.sha256(content).hexdigest()}  manifest.json\n".encode()


def rewound_directories(directory: Path) -> Iterator[tuple[Path, int]]:
    """The directories that `rewind` has created, oldest first, each with the step of its newest checkpoint."""
    for path in sorted(directory.glob("rewound_*")):
        if checkpoints := list_checkpoints(path):
            yield path, checkpoint_step(checkpoints[-1])


def none_is_valid(directory: Path, count: int) -> CheckpointError:
    return CheckpointError(
        f"none of the {count} checkpoints in {directory} is valid; run `scripts/checkpoints.py verify` to see what is "
        "wrong with each, or move them away to start at step 0."
    )


def checkpoints_in(path: Path) -> Path:
    """The directory of checkpoints of a run, or the directory itself."""
    inner = path / CHECKPOINTS
    return inner if inner.is_dir() else path
