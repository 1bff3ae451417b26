"""Weights that are read and written one tensor at a time, so that memory holds one tensor and not the model.

Reads safetensors and torch's pickle files (weights only), whole or sharded with an index, and checks names, shapes and
missing files. Writes safetensors, sharded where they are large.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from data_utils.common import files
from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from data_utils.common.setting_files import one_line
from data_utils.common.untrusted import conform, open_regular, parse_json, read_bounded
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.hf.common.ignored_tensors import is_buffer, listed
from megatron_lite.hf.common.untrusted_tokenizer import check_tokenizer_files

WORDS = "embedding.word_embeddings.weight"  # our only parameter with padding rows
TASK_CLASSIFIER, SCORE = "heads.task.classifier.", "score."  # a task's head, here and in transformers
TRAINING_JSON = "training.json"
TRAINING_TOKENIZER = "training_tokenizer"  # directory beside it
# In the directory of a run that continues a released model: the rows of the word embedding that pad its vocabulary.
PADDING_ROWS = "padding_rows.safetensors"
IMPORTED_FILES = "published"  # directory of a run: files of the import, which an export writes again
# In a run: the repository and commit of the hub that its first weights, or its adapter's updates, are from.
SOURCE, ADAPTER_SOURCE = "source.json", "adapter_source.json"
MAX_JSON_BYTES = 16 << 20
MAX_TENSORS = 60_000  # of a file, an index or a model: GLM-4.5, whose experts have three each, has 43,700
_MAX_NAMES_BYTES = 8 << 20  # of the part of a file that names its tensors
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAME_MODEL = "fetch config.json and the weights of one model"  # the remedy where the two differ
METADATA = {"format": "pt"}  # transformers loads no safetensors file without it
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))  # as safetensors names them
_DOUBLE = "F64"
_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"))
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "rng_state")
_LFS = b"version https://git-lfs.github.com/spec/"
_SHOWN_SHAPES = 2  # differing pairs of shapes in a message: one wrong size can change most tensors


@dataclass(frozen=True)
class Weights:
    """Named tensors of known shapes, read on demand.

    Args:
        buffers: names of the files' tensors that nothing reads.
        doubles: names of tensors that the files hold in fp64.
    """

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]
    buffers: tuple[str, ...] = ()
    doubles: tuple[str, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The same tensors under other names: new name -> old name."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        return replace(self, shapes=shapes, read=lambda new: self.read(names[new]))

    def without_prefix(self, prefix: str) -> Weights:
        """The tensors whose names begin with a prefix, without it."""
        return self.renamed({n.removeprefix(prefix): n for n in self.shapes if n.startswith(prefix)})

    def with_rows(self, name: str, rows: int) -> Weights:
        """Tensor `name` cut, or filled with zeros, to `rows` rows."""
        shape = self.shapes[name]

        def read(read_name: str) -> torch.Tensor:
            tensor = self.read(read_name)
            if read_name != name or rows == shape[0]:
                return tensor
            resized = tensor.new_zeros(rows, *shape[1:])
            kept = min(rows, shape[0])
            resized[:kept] = tensor[:kept]
            return resized

        return replace(self, shapes={**self.shapes, name: (rows, *shape[1:])}, read=read)


# Reading


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from an untrusted file. Raises: CheckpointError."""
    try:
        return conform(parse_json(read_bounded(path, MAX_JSON_BYTES)), dict[str, Any])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: {error.strerror}; check the directory.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; fetch it again.") from None


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def open_directory(directory: Path) -> Weights:
    """The weights of a Hugging Face directory: safetensors if there are any, else pytorch_model.bin.

    Raises: CheckpointError for missing, truncated or hostile files, those of the tokenizer beside them too.
    """
    # Safetensors first: they are memory-mapped and cannot hold code.
    for single, open_file in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_pickle)):
        index, file = directory / f"{single}.index.json", directory / single
        if index.exists() or file.exists():
            weights = _open_shards(index, open_file) if index.exists() else open_file(file)
            rows = max((size for shape in weights.shapes.values() for size in shape), default=0)
            for place in (directory, directory / TRAINING_TOKENIZER):
                check_tokenizer_files(place, rows)
            return _require_unwrapped(weights, index if index.exists() else file)
    raise CheckpointError(
        f"{directory} has neither model.safetensors nor pytorch_model.bin, whole or sharded; "
        f"{_other_weights(directory)}."
    )


