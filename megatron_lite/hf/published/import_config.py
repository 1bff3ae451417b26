"""The run that imports a published system: its configuration, from the directory and the user, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge
from data_utils.tasks.config import TaskConfig
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import with_objective
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.config_json import by_transformers
from megatron_lite.hf.common.imported_run import with_sizes
from megatron_lite.hf.common.weights import IMPORTED_FILES, METADATA, Weights, write_json
from megatron_lite.hf.published.heads import task_section
from megatron_lite.hf.published.source import PublishedSource
from megatron_lite.hf.published.tensor_map import SKIPPED_ROWS, skipped_rows, to_ours
from megatron_lite.hf.published.tokenizers import (
    copy_tokenizer_files,
    import_tokenizer,
    puts_before_texts,
    require_same_ids,
)
from megatron_lite.hf.published.write_config import DERIVED, different_options
from megatron_lite.transformer.init import initialize_parameters

log = logging.getLogger(__name__)


def import_config(source: PublishedSource, directory: Path, tree: Mapping[str, Any], verify: bool) -> Config:
    """The configuration of the new run, with the directory's tokenizer if the tree names none."""
    model, kept = tree.get("model"), directory / IMPORTED_FILES
    overrides = {k: v for k, v in model.items() if v is not None} if isinstance(model, Mapping) else {}
    section, tokenizer, is_imported = _tokenizer(source, kept, tree.get("tokenizer") or {})
    tree = {**tree, "model": merge(source.settings, overrides), "tokenizer": section}
    if head := source.settings.get("task_head", {}).get("type"):
        tree["task"] = {
            **task_section(head, source.config_json),
            **_task_length(build(ModelConfig, source.settings, "model.")),
            **(tree.get("task") or {}),
        }
    begin = source.system.begin
    if begin in tokenizer.lacking:
        # SmolLM2 is a Llama whose tokenizer has no token that begins a text, and was trained without one.
        begin = "none"
    elif begin == "none" and is_imported and puts_before_texts("cls", tokenizer, source.path, kept):
        begin = "cls"  # DeepSeek's Qwen2 was trained with one
    defaults = {key: {"begin": begin} for key in ("causal", "fill_in_middle")}
    tree = with_sizes(source.path, source.settings, with_objective(merge(defaults, tree)))
    config = build(Config, tree)
    require_same_model("model", config.model, source)
    if verify and not is_imported:
        require_same_ids("tokenizer", tokenizer, source.path, kept)
    return with_task_rows(config)


def _tokenizer(
    source: PublishedSource, kept: Path, given: Mapping[str, Any]
) -> tuple[dict[str, Any], Tokenizer, bool]:
    """The section `tokenizer`, the tokenizer, and whether it is the directory's.

    Args: kept: the directory's files, in the run. given: the user's settings.
    """
    section = {"added_tokens": "none", **given}
    is_imported = "path" not in section
    if is_imported:
        with by_transformers(source.path):
            section = import_tokenizer(source.path, kept, section)
    require_rows(load_tokenizer(build(TokenizerConfig, section, "tokenizer.")), source)
    # Tables may be longer than the tokenizer (Qwen): the model's size counts.
    section = {"vocab_size": source.settings["vocab_size"], **section}
    tokenizer = load_tokenizer(build(TokenizerConfig, section, "tokenizer."))
    check_vocabulary(tokenizer, source)
    return section, tokenizer, is_imported


def _task_length(model: ModelConfig) -> dict[str, int]:
    """task.sequence_length of a model whose table of positions is shorter than the default."""
    default: Any = TaskConfig.__dataclass_fields__["sequence_length"].default
    is_short = model.has_position_tables and model.max_position < default
    return {"sequence_length": model.max_position} if is_short else {}


def require_same_model(key: str, model: ModelConfig, source: PublishedSource) -> None:
    """Raise ConfigError unless a section computes what the imported weights do. Args: key: of the section."""
    imported = build(ModelConfig, source.settings, "model.")
    different = different_options(model, imported)
    for name in sorted(different, key=lambda name: (name in DERIVED, name)):  # what follows from others last
        ours, theirs = different[name]
        raise ConfigError(
            f"{key}.{name} is {shown(ours)}, but {source.path} has {shown(theirs)}; leave it out, or set it to that."
        )


def require_rows(tokenizer: Tokenizer, source: PublishedSource) -> None:
    """Raise CheckpointError for a tokenizer with tokens for which the word embedding has no row."""
    rows = source.settings["vocab_size"]
    without_row = [tokenizer.token_to_text(i) for i in range(rows, tokenizer.num_tokens)]
    if not without_row:
        return
    added = tokenizer.config.added_tokens
    remedy = (
        "remove what has none from its tokenizer files, or lengthen the table with transformers "
        f"(resize_token_embeddings({tokenizer.num_tokens})) and save the model"
        if added == "none"
        else f"set tokenizer.added_tokens=none, which {added} adds to"
    )
    raise CheckpointError(
        f"{source.path} has {rows} rows of word embeddings, but its tokenizer {tokenizer.num_tokens} tokens; without "
        f"a row are {', '.join(map(shown, without_row[:5]))}{', ...' if len(without_row) > 5 else ''}: {remedy}."
    )


def check_vocabulary(tokenizer: Tokenizer, source: PublishedSource) -> None:
    """Raise CheckpointError for a tokenizer of another size, or padding by which the class would count otherwise."""
    rows, system = source.settings["vocab_size"], source.system
    if tokenizer.vocab_size != rows:
        raise CheckpointError(
            f"{source.path} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} tokens; "
            "use the tokenizer of this model, with tokenizer.added_tokens=none."
        )
    pad = system.skipped_positions - 1
    if system.skips_pad and tokenizer.special.pad != pad:
        raise CheckpointError(
            f"{source.path / 'config.json'}: pad_token_id is {pad}, from which a {system.model_type} counts positions, "
            f"but the tokenizer pads with {tokenizer.special.pad}; fetch config.json and the tokenizer from one model."
        )


def copy_imported_files(source: PublishedSource, directory: Path) -> None:
    """Write what an export writes again: config.json, the tokenizer's files, and rows that the model does not have."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", source.config_json)
    copy_tokenizer_files(source.path, directory)
    rows = dict(skipped_rows(source.theirs, source.mappings))
    if rows:
        shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
        write_tensors(directory / SKIPPED_ROWS, shapes, rows.values(), metadata=METADATA)


def with_new_heads(source: PublishedSource, config: Config, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """The imported tensors, and initial values of heads that the files do not have, or not in this size.

    Args: shapes: name -> shape of the run's parameters that come from the source.
    """
    weights, others = to_ours(source.theirs, source.mappings), source.others
    missing = [
        name for name in shapes if name not in weights.shapes and others.shapes.get(name) != shapes[name]
    ]
    if missing:
        log.warning("%s does not have %s; they are initialized", source.path, ", ".join(sorted(missing)))
    # Drawn by the run's own rules and seed, as a new run draws them.
    new = {name: torch.nn.Parameter(torch.empty(shapes[name])) for name in missing}
    initialize_parameters(new.items(), config.model, config.training.seed)

    def read(name: str) -> torch.Tensor:
        if name in new:
            return new[name].detach()
        return weights.read(name) if name in weights.shapes else others.read(name)

    return Weights(shapes, read)
