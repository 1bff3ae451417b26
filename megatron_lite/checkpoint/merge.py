"""A checkpoint with the weighted mean of other checkpoints' weights, in place of a decay of the learning rate.

Between checkpoints i - 1 and i the weights change by d_i = w_i - w_(i-1). Had the learning rate decayed, each update
of that interval would have been smaller by the factor f that the decay has at its step, so the change would have been
about F_i d_i with F_i the mean of f over the interval. The sum w_0 + F_1 d_1 + ... + F_k d_k is the mean of the
checkpoints with the shares 1 - F_1, F_1 - F_2, ..., F_(k-1) - F_k, F_k. The decay begins at the first checkpoint's step
and ends at the last one's, and f falls, so every share is above 0.
Source: the equivalence of decay and merging is that of WSM, arXiv:2507.17634, which has an update for each checkpoint.

Sums are computed in fp64 and rounded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.files import new_directory
from data_utils.common.progress import progress_bar
from megatron_lite.checkpoint.manifest import (
    CHECKPOINTS,
    Checkpoint,
    checkpoint_name,
    manifest_header,
    write_manifest,
)
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.shard_slices import matrix_shape
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.verify import check_model
from megatron_lite.config.lora import LORA

# The integral from 0 to x of the factor of the learning rate, where x is the share of the decay that is over.
DECAYS = {"linear": lambda x: x - x * x / 2, "1-sqrt": lambda x: x - x * math.sqrt(x) * 2 / 3}


def merge_shares(text: str, steps: Sequence[int]) -> list[float]:
    """The weight of each checkpoint.

    Args:
        text: mean, a name of DECAYS, or numbers with commas between.
        steps: of the checkpoints, in their order.
    Raises: ConfigError if the numbers are not as many, or do not sum to 1, or if no decay has these steps.
    """
    count = len(steps)
    if text == "mean":
        return [1 / count] * count
    if text in DECAYS:
        return _shares_of_decay(text, steps)
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights is {text!r}; it must be mean, {', '.join(DECAYS)}, or numbers with commas between, as 0.5,0.5."
        ) from None
    if len(shares) != count or not abs(sum(shares) - 1) < 1e-6:
        raise ConfigError(
            f"--weights has {len(shares)} numbers with the sum {sum(shares):.6g} for {count} checkpoints; give one "
            "for each, which sum to 1."
        )
    return shares


def _shares_of_decay(name: str, steps: Sequence[int]) -> list[float]:
    intervals = list(itertools.pairwise(steps))
    if any(first >= second for first, second in intervals):
        raise ConfigError(
            f"--weights {name} needs checkpoints of one run in the order of their steps, and these have "
            f"{', '.join(map(str, steps))}; give mean or numbers."
        )
    integral, length = DECAYS[name], steps[-1] - steps[0]
    # Means over the intervals, not values at their ends: else the newest checkpoint, where the decay is 0, had no
    # share.
    factors = [1.0]  # F_0: what was learnt before the first checkpoint is kept whole
    for first, second in intervals:
        start, stop = (first - steps[0]) / length, (second - steps[0]) / length
        factors.append((integral(stop) - integral(start)) / (stop - start))
    return [factor - after for factor, after in itertools.pairwise([*factors, 0.0])]


def merge(sources: Sequence[Checkpoint], shares: Sequence[float], output: Path) -> Path:
    """Make the run directory `output` with the merged checkpoint, without optimizer state. Returns its path.

    It has the step and the state of the last source.
    Raises: CheckpointError if the sources are not of one model; DataError if it cannot be written: then nothing is.
    """
    last = sources[-1]
    if any(LORA in name for name in last.shapes):
        raise CheckpointError(
            f"checkpoint {last.path} has updates of LoRA, and a mean of factors is not the mean of the models; "
            "export each checkpoint, import the exports, and merge those."
        )
    for source in sources[:-1]:
        check_model(source, last.shapes)
        expected, actual = (each.state.get("config", {}).get("tokenizer") for each in (last, source))
        if expected != actual:
            raise CheckpointError(
                f"checkpoint {source.path} has another tokenizer than {last.path}; merge checkpoints of one tokenizer."
            )
    described = [
        {"path": str(source.path), "share": share} for source, share in zip(sources, shares, strict=True)
    ]
    with new_directory(output) as directory:
        path = write_weights(last, _merged(sources, shares), directory / CHECKPOINTS, {"merged": described})
    return output / path.relative_to(directory)


def write_weights(
    source: Checkpoint, weights: Iterator[torch.Tensor], directory: Path, described: Mapping[str, Any]
) -> Path:
    """Write a checkpoint with the step and state of another into a directory that is made. Returns its path.

    Args:
        weights: fp32, of the parameters of `source.shapes` in their order; no optimizer state goes with them.
        directory: in one that gets its name when all is written (`new_directory`).
        described: what the manifest says of them.
    """
    path, name = directory / checkpoint_name(source.step), "rank_00000.safetensors"
    path.mkdir(parents=True)
    matrices = {each: matrix_shape(shape) for each, shape in source.shapes.items()}
    stored = {f"{each}/weight/0.0": shape for each, shape in matrices.items()}
    manifest = {
        **manifest_header(source.step, {"adam_step": 0.0, "loss_scaler": {}}, source.state),
        **described,
        "shapes": {each: list(shape) for each, shape in source.shapes.items()},
        "kinds": {each: {"weight": list(shape)} for each, shape in matrices.items()},
        "files": {name: write_tensors(path / name, stored, weights)},
        "pieces": [
            {"file": name, "key": f"{each}/weight/0.0", "name": each, "kind": "weight", "box": (0, rows, 0, columns)}
            for each, (rows, columns) in matrices.items()
        ],
    }  # fmt: skip
    write_manifest(path, manifest)
    return path


def _merged(sources: Sequence[Checkpoint], shares: Sequence[float]) -> Iterator[torch.Tensor]:
    readers = [weight_reader(source) for source in sources]
    for name in progress_bar(sources[-1].shapes, desc="merging parameters"):
        # One parameter at a time in fp64: memory is that of the largest tensor, not of the models.
        total = torch.zeros(sources[-1].shapes[name], dtype=torch.float64)
        for read, share in zip(readers, shares, strict=True):
            total.add_(read(name).double(), alpha=share)
        yield total.float()
