"""OPTIMUS begins with two trained stacks: `optimus.encoder_from` and `optimus.decoder_from`, weights only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_utils.base.errors import CheckpointError
from data_utils.text.tokenizers import TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.manifest import Checkpoint, check_model, find_manifest
from megatron_lite.checkpoint.read import find_checkpoint, load_weights_only
from megatron_lite.config.tree import Config
from megatron_lite.model.build import model_shapes
from megatron_lite.model.counts import parameter_shapes
from megatron_lite.model.optimus import DECODER, ENCODER
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.engine import Engine

log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """Raise CheckpointError unless the runs that the stacks begin with have such stacks; each process for itself."""
    for key, path, prefix in _named(config):
        checkpoint = find_manifest(Path(path))
        _check_objective(key, checkpoint)
        _check_tokenizer(key, checkpoint, config)
        stack = config.model if prefix == ENCODER else config.decoder
        assert stack is not None
        check_model(checkpoint, parameter_shapes(stack))


def load(config: Config, engine: Engine, context: ParallelContext) -> None:
    """Load the stacks that have a run to begin with; called by every rank."""
    for _, path, prefix in _named(config):
        checkpoint = find_checkpoint(Path(path), context)
        others = {name for name in model_shapes(config) if not name.startswith(prefix)}
        load_weights_only(checkpoint.as_part(prefix), engine, context, others)
        if context.is_main:
            log.info("the %s began with the weights of %s", prefix.rstrip("."), checkpoint.path)


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Setting, its value, prefix of the stack's parameters."""
    assert config.latent is not None
    for key, prefix in (("encoder_from", ENCODER), ("decoder_from", DECODER)):
        path = getattr(config.latent, key)
        if path is not None:
            yield key, path, prefix


def _check_objective(key: str, checkpoint: Checkpoint) -> None:
    """A causal run decodes, any other encodes."""
    tree = checkpoint.trainer_state().config
    names = [name for name, weight in (tree.get("objectives") or {"blank_infilling": 1}).items() if weight]
    if (names == ["causal"]) != (key == "decoder_from"):
        wanted = (
            "causal alone"
            if key == "decoder_from"
            else "one that reads in both directions, such as masked_lm"
        )
        raise CheckpointError(
            f"optimus.{key} is {checkpoint.path}, a run of the objective {', '.join(names)}; give a run of {wanted}."
        )


def _check_tokenizer(key: str, checkpoint: Checkpoint, config: Config) -> None:
    ours = config.tokenizer
    if key == "decoder_from" and config.decoder_tokenizer is not None:
        ours = config.decoder_tokenizer
    section = checkpoint.trainer_state().config.get("tokenizer")
    if ours is None or not isinstance(section, Mapping):
        return
    theirs = _fingerprint(section)
    if theirs is not None and theirs != load_tokenizer(ours).fingerprint:
        raise CheckpointError(
            f"optimus.{key} is {checkpoint.path}, whose tokenizer {section.get('path')} is not that of this run, "
            f"{ours.path}; give a run of the same tokenizer."
        )


def _fingerprint(section: Mapping[str, Any]) -> str | None:
    """Of a tokenizer, where its files are still there."""
    config = TokenizerConfig(**section)
    return load_tokenizer(config).fingerprint if Path(config.path).exists() else None
