"""Conversion between training checkpoints and Hugging Face directories, each with a proof on logits.

    export_run         a training checkpoint of any layout -> our Hugging Face model, or the released layout
    import_directory   a Hugging Face directory in either layout -> a run to continue from
    import_megatron    the reference's model-parallel shards -> a run to continue from

Tensors are streamed; only the proof holds a whole model. A result is made beside its place and renamed when
everything, the proof included, went well. Rows that pad the vocabulary take no part in training: an import from the
released layout puts them in a file of the run directory, and an export to that layout takes them from there (zeros
where a run has none). An import has no optimizer state: its Adam moments are zero and its step is 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import GenerationConfig

from data_utils.files import require_new_directory
from data_utils.objectives.planes import SpecialTokens
from data_utils.tokenizers import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite import checkpoint
from megatron_lite.boxes import Box, matrix_shape
from megatron_lite.checkpoint_files import describe_file, write_file
from megatron_lite.config import Config, ModelConfig, padded_vocab_size
from megatron_lite.errors import CheckpointError, ConfigError
from megatron_lite.hf import proof, released
from megatron_lite.hf.configuration_glm import GLMConfig
from megatron_lite.hf.model_card import model_card
from megatron_lite.hf.tokenizer_files import (
    TRAINING_TOKENIZER,
    prove_tokenizer,
    training_tokenizer,
    write_tokenizer,
)
from megatron_lite.hf.weights import (
    DTYPES,
    WORDS,
    Weights,
    check_shapes,
    open_directory,
    open_safetensors,
    read_json,
    write_safetensors,
    write_sharded,
)
from megatron_lite.inference import find_checkpoint, load_model
from megatron_lite.model import parameter_shapes
from megatron_lite.settings import build, check, choice, merge, setting, to_tree

LAYOUTS = ("huggingface", "released")
TRAINING_JSON = "training.json"
PADDING_ROWS = "padding_rows.safetensors"  # in a run's directory: of the released model it continues
_PREFIX = "glm."
_CODE = ("configuration_glm.py", "modeling_glm.py", "tokenization_glm.py", "pipeline_glm.py")
_AUTO_MAP = {
    "AutoConfig": "configuration_glm.GLMConfig",
    "AutoModel": "modeling_glm.GLMModel",
    "AutoModelForSeq2SeqLM": "modeling_glm.GLMForBlankInfilling",
    "AutoModelForSequenceClassification": "modeling_glm.GLMForSequenceClassification",
    "AutoModelForMultipleChoice": "modeling_glm.GLMForMultipleChoice",
}
_PIPELINES = {
    "blank-infilling": {
        "impl": "pipeline_glm.BlankInfillingPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}
# Sections of a run's configuration that describe the model and not the machine it was trained on.
_PORTABLE_SECTIONS = ("model", "training", "batch", "optimizer", "schedule", "blank_infilling")
# Our model settings and the names that the released configurations have for them.
_RELEASED_SETTINGS = {
    "num_attention_heads": "num_attention_heads",
    "embedding_dropout": "embedding_dropout_prob",
    "attention_dropout": "attention_dropout_prob",
    "output_dropout": "output_dropout_prob",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    layout: str = setting(
        "huggingface", "huggingface, or released (names and vocabulary rows of the released GLM)"
    )
    dtype: str = setting("fp32", "type of the written weights: fp32, bf16 or fp16")
    max_shard_bytes: int = setting(5 * 10**9, "largest weight file; a single tensor may exceed it")
    verify: bool = setting(True, "run both models and compare logits")
    tolerance: float = setting(proof.TOLERANCE, "largest logit difference that passes")

    def __post_init__(self) -> None:
        choice("layout", self.layout, LAYOUTS)
        choice("dtype", self.dtype, tuple(DTYPES))
        check(self.max_shard_bytes >= 1, f"max_shard_bytes is {self.max_shard_bytes}; it must be positive.")


# Export


def export_run(
    path: Path, output: Path, options: ExportOptions, tokenizer_path: Path | None = None
) -> proof.Proof | None:
    """Write the model of a run directory, or of one of its checkpoints, as a Hugging Face directory.

    Returns: what the proof found, None without one. Raises: CheckpointError, DataError or ConfigError;
    `output` then does not exist.
    """
    with new_directory(output) as directory:
        found = find_checkpoint(path)
        if not isinstance(found.state.get("config"), dict):
            raise CheckpointError(
                f"checkpoint {found.path} holds no configuration; it is not of a training run."
            )
        config = build(Config, found.state["config"])
        if config.tokenizer is None:
            raise CheckpointError(f"checkpoint {found.path} names no tokenizer.")
        section = (
            config.tokenizer
            if tokenizer_path is None
            else replace(config.tokenizer, path=str(tokenizer_path))
        )
        tokenizer = load_tokenizer(section)
        config = config.with_vocab_size(tokenizer.vocab_size)
        if not config.model.is_plain:
            raise CheckpointError(
                f"checkpoint {found.path} is of a model with heads, embeddings or shared layers that the Hugging "
                "Face classes do not have; only models of GLM's own layers can be exported."
            )
        weights = Weights(found.shapes, checkpoint.weight_reader(found))
        check_shapes(weights, parameter_shapes(config.model), found.path)
        if options.layout == "released":
            padded = _with_padding_rows(weights, config.model, found.path.parent.parent / PADDING_ROWS)
            _write_released(directory, padded, config.model, options)
        else:
            _write_huggingface(directory, weights, config, tokenizer, options)
            _write_provenance(directory, found, config, tokenizer)
        if not options.verify:
            return None
        return _prove_export(directory, found, config.model, tokenizer, options)


def _write_huggingface(
    directory: Path, weights: Weights, config: Config, tokenizer: Tokenizer, options: ExportOptions
) -> None:
    exported = weights.renamed({_PREFIX + name: name for name in weights.shapes})
    write_sharded(directory, exported, DTYPES[options.dtype], options.max_shard_bytes)
    glm_config(config.model, tokenizer.special, DTYPES[options.dtype]).save_pretrained(directory)
    generation_config(tokenizer.special).save_pretrained(directory)
    write_tokenizer(tokenizer, directory, config.model.max_position + 1)
    for name in _CODE:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)


def _write_released(directory: Path, weights: Weights, config: ModelConfig, options: ExportOptions) -> None:
    write_sharded(directory, _in_released_layout(weights), DTYPES[options.dtype], options.max_shard_bytes)
    described = {
        "model_type": "glm",
        "vocab_size": weights.shapes[WORDS][0],
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_sequence_length": config.max_position,
        "block_position_encoding": True,
        "initializer_range": config.init_std,
        "output_predict": True,
        **{theirs: getattr(config, ours) for ours, theirs in _RELEASED_SETTINGS.items()},
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _with_padding_rows(weights: Weights, config: ModelConfig, kept: Path) -> Weights:
    """The vocabulary padded with the rows that the import kept, or with zeros to a multiple of 128."""
    assert config.vocab_size is not None
    if not kept.exists():
        return weights.with_rows(WORDS, padded_vocab_size(config.vocab_size))
    padding = open_safetensors(kept)
    rows, columns = padding.shapes.get(WORDS, (0, 0))
    if columns != config.hidden_size:
        raise CheckpointError(
            f"{kept} has no rows of {config.hidden_size} columns for {WORDS}; remove it to pad with zeros."
        )

    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        return torch.cat([tensor, padding.read(WORDS)]) if name == WORDS else tensor

    return Weights({**weights.shapes, WORDS: (config.vocab_size + rows, columns)}, read)


def glm_config(config: ModelConfig, special: SpecialTokens, dtype: torch.dtype) -> GLMConfig:
    """The transformers configuration of a training configuration."""
    assert config.vocab_size is not None
    described = GLMConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        max_position=config.max_position,
        embedding_dropout=config.embedding_dropout,
        attention_dropout=config.attention_dropout,
        output_dropout=config.output_dropout,
        layernorm_epsilon=config.layernorm_epsilon,
        initializer_range=config.init_std,
        gelu=config.gelu,
        cls_token_id=special.cls,
        sop_token_id=special.sop,
        eop_token_id=special.eop,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
        mask_token_ids=sorted({special.mask, special.smask, special.gmask}),
        architectures=["GLMForBlankInfilling"],
        dtype=dtype,
    )
    described.auto_map = dict(_AUTO_MAP)
    described.custom_pipelines = _PIPELINES
    return described


def generation_config(special: SpecialTokens) -> GenerationConfig:
    """Greedy, a span ends at eop or eos, and no other special token is ever written, as in
    scripts/generate.py."""
    ends = {special.eop, special.eos}
    return GenerationConfig(
        eos_token_id=sorted(ends),
        pad_token_id=special.pad,
        suppress_tokens=sorted(set(asdict(special).values()) - ends),
        max_new_tokens=64,
    )


def _write_provenance(
    directory: Path, found: checkpoint.Checkpoint, config: Config, tokenizer: Tokenizer
) -> None:
    """training.json, for the way back, and the model card."""
    tree = to_tree(config)
    described = {
        "format": "megatron-lite-export",
        "step": found.step,
        "config": {
            **{name: tree[name] for name in _PORTABLE_SECTIONS},
            "data": {name: tree["data"][name] for name in ("sequence_length", "row_length")},
        },
        "tokenizer": {
            **{k: v for k, v in asdict(tokenizer.config).items() if k != "path"},
            "fingerprint": tokenizer.fingerprint,
        },
        "state": {key: value for key, value in found.state.items() if key != "config"},
    }
    write_file(directory / TRAINING_JSON, (json.dumps(described, indent=1) + "\n").encode())
    (directory / "README.md").write_text(model_card(found, config, tokenizer), encoding="utf-8")


def _prove_export(
    directory: Path,
    found: checkpoint.Checkpoint,
    config: ModelConfig,
    tokenizer: Tokenizer,
    options: ExportOptions,
) -> proof.Proof:
    batch = proof.proof_batch(config)
    dtype = DTYPES[options.dtype]  # a model rounded to half precision is compared with itself rounded
    model = load_model(found, config, lambda weight: weight.to(dtype).float())
    expected = proof.training_logits(model, batch)
    del model
    if options.layout == "released":
        actual = proof.released_logits([open_directory(directory)], config, batch)
    else:
        prove_tokenizer(tokenizer, directory)
        actual = proof.exported_logits(directory, batch)
    result = proof.compare(actual, expected, options.tolerance)
    result.require(options.tolerance, f"the export of {found.path}")
    return result


# Import


@dataclass(frozen=True)
class Source:
    """A model to import."""

    path: Path
    weights: Weights  # whole tensors by our parameters' names
    shards: list[Weights] | None  # the same in the released layout, for its arithmetic; None = our own layout
    settings: dict[str, Any]  # what it says about the model, as a configuration's model section
    base: dict[str, Any]  # the configuration it was trained with, where it says so


def import_directory(
    source: Path, output: Path, tree: Mapping[str, Any], **options: Any
) -> proof.Proof | None:
    """Make the run directory `output` from a Hugging Face directory, ours or in the released layout.

    Args:
        tree: configuration of the run to come, on top of what the directory says.
        options: as import_source.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    return import_source(open_source(source), output, tree, **options)


