"""Weights that are read and written one tensor at a time, so that memory is that of the largest tensor.

Reads safetensors and torch's pickle files (weights only), whole or sharded with an index, and checks names, shapes and
missing files. Writes safetensors, sharded where they are large.
"""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from data_utils.base import files
from data_utils.base.errors import CheckpointError
from data_utils.base.foreign import conform, parse_json, read_bounded
from data_utils.base.progress import progress_bar
from data_utils.base.setting_files import one_line
from megatron_lite.checkpoint.tensor_files import write_tensors

WORDS = "embedding.word_embeddings.weight"  # our only parameter with padding rows
TASK_CLASSIFIER, SCORE = "heads.task.classifier.", "score."  # a task's head, here and in transformers
TRAINING_JSON = "training.json"
PADDING_ROWS = "padding_rows.safetensors"  # in a run's directory: of the released model it continues
MAX_JSON_BYTES = 64 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
METADATA = {"format": "pt"}  # of a safetensors file that transformers reads
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What files of former versions hold beside weights: position numbers, causal masks, a table that no layer reads. The
# classes of transformers ignore them too.
_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|attn\.bias|attn\.masked_bias|embed_positions\._float_tensor"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"
)
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))  # as safetensors names them


@dataclass(frozen=True)
class Weights:
    """Named tensors of known shapes, read on demand."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], torch.Tensor]

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The same tensors under other names: new name -> old name."""
        return Weights(
            {new: self.shapes[old] for new, old in names.items()}, lambda new: self.read(names[new])
        )

    def with_rows(self, name: str, rows: int) -> Weights:
        """Tensor `name` cut, or filled with zeros, to `rows` rows."""
        shape = self.shapes[name]

        def read(wanted: str) -> torch.Tensor:
            tensor = self.read(wanted)
            if wanted != name or rows == shape[0]:
                return tensor
            resized = tensor.new_zeros(rows, *shape[1:])
            kept = min(rows, shape[0])
            resized[:kept] = tensor[:kept]
            return resized

        return Weights({**self.shapes, name: (rows, *shape[1:])}, read)


# Reading


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a foreign file. Raises: CheckpointError."""
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

    Raises: CheckpointError for missing, truncated or hostile files.
    """
    for single, open_file in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_pickle)):
        index = directory / f"{single}.index.json"
        if index.exists():
            return _open_shards(index, open_file)
        if (directory / single).exists():
            return open_file(directory / single)
    raise CheckpointError(
        f"{directory} has neither model.safetensors nor pytorch_model.bin, whole or sharded; check the path."
    )


def _open_shards(index: Path, open_file: Callable[[Path], Weights]) -> Weights:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no weight_map; fetch it again.")
    for name in table.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} names a file {str(name)[:80]!r}; a shard must lie beside its index."
            )
    shards = {name: open_file(index.parent / name) for name in sorted(set(table.values()))}
    table = {tensor: name for tensor, name in table.items() if not _BUFFERS.search(tensor)}
    for tensor, name in table.items():
        if tensor not in shards[name].shapes:
            raise CheckpointError(
                f"{index.parent / name} lacks the tensor {tensor} that {index.name} places there."
            )
    shapes = {tensor: shards[name].shapes[tensor] for tensor, name in table.items()}
    return Weights(shapes, lambda tensor: shards[table[tensor]].read(tensor))


def open_safetensors(path: Path) -> Weights:
    """One safetensors file. Raises: as `from_state_dict`, and CheckpointError if it is missing or damaged."""
    shapes = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a dictionary
                if _is_weight(name, file.get_slice(name).get_dtype() in _FLOATS, path):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}; the file is missing or damaged.") from None

    def read(name: str) -> torch.Tensor:
        # Opened each time, since an open file keeps every page it has read in memory.
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name).clone()

    return Weights(shapes, read)


def open_pickle(path: Path) -> Weights:
    """One file of torch.save that holds a dictionary of tensors; never executes code from it."""
    return from_state_dict(load_pickle(path), path)


def load_pickle(path: Path) -> dict[str, Any]:
    """torch.load restricted to plain data (weights_only), memory-mapped where the format allows it.

    Raises: CheckpointError if the file is missing, damaged, or asks for anything but plain data.
    """
    try:
        with torch.serialization.safe_globals(_plain_globals()):
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise CheckpointError(f"{path}: {error.strerror}; check the directory.") from None
    except Exception as error:  # a damaged or hostile pickle can raise anything
        # torch's own advice is to open it without this protection.
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} holds more than plain data ({asked[1][:80]}) and was not opened; save its tensors alone where "
                "you trust it, best as safetensors."
            ) from None
        raise CheckpointError(f"{path} is damaged; fetch it again.") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} must hold a dictionary of tensors, not {type(tree).__name__}.")
    return tree


def _plain_globals() -> list[Any]:
    """Data containers that training frameworks store beside weights: arguments and NumPy's random state."""
    import argparse

    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]
    old_name = (rebuild, "numpy.core.multiarray._reconstruct")  # in files written with NumPy 1
    dtypes = [type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float32, np.float64)]
    return [argparse.Namespace, rebuild, old_name, np.ndarray, np.dtype, *dtypes]


def from_state_dict(state: Mapping[str, Any], origin: Path) -> Weights:
    """Weights in memory. Raises: CheckpointError for anything but floating-point tensors and known buffers."""
    shapes = {}
    for name, value in state.items():
        if _is_weight(name, isinstance(value, torch.Tensor) and value.is_floating_point(), origin):
            shapes[name] = tuple(value.shape)
    return Weights(shapes, lambda name: state[name])


def _is_weight(name: Any, is_float: bool, origin: Path) -> bool:
    """False for a known buffer. Raises: CheckpointError for what is neither."""
    if isinstance(name, str) and _BUFFERS.search(name):
        return False
    if not isinstance(name, str) or not is_float:
        raise CheckpointError(f"{origin}: entry {str(name)[:80]!r} is not a floating-point tensor.")
    return True


def check_shapes(
    weights: Weights, expected: Mapping[str, tuple[int, ...]], origin: Path, model: str = "GLM"
) -> None:
    """Raise CheckpointError unless `weights` has exactly the tensors of `expected`."""
    for what, names in (
        ("lacks", expected.keys() - weights.shapes.keys()),
        ("also has", weights.shapes.keys() - expected.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(
                f"{origin} {what} {listed}; it does not hold a {model} of this configuration."
            )
    for name, shape in expected.items():
        if weights.shapes[name] != shape:
            raise CheckpointError(
                f"{origin}: {name} has shape {list(weights.shapes[name])}, but the model needs {list(shape)}."
            )


# Writing


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """As `files.new_directory`. Raises: CheckpointError too, if the library of safetensors cannot write."""
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
