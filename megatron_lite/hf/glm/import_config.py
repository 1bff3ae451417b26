"""The configuration of a run that imports a GLM: what its directory records, and what the user says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.files import copy_files
from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.config.model import OF_TRAINING
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.ignored_tensors import ignored_lines, reason
from megatron_lite.hf.common.imported_run import with_sizes
from megatron_lite.hf.common.weights import SAME_MODEL, TRAINING_TOKENIZER, WORDS, Weights, check_shapes
from megatron_lite.hf.glm.tokenizer_files import training_tokenizer
from megatron_lite.transformer.flops import parameter_shapes

log = logging.getLogger(__name__)


def warn_of_ignored(path: Path, weights: Weights) -> None:
    """Warn of tensors that a GLM does not use, and of those that are rounded."""
    buffers = {name: why for name in weights.buffers if (why := reason(name, "glm", ""))}
    for line in ignored_lines(buffers, "a GLM", weights.doubles):
        log.warning("%s: %s", path, line)


def import_config(
    source: Path,
    weights: Weights,
    settings: dict[str, Any],
    base: Mapping[str, Any],
    tree: Mapping[str, Any],
    directory: Path,
) -> tuple[Config, Tokenizer, Weights]:
    """The configuration of the new run, its tokenizer, and the weights without the rows that pad the vocabulary.

    Args:
        weights: under our names.
        settings: of the section `model`, as the source records them.
        base: the configuration that the model was trained with; {}: not recorded.
        directory: of the run, whose `tokenizer` has the files of the source's, if `tree` names no other.
    """
    _require_recorded_settings(source, settings, tree)
    tree = merge(merge(base, {"model": settings}), tree)
    if isinstance(tree.get("tokenizer"), Mapping) and "path" not in tree["tokenizer"]:
        copy_files(source / TRAINING_TOKENIZER, directory / "tokenizer")
        tokenizer_config = build(TokenizerConfig, {**tree["tokenizer"], "path": str(directory / "tokenizer")})
        tree = {**tree, "tokenizer": training_tokenizer(tokenizer_config, directory / "tokenizer")}
    tree = with_sizes(source, settings, tree)
    config = build(Config, tree)
    if config.tokenizer is None:
        raise ConfigError(
            f"{source} does not say which tokenizer it needs; set tokenizer.kind and tokenizer.path."
        )
    tokenizer = load_tokenizer(config.tokenizer)
    rows = weights.shapes.get(WORDS, (0,))[0]
    # More rows than tokens are padding; fewer would leave tokens without an embedding.
    if rows < tokenizer.vocab_size:
        raise CheckpointError(
            f"{source} has {rows} rows of word embeddings, but the tokenizer has {tokenizer.vocab_size} "
            "tokens; use the tokenizer of this model."
        )
    config = config.with_vocab_size(tokenizer.vocab_size)
    if WORDS in weights.shapes:  # if not, check_shapes reports it
        weights = weights.with_rows(WORDS, tokenizer.vocab_size)
    shapes = parameter_shapes(config.model)
    check_shapes(weights, shapes, source, remedy=SAME_MODEL)
    return config, tokenizer, Weights(shapes, weights.read)


def _require_recorded_settings(source: Path, settings: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Raise ConfigError where the new run's configuration contradicts the settings that the source records."""
    model = tree.get("model")
    overrides = model if isinstance(model, Mapping) else {}
    # The activation may be overridden: GLM was trained with tanh, and its Hugging Face code computes erf.
    for name in sorted(overrides.keys() & settings.keys() - OF_TRAINING - {"activation"}):
        if overrides[name] != settings[name]:
            raise ConfigError(
                f"model.{name} is {overrides[name]}, but {source} has {settings[name]}; use its "
                "configuration."
            )
