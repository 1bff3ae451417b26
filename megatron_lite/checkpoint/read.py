"""Loads a checkpoint under any parallel sizes: all ranks agree on which one is valid, and each reads its own slices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from megatron_lite.checkpoint.collective_errors import raise_on_all_ranks, steps_seen_by_rank_0
from megatron_lite.checkpoint.fragments import StateOwner
from megatron_lite.checkpoint.manifest import (
    Checkpoint,
    StoredSlice,
    checkpoint_name,
    checkpoint_step,
    checkpoints_in,
    is_checkpoint,
    list_checkpoints,
    none_is_valid,
)
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.checkpoint.tensor_files import TensorFile
from megatron_lite.checkpoint.verify import (
    check_same_number,
    check_same_shape,
    checksum_blocks,
    read_checkpoint,
    require_found,
    verify_checkpoint,
)
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import whole_shape

log = logging.getLogger(__name__)
T = TypeVar("T")


def newest_valid(directory: Path, context: ParallelContext) -> Checkpoint | None:
    """The newest checkpoint whose manifest and checksums are right, the same on all ranks. Logs damaged newer ones.

    The ranks share the work of verifying. Raises CheckpointError if checkpoints exist but none is valid.
    """
    # Nodes may see different states of a shared file system: all ranks walk through rank 0's list.
    steps = steps_seen_by_rank_0(directory, context)
    for step in reversed(steps):
        path = next((p for p in list_checkpoints(directory) if checkpoint_step(p) == step), None)
        try:
            # Absent on this rank: reading it fails, so that all ranks fall back together instead of loading different
            # steps.
            return _read_on_all_ranks(path or directory / checkpoint_name(step), context)
        except CheckpointError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
    if steps:
        raise none_is_valid(directory, len(steps))
    return None


def find_checkpoint(path: Path, context: ParallelContext) -> Checkpoint:
    """The checkpoint `path`, or the newest valid one of a run or of a directory of checkpoints; verified.

    Called by every rank. Raises CheckpointError if there is none or it is damaged.
    """
    path = resolve_model(path)
    if is_checkpoint(path):
        return _read_on_all_ranks(path, context)
    return require_found(newest_valid(checkpoints_in(path), context), path)


def _read_on_all_ranks(path: Path, context: ParallelContext) -> Checkpoint:
    """Read the manifest on every rank and verify the checksums, each rank a share of the blocks."""
    with raise_on_all_ranks(context, f"checking {path}"):
        checkpoint = read_checkpoint(path)
        # Ranks divide the bytes: all of a checkpoint of 1 TB by each rank would take hours.
        share = checksum_blocks(checkpoint)[context.rank :: context.world_size]
        for block in _with_progress(share, f"checking {path.name}", context):
            verify_checkpoint(checkpoint, [block])
    return checkpoint


def _with_progress(items: list[T], description: str, context: ParallelContext) -> Iterable[T]:
    """The items, with a progress bar on the main rank's terminal, if it has one."""
    return progress_bar(items, desc=description, disable=None if context.is_main else True)


class _SliceReader:
    """Reads slices of parameters from a checkpoint's files, with little memory besides the target's."""

    def __init__(self, checkpoint: Checkpoint):
        self._path = checkpoint.path
        self._files: dict[str, TensorFile] = {}
        self._slices: dict[tuple[str, str], list[StoredSlice]] = {}
        for stored in checkpoint.slices:
            self._slices.setdefault((stored.name, stored.state_name), []).append(stored)

    def has(self, name: str, state_name: str) -> bool:
        return (name, state_name) in self._slices

    def fill(self, target: torch.Tensor, wanted: ShardSlice, name: str, state_name: str) -> None:
        """Copy the slice `wanted` of a parameter into the matrix `target` from the stored slices that overlap it."""
        for stored in self._stored(name, state_name):
            common = wanted.overlap(stored.slice)
            if common is None:
                continue
            # Opened when needed: a rank of 1,024 overlaps the slices of a few files.
            if stored.file not in self._files:
                self._files[stored.file] = TensorFile(self._path / stored.file)
            for read, values in self._files[stored.file].read(stored.key, stored.slice, common):
                # `is_added`: to what is there, as a stored table (full_word_embedding.py) or noise (upcycling.py).
                destination = target[read.within(wanted)]
                values = destination + values.to(destination.device) if stored.is_added else values
                destination.copy_(values)

    def _stored(self, name: str, state_name: str) -> list[StoredSlice]:
        if not self.has(name, state_name):
            raise CheckpointError(
                f"checkpoint {self._path} holds no {state_name} of {name}; continue with the settings of its run, or "
                "start another run.directory from its weights with checkpoint.initialize_from."
            )
        return self._slices[name, state_name]


