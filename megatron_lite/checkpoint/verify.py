"""Reads and checks a checkpoint's manifest, verifies its files by their checksums, and compares it with a model.

One process, without torch: commands that only look at checkpoints start fast. read.py loads them on all ranks.
"""

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
    ADAM_STATE,
    ADAPTER,
    FORMAT,
    FORMAT_VERSION,
    NAME,
    ROUTER,
    TASK_HEAD,
    Checkpoint,
    StoredSlice,
    checkpoint_name,
    checkpoint_step,
    checkpoints_in,
    checksum_line,
    is_checkpoint,
    list_checkpoints,
    none_is_valid,
)
from megatron_lite.checkpoint.resolve_path import resolve_model
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.config.lora import LORA

# A checkpoint may come from anyone, so what is read of it has a limit.
_MAX_MANIFEST_BYTES = 1 << 30


# Below 2^53 an integer is exact in every JSON reader. The names in the TypedDicts below are the file's (`pieces`,
# `box`, `kind`): they belong to the format and stay.
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


class WrongStepNameError(CheckpointError):
    """A checkpoint named after another step: the newest name would not be the newest checkpoint."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a manifest: structure, file sizes, every element of every parameter covered exactly once.

    Raises CheckpointError naming what is wrong.
    """
    tree = _read_manifest(path)
    try:
        manifest = conform(tree, _Manifest)
        # Only what this package reads. The run's own settings may be of another version; `trainer_state` checks them.
        conform({"state": manifest["state"]}, _OfState)
        files = {name: _file_entry(described) for name, described in manifest["files"].items()}
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: manifest.json {error}.") from None
    checkpoint = Checkpoint(
        path,
        manifest["step"],
        {name: tuple(shape) for name, shape in manifest["shapes"].items()},
        tuple(
            StoredSlice(p["file"], p["key"], p["name"], p["kind"], ShardSlice(*p["box"]))
            for p in manifest["pieces"]
        ),
        files,
        dict(manifest["optimizer"]),
        manifest["state"],
        manifest.get("saved_at"),
    )
    # The newest name must be the newest step: a run that continued from a renamed one would train steps twice.
    if NAME.fullmatch(path.name) and checkpoint_step(path) != checkpoint.step:
        raise WrongStepNameError(
            f"checkpoint {path} holds step {checkpoint.step}, which is not the step of its name; rename it to "
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
        raise ValueError("lacks checksums of some blocks of its files") from None
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
            f"checkpoint {path}: manifest.json has format version {shown(version)}, and this program reads "
            f"{FORMAT_VERSION}; use the version of the program that wrote it."
        )
    # After format and version: a file of another program gets that message instead of "damaged".
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
        # A name is joined to the directory: `../` or an absolute path in a foreign manifest would leave it.
        if not re.fullmatch(r"rank_\d{5,}\.safetensors", name):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest names {name!r}, which is not a file of a rank."
            )
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {name}: {error.strerror}.") from None
        # The size finds a truncated copy in no time; checksums cost a read of the whole file.
        if size != described["bytes"]:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} has {size} bytes, the manifest says {described['bytes']}."
            )


def _check_coverage(checkpoint: Checkpoint, kinds: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """Raise CheckpointError unless the slices of each parameter's state are inside it, disjoint, and cover it.

    Args: kinds: parameter -> state name -> rows and columns, for parameters whose state is not just ADAM_STATE.
    """
    # Every state of every parameter has an entry, so that one without any slice is found as well.
    found: dict[tuple[str, str], list[ShardSlice]] = {
        (name, state_name): []
        for name in checkpoint.shapes
        for state_name in {"weight", *kinds.get(name, ADAM_STATE)}
    }
    for stored in checkpoint.slices:
        if (stored.name, stored.state_name) not in found or stored.file not in checkpoint.files:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the manifest's piece {stored.key!r} fits no parameter or file."
            )
        found[stored.name, stored.state_name].append(stored.slice)
    for (name, state_name), slices in found.items():
        whole_shape = matrix_shape(checkpoint.shapes[name])
        rows, columns = whole_shape if state_name in ADAM_STATE else kinds[name][state_name]
        whole = ShardSlice(0, rows, 0, columns)
        # Inside, disjoint, and of the right total size: together they prove an exact cover without marking elements.
        outside = any(each.overlap(whole) != each for each in slices)
        if outside or _overlapping(slices) or sum(each.size for each in slices) != whole.size:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} ({state_name}) is incomplete, or elements are stored twice."
            )


def _overlapping(slices: list[ShardSlice]) -> bool:
    """Whether two slices share an element. Sorted by rows, only slices that reach the next one's row matter."""
    # A sweep over sorted slices: comparing all pairs is quadratic, and 1,000 ranks store 1,000 slices of a tensor.
    reaching: list[ShardSlice] = []
    for each in sorted(slices):
        reaching = [other for other in reaching if other.row_stop > each.row]
        if any(each.overlap(other) for other in reaching):
            return True
        reaching.append(each)
    return False