def import_megatron(
    source: Path, output: Path, tree: Mapping[str, Any], **options: Any
) -> proof.Proof | None:
    """The same from the reference's `mp_rank_XX_model_states.pt`.

    These do not say how many attention heads there are: `tree` must, and no proof can notice a wrong number.
    """
    shards = released.open_model_parallel(source)
    return import_source(_released_source(source, shards, {}), output, tree, **options)


def open_source(path: Path) -> Source:
    """A Hugging Face directory. Its layout is told by the tensors' names: others use the model type "glm"
    too."""
    described = read_json(path / "config.json")
    weights = open_directory(path)
    if not any(name.endswith(WORDS) for name in weights.shapes):
        return _released_source(path, [released.without_prefix(weights, path)], described)
    prefix = next(name for name in weights.shapes if name.endswith(WORDS)).removesuffix(WORDS)
    tied = {"lm_head.weight"}
    names = {name.removeprefix(prefix): name for name in weights.shapes if name not in tied}
    fields = ("num_layers", "hidden_size", "num_attention_heads", "max_position", "layernorm_epsilon", "gelu",
              "embedding_dropout", "attention_dropout", "output_dropout")  # fmt: skip
    settings = {name: described[name] for name in fields if name in described}
    return Source(path, weights.renamed(names), None, settings, _recorded_configuration(path))