def _require_unwrapped(weights: Weights, origin: Path) -> Weights:
    """The weights. Raises: CheckpointError for names that a wrapper prefixes, which transformers does not load."""
    for prefix, attribute in (("module.", "module"), ("_orig_mod.", "_orig_mod")):
        if weights.shapes and all(name.startswith(prefix) for name in weights.shapes):
            wrapper = "DistributedDataParallel or DeepSpeed" if prefix == "module." else "torch.compile"
            raise CheckpointError(
                f"{origin}: all names of tensors begin with {prefix}, as {wrapper} makes them; save the model inside "
                f"(model.{attribute}.save_pretrained), or rename them."
            )
    return weights


def _other_weights(directory: Path) -> str:
    """The remedy for a directory whose weights have another name or another program's format."""
    found = sorted(
        path.name
        for path in directory.glob("*")
        if path.suffix in _WEIGHTS and not path.name.startswith(_TRAINING_STATE)
    )
    shown = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
    for suffix, expected in ((".safetensors", "model.safetensors"), (".bin", "pytorch_model.bin")):
        readable = [name for name in found if name.endswith(suffix)]
        if len(readable) == 1:
            return f"rename {readable[0]} to {expected}, if it holds the whole model"
        if readable:
            return f"it has {shown}: fetch {expected}.index.json, which lists the tensors of each shard"
    if found:
        return f"{shown} cannot be read: fetch the model's safetensors"
    return "check the path"


def _require_no_pointer(path: Path) -> None:
    """Raise CheckpointError for the three lines of text that a clone without Git LFS has for each large file."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file; fetch it by `git lfs pull`, or the directory by "
                "`hf download`."
            )


def _open_shards(index: Path, open_file: Callable[[Path], Weights]) -> Weights:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no weight_map; fetch it again.")
    _require_few(len(table), index)
    for name in table.values():
        # A name from an untrusted index could lead out of the directory.
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} names a file {str(name)[:80]!r}; a shard must be in the directory of its index."
            )
    # As transformers does: the files are those of the index, and their tensors are what they have. An index may name
    # a tensor that is tied, and in no file.
    shards = {name: open_file(index.parent / name) for name in sorted(set(table.values()))}
    place = {tensor: name for name, shard in shards.items() for tensor in shard.shapes}
    shapes = {tensor: shards[name].shapes[tensor] for tensor, name in place.items()}
    buffers = tuple(tensor for shard in shards.values() for tensor in shard.buffers)
    doubles = tuple(tensor for shard in shards.values() for tensor in shard.doubles)
    return Weights(shapes, lambda tensor: shards[place[tensor]].read(tensor), buffers, doubles)


def open_safetensors(path: Path) -> Weights:
    """One safetensors file. Raises: as `from_state_dict`, and CheckpointError if it is missing or damaged."""
    shapes, dtypes = {}, {}
    _require_no_pointer(path)
    try:
        with open_regular(path) as raw:
            _require_small_names(int.from_bytes(raw.read(8), "little"), path.stat().st_size, path)
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            _require_few(len(names), path)
            for name in names:
                found = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(found.get_shape()), found.get_dtype()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}; the file is missing or damaged.") from None
    # Quantized weights would load as numbers without their scales.
    _require_floats((name for name, dtype in dtypes.items() if dtype not in _FLOATS), path)

    def read(name: str) -> torch.Tensor:
        # Opened for each tensor: pages that an open file has read stay in memory.
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name).clone()

    return _without_buffers(shapes, read, (name for name, dtype in dtypes.items() if dtype == _DOUBLE))


def open_pickle(path: Path) -> Weights:
    """One file of torch.save that holds a dictionary of tensors. No code from it is executed."""
    return from_state_dict(load_pickle(path), path)


def load_pickle(path: Path) -> dict[str, Any]:
    """torch.load restricted to plain data (weights_only), memory-mapped where the format allows it.

    Raises: CheckpointError if the file is missing, damaged, or asks for anything but plain data.
    """
    _require_no_pointer(path)
    try:
        # Files of torch before 1.6 are not zip archives and cannot be memory-mapped.
        if is_archive := zipfile.is_zipfile(path):
            _require_stored(path)
        with torch.serialization.safe_globals(_plain_globals()):
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise CheckpointError(f"{path}: {error.strerror}; check the directory.") from None
    except Exception as error:  # a damaged or hostile pickle can raise anything
        # torch's own message advises to open the file without this protection, so it is not shown.
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds more than plain data ({asked[1][:80]}) and was not opened; if you trust it, save its "
                "tensors alone, best as safetensors."
            ) from None
        raise CheckpointError(f"{path} is damaged; fetch it again.") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} must hold a dictionary of tensors, not {type(tree).__name__}.")
    return tree


def _require_stored(path: Path) -> None:
    """Raise CheckpointError for an archive that torch.save did not write: it stores bytes as they are."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = path.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or size < sum(
        entry.file_size for entry in entries
    ):
        raise CheckpointError(
            f"{path} is a compressed archive, which torch.save never writes; save its tensors again, best as "
            "safetensors."
        )
    _require_few(len(entries), path)
    names = (entry.file_size for entry in entries if entry.filename.endswith("data.pkl"))
    _require_small_names(max(names, default=0), size, path)


