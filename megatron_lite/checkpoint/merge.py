"""A checkpoint whose weights are a weighted mean of others', as a substitute for a decay of the learning rate.

A decay with factors f_i on the changes between checkpoints 0 to k is the mean with weights f_i - f_(i+1), where f_0 = 1
and f_(k+1) = 0. Sums are made in fp64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_utils.base.errors import CheckpointError, ConfigError
from data_utils.base.progress import progress_bar
from megatron_lite.checkpoint.boxes import matrix_shape
from megatron_lite.checkpoint.existing import check_model
from megatron_lite.checkpoint.manifest import (
    Checkpoint,
    checkpoint_name,
    manifest_header,
    write_manifest,
)
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.write import publish

DECAYS = {"linear": lambda x: 1 - x, "1-sqrt": lambda x: 1 - math.sqrt(x)}


def shares_of(text: str, count: int) -> list[float]:
    """The weight of each of `count` checkpoints. Args: text: mean, a name of DECAYS, or numbers with commas between.

    Raises: ConfigError if they are not as many, or do not sum to 1.
    """
    if text == "mean":
        return [1 / count] * count
    if text in DECAYS:
        factors = [DECAYS[text](place / (count - 1)) for place in range(count)]
        return [factor - after for factor, after in zip(factors, [*factors[1:], 0.0], strict=True)]
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights is {text!r}; it must be mean, {', '.join(DECAYS)}, or numbers with commas between."
        ) from None
    if len(shares) != count or not abs(sum(shares) - 1) < 1e-6:
        raise ConfigError(
            f"--weights has {len(shares)} numbers with the sum {sum(shares):.6g} for {count} checkpoints; give one "
            "for each, which sum to 1."
        )
    return shares


def merge(sources: Sequence[Checkpoint], shares: Sequence[float], directory: Path) -> Path:
    """Write the merged checkpoint into a directory of checkpoints, without optimizer state. Returns its path.

    It has the step and the state of the last source. Raises: CheckpointError if the sources are not of one model.
    """
    last = sources[-1]
    for source in sources[:-1]:
        check_model(source, last.shapes)
        ours, theirs = (each.state.get("config", {}).get("tokenizer") for each in (last, source))
        if ours != theirs:
            raise CheckpointError(
                f"checkpoint {source.path} is of another tokenizer than {last.path}; merge checkpoints of one."
            )
    described = [
        {"path": str(source.path), "share": share} for source, share in zip(sources, shares, strict=True)
    ]
    return write_weights(last, _merged(sources, shares), directory, {"merged": described})


def write_weights(
    source: Checkpoint, weights: Iterator[torch.Tensor], directory: Path, described: Mapping[str, Any]
) -> Path:
    """Write a checkpoint with the step and state of another into a directory of checkpoints. Returns its path.

    Args:
        weights: fp32, of the parameters of `source.shapes` in their order; no optimizer state goes with them.
        described: what the manifest says of them.
    """
    path, name = directory / checkpoint_name(source.step), "rank_00000.safetensors"
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir(parents=True)
    boxes = {each: matrix_shape(shape) for each, shape in source.shapes.items()}
    stored = {f"{each}/weight/0.0": shape for each, shape in boxes.items()}
    manifest = {
        **manifest_header(source.step, {"adam_step": 0.0, "loss_scaler": {}}, source.state),
        **described,
        "shapes": {each: list(shape) for each, shape in source.shapes.items()},
        "kinds": {each: {"weight": list(shape)} for each, shape in boxes.items()},
        "files": {name: write_tensors(partial / name, stored, weights)},
        "pieces": [
            {"file": name, "key": f"{each}/weight/0.0", "name": each, "kind": "weight", "box": (0, rows, 0, columns)}
            for each, (rows, columns) in boxes.items()
        ],
    }  # fmt: skip
    write_manifest(partial, manifest)
    publish(partial, path)
    return path


def _merged(sources: Sequence[Checkpoint], shares: Sequence[float]) -> Iterator[torch.Tensor]:
    readers = [weight_reader(source) for source in sources]
    for name in progress_bar(sources[-1].shapes, desc="merging parameters"):
        total = torch.zeros(sources[-1].shapes[name], dtype=torch.float64)
        for read, share in zip(readers, shares, strict=True):
            total.add_(read(name).double(), alpha=share)
        yield total.float()