def _recorded_configuration(path: Path) -> dict[str, Any]:
    """What an export of ours says about its training: a configuration tree, {} if nothing."""
    if not (path / TRAINING_JSON).exists():
        return {}
    recorded = read_json(path / TRAINING_JSON)
    tree, tokenizer = recorded.get("config"), recorded.get("tokenizer")
    if not isinstance(tree, dict) or not isinstance(tokenizer, dict):
        raise CheckpointError(
            f"{path / TRAINING_JSON} has no config and tokenizer; fetch it again, or remove it."
        )
    if (path / TRAINING_TOKENIZER).is_dir():
        options = {key: value for key, value in tokenizer.items() if key not in ("fingerprint", "path")}
        tree = {**tree, "tokenizer": options}
    return tree


def _released_source(path: Path, shards: list[Weights], described: Mapping[str, Any]) -> Source:
    whole = released.merged(shards, path)
    layers = {name.split(".")[2] for name in whole.shapes if name.startswith("transformer.layers.")}
    try:
        positions, hidden_size = whole.shapes["transformer.position_embeddings.weight"]
    except (KeyError, ValueError):
        raise CheckpointError(
            f"{path} has no table transformer.position_embeddings.weight; it is not a GLM."
        ) from None
    settings = {"num_layers": len(layers), "hidden_size": hidden_size, "max_position": positions - 1}
    settings |= {
        ours: described[theirs] for ours, theirs in _RELEASED_SETTINGS.items() if theirs in described
    }
    ours = {_our_name(name): name for name in whole.shapes}
    return Source(path, whole.renamed(ours), shards, settings, {})


