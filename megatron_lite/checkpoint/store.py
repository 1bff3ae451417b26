"""Checkpoints without pickle that every layout can load: tensor x pipeline x data parallel, ZeRO 1 to 3.

    DIRECTORY/step_00000100/
        rank_00000.safetensors   the boxes of parameters this rank owned: fp32 weights and Adam moments
        manifest.json            every box, size and checksums of every file, parameter shapes, training state
        manifest.json.sha256     the manifest's own checksum; `sha256sum -c` reads it

Every rank writes what it owns; a box says where its elements lie in the whole parameter (boxes.py), not who owned them,
and padding rows of the vocabulary are left out, since their number depends on the layout. Rank 0 writes the manifest
last, and the directory gets its name by an atomic rename after everything is on disk, so a name that exists is a
complete checkpoint. There is no "latest" pointer: the newest directory whose manifest and checksums hold is it. Whether
a save or load went well is decided by all ranks together. saver.py says when to save, in the background if wanted.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from data_utils.base.errors import CheckpointError
from megatron_lite.checkpoint.boxes import Box, matrix_shape, whole_shape
from megatron_lite.checkpoint.state import TrainerState
from megatron_lite.checkpoint.tensor_files import (
    TensorFile,
    block_sizes,
    check_block,
    make_directory,
    sync_directory,
    write_file,
    write_tensors,
)
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.engine import Engine, Fragment

FORMAT = "megatron-lite-checkpoint"
FORMAT_VERSION = 2
KINDS = ("weight", "exp_avg", "exp_avg_sq")
_NAME = re.compile(r"step_(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"(step_\d{8,})\.(partial|deleted|replaced)")
_MAX_MANIFEST_BYTES = 1 << 30

T = TypeVar("T")
Watch = Callable[[str], contextlib.AbstractContextManager[None]]

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
    files: dict[str, dict[str, Any]]  # name -> size and checksums (checkpoint_files.py)
    optimizer: dict[str, Any]
    state: dict[str, Any]  # of a training run: a TrainerState
    saved_at: str | None  # UTC, ISO 8601

    @property
    def bytes(self) -> int:
        return sum(described["bytes"] for described in self.files.values())

    def trainer_state(self) -> TrainerState:
        """Raises CheckpointError where `state` is none."""
        return TrainerState.from_json(self.state, self.path)


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a path names one checkpoint, good or damaged, and not a directory of several."""
    return bool(_NAME.fullmatch(path.name)) or (path / "manifest.json").exists()


def list_checkpoints(directory: Path) -> list[Path]:
    """Committed checkpoint directories, oldest first.

    `step_N.replaced` counts where `step_N` is absent: a save of the same step was killed between its two renames.
    """
    if not directory.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # step_N comes after step_N.replaced
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return [path for _, path in sorted(found.items())]


# Writing


def save(directory: Path, step: int, engine: Engine, state: dict[str, Any], context: ParallelContext) -> Path:
    """Write the checkpoint of `step`, called by every rank. Returns its path.

    Raises CheckpointError on every rank if any rank could not write; earlier checkpoints are untouched.
    """
    header = manifest_header(step, engine.scalar_state(), state)
    running = Save(directory, step, engine.fragments(), header, context)
    running.advance(wait=True)
    return running.path


def manifest_header(step: int, optimizer: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says beside shapes, pieces and files, as of now. Args: optimizer: Engine.scalar_state."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "optimizer": optimizer,
        "state": state,
    }


def unwatched(what: str) -> contextlib.AbstractContextManager[None]:
    """A `Watch` that does nothing."""
    return contextlib.nullcontext()


