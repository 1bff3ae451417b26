"""A checkpoint that exists: its manifest read and checked, its files compared with their checksums and with a model."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.checksums import check_entry, damaged_block
from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from data_utils.common.untrusted import conform, parse_json, read_bounded
from megatron_lite.checkpoint.manifest import (
    ADAPTER,
    FORMAT,
    FORMAT_VERSION,
    KINDS,
    NAME,
    TASK_HEAD,
    Checkpoint,
    Piece,
    checkpoint_name,
    checkpoints_in,
    checksum_line,
    is_checkpoint,
    list_checkpoints,
    none_is_valid,
    step_of,
)
from megatron_lite.checkpoint.resolve_path import model_at
from megatron_lite.checkpoint.shard_slices import Box, matrix_shape

_MAX_MANIFEST_BYTES = 1 << 30


_Number = Annotated[int, Field(ge=0, lt=1 << 53)]


class _File(TypedDict):
    bytes: _Number
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 53)]
    crc32: list[Annotated[int, Field(ge=0, lt=1 << 32)]]


class _Piece(TypedDict):
    file: str
    key: str
    name: str
    kind: str
    box: Annotated[list[_Number], Field(min_length=4, max_length=4)]


_Value = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _LossScaler(TypedDict):
    cur_scale: NotRequired[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    cur_iter: NotRequired[_Number]
    last_overflow_iter: NotRequired[Annotated[int, Field(ge=-1, lt=1 << 53)] | None]
    cur_hysteresis: NotRequired[_Number]


class _Optimizer(TypedDict):
    kind: NotRequired[str]  # AdamW's if absent
    adam_step: _Value
    adam_steps: NotRequired[dict[str, _Value]]  # of parameters with another count
    loss_scaler: _LossScaler


class _Averages(TypedDict):
    use: NotRequired[bool]


class _Config(TypedDict):
    ema: NotRequired[_Averages]
    tokenizer: NotRequired[dict[str, Any] | None]


class _State(TypedDict):
    config: NotRequired[_Config]


class _OfState(TypedDict):
    """What is read of a state before the run is opened, which checks all of it."""

    state: _State


class _Manifest(TypedDict):
    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    shapes: dict[str, Annotated[list[_Number], Field(min_length=1)]]
    files: dict[str, _File]
    pieces: list[_Piece]
    kinds: NotRequired[dict[str, dict[str, Annotated[list[_Number], Field(min_length=2, max_length=2)]]]]
    optimizer: _Optimizer
    state: dict[str, Any]
    saved_at: NotRequired[str | None]


class MisnamedError(CheckpointError):
    """A checkpoint that has the name of another step: the newest name would not be the newest checkpoint."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a manifest: structure, file sizes, every element of every parameter covered exactly once.

    Raises CheckpointError naming what is wrong.
    """
    tree = _read_manifest(path)
    try:
        manifest = conform(tree, _Manifest)
        conform({"state": manifest["state"]}, _OfState)
        files = {name: _file_entry(described) for name, described in manifest["files"].items()}
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: manifest.json {error}.") from None
    checkpoint = Checkpoint(
        path,
        manifest["step"],
        {name: tuple(shape) for name, shape in manifest["shapes"].items()},
        tuple(Piece(p["file"], p["key"], p["name"], p["kind"], Box(*p["box"])) for p in manifest["pieces"]),
        files,
        dict(manifest["optimizer"]),
        manifest["state"],
        manifest.get("saved_at"),
    )
    if NAME.fullmatch(path.name) and step_of(path) != checkpoint.step:
        raise MisnamedError(
            f"checkpoint {path} holds step {checkpoint.step}, and its name is that of another; rename it to "
            f"{checkpoint_name(checkpoint.step)}, or remove it."
        )
    _check_files(checkpoint)
    _check_coverage(checkpoint, manifest.get("kinds", {}))
    return checkpoint


def _file_entry(described: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's entry for a file, its list of CRC-32 as the digits that checksums.py reads. Raises ValueError."""
    entry = {**described, "crc32": "".join(f"{value:08x}" for value in described["crc32"])}
    try:
        check_entry(entry)
    except ValueError:
        raise ValueError("does not hold the checksums of all blocks of its files") from None
    return entry


def _read_manifest(path: Path) -> dict[str, Any]:
    content = _read_small(path, "manifest.json")
    try:
        manifest = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: manifest.json {error}; the file is damaged.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: manifest.json is not of format {FORMAT}.")
    version = manifest.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path}: manifest.json has version {shown(version)} of the format and this program reads "
            f"{FORMAT_VERSION}; use the program that wrote it, unless the file is damaged."
        )
    if _read_small(path, "manifest.json.sha256") != checksum_line(content):
        raise CheckpointError(
            f"checkpoint {path}: manifest.json does not match manifest.json.sha256; one of them is damaged."
        )
    return manifest


def _read_small(path: Path, name: str) -> bytes:
    try:
        return read_bounded(path / name, _MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path}: {name}: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {name} {error}.") from None


def _check_files(checkpoint: Checkpoint) -> None:
    for name, described in checkpoint.files.items():
        if not re.fullmatch(r"rank_\d{5,}\.safetensors", name):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest names {name!r}, which is not a file of a rank."
            )
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {name}: {error.strerror}.") from None
        if size != described["bytes"]:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} has {size} bytes, the manifest says {described['bytes']}."
            )