def _require_small_names(size: int, size_of_file: int, path: Path) -> None:
    """Raise CheckpointError, before it is parsed, for a list of tensors that no model has. Args: size: in bytes."""
    if _MAX_NAMES_BYTES < size <= size_of_file:  # a larger one is damage, which the reader reports
        raise CheckpointError(
            f"{path} lists its tensors in {size:,} bytes, and a model that can be imported in {_MAX_NAMES_BYTES:,} at "
            "most; fetch it again."
        )


def _require_few(count: int, path: Path) -> None:
    if count > MAX_TENSORS:
        raise CheckpointError(
            f"{path} has {count:,} tensors, and a model that can be imported {MAX_TENSORS:,} at most; fetch it again."
        )


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a file has its own numbers there; a stride of 0 makes any size of a single one."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def _plain_globals() -> list[Any]:
    """Data containers that training frameworks store with weights: arguments and NumPy's random state."""
    rebuild = np.empty(0).__reduce__()[0]
    old_name = (rebuild, "numpy.core.multiarray._reconstruct")  # in files written with NumPy 1
    dtypes = [type(np.dtype(scalar)) for scalar in (np.uint32, np.int64, np.float32, np.float64)]
    return [argparse.Namespace, rebuild, old_name, np.ndarray, np.dtype, *dtypes]


