"""ERNIE (Tsinghua) as files of its repository, and back to a run. Transformers has no class of it.

    DIRECTORY/ernie_config.json    BERT's fields, and layer_types: sim, mix or norm for each block
    DIRECTORY/pytorch_model.bin    the names of BertForPreTraining; or model.safetensors, which an export writes
    DIRECTORY/vocab.txt

Entities are 100 wide with 4 heads there; other heads are in a field of our own. Vectors are in neither layout.

Source: thunlp/ERNIE, the module knowledge_bert.modeling.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import yaml
from pydantic import Field as Limits
from typing_extensions import TypedDict

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge, to_tree
from data_utils.common.untrusted import conform
from data_utils.tokenizers.tokenizer import load_tokenizer
from data_utils.tokenizers.tokenizer_readers import read_files
from megatron_lite.checkpoint.manifest import checkpoint_name
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.config.tree import Config
from megatron_lite.hf.files.config_json import CONFIG_JSON, Rate, Size, check_sizes
from megatron_lite.hf.files.first_checkpoint import write_training_checkpoint
from megatron_lite.hf.files.model_card import ORIGINS, write_card
from megatron_lite.hf.files.system_table import TensorRule, numbered
from megatron_lite.hf.files.weights import (
    DTYPES,
    Weights,
    check_shapes,
    new_directory,
    open_directory,
    read_json,
    write_json,
    write_sharded,
)
from megatron_lite.hf.published.read_config import model_settings
from megatron_lite.hf.published.runs import KEPT_FILES, check_vocabulary, require_same_model
from megatron_lite.hf.published.source import PublishedSource
from megatron_lite.hf.published.systems import BERT
from megatron_lite.hf.published.tensor_map import normalized, tensor_mappings, to_ours, to_theirs
from megatron_lite.hf.published.usual import with_sizes
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.model.build import model_spec
from megatron_lite.models.ernie_thu.model_spec import section_of

ERNIE_CONFIG, VOCABULARY, HEADS = "ernie_config.json", "vocab.txt", "entity_attention_heads"
TIED = "cls.predictions.decoder.weight"
_HEADS = 4  # of the published code
_NAME = "ERNIE (Tsinghua)"
_ENTITIES = [
    TensorRule(
        "entity_attention.query_key_value",
        tuple(f"attention.self_ent.{name}" for name in ("query", "key", "value")),
    ),
    TensorRule("entity_attention.dense", ("attention.output_ent.dense",)),
    TensorRule("attended_entity_layernorm", ("attention.output_ent.LayerNorm",)),
    TensorRule("entity_h_to_4h", ("intermediate.dense_ent",)),
    TensorRule("entity_bias", ("intermediate.dense_ent.bias",), is_tensor=True),
    TensorRule("entity_4h_to_h", ("output.dense_ent",)),
    TensorRule("entity_layernorm", ("output.LayerNorm_ent",)),
]  # fmt: skip
_HEAD = "cls.predictions_ent.transform"
SYSTEM = replace(
    BERT,
    rules=(
        *BERT.rules,
        *numbered(_ENTITIES, "layers.{i}.", "bert.encoder.layer.{i}."),
        TensorRule("entity_head.dense", (f"{_HEAD}.dense",)),
        TensorRule("entity_head.layernorm", (f"{_HEAD}.LayerNorm",)),
    ),
)
_ACTIVATIONS = {"gelu": "gelu_erf", "relu": "relu"}
_CARD = """A BERT with entity states ({name}, arXiv:1905.07129), in the layout of its repository. {origin}"""
_EXAMPLE = """import torch
from safetensors.torch import load_file

torch.save(load_file("PATH/model.safetensors"), "PATH/pytorch_model.bin")  # for BertForPreTraining of thunlp/ERNIE"""