def _check_coverage(checkpoint: Checkpoint, kinds: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Raise CheckpointError unless each parameter's boxes are inside it, disjoint, and together as large.

    Args: kinds: parameter -> kind of its state -> rows and columns; for those that do not have just KINDS.
    """
    stored: dict[tuple[str, str], list[Box]] = {
        (name, kind): [] for name in checkpoint.shapes for kind in {"weight", *kinds.get(name, KINDS)}
    }
    for piece in checkpoint.pieces:
        if (piece.name, piece.kind) not in stored or piece.file not in checkpoint.files:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest's piece {piece.key!r} fits no parameter or file."
            )
        stored[piece.name, piece.kind].append(piece.box)
    for (name, kind), boxes in stored.items():
        whole_shape = matrix_shape(checkpoint.shapes[name])
        rows, columns = whole_shape if kind in KINDS else kinds[name][kind]
        whole = Box(0, rows, 0, columns)
        outside = any(box.overlap(whole) != box for box in boxes)
        if outside or _overlapping(boxes) or sum(box.size for box in boxes) != whole.size:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} ({kind}) is not complete, or parts of it are there twice."
            )


def _overlapping(boxes: list[Box]) -> bool:
    """Whether two boxes share an element. In the order of rows, only boxes that reach the next one's row matter."""
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other.row_stop > box.row]
        if any(box.overlap(other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


@dataclass(frozen=True)
class Block:
    """A part of a file, with a checksum of its own."""

    file: str
    number: int
    bytes: int


def blocks(checkpoint: Checkpoint) -> list[Block]:
    """All blocks of all files."""
    return [
        Block(name, number, min(described["block_bytes"], described["bytes"] - start))
        for name, described in sorted(checkpoint.files.items())
        for number, start in enumerate(range(0, described["bytes"], described["block_bytes"]))
    ]


def verify_checkpoint(checkpoint: Checkpoint, chosen: Iterable[Block] | None = None) -> None:
    """Compare blocks, all by default, with their checksums. Raises CheckpointError naming the damaged file."""
    for block in blocks(checkpoint) if chosen is None else chosen:
        try:
            damage = damaged_block(checkpoint.path / block.file, checkpoint.files[block.file], [block.number])
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {block.file}: {error.strerror or error}."
            ) from None
        if damage is not None:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {block.file} does not match its checksum in bytes {damage} to "
                f"{damage + block.bytes}; the file is damaged."
            )


def newest_readable(directory: Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest and file sizes are right, as this process sees it; None if there is none.

    Raises CheckpointError if checkpoints exist but none is readable.
    """
    paths = list_checkpoints(directory)
    for path in reversed(paths):
        with contextlib.suppress(CheckpointError):
            return read_checkpoint(path)
    if paths:
        raise none_is_valid(directory, len(paths))
    return None


def find_manifest(path: Path) -> Checkpoint:
    """The checkpoint that `find_checkpoint` would find, by this process alone, and without reading its tensor files."""
    path = model_at(path)
    if is_checkpoint(path):
        return read_checkpoint(path)
    return existing(newest_readable(checkpoints_in(path)), path)


def existing(checkpoint: Checkpoint | None, path: Path) -> Checkpoint:
    """The checkpoint found in `path`. Raises CheckpointError if it is None."""
    if checkpoint is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a run directory or one of its checkpoints/step_... directories."
        )
    return checkpoint


def check_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint's parameters have exactly these names and shapes."""
    check_same_number(checkpoint, len(shapes))
    for name, shape in shapes.items():
        check_same_shape(checkpoint, name, shape)


def new_parameters(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Names of the parameters that a run adds to the checkpoint it begins with.

    They are a task's head, unless the checkpoint has one of the same shapes, adapters, if the checkpoint has none, and
    the layer before the output projection, if the checkpoint has no head (a discriminator).
    Raises: CheckpointError if the other parameters are of another model.
    """
    head = {name for name in shapes if name.startswith(TASK_HEAD)}
    adapters = {name for name in shapes if ADAPTER in name}
    if not any(name.startswith("heads.") for name in checkpoint.shapes):
        head |= {name for name in shapes if name.startswith("heads.projection.")}
    if any(ADAPTER in name for name in checkpoint.shapes):
        adapters = set()
    theirs = {name: shape for name, shape in checkpoint.shapes.items() if not name.startswith(TASK_HEAD)}
    without_head = dataclasses.replace(checkpoint, shapes=theirs)
    check_model(without_head, {name: shapes[name] for name in shapes if name not in head | adapters})
    # Each of several heads is new or known alone.
    lacking = {name.rsplit(".", 2)[0] for name in head if checkpoint.shapes.get(name) != shapes[name]}
    return frozenset({name for name in head if name.rsplit(".", 2)[0] in lacking} | adapters)


def check_same_number(checkpoint: Checkpoint, count: int) -> None:
    if len(checkpoint.shapes) != count:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model, of {len(checkpoint.shapes)} parameter tensors; "
            f"this one has {count}. Use the configuration it was trained with, or another directory."
        )


def check_same_shape(checkpoint: Checkpoint, name: str, ours: tuple[int, ...]) -> None:
    theirs = checkpoint.shapes.get(name)
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model: {name} is {theirs or 'absent'} there and {ours} "
            f"here; use the configuration it was trained with, or another directory."
        )
