"""Imports a GLM as a run: a directory of our own class, a released GLM, or the reference's model-parallel shards.

    open_glm        a Hugging Face directory, in our own layout or in the released one
    open_megatron   the reference's mp_rank_XX_model_states.pt
    import_glm      writes the run and proves it

Rows of the word embedding beyond the tokenizer's vocabulary are padding. An import from the released layout keeps them
in a file of the run's directory, so that an export to that layout is bit-equal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.files import copy_files
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, merge
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.config.model import OF_TRAINING
from megatron_lite.config.tree import Config
from megatron_lite.hf.files import proof
from megatron_lite.hf.files.config_json import (
    CONFIG_JSON,
    by_transformers,
    check_sizes,
    own_layout,
    read_config_json,
    released_layout,
)
from megatron_lite.hf.files.first_checkpoint import write_imported_run
from megatron_lite.hf.files.left_out import lines as left_out_lines
from megatron_lite.hf.files.left_out import reason
from megatron_lite.hf.files.recipe import read_recipe
from megatron_lite.hf.files.tensor_sizes import REMEDY, tensor_sizes, wrong_size
from megatron_lite.hf.files.weights import (
    METADATA,
    PADDING_ROWS,
    SCORE,
    TASK_CLASSIFIER,
    TRAINING_JSON,
    TRAINING_TOKENIZER,
    WORDS,
    Weights,
    check_shapes,
    new_directory,
    open_directory,
)
from megatron_lite.hf.glm import proof as glm_proof
from megatron_lite.hf.glm import released
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.tokenizer_files import prove_tokenizer, training_tokenizer
from megatron_lite.hf.published.source import unsupported
from megatron_lite.hf.published.usual import with_sizes
from megatron_lite.transformer.flops import parameter_shapes

log = logging.getLogger(__name__)

_GLM_TYPES = ("glm", GLMConfig.model_type)


@dataclass(frozen=True)
class GLMSource:
    """A GLM to import.

    Args:
        weights: whole tensors under our parameters' names.
        shards: the same tensors in the released layout, one per model-parallel rank, for the proof; None: the directory
            is of our own class.
        settings: of the section `model`, as the source records them.
        base: the configuration that the model was trained with; {}: not recorded.
    """

    path: Path
    weights: Weights
    shards: list[Weights] | None
    settings: dict[str, Any]
    base: dict[str, Any]


def open_glm(path: Path) -> GLMSource:
    """Open a Hugging Face directory. Raises: CheckpointError where it holds no GLM, or its files contradict it."""
    config_json, weights = read_config_json(path), open_directory(path)
    # Names of tensors decide before config.json does: GLM-4 has the model_type "glm" too.
    is_own = any(name.endswith(WORDS) for name in weights.shapes)
    if not (is_own or config_json.get("model_type") in _GLM_TYPES or released.is_released(weights)):
        raise unsupported(path, config_json)
    buffers = {name: why for name in weights.buffers if (why := reason(name, "glm", ""))}
    for line in left_out_lines(buffers, "a GLM", weights.doubles):
        log.warning("%s: %s", path, line)
    if is_own:
        return _own_source(path, config_json, weights)
    shards = [released.without_prefix(weights, path)]
    return _released_source(path, shards, released_layout(path, config_json))


def open_megatron(path: Path) -> GLMSource:
    """Open a directory of `mp_rank_XX_model_states.pt`. They do not record the number of attention heads."""
    return _released_source(path, released.open_model_parallel(path), {})


def _own_source(path: Path, config_json: Mapping[str, Any], weights: Weights) -> GLMSource:
    prefix = next(name for name in weights.shapes if name.endswith(WORDS)).removesuffix(WORDS)
    # lm_head.weight is a copy of the word embedding, which some versions of transformers write.
    names = {our_name(name, prefix): name for name in weights.shapes if name != "lm_head.weight"}
    weights, settings = weights.renamed(names), own_layout(path, config_json)
    wrong = [
        wrong_size(name, settings[name], size)
        for name, size in tensor_sizes(weights.shapes).items()
        if settings.get(name, size) not in (None, size)
    ]
    if wrong:
        raise CheckpointError(f"{path / CONFIG_JSON}: {'; '.join(wrong)}; {REMEDY}.")
    check_sizes(path, settings, weights)
    # The tokenizer decides the size of the vocabulary.
    settings.pop("vocab_size")
    return GLMSource(path, weights, None, settings, _recorded(path, settings, weights))


def our_name(name: str, prefix: str) -> str:
    """The name of our parameter for a tensor of the class. Args: prefix: of the stack, `glm.` or none."""
    return TASK_CLASSIFIER + name.removeprefix(SCORE) if name.startswith(SCORE) else name.removeprefix(prefix)


def _recorded(path: Path, settings: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """The configuration of training.json, with the tokenizer if its files are there."""
    recorded = read_recipe(path)
    model = recorded.config.get("model", {})
    # The two files are fetched together; one that is newer than the other describes another model.
    different = [
        f"model.{name} is {shown(value)} in {CONFIG_JSON} and {shown(model[name])} in {TRAINING_JSON}"
        for name, value in settings.items()
        if model.get(name, value) != value
    ]
    if different:
        raise CheckpointError(f"{path}: {'; '.join(different)}; fetch both again.")
    check_sizes(path, model, weights)
    if (path / TRAINING_TOKENIZER).is_dir() and "tokenizer" in recorded.tokenizers:
        return {**recorded.config, "tokenizer": recorded.tokenizers["tokenizer"]}
    return recorded.config


def _released_source(path: Path, shards: list[Weights], config_json: Mapping[str, Any]) -> GLMSource:
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
        ours: config_json[theirs] for ours, theirs in released.SETTINGS.items() if theirs in config_json
    }
    ours = {released.our_name(name): name for name in whole.shapes}
    return GLMSource(path, whole.renamed(ours), shards, settings, {})


def import_glm(
    source: GLMSource,
    output: Path,
    tree: Mapping[str, Any],
    copy_eop_to_gmask: bool,
    verify: bool,
    tolerance: float,
) -> proof.Proof | None:
    """Write a run directory with one checkpoint at step 0 and its config.yaml. Args: as of `import_directory`."""
    # The directory gets its name only when everything in it is written and proven.
    with new_directory(output) as directory:
        config, tokenizer = _import_config(source, directory, tree)
        weights = source.weights
        if WORDS in weights.shapes:  # if not, check_shapes reports it
            weights = weights.with_rows(WORDS, tokenizer.vocab_size)
        if copy_eop_to_gmask:
            check(
                source.shards is not None, "--copy-eop-to-gmask is for weights in the released layout only."
            )
            weights = _with_gmask_of_eop(weights, tokenizer.special)
            # The proof must see the copied embedding too.
            source = replace(source, shards=[released.in_released_layout(weights)])
        shapes = parameter_shapes(config.model)
        check_shapes(weights, shapes, source.path)
        if source.shards is not None:
            _keep_padding_rows(source.weights, tokenizer.vocab_size, directory / PADDING_ROWS)
        path = write_imported_run(directory, output, Weights(shapes, weights.read), config)
        return _prove_import(source, path, config, tokenizer, tolerance) if verify else None


def _import_config(source: GLMSource, directory: Path, tree: Mapping[str, Any]) -> tuple[Config, Tokenizer]:
    """The configuration of the new run. Copies the tokenizer's files to `directory` if they come with the model."""
    _require_recorded_settings(source, tree)
    tree = merge(merge(source.base, {"model": source.settings}), tree)
    if isinstance(tree.get("tokenizer"), Mapping) and "path" not in tree["tokenizer"]:
        copy_files(source.path / TRAINING_TOKENIZER, directory / "tokenizer")
        tokenizer_config = build(TokenizerConfig, {**tree["tokenizer"], "path": str(directory / "tokenizer")})
        tree = {**tree, "tokenizer": training_tokenizer(tokenizer_config, directory / "tokenizer")}
    tree = with_sizes(source.path, source.settings, tree)
    config = build(Config, tree)
    if config.tokenizer is None:
        raise ConfigError(
            f"{source.path} does not say which tokenizer it needs; set tokenizer.kind and tokenizer.path."
        )
    tokenizer = load_tokenizer(config.tokenizer)
    rows = source.weights.shapes.get(WORDS, (0,))[0]
    # More rows than tokens are padding; fewer would leave tokens without an embedding.
    if rows < tokenizer.vocab_size:
        raise CheckpointError(
            f"{source.path} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} "
            "tokens; use the tokenizer of this model."
        )
    return config.with_vocab_size(tokenizer.vocab_size), tokenizer