def from_state_dict(state: Mapping[str, Any], origin: Path) -> Weights:
    """Weights of a dictionary. Raises: CheckpointError for anything but floating-point tensors and known buffers."""
    floats = {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    nested = [str(name)[:80] for name, value in state.items() if isinstance(value, Mapping)]
    if nested and not floats:  # a checkpoint of a trainer, such as Lightning's
        raise CheckpointError(
            f"{origin} has no tensors at its top level, as the checkpoint of a trainer; save the mapping "
            f"{' or '.join(nested)} alone, with the tensor names of the class of transformers."
        )
    _require_few(len(state), origin)
    _require_floats((name for name in state if name not in floats), origin)
    if unreal := [name for name, value in floats.items() if not _is_whole(value)]:
        raise CheckpointError(
            f"{origin}: {listed(unreal)} has more numbers than the file stores of it; save the tensors again, best as "
            "safetensors."
        )
    shapes = {name: tuple(value.shape) for name, value in floats.items()}
    doubles = (name for name, value in floats.items() if value.dtype == torch.float64)
    others = [name for name in state if name not in floats]
    return _without_buffers(shapes | dict.fromkeys(others, ()), lambda name: state[name], doubles)


def _require_floats(others: Iterable[Any], origin: Path) -> None:
    """Raise CheckpointError for entries that are neither floating-point tensors nor known buffers."""
    unknown = [str(name)[:80] for name in others if not isinstance(name, str) or not is_buffer(name)]
    if unknown:
        raise CheckpointError(
            f"{origin}: {', '.join(map(repr, unknown))} {'are' if len(unknown) > 1 else 'is'} not a floating-point "
            "tensor, which no model here has; save the file again without it."
        )


def _without_buffers(
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor], doubles: Iterable[str]
) -> Weights:
    kept = {name: shape for name, shape in shapes.items() if not is_buffer(name)}
    buffers = tuple(name for name in shapes if name not in kept)
    return Weights(kept, read, buffers, tuple(name for name in doubles if name in kept))


def check_shapes(
    weights: Weights,
    expected: Mapping[str, tuple[int, ...]],
    origin: Path,
    model: str = "GLM",
    remedy: str = "",
) -> None:
    """Raise CheckpointError unless `weights` has exactly the tensors of `expected`."""
    if problems := shape_problems(weights, expected):
        what = f"it does not hold a {model} of this configuration"
        raise CheckpointError(f"{origin}: {'; '.join([*problems, what, *[remedy] * bool(remedy)])}.")


def shape_problems(weights: Weights, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A clause for each type of difference: missing tensors, unknown tensors, other shapes. Its subject is the file."""
    problems = []
    if missing := expected.keys() - weights.shapes.keys():
        problems.append(f"it lacks {listed(missing)}")
    if unknown := weights.shapes.keys() - expected.keys():
        problems.append(f"it also has {listed(unknown)}")
    wrong: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, shape in expected.items():
        if name in weights.shapes and weights.shapes[name] != shape:
            wrong.setdefault((weights.shapes[name], shape), []).append(name)
    groups = list(wrong.items())
    for (found, shape), names in groups[:_SHOWN_SHAPES]:
        problems.append(f"{listed(names)} has shape {list(found)}, but the model needs {list(shape)}")
    if more := sum(len(names) for _, names in groups[_SHOWN_SHAPES:]):
        problems.append(f"{more} more have other shapes too")
    return problems


# Writing


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """As `files.new_directory`; in addition raises CheckpointError if safetensors cannot write a file."""
    with files.new_directory(output) as directory:
        try:
            yield directory
        except SafetensorError as error:
            raise CheckpointError(f"{output}: {one_line(error)}") from None


def write_sharded(directory: Path, weights: Weights, dtype: torch.dtype, max_shard_bytes: int) -> None:
    """model.safetensors, or numbered shards of at most `max_shard_bytes` (or one tensor) and their index."""
    shards = list(_split(weights.shapes, dtype, max_shard_bytes))
    width = f"{len(shards):05d}"
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{width}.safetensors" for i in range(1, len(shards) + 1)]
    )
    with progress_bar(total=len(weights.shapes), desc="writing tensors") as progress:
        for name, shapes in zip(names, shards, strict=True):
            write_tensors(directory / name, shapes, _counted(weights, shapes, progress), dtype, METADATA)
    if len(shards) > 1:
        table = {tensor: name for name, shapes in zip(names, shards, strict=True) for tensor in shapes}
        total = sum(_size_bytes(shape, dtype) for shape in weights.shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": table}
        write_json(directory / "model.safetensors.index.json", index)


def _counted(weights: Weights, names: Iterable[str], progress: tqdm) -> Iterator[torch.Tensor]:
    for name in names:
        yield weights.read(name)
        progress.update()


def _split(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        added = _size_bytes(shape, dtype)
        if shard and size + added > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += added
    yield shard


def _size_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
