"""Reading a checkpoint into any layout: all ranks agree on which one is good, and each reads its own boxes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from megatron_lite.checkpoint.agreement import agreed_steps, agreement
from megatron_lite.checkpoint.existing import (
    blocks,
    check_same_number,
    check_same_shape,
    existing,
    read_checkpoint,
    verify_checkpoint,
)
from megatron_lite.checkpoint.fragments import StateOwner
from megatron_lite.checkpoint.manifest import (
    Checkpoint,
    Piece,
    checkpoint_name,
    checkpoints_in,
    is_checkpoint,
    list_checkpoints,
    none_is_valid,
    step_of,
)
from megatron_lite.checkpoint.resolve_path import model_at
from megatron_lite.checkpoint.shard_slices import Box, matrix_shape
from megatron_lite.checkpoint.tensor_files import TensorFile
from megatron_lite.model.tensor_parallel import whole_shape
from megatron_lite.parallel.context import ParallelContext

log = logging.getLogger(__name__)
T = TypeVar("T")


def newest_valid(directory: Path, context: ParallelContext) -> Checkpoint | None:
    """The newest checkpoint whose manifest and checksums are right, the same on all ranks. Logs damaged newer ones.

    The ranks share the work of verifying. Raises CheckpointError if checkpoints exist but none is valid.
    """
    steps = agreed_steps(directory, context)
    for step in reversed(steps):
        path = next((p for p in list_checkpoints(directory) if step_of(p) == step), None)
        try:
            return _read_together(path or directory / checkpoint_name(step), context)
        except CheckpointError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
    if steps:
        raise none_is_valid(directory, len(steps))
    return None


def find_checkpoint(path: Path, context: ParallelContext) -> Checkpoint:
    """The checkpoint `path`, or the newest valid one of a run or of a directory of checkpoints; verified.

    Called by every rank. Raises CheckpointError if there is none or it is damaged.
    """
    path = model_at(path)
    if is_checkpoint(path):
        return _read_together(path, context)
    return existing(newest_valid(checkpoints_in(path), context), path)


def _read_together(path: Path, context: ParallelContext) -> Checkpoint:
    """Read a checkpoint on every rank and verify it, each rank a part."""
    with agreement(context, f"checking {path}"):
        checkpoint = read_checkpoint(path)
        share = blocks(checkpoint)[context.rank :: context.world_size]
        for block in _shown(share, f"checking {path.name}", context):
            verify_checkpoint(checkpoint, [block])
    return checkpoint


def _shown(items: list[T], what: str, context: ParallelContext) -> Iterable[T]:
    """The items, with a progress bar on the main rank's terminal, if it has one."""
    return progress_bar(items, desc=what, disable=None if context.is_main else True)


class _Reader:
    """Reads boxes of whole parameters from a checkpoint's files, with little memory beside the target's."""

    def __init__(self, checkpoint: Checkpoint):
        self._path = checkpoint.path
        self._files: dict[str, TensorFile] = {}
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in checkpoint.pieces:
            self._pieces.setdefault((piece.name, piece.kind), []).append(piece)

    def has(self, name: str, kind: str) -> bool:
        return (name, kind) in self._pieces

    def fill(self, target: torch.Tensor, box: Box, name: str, kind: str) -> None:
        """Copy `box` of a parameter into the matrix `target` from the pieces that overlap it."""
        for piece in self._of(name, kind):
            common = box.overlap(piece.box)
            if common is None:
                continue
            if piece.file not in self._files:
                self._files[piece.file] = TensorFile(self._path / piece.file)
            for part, values in self._files[piece.file].read(piece.key, piece.box, common):
                place = target[part.within(box)]
                place.copy_(place + values.to(place.device) if piece.is_added else values)

    def _of(self, name: str, kind: str) -> list[Piece]:
        if not self.has(name, kind):
            raise CheckpointError(
                f"checkpoint {self._path} holds no {kind} of {name}; continue with the settings of its run, or begin "
                "with its weights by checkpoint.initialize_from in another run.directory."
            )
        return self._pieces[name, kind]


@torch.no_grad()
def load_checkpoint(checkpoint: Checkpoint, engine: StateOwner, context: ParallelContext) -> None:
    """Fill this rank's fragments from the boxes that overlap them, then publish the weights to the model."""
    _load_fragments(checkpoint, engine, context, None)
    engine.load_scalar_state(checkpoint.optimizer)
    engine.publish_weights()


@torch.no_grad()
def load_weights_only(
    checkpoint: Checkpoint, engine: StateOwner, context: ParallelContext, new: Collection[str] = ()
) -> None:
    """Load the weights of a checkpoint, or the averages that its run uses, without its optimizer state.

    Args: new: parameters that stay as they are too, see `new_parameters`.
    """
    _load_fragments(checkpoint, engine, context, ("weight",), new)
    engine.publish_weights()


def _load_fragments(
    checkpoint: Checkpoint,
    engine: StateOwner,
    context: ParallelContext,
    kinds: Collection[str] | None,
    new: Collection[str] | None = None,
) -> None:
    """Fill the fragments.

    Args: kinds: None = all. new: as for `load_weights_only`; None: names must be exactly the checkpoint's.
    """
    count = engine.count_parameters()
    with agreement(context, f"loading {checkpoint.path}"):
        if new is None:
            check_same_number(checkpoint, count)
        reader, used = _Reader(checkpoint), used_kind(checkpoint)
        fragments = [fragment for fragment in engine.fragments() if fragment.name not in (new or ())]
        for fragment in _shown(fragments, f"loading {checkpoint.path.name}", context):
            chosen = {k: values for k, values in fragment.tensors.items() if kinds is None or k in kinds}
            if "weight" in chosen:
                shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
                check_same_shape(checkpoint, fragment.name, shape)
            for kind in [kind for kind in chosen if not reader.has(fragment.name, kind)]:
                if kind == "ema" or not checkpoint.optimizer["adam_step"]:  # moments of before the first step
                    chosen.pop(kind).zero_()
            for run in fragment.runs():
                for kind, flat in chosen.items():
                    values = flat[run.start - fragment.start : run.stop - fragment.start]
                    stored = kind if kinds is None else used
                    reader.fill(values.view(run.box.shape), run.box, fragment.name, stored)
            if "ema" in fragment.tensors and "ema" not in chosen:  # averages begin
                fragment.tensors["ema"].copy_(fragment.tensors["weight"])


def used_kind(checkpoint: Checkpoint) -> str:
    """The kind of state that its run uses as weights: their averages, if `ema.use` says so and it has them."""
    settings = checkpoint.state.get("config", {}).get("ema", {})
    has_averages = any(piece.kind == "ema" for piece in checkpoint.pieces)
    return "ema" if settings.get("use") and has_averages else "weight"


def weight_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """A function that reads one whole fp32 weight, or its average, without padding rows, by its parameter's name."""
    reader, kind = _Reader(checkpoint), used_kind(checkpoint)

    def read(name: str) -> torch.Tensor:
        rows, columns = matrix_shape(checkpoint.shapes[name])
        matrix = torch.empty(rows, columns)
        reader.fill(matrix, Box(0, rows, 0, columns), name, kind)
        return matrix.view(checkpoint.shapes[name])

    return read