class _Described(TypedDict):
    """The fields of ernie_config.json; those that may be missing have the values of the published code."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    layer_types: list[Literal["sim", "mix", "norm"]]
    hidden_act: Literal["gelu", "relu"]
    type_vocab_size: Size
    hidden_dropout_prob: Rate
    attention_probs_dropout_prob: Rate
    initializer_range: NotRequired[Annotated[float, Limits(gt=0)]]
    entity_attention_heads: NotRequired[Size]


def is_ernie_directory(path: Path) -> bool:
    """Whether a directory is of this layout."""
    return (path / ERNIE_CONFIG).exists() and not (path / CONFIG_JSON).exists()


def is_ernie_thu(config: Config) -> bool:
    """Whether a configuration is of a model with entities."""
    return any(choice.name == "entities" for choice in config.objective_choices)


def _refuse_proof(path: Path, verify: bool) -> None:
    """Raise CheckpointError where a proof is asked for."""
    if verify:
        raise CheckpointError(
            f"{path}: transformers has no class of {_NAME} to compare with; add --no-verify."
        )


def import_ernie(
    path: Path, output: Path, tree: Mapping[str, Any], *, verify: bool = True, **options: Any
) -> None:
    """Write a run directory with one checkpoint at step 0, its config.yaml, and what an export needs.

    Args: tree: configuration of the new run. It must not contradict the model. options: of a proof; there is none.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    _refuse_proof(path, verify)
    with new_directory(output) as directory:
        described, (theirs, problems) = _described(path), normalized(open_directory(path), SYSTEM)
        if problems:
            raise CheckpointError(f"{path}: {' '.join(problems)}")
        of_bert = {name: value for name, value in described.items() if name not in ("layer_types", HEADS)}
        settings = model_settings(SYSTEM, of_bert, theirs, path) | {"sentence_classes": 2}
        check_sizes(path, settings, theirs, ERNIE_CONFIG)
        kept = directory / KEPT_FILES
        kept.mkdir()
        for name in (ERNIE_CONFIG, VOCABULARY):
            if (path / name).exists():
                shutil.copyfile(path / name, kept / name)
        section = _section(path, described, theirs)
        config = _config(path, kept, settings, section, tree, output)
        shapes = model_spec(config).shapes(config)
        parts = tensor_mappings(SYSTEM, shapes, config.model)
        source = PublishedSource(path, SYSTEM, settings, theirs, parts, Weights({}, theirs.read))
        require_same_model("model", config.model, source)
        check_shapes(theirs, to_theirs(Weights(shapes, theirs.read), parts, None, SYSTEM).shapes, path, _NAME)
        assert config.tokenizer is not None
        check_vocabulary(load_tokenizer(config.tokenizer), source)
        if Path(config.tokenizer.path).is_relative_to(directory):
            moved = str(output.absolute() / Path(config.tokenizer.path).relative_to(directory))
            config = replace(config, tokenizer=replace(config.tokenizer, path=moved))
        config = replace(config, tokenizer=config.tokenizer.absolute())  # type: ignore[union-attr]
        ours = to_ours(theirs, parts)
        weights = Weights({name: ours.shapes[name] for name in shapes}, lambda name: ours.read(name).float())
        write_training_checkpoint(directory / "checkpoints" / checkpoint_name(0), weights, config)
        (directory / "config.yaml").write_text(
            yaml.safe_dump(to_tree(config), sort_keys=False), encoding="utf-8"
        )


def _described(path: Path) -> dict[str, Any]:
    """The checked fields of ernie_config.json. Raises: CheckpointError."""
    described = read_json(path / ERNIE_CONFIG)
    known = {name: value for name, value in described.items() if name in _Described.__annotations__}
    try:
        conform(known, _Described)
    except ValueError as error:
        raise CheckpointError(f"{path / ERNIE_CONFIG} {error}; fetch it again.") from None
    if len(known["layer_types"]) > known["num_hidden_layers"]:
        raise CheckpointError(
            f"{path / ERNIE_CONFIG} has {len(known['layer_types'])} layer_types for {known['num_hidden_layers']} "
            "layers; fetch it again."
        )
    return known


def _section(path: Path, described: Mapping[str, Any], theirs: Weights) -> dict[str, Any]:
    """The section `entities`. Blocks without a type are sim."""
    name = f"{_HEAD}.dense.weight"
    if name not in theirs.shapes:
        raise CheckpointError(
            f"{path} lacks {name}; only the weights of BertForPreTraining can be imported, with all heads."
        )
    types = described["layer_types"]
    types = types + ["sim"] * (described["num_hidden_layers"] - len(types))
    return {
        "size": theirs.shapes[name][0], "heads": described.get(HEADS, _HEADS), "layer_types": types,
        "next_sentence": True,
    }  # fmt: skip


