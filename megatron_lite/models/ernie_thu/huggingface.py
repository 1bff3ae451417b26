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

from pydantic import Field as Limits
from typing_extensions import TypedDict

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge
from data_utils.common.untrusted import conform
from data_utils.tokenizers.tokenizer import load_tokenizer
from data_utils.tokenizers.tokenizer_readers import read_files
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.config_json import CONFIG_JSON, Rate, Size, check_sizes
from megatron_lite.hf.common.imported_run import with_sizes
from megatron_lite.hf.common.model_card import write_card
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.provenance import provenance
from megatron_lite.hf.common.system_table import TensorRule, prefixed
from megatron_lite.hf.common.weights import (
    DTYPES,
    IMPORTED_FILES,
    Weights,
    check_shapes,
    open_directory,
    read_json,
    write_json,
    write_sharded,
)
from megatron_lite.hf.published.import_config import check_vocabulary, require_same_model
from megatron_lite.hf.published.read_config import model_settings
from megatron_lite.hf.published.source import PublishedSource
from megatron_lite.hf.published.systems import BERT
from megatron_lite.hf.published.tensor_map import normalize_names, tensor_mappings, to_ours, to_theirs
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.models.ernie_thu.model_spec import section_of
from megatron_lite.transformer.build import model_spec