def _require_recorded_settings(source: GLMSource, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError where the new run's configuration contradicts the settings that the source records."""
    model = tree.get("model")
    overrides = model if isinstance(model, Mapping) else {}
    # The activation may be overridden: GLM was trained with tanh, and its Hugging Face code computes erf.
    for name in sorted(overrides.keys() & source.settings.keys() - OF_TRAINING - {"activation"}):
        if overrides[name] != source.settings[name]:
            raise ConfigError(
                f"model.{name} is {overrides[name]}, but {source.path} has {source.settings[name]}; use its "
                "configuration."
            )


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


def _prove_import(
    source: GLMSource, path: Path, config: Config, tokenizer: Tokenizer, tolerance: float
) -> proof.Proof:
    """Compare the source with the checkpoint at `path`. Raises: CheckpointError unless both compute the same."""
    model, shards = config.model, source.shards
    if shards is not None:
        check(
            model.num_attention_heads % len(shards) == 0,
            f"model.num_attention_heads ({model.num_attention_heads}) must be a multiple of the "
            f"{len(shards)} shards of {source.path}; give the number the model was trained with.",
        )
    has_tokenizer = shards is None and (source.path / "tokenizer_config.json").exists()
    if has_tokenizer:
        with by_transformers(source.path):
            prove_tokenizer(tokenizer, source.path)
    # Blanks are compared only where the model was trained to fill them, and with the tokenizer of the files.
    is_filler = any(choice.name == "blank_infilling" for choice in config.objective_choices)

    def ask(dtype: torch.dtype) -> list[proof.Question]:
        if shards is not None:
            # On the unmerged shards, by code that shares nothing with our model: a wrong cut of Q, K and V shows.
            return glm_proof.ask_released(shards, model, dtype)
        writer = tokenizer if is_filler and has_tokenizer else None
        return glm_proof.ask(source.path, model, writer, is_export=False, dtype=dtype)

    return proof.prove_import(ask, path, model, source.path, tolerance)