def _config(
    path: Path,
    kept: Path,
    settings: dict[str, Any],
    section: Mapping[str, Any],
    tree: Mapping[str, Any],
    output: Path,
) -> Config:
    """The configuration of the new run. Raises: ConfigError where it contradicts the files."""
    given = tree.get("entities") or {}
    for name, value in section.items():
        if given.get(name, value) != value:
            raise ConfigError(
                f"entities.{name} is {shown(given[name])}, but {path} has {shown(value)}; leave it out."
            )
    if not (kept / VOCABULARY).exists() and "path" not in (tree.get("tokenizer") or {}):
        raise CheckpointError(f"{path} has no {VOCABULARY}; fetch it, or set tokenizer.path.")
    usual = {
        "tokenizer": {"kind": "bert_wordpiece", "path": str(kept / VOCABULARY), "added_tokens": "none"},
        "objectives": {"entities": 1},
        "training": {"loss_normalization": "per_objective"},
    }
    sections = {"model": {**settings, **(tree.get("model") or {})}, "entities": {**given, **section}}
    whole = merge(merge(usual, tree), {**sections, "run": {"directory": str(output)}})
    config = build(Config, with_sizes(path, settings, whole))
    if not is_ernie_thu(config):
        raise ConfigError(f"{path} has entities; set objectives to {{entities: 1}}, or leave it out.")
    return config


def write_ernie(directory: Path, run: OpenRun, dtype: str, max_shard_bytes: int, verify: bool) -> None:
    """Write a run in the published layout. Raises: CheckpointError for what that does not have, and for a proof."""
    config, path = run.config, run.checkpoint.path
    _refuse_proof(path, verify)
    model, section = config.model, section_of(config)
    published = {name: ours for name, ours in _ACTIVATIONS.items() if ours == model.activation}
    for problem, is_there in (
        (f"the head of a task ({model.task_head})", model.task_head != "none"),
        ("no label of two sentences", not section.next_sentence),
        (f"model.activation {model.activation}", not published),
        (f"model.layernorm_epsilon {model.layernorm_epsilon}", model.layernorm_epsilon != 1e-12),
        (f"the tokenizer {run.tokenizer.config.kind}", run.tokenizer.config.kind != "bert_wordpiece"),
        ("tokens that its vocab.txt lacks", run.tokenizer.config.added_tokens != "none"),
    ):
        if is_there:
            raise CheckpointError(
                f"checkpoint {path} has {problem}, which the published layout of {_NAME} does not have; use the run "
                "itself."
            )
    weights = Weights(run.checkpoint.shapes, weight_reader(run.checkpoint))
    check_shapes(weights, model_spec(config).shapes(config), path)
    theirs = to_theirs(weights, tensor_mappings(SYSTEM, weights.shapes, model), None, SYSTEM)
    words = SYSTEM.ties[TIED]
    shapes = {**theirs.shapes, TIED: theirs.shapes[words]}
    written = Weights(shapes, lambda name: theirs.read(words if name == TIED else name))
    write_sharded(directory, written, DTYPES[dtype], max_shard_bytes)
    kept = path.parent.parent / KEPT_FILES / ERNIE_CONFIG
    (activation,) = published
    described = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads, "intermediate_size": model.inner_size,
        "max_position_embeddings": model.max_position + 1, "type_vocab_size": model.segments, "hidden_act": activation,
        "hidden_dropout_prob": model.output_dropout, "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std, "layer_types": [*section.layer_types_for(model.num_layers)],
    }  # fmt: skip
    described |= {} if section.heads == _HEADS else {HEADS: section.heads}
    write_json(directory / ERNIE_CONFIG, {**(read_json(kept) if kept.exists() else {}), **described})
    (directory / VOCABULARY).write_bytes(read_files(run.tokenizer.config)["vocab.txt"])
    origin = ORIGINS[kept.exists(), run.checkpoint.step > 0].format(names="entities")
    introduction = _CARD.format(name=_NAME, origin=origin)
    card = {"tags": "- ernie", "title": _NAME, "introduction": introduction, "example": _EXAMPLE}
    text = write_card(run, card, "and of the imported weights " if kept.exists() else "")
    (directory / "README.md").write_text(text, encoding="utf-8")
