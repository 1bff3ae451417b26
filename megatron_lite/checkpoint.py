"""Checkpoints without pickle that every layout can load: tensor x pipeline x data parallel, ZeRO 1 or 2.

    DIRECTORY/step_00000100/
        rank_00000.safetensors   the boxes of parameters this rank owned: fp32 weights and Adam moments
        rank_00000.json          what they are; folded into the manifest
        manifest.json            every box, size and SHA-256 of every file, parameter shapes, training state

Every rank writes what it owns; a box says where its elements lie in the whole parameter (boxes.py), not who owned them,
and padding rows of the vocabulary are left out, since their number depends on the layout. Rank 0 writes the manifest
last, and the directory gets its name by an atomic rename after everything is on disk, so a name that exists is a
complete checkpoint. There is no "latest" pointer: the newest directory whose manifest and checksums hold is it. Whether
a save or load went well is decided by all ranks together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_lite.boxes import Box, matrix_shape, whole_shape
from megatron_lite.engine import Engine, Fragment
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel_context import ParallelContext

FORMAT = "megatron-lite-checkpoint"
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{8,})")
_MAX_MANIFEST_BYTES = 1 << 30
KINDS = ("weight", "exp_avg", "exp_avg_sq")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """A box of one parameter's values, and where it is stored, as a matrix."""

    file: str
    key: str
    name: str
    kind: str
    box: Box


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, its manifest read and checked for shape, its files not yet read."""

    path: Path
    step: int
    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
    files: dict[str, dict[str, Any]]  # name -> {"bytes", "sha256"}
    optimizer: dict[str, Any]
    state: dict[str, Any]  # the trainer's own


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Committed checkpoint directories, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


# Writing


def save(directory: Path, step: int, engine: Engine, state: dict[str, Any], context: ParallelContext) -> Path:
    """Write the checkpoint of `step`, called by every rank. Returns its path.

    Raises CheckpointError on every rank if any rank could not write; earlier checkpoints are untouched.
    """
    final = directory / checkpoint_name(step)
    partial = directory / f"{final.name}.partial"
    with _agreement(context, f"saving {final}"):
        if context.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed while saving
            partial.mkdir(parents=True)
    with _agreement(context, f"saving {final}"):
        _write_rank(partial, context.rank, engine.fragments())
    with _agreement(context, f"saving {final}"):
        if context.is_main:
            _write_manifest(partial, step, engine, state, context.world_size)
            _sync_directory(partial)
            if final.exists():  # the same step again, for example after a fallback to an older checkpoint
                shutil.rmtree(final)
            os.rename(partial, final)
            _sync_directory(directory)
    return final


@contextlib.contextmanager
def _agreement(context: ParallelContext, what: str):  # type: ignore[no-untyped-def]
    """Run a section on every rank; if one fails, all raise CheckpointError instead of some waiting for ever."""
    failure = ""
    try:
        yield
    except (OSError, SafetensorError, ValueError, CheckpointError) as error:
        failure = str(error) or type(error).__name__
    failed = context.sum(torch.tensor([float(bool(failure))], device=context.device))
    if failure:
        raise CheckpointError(f"{what}: {failure}")
    if failed.item():
        raise CheckpointError(f"{what}: {int(failed.item())} other rank(s) failed; their messages say why.")


def _write_rank(directory: Path, rank: int, fragments: Iterable[Fragment]) -> None:
    tensors, pieces, shapes = {}, [], {}
    for fragment in fragments:
        shapes[fragment.name] = list(whole_shape(fragment.shape, fragment.partition, fragment.tp.size))
        if fragment.is_copy:
            continue
        for run in fragment.runs():
            for kind, values in fragment.tensors.items():
                key = f"{fragment.name}/{kind}/{run.box.row}.{run.box.column}"
                part = values[run.start - fragment.start : run.stop - fragment.start]
                tensors[key] = part.detach().cpu().contiguous().view(run.box.shape)
                pieces.append({"key": key, "name": fragment.name, "kind": kind, "box": astuple(run.box)})
    path = directory / f"rank_{rank:05d}.safetensors"
    save_file(tensors, path)
    _sync_file(path)
    described = {
        "bytes": path.stat().st_size,
        "sha256": file_sha256(path),
        "shapes": shapes,
        "pieces": pieces,
    }
    write_json(directory / f"rank_{rank:05d}.json", described)


def _write_manifest(
    directory: Path, step: int, engine: Engine, state: dict[str, Any], world_size: int
) -> None:
    files, pieces, shapes = {}, [], {}
    for rank in range(world_size):
        described = json.loads((directory / f"rank_{rank:05d}.json").read_text(encoding="utf-8"))
        name = f"rank_{rank:05d}.safetensors"
        files[name] = {"bytes": described["bytes"], "sha256": described["sha256"]}
        shapes.update(described["shapes"])
        pieces += [{"file": name, **piece} for piece in described["pieces"]]
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "shapes": shapes,
        "files": files,
        "pieces": pieces,
        "optimizer": engine.scalar_state(),
        "state": state,
    }
    write_json(directory / "manifest.json", manifest)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the name only ever holds a complete file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def retain(directory: Path, keep_last: int, keep_every: int) -> None:
    """Delete checkpoints beyond the newest `keep_last` (0 = keep all), except multiples of `keep_every` steps."""
    if keep_last == 0:
        return
    for path in list_checkpoints(directory)[:-keep_last]:
        step = int(path.name.removeprefix("step_"))
        if keep_every and step % keep_every == 0:
            continue
        doomed = path.with_name(
            f"{path.name}.deleted"
        )  # renamed first: a half-deleted checkpoint has no valid name
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


# Reading


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a manifest: structure, file sizes, every element of every parameter covered exactly once.

    Raises CheckpointError naming what is wrong.
    """
    manifest = _read_manifest(path)
    try:
        shapes = {name: tuple(int(n) for n in shape) for name, shape in manifest["shapes"].items()}
        pieces = tuple(
            Piece(p["file"], p["key"], p["name"], p["kind"], Box(*map(int, p["box"])))
            for p in manifest["pieces"]
        )
        checkpoint = Checkpoint(
            path,
            int(manifest["step"]),
            shapes,
            pieces,
            manifest["files"],
            manifest["optimizer"],
            manifest["state"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: the manifest is incomplete ({type(error).__name__}: {error})."
        ) from None
    _check_files(checkpoint)
    _check_coverage(checkpoint)
    return checkpoint


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"checkpoint {path}: manifest.json is larger than {_MAX_MANIFEST_BYTES} bytes."
            )
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: manifest.json: {error.strerror}.") from None
    except ValueError:
        raise CheckpointError(f"checkpoint {path}: manifest.json is damaged.") from None
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or manifest.get("version") != FORMAT_VERSION
    ):
        raise CheckpointError(
            f"checkpoint {path}: manifest.json is not of format {FORMAT} version {FORMAT_VERSION}."
        )
    return manifest


