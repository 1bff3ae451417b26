"""Writes a run that starts from imported weights: its config.yaml, and its checkpoint of step 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
import yaml

from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from data_utils.common.settings import to_tree
from data_utils.tokenizers.tokenizer import TokenizerConfig
from megatron_lite.checkpoint.manifest import ADAM_STATE, checkpoint_name, manifest_header, write_manifest
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.tree import Config
from megatron_lite.hf.files.weights import METADATA, Weights


def write_imported_run(directory: Path, output: Path, weights: Weights, config: Config) -> Path:
    """Write config.yaml and the checkpoint of step 0. Raises: CheckpointError, as `write_training_checkpoint`.

    Args:
        directory: of the new run, under a temporary name until all is proven. output: its name after that.
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
    state = TrainerState.beginning(to_tree(config)).to_json()
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