@dataclass(frozen=True)
class ChecksumBlock:
    """A block of a file: the unit that has a checksum."""

    file: str
    number: int
    bytes: int


def checksum_blocks(checkpoint: Checkpoint) -> list[ChecksumBlock]:
    """All blocks of all files."""
    return [
        ChecksumBlock(name, number, min(described["block_bytes"], described["bytes"] - start))
        for name, described in sorted(checkpoint.files.items())
        for number, start in enumerate(range(0, described["bytes"], described["block_bytes"]))
    ]


def verify_checkpoint(checkpoint: Checkpoint, chosen: Iterable[ChecksumBlock] | None = None) -> None:
    """Compare blocks, all by default, with their checksums. Raises CheckpointError naming the damaged file."""
    # One block in memory at a time; ranks share the blocks of a checkpoint (read.py).
    for block in checksum_blocks(checkpoint) if chosen is None else chosen:
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
        # By manifest and sizes only: a look must be fast. A load verifies checksums on top (`newest_valid`).
        with contextlib.suppress(CheckpointError):
            return read_checkpoint(path)
    if paths:
        raise none_is_valid(directory, len(paths))
    return None


def find_manifest(path: Path) -> Checkpoint:
    """The checkpoint that `find_checkpoint` would find, by this process alone, and without reading its tensor files."""
    path = resolve_model(path)
    if is_checkpoint(path):
        return read_checkpoint(path)
    return require_found(newest_readable(checkpoints_in(path)), path)


def require_found(checkpoint: Checkpoint | None, path: Path) -> Checkpoint:
    """The checkpoint found in `path`. Raises CheckpointError if it is None."""
    if checkpoint is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a run directory or one of its checkpoints/step_... directories."
        )
    return checkpoint


def check_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint's parameters have exactly these names and shapes."""
    was_adapted, is_adapted = (any(LORA in name for name in names) for names in (checkpoint.shapes, shapes))
    if is_adapted and not was_adapted:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has no updates of LoRA, but model.lora is set; begin another run.directory "
            f"with checkpoint.initialize_from={checkpoint.path} and checkpoint.initialize=weights, or set model.lora "
            "to null."
        )
    if was_adapted and not is_adapted:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has updates of LoRA, but model.lora is null; set it as there, or begin with "
            "the merged model: export the checkpoint, and import the export (scripts/convert_checkpoint.py)."
        )
    check_same_number(checkpoint, len(shapes))
    for name, shape in shapes.items():
        check_same_shape(checkpoint, name, shape)


def new_parameters(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Names of the parameters that a run has and the checkpoint it is initialized from lacks.

    They are a task's head, unless the checkpoint has one of the same shapes; adapters, updates of LoRA and routers, if
    the checkpoint has none; the block of further tokens (MTP), which a run without it leaves in the checkpoint; and
    the layer before the output projection, if the checkpoint has no head (a discriminator).
    Raises: CheckpointError if the other parameters differ.
    """
    head = {name for name in shapes if name.startswith(TASK_HEAD)}
    lacking_kinds = [
        kind for kind in (ADAPTER, LORA, ROUTER) if not any(kind in name for name in checkpoint.shapes)
    ]
    adapters = {name for name in shapes if any(kind in name for kind in lacking_kinds)}
    # A discriminator (ELECTRA) predicts no tokens: what it lacks of the output head is new.
    if not any(name.startswith("heads.") for name in checkpoint.shapes):
        head |= {name for name in shapes if name.startswith("heads.projection.")}
    further, had_further = _further_block(shapes), _further_block(checkpoint.shapes)
    adapters |= set() if had_further else further
    theirs = {
        name: shape
        for name, shape in checkpoint.shapes.items()
        if not name.startswith(TASK_HEAD) and (further or name not in had_further)
    }
    without_head = dataclasses.replace(checkpoint, shapes=theirs)
    check_model(without_head, {name: shapes[name] for name in shapes if name not in head | adapters})
    # Each of several heads is new or known alone.
    lacking = {name.rsplit(".", 2)[0] for name in head if checkpoint.shapes.get(name) != shapes[name]}
    return frozenset({name for name in head if name.rsplit(".", 2)[0] in lacking} | adapters)


def _further_block(names: Iterable[str]) -> set[str]:
    """Those of a model's parameters that are of its block of further tokens, which alone has this product."""
    found = [re.fullmatch(r"(layers\.\d+\.)projection\.weight", name) for name in names]
    prefixes = tuple(match[1] for match in found if match)
    return {name for name in names if name.startswith(prefixes)}


def check_same_number(checkpoint: Checkpoint, count: int) -> None:
    if len(checkpoint.shapes) != count:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is of another model: it has {len(checkpoint.shapes)} parameter "
            f"tensors, the configured model has {count}; use the configuration it was trained "
            "with, or another directory."
        )


def check_same_shape(checkpoint: Checkpoint, name: str, ours: tuple[int, ...]) -> None:
    theirs = checkpoint.shapes.get(name)
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is of another model: {name} is {theirs or 'absent'} there and "
            f"{ours} here; use the configuration it was trained with, or another directory."
        )
