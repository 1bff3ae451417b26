"""Saves the checkpoints of a run, in the foreground or from a snapshot in the background, and deletes old ones.

`checkpoint.asynchronous` copies this rank's state to CPU memory that is allocated once, at the start. The copy is made
during the forward and backward pass of the next step, which do not change the state; the update waits for the rest of
the copy. Threads write the copy while training goes on. A forked process could not read GPU memory, and on CPU its
copy-on-write would cost the following step five times what the copy costs (docs/log.md). At most one save is in flight:
a second one would need the memory of another copy, to write to the same disk, so it waits for the first. All ranks
commit together at the end of some later step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, system_problem
from megatron_lite.checkpoint.fragments import Fragment, StateOwner
from megatron_lite.checkpoint.manifest import list_checkpoints, manifest_header
from megatron_lite.checkpoint.write import Save, Watch, retain, unwatched
from megatron_lite.config.sections import CheckpointConfig
from megatron_lite.parallel.context import ParallelContext

log = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of one run. Every method is called by all ranks at the same point."""

    def __init__(
        self,
        directory: Path,
        engine: StateOwner,
        context: ParallelContext,
        config: CheckpointConfig,
        watch: Watch = unwatched,
        on_saved: Callable[[int, float], None] = lambda step, seconds: None,
    ) -> None:
        """Args: watch: as for `Save`; on_saved: called on every rank with step and seconds of each committed save."""
        self.saved_step = 0  # of the newest checkpoint that this run saved or continues from
        self._directory = directory
        self._engine = engine
        self._context = context
        self._config = config
        self._watch = watch
        self._on_saved = on_saved
        self._snapshot = None
        if config.asynchronous:
            # At the start: memory that is short shows here and not hours later, and the first save costs no allocation.
            self._snapshot = Snapshot(engine)
            engine.before_update = self._wait_for_copy
        self._running: Save | None = None
        self._running_step = 0
        self._waited_seconds = 0.0  # of training, for the save that is running
        self._failures_in_a_row = 0

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save `step`. The save has ended when this returns, unless saves are asynchronous.

        Raises CheckpointError on every rank when `checkpoint.max_failed_saves` saves failed in a row.
        """
        start = time.perf_counter()
        self.finish()
        fragments = self._engine.fragments() if self._snapshot is None else self._snapshot.take(self._engine)
        header = manifest_header(step, self._engine.scalar_state(), state)
        self._running_step = step
        self._running = Save(
            self._directory, step, fragments, header, self._context, self._retain, self._watch
        )
        self._waited_seconds = time.perf_counter() - start
        if self._snapshot is None:
            self.finish()

    def _wait_for_copy(self) -> None:
        assert self._snapshot is not None
        start = time.perf_counter()
        self._snapshot.wait()
        self._waited_seconds += time.perf_counter() - start

    def save_last(self, step: int, state: dict[str, Any]) -> None:
        """Save `step` unless it is saved, and wait. Raises CheckpointError if that fails, since the run ends here."""
        self.finish()
        if self.saved_step == step:
            return
        # No step follows in which another save could succeed, so this failure ends the run with an error.
        self._failures_in_a_row = self._config.max_failed_saves - 1
        self.save(step, state)
        self.finish()

    def poll(self) -> None:
        """Commit the save in flight if all ranks have written their part. Costs one small reduction if there is one."""
        self._advance(wait=False)

    def finish(self) -> None:
        """Wait for the save in flight, if any."""
        self._advance(wait=True)

    def _advance(self, wait: bool) -> None:
        if self._running is None:
            return
        try:
            if not self._running.advance(wait):
                return
        except CheckpointError as error:
            failed_here, self._running = bool(self._running.failure), None
            self._count_failure(error, report=failed_here or self._context.is_main)
            return
        self._failures_in_a_row = 0
        # Only when all ranks have committed: the name did not exist before.
        self.saved_step = self._running_step
        if self._context.is_main:
            background = f", {self._waited_seconds:.1f} s of them waited for" if self._snapshot else ""
            log.info("saved %s in %.1f s%s", self._running.path, self._running.seconds, background)
        self._on_saved(self._running_step, self._running.seconds)
        self._running = None

    def _count_failure(self, error: CheckpointError, report: bool) -> None:
        self._failures_in_a_row += 1
        limit = self._config.max_failed_saves
        if self._failures_in_a_row >= limit:
            kept = list_checkpoints(self._directory)
            newest = f"the newest checkpoint is {kept[-1].name}" if kept else "there is no checkpoint"
            last = CheckpointError(
                f"{error} The run ends because it could not be saved; {newest}. Remove the cause (space, permissions, "
                f"quota of {self._directory}) and start again to continue from there."
            )
            last.only_here = error.only_here
            raise last
        if not report:
            return
        log.warning(
            "%s Earlier checkpoints are untouched and training goes on; it ends after %d consecutive failed saves "
            "(checkpoint.max_failed_saves), this was number %d.",
            error,
            limit,
            self._failures_in_a_row,
        )

    def _retain(self) -> None:
        """Delete old checkpoints after a commit, on rank 0. If that fails, the new checkpoint is valid all the same."""
        try:
            retain(self._directory, self._config.keep_last, self._config.keep_every)
        except OSError as error:
            log.warning("old checkpoints stay, since they cannot be deleted: %s", system_problem(error))


class Snapshot:
    """Copies of the state that this rank owns, in CPU memory that is allocated once."""

    def __init__(self, engine: StateOwner):
        self._buffers = [
            torch.zeros(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            for fragment in _written(engine.fragments())
            for values in fragment.tensors.values()
        ]
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def take(self, engine: StateOwner) -> Iterator[Fragment]:
        """The engine's fragments as they are now, valid until the next call. Iterating waits for the copy.

        A thread makes the copy: the caller must call `wait` before it changes the engine's fragments.
        """
        self.wait()
        fragments = list(engine.fragments())
        self._thread = threading.Thread(target=self._copy, args=(fragments,), name="snapshot", daemon=True)
        self._thread.start()
        return self._copies(fragments)

    def wait(self) -> None:
        """Wait until the copy is made."""
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def _copy(self, fragments: list[Fragment]) -> None:
        self._failure = None
        try:
            live = [values for fragment in _written(fragments) for values in fragment.tensors.values()]
            for buffer, values in zip(self._buffers, live, strict=True):
                buffer.copy_(values, non_blocking=True)
            # Weights that are never trained may be in the host's memory while the others are not.
            on_device = next((values for values in live if values.is_cuda), None)
            if on_device is not None:
                torch.cuda.synchronize(on_device.device)  # in this thread: the step goes on meanwhile
        except Exception as error:  # `_copies` raises it
            self._failure = error

    def _copies(self, fragments: list[Fragment]) -> Iterator[Fragment]:
        self.wait()
        if self._failure is not None:
            raise self._failure
        buffers = iter(self._buffers)
        for fragment in fragments:
            # Copies of other ranks' values are neither copied here nor written.
            names = [] if fragment.is_copy else list(fragment.tensors)
            yield replace(fragment, tensors={name: next(buffers) for name in names})


def _written(fragments: Iterable[Fragment]) -> Iterator[Fragment]:
    return (fragment for fragment in fragments if not fragment.is_copy)