def _check_files(checkpoint: Checkpoint) -> None:
    for name, described in checkpoint.files.items():
        if not re.fullmatch(r"rank_\d{5,}\.safetensors", name):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest names a file {name!r} of another kind."
            )
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {name}: {error.strerror}.") from None
        if size != described["bytes"]:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} has {size} bytes, the manifest says {described['bytes']}."
            )


def _check_coverage(checkpoint: Checkpoint) -> None:
    """Every parameter's boxes must tile it: disjoint, inside, and together as large."""
    boxes: dict[tuple[str, str], list[Box]] = {(n, k): [] for n in checkpoint.shapes for k in KINDS}
    for piece in checkpoint.pieces:
        if (piece.name, piece.kind) not in boxes or piece.file not in checkpoint.files:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest's piece {piece.key!r} fits no parameter or file."
            )
        boxes[piece.name, piece.kind].append(piece.box)
    for (name, kind), found in boxes.items():
        rows, columns = matrix_shape(checkpoint.shapes[name])
        whole = Box(0, rows, 0, columns)
        overlapping = any(a.overlap(b) for i, a in enumerate(found) for b in found[:i])
        outside = any(box.overlap(whole) != box for box in found)
        if overlapping or outside or sum(box.size for box in found) != whole.size:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} ({kind}) is not complete, or some of it is twice."
            )


def verify(checkpoint: Checkpoint) -> None:
    """Compare every file with its checksum. Raises CheckpointError naming the damaged file."""
    for name, described in checkpoint.files.items():
        if file_sha256(checkpoint.path / name) != described["sha256"]:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} does not match its checksum; the file is damaged."
            )


