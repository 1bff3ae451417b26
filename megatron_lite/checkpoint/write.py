"""Writing, deleting and setting aside checkpoints. manifest.py describes the files, saver.py says when to save."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from data_utils.common.files import sync_directory, write_synced
from megatron_lite.checkpoint.collective_errors import collective_error, describe_error
from megatron_lite.checkpoint.fragments import Fragment, StateOwner
from megatron_lite.checkpoint.manifest import (
    ADAM_STATE,
    BEST,
    CHECKPOINTS,
    NAME,
    RESULTS,
    checkpoint_name,
    checkpoint_step,
    checkpoints_at_steps,
    list_checkpoints,
    manifest_header,
    write_manifest,
)
from megatron_lite.checkpoint.shard_slices import matrix_shape
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.verify import read_checkpoint, verify_checkpoint
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import whole_shape

log = logging.getLogger(__name__)
# partial: never complete. deleted: its removal has begun. replaced: complete; its successor may not have its name yet.
_LEFTOVER = re.compile(r"(step_\d{8,})\.(partial|deleted|replaced)")
Watch = Callable[[str], contextlib.AbstractContextManager[None]]


def save_checkpoint(
    directory: Path, step: int, engine: StateOwner, state: dict[str, Any], context: ParallelContext
) -> Path:
    """Write the checkpoint of `step`, called by every rank. Returns its path.

    Raises CheckpointError on every rank if any rank could not write; earlier checkpoints are untouched.
    """
    header = manifest_header(step, engine.scalar_state(), state)
    running = Save(directory, step, engine.fragments(), header, context)
    running.advance(wait=True)
    return running.path


def unwatched(what: str) -> contextlib.AbstractContextManager[None]:
    """A `Watch` that does nothing."""
    return contextlib.nullcontext()


class Save:
    """One save in progress on every rank, in a background thread.

    It has three stages. Each begins when all ranks have finished the one before. Only `advance` communicates, so
    training can go on meanwhile: all ranks need only call `advance` at the same points.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        fragments: Iterable[Fragment],
        header: dict[str, Any],
        context: ParallelContext,
        after_commit: Callable[[], None] = lambda: None,
        watch: Watch = unwatched,
    ):
        """
        Args:
            fragments: must not change before the save has ended.
            after_commit: called on rank 0.
            watch: makes the context in which the thread works, from a description of the work.
        """
        self.path = directory / checkpoint_name(step)
        self.seconds = 0.0  # from beginning to commit; 0 before
        self._partial = directory / f"{self.path.name}.partial"
        self._fragments = fragments
        self._header = header
        self._context = context
        self._after_commit = after_commit
        self._watch = watch
        self._started = time.perf_counter()
        # One directory for all ranks: it exists before any rank writes, and all files exist before the manifest names
        # them.
        self._stages = iter((self._prepare, self._write, self._commit))
        self.failure = ""  # of this rank
        self._thread: threading.Thread | None = None
        self._start_next_stage()

    def advance(self, wait: bool) -> bool:
        """Go on to the next stage if all ranks are ready for it; with `wait`, wait for the end. True when committed.

        Raises CheckpointError on every rank if some rank failed; the partial directory is gone then.
        """
        # Collectives only here, in the training thread: those of two threads would meet in different orders on the
        # ranks.
        while self._thread is not None:
            if wait:
                self._thread.join()
            ended = not self._thread.is_alive()
            failed = ended and bool(self.failure)
            # On the hosts: every step asks, and must not wait for the device.
            all_ended, all_failed = self._context.sum_on_hosts([float(ended), float(failed)])
            if all_ended < self._context.world_size:
                # Some rank still writes; the next step asks again.
                return False
            # Only after all have ended: another rank's thread may still write into the directory that is removed.
            if all_failed:
                self._give_up(int(all_failed))
            self._start_next_stage()
            if not wait:
                break
        return self._thread is None

    def _start_next_stage(self) -> None:
        stage = next(self._stages, None)
        if stage is None:
            self._thread = None
            self.seconds = time.perf_counter() - self._started
            return
        # A daemon: a process that ends with an error does not wait for a checkpoint that no rank would commit.
        self._thread = threading.Thread(target=self._run, args=(stage,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, stage: Callable[[], None]) -> None:
        try:
            with self._watch(f"writing {self.path.name}"):
                stage()
        except Exception as error:  # of any kind: the other ranks must be told
            self.failure = describe_error(error)
            log.debug("saving %s", self.path, exc_info=True)

    def _give_up(self, failed: int) -> None:
        self._thread = None
        if self._context.is_main:
            shutil.rmtree(self._partial, ignore_errors=True)  # frees space on a full disk
        raise collective_error(f"saving {self.path}", self.failure, failed, self._context)

    def _prepare(self) -> None:
        if self._context.is_main:
            _make_directory(self._partial.parent)
            _clear_leftovers(self._partial.parent)
            os.mkdir(self._partial)

    def _write(self) -> None:
        _write_rank(self._partial, self._context.rank, self._fragments)

    def _commit(self) -> None:
        if self._context.is_main:
            _write_manifest(self._partial, self._header, self._context.world_size)
            commit_directory(self._partial, self.path)
            self._after_commit()


def _make_directory(path: Path) -> None:
    """Create a directory and those above it, with their names on disk, unless it exists."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    os.mkdir(path)
    sync_directory(path.parent)


def _clear_leftovers(directory: Path) -> None:
    """Remove the leftovers of killed saves; give a checkpoint that was being replaced its name back."""
    for path in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match:
            continue
        if match[2] == "replaced" and not (directory / match[1]).exists():
            # Killed between the two renames of `commit_directory`: the old checkpoint is the only one of its step.
            os.rename(path, directory / match[1])
            sync_directory(directory)
        else:  # what cannot be removed takes space, and must not keep the run from saving
            shutil.rmtree(path, ignore_errors=True)


def _write_rank(directory: Path, rank: int, fragments: Iterable[Fragment]) -> None:
    tensors, matrices, pieces, shapes = [], {}, [], {}
    kinds: dict[str, dict[str, tuple[int, int]]] = {}
    for fragment in fragments:
        if fragment.is_copy:
            continue
        shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
        # Fragments of whole states (factored moments) have the shape of the state, not of the parameter.
        if "weight" in fragment.tensors:
            shapes[fragment.name] = list(shape)
        kinds.setdefault(fragment.name, {}).update(dict.fromkeys(fragment.tensors, matrix_shape(shape)))
        # A flat range of a matrix is up to three rectangles; readers know rectangles of the whole parameter only.
        for owned in fragment.ranges():
            for state_name, values in fragment.tensors.items():
                key = f"{fragment.name}/{state_name}/{owned.slice.row}.{owned.slice.column}"
                # Views: a copy of all of it would double the memory of a save.
                tensors.append(values[owned.start - fragment.start : owned.stop - fragment.start])
                matrices[key] = owned.slice.shape
                stored = {"key": key, "name": fragment.name, "kind": state_name, "box": astuple(owned.slice)}
                pieces.append(stored)
    described = write_tensors(directory / _rank_file(rank), matrices, tensors)
    # JSON, not an object collective: torch's pickle, and this thread may not communicate.
    listing = {"file": described, "shapes": shapes, "pieces": pieces, "kinds": kinds}
    write_synced(directory / _rank_listing(rank), json.dumps(listing).encode())


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _rank_listing(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _write_manifest(directory: Path, header: dict[str, Any], world_size: int) -> None:
    """Merge the ranks' listings into the manifest. It is on disk when this returns."""
    files, pieces, shapes = {}, [], {}
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank in range(world_size):
        listing = json.loads((directory / _rank_listing(rank)).read_text(encoding="utf-8"))
        files[_rank_file(rank)] = listing["file"]
        shapes.update(listing["shapes"])
        pieces += [{"file": _rank_file(rank), **piece} for piece in listing["pieces"]]
        for name, state_shapes in listing["kinds"].items():
            kinds.setdefault(name, {}).update(state_shapes)
    # AdamW's state is what a manifest without "kinds" means, so most manifests have none.
    unusual = {name: states for name, states in kinds.items() if set(states) != set(ADAM_STATE)}
    content = {**header, "shapes": shapes, "files": files, "pieces": pieces}
    write_manifest(directory, {**content, "kinds": unusual} if unusual else content)
    for rank in range(world_size):
        # After the manifest is on disk: until then they are the only description of the files.
        os.unlink(directory / _rank_listing(rank))
    sync_directory(directory)


def commit_directory(partial: Path, final: Path) -> None:
    """Give a complete directory its name, durably."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():  # the same step again, for example after a fallback to an older checkpoint
        os.rename(final, replaced)
    # Files and manifest are on disk by now, so that a name that exists is a complete checkpoint even after a power cut.
    os.rename(partial, final)
    sync_directory(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def retain(directory: Path, keep_last: int, keep_every: int) -> None:
    """Delete checkpoints beyond the newest `keep_last` (0 = keep all), except multiples of `keep_every` steps.

    Raises the first OSError when all that can be deleted are.
    """
    if keep_last == 0:
        return
    failure: OSError | None = None
    for path in list_checkpoints(directory)[:-keep_last]:
        step = checkpoint_step(path)
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first, and that on disk: a half-deleted checkpoint has no valid name.
        doomed = path.with_name(f"{checkpoint_name(step)}.deleted")
        try:
            os.rename(path, doomed)
            sync_directory(directory)
        except OSError as error:  # the next may go; if all stayed, the disk would fill up
            failure = failure or error
            continue
        shutil.rmtree(doomed, ignore_errors=True)
    if failure is not None:
        raise failure


def rewind(run: Path, step: int) -> Path | None:
    """Make the checkpoint of `step` the newest of a run: move all newer ones into a new directory `rewound_TIME`.

    Results of fine-tuning that were computed with them go there too. Nothing is deleted. If a call is killed, another
    one moves the rest. Returns the new directory, None if there was nothing to move.
    Raises: CheckpointError if there is no such checkpoint or it is damaged; OSError.
    """
    directory = run / CHECKPOINTS
    (path,) = checkpoints_at_steps(directory, [step])
    # First: going back to a damaged checkpoint would leave the run with none.
    verify_checkpoint(read_checkpoint(path))
    newer, best = (
        [p for p in above.glob("step_*") if NAME.fullmatch(p.name) and checkpoint_step(p) > step]
        for above in (directory, run / BEST)
    )
    if not newer and not best:
        return None
    target = directory / f"rewound_{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S_%f}"
    os.mkdir(target)
    # Results belong to the end of the run. They go first: the run writes them again when it ends.
    for path in filter(Path.exists, [run / name for name in (RESULTS, "predictions", "tasks")]):
        os.rename(path, target / path.name)
    if best:
        os.mkdir(target / BEST)
    for path in best:
        os.rename(path, target / BEST / path.name)
    for path in sorted(newer, reverse=True):  # newest first: a kill in between leaves no gap in the steps
        os.rename(path, target / path.name)
    for changed in (target, directory, run):
        sync_directory(changed)
    return target