def _our_name(name: str) -> str:
    inner = name.removeprefix("transformer.")
    return inner if inner.startswith(("layers.", "final_layernorm.")) else f"embedding.{inner}"


def import_source(
    source: Source,
    output: Path,
    tree: Mapping[str, Any],
    *,
    copy_eop_to_gmask: bool = False,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """Write a run directory with one checkpoint at step 0 and its config.yaml.

    Args:
        copy_eop_to_gmask: give [gMASK] the embedding of eop, for GLM-10B-Chinese, trained with one id for
            both.
    """
    with new_directory(output) as directory:
        config, tokenizer = _import_config(source, output, directory, tree)
        weights = source.weights
        if WORDS in weights.shapes:  # else the check below names it
            weights = weights.with_rows(WORDS, tokenizer.vocab_size)
        if copy_eop_to_gmask:
            check(
                source.shards is not None, "--copy-eop-to-gmask is for weights in the released layout only."
            )
            weights = _with_copied_row(weights, tokenizer.special)
            source = replace(source, shards=[_in_released_layout(weights)])
        shapes = parameter_shapes(config.model)
        check_shapes(weights, shapes, source.path)
        if source.shards is not None:
            _keep_padding_rows(source.weights, tokenizer.vocab_size, directory / PADDING_ROWS)
        path = directory / "checkpoints" / checkpoint.checkpoint_name(0)
        write_training_checkpoint(path, Weights(shapes, weights.read), config)
        config_text = yaml.safe_dump(to_tree(config), sort_keys=False)
        (directory / "config.yaml").write_text(config_text, encoding="utf-8")
        return _prove_import(source, path, config.model, tolerance) if verify else None


def _keep_padding_rows(weights: Weights, vocab_size: int, path: Path) -> None:
    """Write the rows that follow the vocabulary, so that an export in the released layout is bit-equal."""
    rows, *columns = weights.shapes[WORDS]
    padding = weights.read(WORDS)[vocab_size:]
    shapes = {WORDS: (rows - vocab_size, *columns)}
    write_safetensors(path, [padding], shapes, torch.float32, {"format": "pt"})


def _in_released_layout(weights: Weights) -> Weights:
    return weights.renamed({released.released_name(name): name for name in weights.shapes})


def _prove_import(source: Source, path: Path, config: ModelConfig, tolerance: float) -> proof.Proof:
    batch = proof.proof_batch(config)
    if source.shards is None:
        expected = proof.exported_logits(source.path, batch)
    else:
        check(
            config.num_attention_heads % len(source.shards) == 0,
            f"model.num_attention_heads ({config.num_attention_heads}) must be a multiple of the "
            f"{len(source.shards)} shards of {source.path}; give the number the model was trained with.",
        )
        expected = proof.released_logits(source.shards, config, batch)
    model = load_model(checkpoint.read_checkpoint(path), config)
    result = proof.compare(proof.training_logits(model, batch), expected, tolerance)
    result.require(tolerance, f"the import of {source.path}")
    return result


def _import_config(
    source: Source, output: Path, directory: Path, tree: Mapping[str, Any]
) -> tuple[Config, Tokenizer]:
    """The configuration of the run to come, its tokenizer's files copied to `directory` if they come with the
    model."""
    given = tree.get("model") if isinstance(tree.get("model"), Mapping) else {}
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position"):
        if (
            name in source.settings
            and given
            and given.get(name, source.settings[name]) != source.settings[name]
        ):
            raise ConfigError(
                f"model.{name} is {given[name]}, but {source.path} has {source.settings[name]}; "
                "use its configuration."
            )
    tree = merge(merge(source.base, {"model": source.settings}), tree)
    brings_tokenizer = isinstance(tree.get("tokenizer"), Mapping) and "path" not in tree["tokenizer"]
    if brings_tokenizer:
        shutil.copytree(source.path / TRAINING_TOKENIZER, directory / "tokenizer")
        tokenizer_config = build(TokenizerConfig, {**tree["tokenizer"], "path": str(directory / "tokenizer")})
        tree = {**tree, "tokenizer": training_tokenizer(tokenizer_config, directory / "tokenizer")}
    config = build(Config, merge(tree, {"run": {"directory": str(output)}}))
    if config.tokenizer is None:
        raise ConfigError(
            f"{source.path} does not say which tokenizer it needs; set tokenizer.kind and tokenizer.path."
        )
    tokenizer = load_tokenizer(config.tokenizer)
    if brings_tokenizer:
        config = replace(
            config,
            tokenizer=build(TokenizerConfig, training_tokenizer(config.tokenizer, output / "tokenizer")),
        )
    rows = source.weights.shapes.get(WORDS, (0,))[0]
    if rows < tokenizer.vocab_size:
        raise CheckpointError(
            f"{source.path} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} "
            "tokens; use the tokenizer of this model."
        )
    return config.with_vocab_size(tokenizer.vocab_size), tokenizer


def _with_copied_row(weights: Weights, special: SpecialTokens) -> Weights:
    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        if name == WORDS:
            tensor = tensor.clone()
            tensor[special.gmask] = tensor[special.eop]
        return tensor

    return Weights(weights.shapes, read)


def write_training_checkpoint(path: Path, weights: Weights, config: Config) -> None:
    """A checkpoint of step 0 with these weights and Adam moments of zero, which any layout can load."""
    path.mkdir(parents=True)
    name = "rank_00000.safetensors"
    pieces, shapes = [], {}
    for parameter, shape in weights.shapes.items():
        rows, columns = matrix_shape(shape)
        box = astuple(Box(0, rows, 0, columns))
        for kind in checkpoint.KINDS:
            key = f"{parameter}/{kind}/0.0"
            pieces.append({"file": name, "key": key, "name": parameter, "kind": kind, "box": box})
            shapes[key] = (rows, columns)
    write_safetensors(path / name, _with_moments(weights), shapes, torch.float32, {"format": "pt"})
    manifest = {
        "format": checkpoint.FORMAT,
        "version": checkpoint.FORMAT_VERSION,
        "step": 0,
        "shapes": {parameter: list(shape) for parameter, shape in weights.shapes.items()},
        "files": {name: describe_file(path / name)},
        "pieces": pieces,
        "optimizer": {"adam_step": 0.0, "loss_scaler": {}},
        "state": {
            "step": 0,
            "consumed_samples": 0,
            "consumed_tokens": 0,
            "skipped_steps": 0,
            "skipped_in_a_row": 0,
            "config": to_tree(config),
            "data": None,
        },
    }
    checkpoint.write_manifest(path, manifest)


def _with_moments(weights: Weights) -> Iterator[torch.Tensor]:
    for name in tqdm(weights.shapes, desc="writing parameters", disable=None):
        weight = weights.read(name).view(matrix_shape(weights.shapes[name]))
        yield weight
        zeros = torch.zeros(1).expand(weight.shape)
        for _ in checkpoint.KINDS[1:]:
            yield zeros


# Shared


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A directory to fill, renamed to `output` at the end, or removed if anything fails.

    Raises: DataError if `output` holds something; CheckpointError if it cannot be written.
    """
    require_new_directory(output)
    partial = output.with_name(f"{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
        partial.mkdir(parents=True)
        yield partial
        if output.exists():
            output.rmdir()
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{output}: {' '.join(str(error).split())}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