ERNIE_CONFIG, VOCABULARY, HEADS = "ernie_config.json", "vocab.txt", "entity_attention_heads"
TIED = "cls.predictions.decoder.weight"
_PUBLISHED_HEADS = 4  # attention heads over entities of the published code, which has no field for them
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
        *prefixed(_ENTITIES, "layers.{i}.", "bert.encoder.layer.{i}."),
        TensorRule("entity_head.dense", (f"{_HEAD}.dense",)),
        TensorRule("entity_head.layernorm", (f"{_HEAD}.LayerNorm",)),
    ),
)
_ACTIVATIONS = {"gelu": "gelu_erf", "relu": "relu"}
_CARD = """A BERT with entity states ({name}, arXiv:1905.07129), in the layout of its repository. {origin}"""
_EXAMPLE = """from safetensors.torch import load_file

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


class ErnieFormat(HuggingFaceFormat):
    """The layout of the published repository."""

    unverifiable = f"transformers has no class of {_NAME} to compare with"

    def is_format_of(self, directory: Path) -> bool:
        return (directory / ERNIE_CONFIG).exists() and not (directory / CONFIG_JSON).exists()

    def require_model(self, run: OpenRun) -> None:
        model, tokenizer = run.config.model, run.tokenizer.config
        for problem, is_there in (
            (f"the head of a task ({model.task_head.type})", model.task_head.type != "none"),
            ("no label of two sentences", not section_of(run.config).next_sentence),
            (f"model.activation {model.activation}", model.activation not in _ACTIVATIONS.values()),
            (f"model.layernorm_epsilon {model.layernorm_epsilon}", model.layernorm_epsilon != 1e-12),
            (f"the tokenizer {tokenizer.kind}", tokenizer.kind != "bert_wordpiece"),
            ("tokens that its vocab.txt lacks", tokenizer.added_tokens != "none"),
        ):
            if is_there:
                raise CheckpointError(
                    f"checkpoint {run.checkpoint.path} has {problem}, which the published layout of {_NAME} does not "
                    "have; use the run itself."
                )

    def write(
        self, directory: Path, run: OpenRun, weights: Weights, dtype: str, max_shard_bytes: int
    ) -> None:
        model, section = run.config.model, section_of(run.config)
        theirs = to_theirs(weights, tensor_mappings(SYSTEM, weights.shapes, model), None, SYSTEM)
        # The published code reads the tied matrix of the head from the file too.
        names = {name: name for name in theirs.shapes} | {TIED: SYSTEM.ties[TIED]}
        write_sharded(directory, theirs.renamed(names), DTYPES[dtype], max_shard_bytes)
        activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        described = {
            "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads, "intermediate_size": model.inner_size,
            "max_position_embeddings": model.max_position + 1, "type_vocab_size": model.segments,
            "hidden_act": activations[model.activation], "hidden_dropout_prob": model.output_dropout,
            "attention_probs_dropout_prob": model.attention_dropout, "initializer_range": model.init_std,
            "layer_types": [*section.layer_types_for(model.num_layers)],
        }  # fmt: skip
        if section.heads != _PUBLISHED_HEADS:
            described[HEADS] = section.heads
        # Fields of the imported file that the model does not decide stay as they were.
        imported = run.checkpoint.path.parent.parent / IMPORTED_FILES / ERNIE_CONFIG
        base = read_json(imported) if imported.exists() else {}
        write_json(directory / ERNIE_CONFIG, {**base, **described})
        (directory / VOCABULARY).write_bytes(read_files(run.tokenizer.config)["vocab.txt"])
        origin = provenance(run, "entities")
        introduction = _CARD.format(name=_NAME, origin=origin)
        words = {"tags": "- ernie", "title": _NAME, "introduction": introduction, "example": _EXAMPLE}
        card = write_card(run, words, origin.is_imported)
        (directory / "README.md").write_text(card, encoding="utf-8")
        return None

    def read(self, source: Path, directory: Path, tree: Mapping[str, Any], *, verify: bool) -> Imported:
        described, (theirs, problems) = _described(source), normalize_names(open_directory(source), SYSTEM)
        if problems:
            raise CheckpointError(f"{source}: {' '.join(problems)}")
        bert = {name: value for name, value in described.items() if name not in ("layer_types", HEADS)}
        settings = model_settings(SYSTEM, bert, theirs, source) | {"sentence_classes": 2}
        check_sizes(source, settings, theirs, ERNIE_CONFIG)
        kept = directory / IMPORTED_FILES
        kept.mkdir()
        for name in (ERNIE_CONFIG, VOCABULARY):
            if (source / name).exists():
                shutil.copyfile(source / name, kept / name)
        config = _config(source, kept, settings, _section(source, described, theirs), tree)
        shapes = model_spec(config).shapes(config)
        mappings = tensor_mappings(SYSTEM, shapes, config.model)
        published = PublishedSource(source, SYSTEM, settings, theirs, mappings, Weights({}, theirs.read))
        require_same_model("model", config.model, published)
        expected = to_theirs(Weights(shapes, theirs.read), mappings, None, SYSTEM).shapes
        check_shapes(theirs, expected, source, _NAME)
        assert config.tokenizer is not None
        check_vocabulary(load_tokenizer(config.tokenizer), published)
        ours = to_ours(theirs, mappings)
        weights = Weights({name: ours.shapes[name] for name in shapes}, lambda name: ours.read(name).float())
        return Imported(config, weights, None)


HUGGINGFACE_FORMAT = ErnieFormat()


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
        "size": theirs.shapes[name][0], "heads": described.get(HEADS, _PUBLISHED_HEADS), "layer_types": types,
        "next_sentence": True,
    }  # fmt: skip


def _config(
    path: Path,
    kept: Path,
    settings: dict[str, Any],
    section: Mapping[str, Any],
    tree: Mapping[str, Any],
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
    defaults = {
        "tokenizer": {"kind": "bert_wordpiece", "path": str(kept / VOCABULARY), "added_tokens": "none"},
        "objectives": {"entities": 1},
        "training": {"loss_normalization": "per_objective"},
    }
    sections = {"model": {**settings, **(tree.get("model") or {})}, "entities": {**given, **section}}
    whole = merge(merge(defaults, tree), sections)
    config = build(Config, with_sizes(path, settings, whole))
    if not any(choice.name == "entities" for choice in config.objective_choices):
        raise ConfigError(f"{path} has entities; set objectives to {{entities: 1}}, or leave it out.")
    return config