@torch.no_grad()
def load_checkpoint(checkpoint: Checkpoint, engine: StateOwner, context: ParallelContext) -> None:
    """Fill this rank's fragments from the stored slices that overlap them, then copy the weights to the model."""
    _load_fragments(checkpoint, engine, context, None)
    engine.load_scalar_state(checkpoint.optimizer)
    engine.gather_weights()


@torch.no_grad()
def load_weights_only(
    checkpoint: Checkpoint, engine: StateOwner, context: ParallelContext, new: Collection[str] = ()
) -> None:
    """Load the weights of a checkpoint, or their EMA if its run uses that, without its optimizer state.

    Args: new: parameters that the checkpoint lacks and that keep their values, see `new_parameters`.
    """
    _load_fragments(checkpoint, engine, context, ("weight",), new)
    engine.gather_weights()


def _load_fragments(
    checkpoint: Checkpoint,
    engine: StateOwner,
    context: ParallelContext,
    state_names: Collection[str] | None,
    new: Collection[str] | None = None,
) -> None:
    """Fill the fragments.

    Args:
        state_names: to fill; None: all.
        new: as for `load_weights_only`; None: the parameters must be exactly those of the checkpoint.
    """
    # A collective, so before the block below: a rank that fails in there makes no more collectives.
    count = engine.count_parameters()
    with raise_on_all_ranks(context, f"loading {checkpoint.path}"):
        if new is None:
            check_same_number(checkpoint, count)
        reader, weight = _SliceReader(checkpoint), weights_in_use(checkpoint)
        fragments = [fragment for fragment in engine.fragments() if fragment.name not in (new or ())]
        for fragment in _with_progress(fragments, f"loading {checkpoint.path.name}", context):
            chosen = {k: v for k, v in fragment.tensors.items() if state_names is None or k in state_names}
            if "weight" in chosen:
                shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
                check_same_shape(checkpoint, fragment.name, shape)
            for absent in [state_name for state_name in chosen if not reader.has(fragment.name, state_name)]:
                # Before its first step the moments are zero, and a checkpoint of weights alone holds none.
                if absent == "ema" or not checkpoint.optimizer["adam_step"]:
                    chosen.pop(absent).zero_()
            for owned in fragment.ranges():
                for state_name, flat in chosen.items():
                    values = flat[owned.start - fragment.start : owned.stop - fragment.start]
                    # A new run begins with the weights that its source evaluates, the averages if it has them; a
                    # continued run needs the trained weights themselves.
                    read = state_name if state_names is None else weight
                    reader.fill(values.view(owned.slice.shape), owned.slice, fragment.name, read)
            if "ema" in fragment.tensors and "ema" not in chosen:  # the averages start at the weights
                fragment.tensors["ema"].copy_(fragment.tensors["weight"])


def weights_in_use(checkpoint: Checkpoint) -> str:
    """Name of the state that its run evaluates and exports as weights: "ema" if `ema.use` is set and it is stored."""
    settings = checkpoint.state.get("config", {}).get("ema", {})
    has_averages = any(stored.state_name == "ema" for stored in checkpoint.slices)
    return "ema" if settings.get("use") and has_averages else "weight"


def weight_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """A function: parameter name -> its whole fp32 weight, or EMA where the run uses it, without padding rows."""
    reader, state_name = _SliceReader(checkpoint), weights_in_use(checkpoint)

    def read(name: str) -> torch.Tensor:
        rows, columns = matrix_shape(checkpoint.shapes[name])
        # Filled completely: `read_checkpoint` has proved that the slices cover every element.
        matrix = torch.empty(rows, columns)
        reader.fill(matrix, ShardSlice(0, rows, 0, columns), name, state_name)
        return matrix.view(checkpoint.shapes[name])

    return read