def newest_valid(directory: Path, context: ParallelContext) -> Checkpoint | None:
    """The newest checkpoint whose manifest and checksums hold, agreed by all ranks; damaged newer ones are reported.

    Files are verified once, split over the ranks. Raises CheckpointError if checkpoints exist but none is valid.
    """
    paths = list_checkpoints(directory)
    for path in reversed(paths):
        try:
            with _agreement(context, f"checking {path}"):
                checkpoint = read_checkpoint(path)
                mine = sorted(checkpoint.files)[context.rank :: context.world_size]
                verify(
                    Checkpoint(
                        **{**checkpoint.__dict__, "files": {name: checkpoint.files[name] for name in mine}}
                    )
                )
            return checkpoint
        except CheckpointError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {directory} is valid; move them away to start afresh."
        )
    return None


Read = Callable[[Piece, Box], torch.Tensor]


def _reader(checkpoint: Checkpoint) -> Read:
    """A function that reads a box of a whole parameter out of one piece that covers it."""
    handles: dict[str, Any] = {}

    def read(piece: Piece, box: Box) -> torch.Tensor:
        if piece.file not in handles:
            handles[piece.file] = safe_open(checkpoint.path / piece.file, framework="pt")
        return handles[piece.file].get_slice(piece.key)[box.within(piece.box)]

    return read


@torch.no_grad()
def load(checkpoint: Checkpoint, engine: Engine, context: ParallelContext) -> None:
    """Fill this rank's fragments from the boxes that overlap them, then publish the weights to the model."""
    with _agreement(context, f"loading {checkpoint.path}"):
        _check_same_number(checkpoint, engine.count_parameters())
        read = _reader(checkpoint)
        by_parameter = _pieces_by_parameter(checkpoint)
        for fragment in engine.fragments():
            shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
            _check_same_shape(checkpoint, fragment.name, shape)
            for run in fragment.runs():
                for kind, values in fragment.tensors.items():
                    target = values[run.start - fragment.start : run.stop - fragment.start].view(
                        run.box.shape
                    )
                    _fill(target, run.box, by_parameter[fragment.name, kind], read)
        engine.load_scalar_state(checkpoint.optimizer)
    engine.publish_weights()


def load_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The whole fp32 model weights, for inference in one process, without padding rows."""
    return dict(iterate_weights(checkpoint))


def iterate_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole fp32 weight of each parameter, without padding rows, one in memory at a time."""
    read = weight_reader(checkpoint)
    for name in checkpoint.shapes:
        yield name, read(name)


def weight_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """A function that reads one whole fp32 weight, without padding rows, by its parameter's name."""
    by_parameter = _pieces_by_parameter(checkpoint)

    def read(name: str) -> torch.Tensor:
        rows, columns = matrix_shape(checkpoint.shapes[name])
        matrix = torch.empty(rows, columns)
        pieces = by_parameter[name, "weight"]
        # A reader for each parameter: an open file keeps every page that was read.
        _fill(matrix, Box(0, rows, 0, columns), pieces, _reader(checkpoint))
        return matrix.view(checkpoint.shapes[name])

    return read


def _pieces_by_parameter(checkpoint: Checkpoint) -> dict[tuple[str, str], list[Piece]]:
    table: dict[tuple[str, str], list[Piece]] = {}
    for piece in checkpoint.pieces:
        table.setdefault((piece.name, piece.kind), []).append(piece)
    return table


def _fill(target: torch.Tensor, box: Box, pieces: list[Piece], read: Read) -> None:
    """Copy `box` of a parameter into `target` from the pieces that overlap it."""
    for piece in pieces:
        common = box.overlap(piece.box)
        if common is not None:
            target[common.within(box)] = read(piece, common)


def _check_same_number(checkpoint: Checkpoint, count: int) -> None:
    if len(checkpoint.shapes) != count:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model, of {len(checkpoint.shapes)} parameter tensors; "
            f"this one has {count}. Use the configuration it was trained with, or another run.directory."
        )


def _check_same_shape(checkpoint: Checkpoint, name: str, ours: tuple[int, ...]) -> None:
    theirs = checkpoint.shapes.get(name)
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model: {name} is {theirs or 'absent'} there and {ours} "
            f"here; use the configuration it was trained with, or another run.directory."
        )