class Save:
    """One save under way on every rank, in a thread of its own.

    It has three stages; each begins when all ranks have ended the one before, which `advance` finds out. Only `advance`
    communicates, so training can go on meanwhile: all ranks need only call it at the same points.
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
            after_commit: run on rank 0.
            watch: the thread's work is done within watch(what it does).
        """
        self.path = directory / checkpoint_name(step)
        self.seconds = 0.0  # it took, once committed
        self._partial = directory / f"{self.path.name}.partial"
        self._fragments = fragments
        self._header = header
        self._context = context
        self._after_commit = after_commit
        self._watch = watch
        self._started = time.perf_counter()
        self._stages = iter((self._prepare, self._write, self._commit))
        self.failure = ""  # of this rank
        self._thread: threading.Thread | None = None
        self._start_next_stage()

    def advance(self, wait: bool) -> bool:
        """Go on to the next stage if all ranks are ready for it; with `wait`, wait for the end. True when committed.

        Raises CheckpointError on every rank if some rank failed; the partial directory is gone then.
        """
        while self._thread is not None:
            if wait:
                self._thread.join()
            ended = not self._thread.is_alive()
            failed = ended and bool(self.failure)
            counts = torch.tensor([float(ended), float(failed)], device=self._context.device)
            all_ended, all_failed = self._context.sum(counts).tolist()
            if all_ended < self._context.world_size:
                return False
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
        # A daemon: a process that ends by an error does not wait for a checkpoint that nobody would commit.
        self._thread = threading.Thread(target=self._run, args=(stage,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, stage: Callable[[], None]) -> None:
        try:
            with self._watch(f"writing {self.path.name}"):
                stage()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self.failure = _describe(error)
            log.debug("saving %s", self.path, exc_info=True)

    def _give_up(self, failed: int) -> None:
        self._thread = None
        if self._context.is_main:
            shutil.rmtree(self._partial, ignore_errors=True)  # gives a full disk its space back
        raise _failed_together(f"saving {self.path}", self.failure, failed, self._context)

    def _prepare(self) -> None:
        if self._context.is_main:
            make_directory(self._partial.parent)
            _clear_leftovers(self._partial.parent)
            os.mkdir(self._partial)

    def _write(self) -> None:
        _write_rank(self._partial, self._context.rank, self._fragments)

    def _commit(self) -> None:
        if self._context.is_main:
            _write_manifest(self._partial, self._header, self._context.world_size)
            _publish(self._partial, self.path)
            self._after_commit()


def _clear_leftovers(directory: Path) -> None:
    """Remove what earlier saves left when they were killed; bring back a checkpoint that was about to be replaced."""
    for path in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if not match:
            continue
        if match[2] == "replaced" and not (directory / match[1]).exists():
            os.rename(path, directory / match[1])
            sync_directory(directory)
        else:
            shutil.rmtree(path)


def _write_rank(directory: Path, rank: int, fragments: Iterable[Fragment]) -> None:
    tensors, pieces, shapes = [], [], {}
    for fragment in fragments:
        shapes[fragment.name] = list(whole_shape(fragment.shape, fragment.partition, fragment.tp.size))
        if fragment.is_copy:
            continue
        for run in fragment.runs():
            for kind, values in fragment.tensors.items():
                key = f"{fragment.name}/{kind}/{run.box.row}.{run.box.column}"
                part = values[run.start - fragment.start : run.stop - fragment.start]
                tensors.append((key, part, run.box.shape))
                pieces.append({"key": key, "name": fragment.name, "kind": kind, "box": astuple(run.box)})
    described = write_tensors(directory / _rank_file(rank), tensors)
    listing = {"file": described, "shapes": shapes, "pieces": pieces}
    write_file(directory / _rank_listing(rank), json.dumps(listing).encode())


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _rank_listing(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _write_manifest(directory: Path, header: dict[str, Any], world_size: int) -> None:
    """Fold the ranks' listings into the manifest. On disk when this returns."""
    files, pieces, shapes = {}, [], {}
    for rank in range(world_size):
        listing = json.loads((directory / _rank_listing(rank)).read_text(encoding="utf-8"))
        files[_rank_file(rank)] = listing["file"]
        shapes.update(listing["shapes"])
        pieces += [{"file": _rank_file(rank), **piece} for piece in listing["pieces"]]
    write_manifest(directory, {**header, "shapes": shapes, "files": files, "pieces": pieces})
    for rank in range(world_size):
        os.unlink(directory / _rank_listing(rank))
    sync_directory(directory)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json and its checksum."""
    content = json.dumps(manifest).encode()
    write_file(directory / "manifest.json", content)
    write_file(directory / "manifest.json.sha256", _checksum_line(content))


def _checksum_line(content: bytes) -> bytes:
    """As `sha256sum manifest.json` prints it."""
    return f"{hashlib.sha256(content).hexdigest()}  manifest.json\n".encode()


def _publish(partial: Path, final: Path) -> None:
    """Give a complete directory its name, durably."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():  # the same step again, for example after a fallback to an older checkpoint
        os.rename(final, replaced)
    os.rename(partial, final)
    sync_directory(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def retain(directory: Path, keep_last: int, keep_every: int) -> None:
    """Delete checkpoints beyond the newest `keep_last` (0 = keep all), except multiples of `keep_every` steps."""
    if keep_last == 0:
        return
    for path in list_checkpoints(directory)[:-keep_last]:
        step = _step_of(path)
        if keep_every and step % keep_every == 0:
            continue
        # Renamed first, and that on disk: a half-deleted checkpoint has no valid name.
        doomed = path.with_name(f"{checkpoint_name(step)}.deleted")
        os.rename(path, doomed)
        sync_directory(directory)
        shutil.rmtree(doomed, ignore_errors=True)


# Going back


def rewind(directory: Path, step: int) -> Path | None:
    """Make the checkpoint of `step` the newest: move all newer ones, whole, into a new directory `rewound_TIME`.

    Nothing is deleted, and what a kill leaves half done, another call completes. Returns the new directory, None if
    there was nothing to move. Raises CheckpointError if there is no such checkpoint or it is damaged; OSError.
    """
    known = {_step_of(path): path for path in list_checkpoints(directory)}
    if step not in known:
        there = ", ".join(map(str, known)) or "none"
        raise CheckpointError(
            f"{directory} holds no checkpoint of step {step}; it holds those of steps {there}."
        )
    verify(read_checkpoint(known[step]))
    newer = [p for p in directory.iterdir() if _NAME.fullmatch(p.name) and _step_of(p) > step]
    if not newer:
        return None
    target = directory / f"rewound_{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S_%f}"
    os.mkdir(target)
    for path in sorted(
        newer, reverse=True
    ):  # the newest first: what is left is at every moment a run's history
        os.rename(path, target / path.name)
    sync_directory(target)
    sync_directory(directory)
    return target


def rewinds(directory: Path) -> Iterator[tuple[Path, int]]:
    """What `rewind` set aside, oldest first: each directory and the step of its newest checkpoint."""
    for path in sorted(directory.glob("rewound_*")):
        if found := list_checkpoints(path):
            yield path, _step_of(found[-1])


# Agreement


@contextlib.contextmanager
def _agreement(context: ParallelContext, what: str) -> Iterator[None]:
    """Run a section on every rank; if one fails, all raise CheckpointError instead of some waiting for ever."""
    failure = ""
    try:
        yield
    except (OSError, ValueError, CheckpointError) as error:
        failure = _describe(error)
    failed = int(context.sum(torch.tensor([float(bool(failure))], device=context.device)).item())
    if failed:
        raise _failed_together(what, failure, failed, context)


def _failed_together(what: str, failure: str, failed: int, context: ParallelContext) -> CheckpointError:
    """What each rank raises when `failed` ranks have failed, this one by `failure` unless that is empty."""
    error = CheckpointError(f"{what}: {failure or f'{failed} other rank(s) failed; their messages say why.'}")
    error.only_here = bool(failure) and failed < context.world_size
    return error


def _describe(error: Exception) -> str:
    """One line that says what went wrong, and on which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


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
            manifest.get("saved_at"),
        )
        for described in checkpoint.files.values():
            block_sizes(described)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: the manifest is incomplete ({type(error).__name__}: {error})."
        ) from None
    _check_files(checkpoint)
    _check_coverage(checkpoint)
    return checkpoint


def _read_manifest(path: Path) -> dict[str, Any]:
    content = _read_small(path, "manifest.json")
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"checkpoint {path}: manifest.json is damaged.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path}: manifest.json is not of format {FORMAT}.")
    version = manifest.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path}: manifest.json has version {version!r} of the format and this program reads "
            f"{FORMAT_VERSION}; use the program that wrote it, unless the file is damaged."
        )
    if _read_small(path, "manifest.json.sha256") != _checksum_line(content):
        raise CheckpointError(
            f"checkpoint {path}: manifest.json does not match manifest.json.sha256; one of them is damaged."
        )
    return manifest


def _read_small(path: Path, name: str) -> bytes:
    file = path / name
    try:
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"checkpoint {path}: {name} is larger than {_MAX_MANIFEST_BYTES} bytes.")
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {name}: {error.strerror}.") from None


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
        outside = any(box.overlap(whole) != box for box in found)
        if outside or _overlapping(found) or sum(box.size for box in found) != whole.size:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} ({kind}) is not complete, or some of it is twice."
            )


def _overlapping(boxes: list[Box]) -> bool:
    """Whether two boxes share an element. By rows, downwards: only boxes that reach the next one's row matter."""
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other.row_stop > box.row]
        if any(box.overlap(other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


@dataclass(frozen=True)
class Block:
    """A part of a file that has a checksum of its own."""

    file: str
    number: int
    bytes: int


def blocks(checkpoint: Checkpoint) -> list[Block]:
    """What there is to verify."""
    return [
        Block(name, number, size)
        for name, described in sorted(checkpoint.files.items())
        for number, size in enumerate(block_sizes(described))
    ]


def verify(checkpoint: Checkpoint, chosen: Iterable[Block] | None = None) -> None:
    """Compare blocks, all by default, with their checksums. Raises CheckpointError naming the damaged file."""
    for block in blocks(checkpoint) if chosen is None else chosen:
        try:
            check_block(checkpoint.path / block.file, checkpoint.files[block.file], block.number)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {block.file}: {error.strerror or error}."
            ) from None


def newest_valid(directory: Path, context: ParallelContext) -> Checkpoint | None:
    """The newest checkpoint whose manifest and checksums hold, agreed by all ranks; damaged newer ones are reported.

    Files are verified once, split over the ranks. Raises CheckpointError if checkpoints exist but none is valid.
    """
    steps = _agreed_steps(directory, context)
    for step in reversed(steps):
        path = next((p for p in list_checkpoints(directory) if _step_of(p) == step), None)
        try:
            return _read_together(path or directory / checkpoint_name(step), context)
        except CheckpointError as error:
            log.warning("%s Falling back to the checkpoint before it.", error)
    if steps:
        raise _none_is_valid(directory, len(steps))
    return None


def newest_readable(directory: Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest and file sizes are right, as this process sees it; None if there is none.

    Raises CheckpointError if checkpoints exist but none is readable.
    """
    paths = list_checkpoints(directory)
    for path in reversed(paths):
        with contextlib.suppress(CheckpointError):
            return read_checkpoint(path)
    if paths:
        raise _none_is_valid(directory, len(paths))
    return None


def _none_is_valid(directory: Path, count: int) -> CheckpointError:
    return CheckpointError(
        f"none of the {count} checkpoints in {directory} is valid; `scripts/checkpoints.py verify` says what is wrong "
        "with each. Move them away to start afresh."
    )


def find_checkpoint(path: Path, context: ParallelContext) -> Checkpoint:
    """A `step_...` directory, or the newest valid checkpoint of a run or of a directory of checkpoints; verified.

    Called by every rank. Raises CheckpointError if there is none or it is damaged.
    """
    if is_checkpoint(path):
        return _read_together(path, context)
    return _existing(newest_valid(_checkpoints_in(path), context), path)


def find_manifest(path: Path) -> Checkpoint:
    """As `find_checkpoint`, by this process alone, and without reading the files that the manifest names."""
    if is_checkpoint(path):
        return read_checkpoint(path)
    return _existing(newest_readable(_checkpoints_in(path)), path)


def _checkpoints_in(path: Path) -> Path:
    """The directory of checkpoints of a run, or the directory itself."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def _existing(found: Checkpoint | None, path: Path) -> Checkpoint:
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a run directory or one of its checkpoints/step_... directories."
        )
    return found


def _read_together(path: Path, context: ParallelContext) -> Checkpoint:
    """Read a checkpoint on every rank and verify it, each rank a part."""
    with _agreement(context, f"checking {path}"):
        checkpoint = read_checkpoint(path)
        share = blocks(checkpoint)[context.rank :: context.world_size]
        for block in _shown(share, f"checking {path.name}", context):
            verify(checkpoint, [block])
    return checkpoint


def _shown(items: list[T], what: str, context: ParallelContext) -> Iterable[T]:
    """The items, with a progress bar on the main rank's terminal, if it has one."""
    return tqdm(items, desc=what, disable=None if context.is_main else True)


def _agreed_steps(directory: Path, context: ParallelContext) -> list[int]:
    """The steps that rank 0 finds: another node may see an older state of a shared file system."""
    steps: list[int] = []
    with _agreement(context, f"reading {directory}"):
        if context.is_main:
            steps = [_step_of(path) for path in list_checkpoints(directory)]
    count = int(context.sum(torch.tensor([len(steps)], device=context.device)).item())
    shared = torch.zeros(count, dtype=torch.int64, device=context.device)
    if context.is_main:
        shared += torch.tensor(steps, dtype=torch.int64, device=context.device)
    return context.sum(shared).tolist() if count else []


class _Reader:
    """Reads boxes of whole parameters out of a checkpoint's files, with little memory beside the target's."""

    def __init__(self, checkpoint: Checkpoint):
        self._path = checkpoint.path
        self._files: dict[str, TensorFile] = {}
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in checkpoint.pieces:
            self._pieces.setdefault((piece.name, piece.kind), []).append(piece)

    def fill(self, target: torch.Tensor, box: Box, name: str, kind: str) -> None:
        """Copy `box` of a parameter into the matrix `target` from the pieces that overlap it."""
        for piece in self._pieces[name, kind]:
            common = box.overlap(piece.box)
            if common is None:
                continue
            if piece.file not in self._files:
                self._files[piece.file] = TensorFile(self._path / piece.file)
            for part, values in self._files[piece.file].read(piece.key, piece.box, common):
                target[part.within(box)] = values.to(target.device)


@torch.no_grad()
def load(checkpoint: Checkpoint, engine: Engine, context: ParallelContext) -> None:
    """Fill this rank's fragments from the boxes that overlap them, then publish the weights to the model."""
    _load_fragments(checkpoint, engine, context, KINDS)
    engine.load_scalar_state(checkpoint.optimizer)
    engine.publish_weights()


@torch.no_grad()
def load_weights_only(checkpoint: Checkpoint, engine: Engine, context: ParallelContext) -> None:
    """As `load`, but the optimizer stays as it is."""
    _load_fragments(checkpoint, engine, context, ("weight",))
    engine.publish_weights()


def _load_fragments(
    checkpoint: Checkpoint, engine: Engine, context: ParallelContext, kinds: Iterable[str]
) -> None:
    count = engine.count_parameters()
    with _agreement(context, f"loading {checkpoint.path}"):
        _check_same_number(checkpoint, count)
        reader = _Reader(checkpoint)
        for fragment in _shown(list(engine.fragments()), f"loading {checkpoint.path.name}", context):
            shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
            _check_same_shape(checkpoint, fragment.name, shape)
            for run in fragment.runs():
                for kind in kinds:
                    values = fragment.tensors[kind][run.start - fragment.start : run.stop - fragment.start]
                    reader.fill(values.view(run.box.shape), run.box, fragment.name, kind)


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
    reader = _Reader(checkpoint)

    def read(name: str) -> torch.Tensor:
        rows, columns = matrix_shape(checkpoint.shapes[name])
        matrix = torch.empty(rows, columns)
        reader.fill(matrix, Box(0, rows, 0, columns), name, "weight")
        return matrix.view(checkpoint.shapes[name])

    return read


def check_model(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint holds parameters of just these names and shapes."""
    _check_same_number(checkpoint, len(shapes))
    for name, shape in shapes.items():
        _check_same_shape(checkpoint, name, shape)


def _check_same_number(checkpoint: Checkpoint, count: int) -> None:
    if len(checkpoint.shapes) != count:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model, of {len(checkpoint.shapes)} parameter tensors; "
            f"this one has {count}. Use the configuration it was trained with, or another directory."
        )


def _check_same_shape(checkpoint: Checkpoint, name: str, ours: tuple[int, ...]) -> None:
    theirs = checkpoint.shapes.get(name)
    if ours != theirs:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds another model: {name} is {theirs or 'absent'} there and {ours} "
            f"here; use the configuration it was trained with, or another directory."
        )
