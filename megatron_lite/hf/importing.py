"""Imports a Hugging Face directory, or the reference's model-parallel shards, as a run, and compares logits.

    import_directory   a Hugging Face directory: GLM as exported here or as released, or a published system
    import_megatron    the reference's mp_rank_XX_model_states.pt

An import has no optimizer state: its Adam moments are zero and its step is 0. See export.py for memory and for the rows
that pad a vocabulary.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, merge
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.checkpoint.verify import read_checkpoint
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
    WORDS,
    Weights,
    check_shapes,
    new_directory,
    open_directory,
)
from megatron_lite.hf.glm import proof as glm_proof
from megatron_lite.hf.glm import released
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.tokenizer_files import TRAINING_TOKENIZER, prove_tokenizer, training_tokenizer
from megatron_lite.hf.model_format import format_of_directory
from megatron_lite.hf.published.runs import import_published
from megatron_lite.hf.published.source import is_published, unsupported
from megatron_lite.hf.published.usual import with_sizes
from megatron_lite.inference.open_run import load_model
from megatron_lite.model.flops import parameter_shapes

log = logging.getLogger(__name__)

_GLM_TYPES = ("glm", GLMConfig.model_type)


@dataclass(frozen=True)
class Source:
    """A model to import."""

    path: Path
    weights: Weights  # whole tensors by our parameters' names
    shards: list[Weights] | None  # the same in the released layout, for its arithmetic; None = our own layout
    settings: dict[str, Any]  # those of the configuration's model section that it records
    base: dict[str, Any]  # the configuration it was trained with; {}: not recorded


def import_directory(
    source: Path,
    output: Path,
    tree: Mapping[str, Any],
    *,
    copy_eop_to_gmask: bool = False,
    verify: bool = True,
    tolerance: float = proof.TOLERANCE,
) -> proof.Proof | None:
    """Make the run directory `output` from a Hugging Face directory: ours, a released GLM, or a published system.

    Args: as for import_source; `tree` overrides what the directory records.
    Raises: CheckpointError, DataError or ConfigError; `output` then does not exist.
    """
    # From the most special directory to the most general one: each test looks at files that the directories after it
    # lack.
    model_format = format_of_directory(source)
    if model_format is None and not is_published(source):
        return import_source(
            open_source(source),
            output,
            tree,
            copy_eop_to_gmask=copy_eop_to_gmask,
            verify=verify,
            tolerance=tolerance,
        )
    check(not copy_eop_to_gmask, "--copy-eop-to-gmask is for GLM only.")
    if model_format is None:
        return import_published(source, output, tree, verify=verify, tolerance=tolerance)
    if verify:
        model_format.require_provable(source)
    return model_format.read(source, output, tree, verify=verify, tolerance=tolerance)


def import_megatron(
    source: Path, output: Path, tree: Mapping[str, Any], **options: Any
) -> proof.Proof | None:
    """Make the run directory `output` from the reference's `mp_rank_XX_model_states.pt`.

    These do not say how many attention heads there are: `tree` must, and no proof can notice a wrong number.
    """
    shards = released.open_model_parallel(source)
    return import_source(_released_source(source, shards, {}), output, tree, **options)


def open_source(path: Path) -> Source:
    """A Hugging Face directory. The tensors' names decide its layout, since other models have the type "glm" too."""
    config_json, weights = read_config_json(path), open_directory(path)
    # Other models have the model_type "glm" too (GLM-4), so names of tensors decide before config.json does.
    is_own = any(name.endswith(WORDS) for name in weights.shapes)
    if not (is_own or config_json.get("model_type") in _GLM_TYPES or released.is_released(weights)):
        raise unsupported(path, config_json)
    buffers = {name: why for name in weights.buffers if (why := reason(name, "glm", ""))}
    for line in left_out_lines(buffers, "a GLM", weights.doubles):
        log.warning("%s: %s", path, line)
    if not is_own:
        shards = [released.without_prefix(weights, path)]
        return _released_source(path, shards, released_layout(path, config_json))
    prefix = next(name for name in weights.shapes if name.endswith(WORDS)).removesuffix(WORDS)
    tied = {"lm_head.weight"}
    weights = weights.renamed({_our_name(name, prefix): name for name in weights.shapes if name not in tied})
    settings = own_layout(path, config_json)
    sizes = tensor_sizes(weights.shapes)
    wrong = [
        wrong_size(name, settings[name], size)
        for name, size in sizes.items()
        if settings.get(name, size) not in (None, size)
    ]
    if wrong:
        raise CheckpointError(f"{path / CONFIG_JSON}: {'; '.join(wrong)}; {REMEDY}.")
    check_sizes(path, settings, weights)
    settings.pop("vocab_size")
    return Source(path, weights, None, settings, _recorded(path, settings, weights))


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


