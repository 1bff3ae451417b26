"""A run that starts from imported weights: the sizes that it gets, its config.yaml, and its checkpoint of step 0."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from data_utils.common.settings import build, check, merge, to_tree
from data_utils.tokenizers.tokenizer import TokenizerConfig
from megatron_lite.checkpoint.manifest import ADAM_STATE, checkpoint_name, manifest_header, write_manifest
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.sections import BatchConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.weights import METADATA, Weights

_STEPS = 1000
_LONGEST = 2048  # positions: rotary models have many more, but longer samples make a first run slow
_MICRO_BATCH_TOKENS = 4096  # the default batch: 8 samples of 512 tokens


def with_sizes(path: Path, model: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with steps, samples that fit the positions, a batch for their length, and a warmup of a tenth.

    Settings of the user override them. Settings of a recipe that the directory does not contain come from configs/.

    Args: path, model: the imported directory, and what it says of the section `model`.
    Raises: ConfigError for a length that the positions do not hold.
    """
    tree = merge({"training": {"steps": _STEPS}}, tree)
    # Without a limit on positions, so that every other mistake is reported before the length is chosen.
    config = build(Config, merge(tree, {"model": {"max_position": 1 << 30}}))
    length = _length(path, model.get("max_position"), config, tree)
    sizes: dict[str, Any] = {"data": {"sequence_length": length}}
    batch = tree.get("batch") or {}
    if not batch.keys() & {"micro_batch_size", "ramp"}:
        sizes["batch"] = {"micro_batch_size": _micro_batch(length, config.batch)}
    if not tree.get("schedule"):
        sizes["schedule"] = {"warmup_steps": config.training.steps // 10}
    return merge(tree, sizes)


def _length(path: Path, last: Any, config: Config, tree: Mapping[str, Any]) -> int:
    """Tokens of a sample: all that fit the positions and the objective's special tokens, 512 without positions."""
    data, length = tree.get("data") or {}, config.data.sequence_length
    needed = max(choice.section.max_position_needed(length) for choice in config.objective_choices)
    if not isinstance(last, int) or config.model.positions == "none":
        return length
    check(
        "sequence_length" not in data or needed <= last,
        f"data.sequence_length ({length}) needs position ids up to {needed}, but the tables of {path} end at {last}; "
        f"set data.sequence_length={length - (needed - last)}, or leave it out.",
    )
    if "sequence_length" in data:
        return length
    longest = min(last, _LONGEST - 1)
    if data.keys() & {"row_length", "region"}:  # both must hold a sample
        longest = min(longest, needed)
    return length - (needed - longest)


def _micro_batch(length: int, batch: BatchConfig) -> int:
    """Samples of a micro-batch: 8, or fewer of longer ones, and a divisor of the batch."""
    sizes = (size for size in (8, 4, 2) if size * length <= _MICRO_BATCH_TOKENS)
    return next((size for size in sizes if batch.global_batch_size % size == 0), 1)


def write_imported_run(directory: Path, output: Path, weights: Weights, config: Config) -> Path:
    """Write config.yaml and the checkpoint of step 0. Raises: CheckpointError, as `write_training_checkpoint`.

    Args:
        directory: of the new run, under a temporary name until all is verified. output: its name after that.
        config: whose tokenizers may be in `directory`; their paths are written as they will be.
    Returns: the directory of the checkpoint.
    """
    config = replace(
        config,
        run=replace(config.run, directory=str(output)),
        tokenizer=_moved(config.tokenizer, directory, output),
        decoder_tokenizer=_moved(config.decoder_tokenizer, directory, output),
    )
    checkpoint = directory / "checkpoints" / checkpoint_name(0)
    write_training_checkpoint(checkpoint, weights, config)
    text = yaml.safe_dump(to_tree(config), sort_keys=False)
    (directory / "config.yaml").write_text(text, encoding="utf-8")
    return checkpoint


def _moved(section: TokenizerConfig | None, directory: Path, output: Path) -> TokenizerConfig | None:
    if section is None:
        return None
    path = Path(section.path)
    if path.is_relative_to(directory):
        return replace(section, path=os.path.abspath(output / path.relative_to(directory)))
    return section.absolute()


def write_training_checkpoint(path: Path, weights: Weights, config: Config) -> None:
    """Write a checkpoint of step 0 with these weights and Adam moments of zero.

    Raises: CheckpointError for a weight that is not finite: nothing could be trained from it.
    """
    path.mkdir(parents=True)
    name = "rank_00000.safetensors"
    slices, shapes = [], {}
    for parameter, shape in weights.shapes.items():
        rows, columns = matrix_shape(shape)
        box = astuple(ShardSlice(0, rows, 0, columns))
        for kind in ADAM_STATE:
            key = f"{parameter}/{kind}/0.0"
            slices.append({"file": name, "key": key, "name": parameter, "kind": kind, "box": box})
            shapes[key] = (rows, columns)
    described = write_tensors(path / name, shapes, _with_moments(weights), metadata=METADATA)
    state = TrainerState.at_step_0(to_tree(config)).to_json()
    manifest = {
        **manifest_header(0, {"adam_step": 0.0, "loss_scaler": {}}, state),
        "shapes": {parameter: list(shape) for parameter, shape in weights.shapes.items()},
        "files": {name: described},
        "pieces": slices,
    }
    write_manifest(path, manifest)


def _with_moments(weights: Weights) -> Iterator[torch.Tensor]:
    """Each weight, followed by zeros for its Adam moments."""
    for name in progress_bar(weights.shapes, desc="writing parameters"):
        weight = weights.read(name).view(matrix_shape(weights.shapes[name]))
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"{name} of the weights to import has values that are not finite; fetch them again, or import an "
                "earlier checkpoint of their training."
            )
        yield weight
        zeros = torch.zeros(1).expand(weight.shape)  # takes no memory
        for _ in ADAM_STATE[1:]:
            yield zeros
