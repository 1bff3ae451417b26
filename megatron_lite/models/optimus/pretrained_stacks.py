"""Initializes OPTIMUS from trained stacks: `optimus.encoder_from` and `optimus.decoder_from`, weights only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from data_utils.common.errors import CheckpointError
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.read import find_checkpoint, load_weights_only
from megatron_lite.checkpoint.verify import check_model, find_manifest
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.trained_model import DECODER, ENCODER

log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """Raise CheckpointError unless the stacks of the named runs have this run's shapes. Not collective."""
    for key, path, prefix in _named(config):
        checkpoint = find_manifest(Path(path))
        _check_objective(key, checkpoint)
        checkpoint, _ = _fitted(key, checkpoint, config)
        check_model(checkpoint, parameter_shapes(_stack(config, prefix)))


def load(config: Config, engine: Engine, context: ParallelContext) -> None:
    """Load the stacks whose setting names a run; called by every rank."""
    for key, path, prefix in _named(config):
        checkpoint, added = _fitted(key, find_checkpoint(Path(path), context), config)
        others = {name for name in model_spec(config).shapes(config) if not name.startswith(prefix)}
        load_weights_only(checkpoint.as_stack(prefix), engine, context, others)
        if context.is_main:
            new = (
                f"; the embeddings of {', '.join(added)}, which it lacks, keep initial values"
                if added
                else ""
            )
            log.info("the %s is initialized from %s%s", prefix.rstrip("."), checkpoint.path, new)


def _stack(config: Config, prefix: str) -> ModelConfig:
    stack = config.model if prefix == ENCODER else config.decoder
    assert stack is not None
    return stack


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Setting, its value, prefix of the stack's parameters."""
    for key, prefix in (("encoder_from", ENCODER), ("decoder_from", DECODER)):
        path = getattr(latent_of(config), key)
        if path is not None:
            yield key, path, prefix


def _check_objective(key: str, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless a causal run is used as decoder, and any other as encoder."""
    tree = checkpoint.trainer_state().config
    names = [name for name, weight in (tree.get("objectives") or {"blank_infilling": 1}).items() if weight]
    if (names == ["causal"]) != (key == "decoder_from"):
        wanted = (
            "objective causal alone"
            if key == "decoder_from"
            else "a bidirectional objective, such as masked_lm"
        )
        raise CheckpointError(
            f"optimus.{key} is {checkpoint.path}, trained with objective {', '.join(names)}; give a run of {wanted}."
        )


def _fitted(key: str, checkpoint: Checkpoint, config: Config) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with vocabulary tables as long as here, if this tokenizer is its tokenizer plus OPTIMUS's tokens.

    The checkpoint stores no slice of the added rows, so that loading keeps their initial values.
    Returns: the checkpoint, and the tokens that it lacks. Raises: CheckpointError for another tokenizer.
    """
    ours, stack = config.tokenizer, config.model
    if key == "decoder_from":
        ours, stack = config.decoder_tokenizer or ours, _stack(config, DECODER)
    section = checkpoint.trainer_state().config.get("tokenizer")
    if ours is None or not isinstance(section, Mapping):
        return checkpoint, []
    tokenizer, theirs = load_tokenizer(ours), TokenizerConfig(**section)
    same = replace(ours, added_tokens=theirs.added_tokens)
    # Files that are gone cannot be compared; sizes are.
    found = load_tokenizer(theirs).fingerprint if Path(theirs.path).exists() else None
    follows = (ours.added_tokens, theirs.added_tokens) == ("optimus", "none")
    known = {tokenizer.fingerprint, None} | ({load_tokenizer(same).fingerprint} if follows else set())
    if found not in known:
        raise CheckpointError(
            f"optimus.{key} is {checkpoint.path}, whose tokenizer {theirs.path} differs in files or "
            f"settings from this run's, {ours.path}; give a run of the same tokenizer."
        )
    added, shapes = list(tokenizer.added_names.values()) if follows else [], dict(checkpoint.shapes)
    for name, (rows, *columns) in parameter_shapes(stack).items():
        if rows == stack.vocab_size and shapes.get(name) == (rows - len(added), *columns):
            shapes[name] = (rows, *columns)
    return replace(checkpoint, shapes=shapes), added if shapes != checkpoint.shapes else []
