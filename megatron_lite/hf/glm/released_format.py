"""The layout of the released GLM checkpoints: tensors and config.json as they have them, without a tokenizer.

    ReleasedFormat   a Hugging Face directory
    MegatronFormat   the reference's mp_rank_XX_model_states.pt, which an import alone knows

Rows that pad the vocabulary are not trained. An import keeps them in a file of the run's directory, and an export
writes them again, so that it is bit-equal; without that file they are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import check
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.hf.common.config_json import read_config_json, released_layout
from megatron_lite.hf.common.lora import merged_model
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.verify import Checks
from megatron_lite.hf.common.verify_tokenizer import TokenizerComparison
from megatron_lite.hf.common.weights import (
    DTYPES,
    METADATA,
    PADDING_ROWS,
    WORDS,
    Weights,
    open_directory,
    open_safetensors,
    write_json,
    write_sharded,
)
from megatron_lite.hf.glm import released
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.import_config import import_config, warn_of_ignored
from megatron_lite.hf.glm.own_format import GLM_VALUES, GLMFormat
from megatron_lite.hf.glm.verify import released_checks
from megatron_lite.inference.open_run import OpenRun, objective_names
from megatron_lite.transformer.build import model_spec

_GLM_TYPES = ("glm", GLMConfig.model_type)


@dataclass(frozen=True)
class ReleasedFormat(HuggingFaceFormat):
    """One GLM. Args: copy_eop_to_gmask: an import gives [gMASK] the embedding of eop."""

    copy_eop_to_gmask: bool = False

    def is_format_of(self, directory: Path) -> bool:
        model_type = read_config_json(directory).get("model_type")
        return model_type in _GLM_TYPES or released.is_released(open_directory(directory))

    def require_model(self, run: OpenRun) -> None:
        """Raise CheckpointError for a model that is not exactly GLM, or that was not trained to fill blanks."""
        path, names, model = run.checkpoint.path, objective_names(run.objectives), run.config.model
        model = replace(model, lora=None)  # updates are merged
        has_own_model = model_spec(run.config).huggingface is not None
        if not has_own_model:
            GLMFormat().require_model(run)
        for name, is_used in (
            (f"the model of {', '.join(names)}", has_own_model),
            ("the head of a task", model.task_head.type != "none"),
            ("rotary positions", model.positions == "rotary"),
            ("local layers, another norm or FFN, or no biases", replace(model, **GLM_VALUES) != model),
        ):
            if is_used:
                raise CheckpointError(
                    f"checkpoint {path} has {name}, which the released layout does not have; use --layout huggingface."
                )
        # config.json of the released layout does not name objectives: its users fill blanks.
        if "blank_infilling" not in names:
            raise CheckpointError(
                f"checkpoint {path} was trained on {', '.join(names)}, but the released layout is for models that fill "
                "blanks; use --layout huggingface."
            )

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> Checks:
        config, run_directory = run.config.model, run.checkpoint.path.parent.parent
        padded = _with_padding_rows(merged_model(weights, config), config, run_directory / PADDING_ROWS)
        write_sharded(directory, released.in_released_layout(padded), DTYPES[dtype], max_shard_bytes)
        config_json = {
            "model_type": "glm",
            "vocab_size": padded.shapes[WORDS][0],
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "max_sequence_length": config.max_position,
            "block_position_encoding": True,
            "initializer_range": config.init_std,
            "output_predict": True,
            **{theirs: getattr(config, ours) for ours, theirs in released.SETTINGS.items()},
        }
        write_json(directory / "config.json", config_json)
        return partial(released_checks, [open_directory(directory)], config)

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        shards, recorded = self._open(source)
        whole = released.merged(shards, source)
        try:
            positions, hidden_size = whole.shapes["transformer.position_embeddings.weight"]
        except (KeyError, ValueError):
            raise CheckpointError(
                f"{source} has no table transformer.position_embeddings.weight; it is not a GLM."
            ) from None
        layers = {name.split(".")[2] for name in whole.shapes if name.startswith("transformer.layers.")}
        settings = {"num_layers": len(layers), "hidden_size": hidden_size, "max_position": positions - 1}
        settings |= recorded
        whole = whole.renamed({released.our_name(name): name for name in whole.shapes})
        config, tokenizer, weights = import_config(source, whole, settings, {}, tree, directory)
        _keep_padding_rows(whole, tokenizer.vocab_size, directory / PADDING_ROWS)
        if self.copy_eop_to_gmask:
            weights = _with_gmask_of_eop(weights, tokenizer.special)
            # The comparison must see the copied embedding too.
            shards = [released.in_released_layout(weights)]
        heads = config.model.num_attention_heads
        check(
            not verify or heads % len(shards) == 0,
            f"model.num_attention_heads ({heads}) must be a multiple of the {len(shards)} shards of {source}; give the "
            "number the model was trained with.",
        )
        # On the unmerged shards, by code that shares nothing with our model: a wrong cut of Q, K and V shows.
        return Imported(config, weights, partial(released_checks, shards, config.model))

    def compare_tokenizers(self, run: OpenRun, directory: Path) -> dict[str, TokenizerComparison]:
        return {}  # the layout has none

    def _open(self, source: Path) -> tuple[list[Weights], dict[str, Any]]:
        """One Weights per model-parallel rank, and the settings of the section `model` that are recorded."""
        config_json, weights = released_layout(source, read_config_json(source)), open_directory(source)
        warn_of_ignored(source, weights)
        settings = {
            ours: config_json[theirs] for ours, theirs in released.SETTINGS.items() if theirs in config_json
        }
        return [released.without_prefix(weights, source)], settings


class MegatronFormat(ReleasedFormat):
    """The reference's model-parallel shards, which do not record the number of attention heads."""

    def _open(self, source: Path) -> tuple[list[Weights], dict[str, Any]]:
        return released.open_model_parallel(source), {}


def _with_padding_rows(weights: Weights, config: ModelConfig, padding_file: Path) -> Weights:
    """The vocabulary padded with the rows of a file, or with zeros to a multiple of 128 if there is no file."""
    assert config.vocab_size is not None
    # An import stores the padding rows of its source, so that an export back is bit-equal.
    if not padding_file.exists():
        return weights.with_rows(WORDS, padded_vocab_size(config.vocab_size))
    padding = open_safetensors(padding_file)
    rows, columns = padding.shapes.get(WORDS, (0, 0))
    if columns != config.hidden_size:
        raise CheckpointError(
            f"{padding_file} has no rows of {config.hidden_size} columns for {WORDS}; remove it to pad with zeros."
        )

    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        return torch.cat([tensor, padding.read(WORDS)]) if name == WORDS else tensor

    return Weights({**weights.shapes, WORDS: (config.vocab_size + rows, columns)}, read)


def _with_gmask_of_eop(weights: Weights, special: SpecialTokens) -> Weights:
    """The weights with eop's word embedding as that of [gMASK]."""

    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        if name == WORDS:
            tensor = tensor.clone()
            tensor[special.gmask] = tensor[special.eop]
        return tensor

    return Weights(weights.shapes, read)


def _keep_padding_rows(weights: Weights, vocab_size: int, path: Path) -> None:
    """Write the rows of the word embedding after those of the vocabulary, for an export to the released layout."""
    rows, *columns = weights.shapes[WORDS]
    padding = weights.read(WORDS)[vocab_size:]
    write_tensors(path, {WORDS: (rows - vocab_size, *columns)}, [padding], metadata=METADATA)