def _our_name(name: str, prefix: str) -> str:
    return TASK_CLASSIFIER + name.removeprefix(SCORE) if name.startswith(SCORE) else name.removeprefix(prefix)


def _released_source(path: Path, shards: list[Weights], config_json: Mapping[str, Any]) -> Source:
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
    return Source(path, whole.renamed(ours), shards, settings, {})


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
        tree: configuration of the new run, which overrides what the source records.
        copy_eop_to_gmask: give [gMASK] the embedding of eop, for GLM-10B-Chinese, trained with one id for both.
        verify: compare the logits of both models; the result is then not None.
        tolerance: largest difference of logits that passes.
    """
    # The directory gets its name only when everything in it is written and proven.
    with new_directory(output) as directory:
        config, tokenizer = _import_config(source, output, directory, tree)
        weights = source.weights
        if WORDS in weights.shapes:  # if not, check_shapes reports it
            weights = weights.with_rows(WORDS, tokenizer.vocab_size)
        if copy_eop_to_gmask:
            check(
                source.shards is not None, "--copy-eop-to-gmask is for weights in the released layout only."
            )
            weights = _with_copied_row(weights, tokenizer.special)
            source = replace(source, shards=[released.in_released_layout(weights)])
        shapes = parameter_shapes(config.model)
        check_shapes(weights, shapes, source.path)
        if source.shards is not None:
            _keep_padding_rows(source.weights, tokenizer.vocab_size, directory / PADDING_ROWS)
        path = write_imported_run(directory, Weights(shapes, weights.read), config)
        return _prove_import(source, path, config, tokenizer, tolerance) if verify else None


def _keep_padding_rows(weights: Weights, vocab_size: int, path: Path) -> None:
    """Write the rows that follow the vocabulary, so that an export in the released layout is bit-equal."""
    rows, *columns = weights.shapes[WORDS]
    padding = weights.read(WORDS)[vocab_size:]
    write_tensors(path, {WORDS: (rows - vocab_size, *columns)}, [padding], metadata=METADATA)


def _prove_import(
    source: Source, path: Path, config: Config, tokenizer: Tokenizer, tolerance: float
) -> proof.Proof:
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
    # The proof fills blanks only with a model that trained them.
    fills = any(choice.name == "blank_infilling" for choice in config.objective_choices)

    def ask(dtype: torch.dtype) -> list[proof.Question]:
        if shards is not None:
            # A forward pass of its own on the unmerged shards: our model would compare merged weights with
            # themselves, and miss a wrong cut of Q, K and V.
            return glm_proof.ask_released(shards, model, dtype)
        writer = tokenizer if fills and has_tokenizer else None
        return glm_proof.ask(source.path, model, writer, is_export=False, dtype=dtype)

    saved = read_checkpoint(path)
    found = proof.prove(
        ask, lambda: load_model(saved, model), tolerance, f"the import of {source.path}", saved.shapes
    )
    return proof.joined(found)


def _import_config(
    source: Source, output: Path, directory: Path, tree: Mapping[str, Any]
) -> tuple[Config, Tokenizer]:
    """The configuration of the new run. Copies the tokenizer's files to `directory` if they come with the model."""
    model = tree.get("model")
    given = model if isinstance(model, Mapping) else {}
    # A setting that changes the function is refused, not overridden: the weights were trained with the recorded
    # one.
    for name in sorted(source.settings.keys() - OF_TRAINING - {"activation"}):
        if given.get(name, recorded := source.settings[name]) != recorded:
            raise ConfigError(
                f"model.{name} is {given[name]}, but {source.path} has {recorded}; use its configuration."
            )
    tree = merge(merge(source.base, {"model": source.settings}), tree)
    brings_tokenizer = isinstance(tree.get("tokenizer"), Mapping) and "path" not in tree["tokenizer"]
    if brings_tokenizer:
        shutil.copytree(source.path / TRAINING_TOKENIZER, directory / "tokenizer")
        tokenizer_config = build(TokenizerConfig, {**tree["tokenizer"], "path": str(directory / "tokenizer")})
        tree = {**tree, "tokenizer": training_tokenizer(tokenizer_config, directory / "tokenizer")}
    tree = with_sizes(source.path, source.settings, tree)
    config = build(Config, merge(tree, {"run": {"directory": str(output)}}))
    if config.tokenizer is None:
        raise ConfigError(
            f"{source.path} does not say which tokenizer it needs; set tokenizer.kind and tokenizer.path."
        )
    tokenizer = load_tokenizer(config.tokenizer)
    kept = config.tokenizer
    if brings_tokenizer:
        # The configuration names the final place; the files are still under the temporary name.
        kept = build(TokenizerConfig, training_tokenizer(kept, output.absolute() / "tokenizer"))
    config = replace(config, tokenizer=kept.absolute())
    rows = source.weights.shapes.get(WORDS, (0,))[0]
    # More rows than tokens are padding; fewer would leave tokens without an embedding.
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
