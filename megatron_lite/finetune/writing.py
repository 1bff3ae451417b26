"""Texts that a model writes for a task: the target of a source, or the fillings of a text's blanks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from data_utils.common.errors import ConfigError
from data_utils.objectives import ObjectiveChoice
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.inference.decoders import BlankDecoder, make_decoder_for
from megatron_lite.transformer.transformer import Transformer

# Contexts -> for each the spans of its blanks.
Write = Callable[[Sequence[Sequence[int]]], list[list[list[int]]]]


def writer(
    model: Transformer, config: Config, tokenizer: Tokenizer, objectives: Sequence[ObjectiveChoice], run: str
) -> Write | None:
    """The function that generates a task's texts with a model; None for tasks and runs without generated texts.

    Raises: ConfigError for a run whose objectives do not train generation.
    """
    task = config.task
    assert task is not None
    if not task.writes_text:
        return None
    generation = replace(
        config.generation, max_length=max(task.target_length, config.generation.min_length + 1)
    )
    decoder = make_decoder_for(model, tokenizer, objectives, generation, run)
    if task.kind == "seq2seq":
        return lambda contexts: [[answer] for answer in decoder.generate(contexts)]
    if not isinstance(decoder, BlankDecoder):
        raise ConfigError(f"task.kind is blanks, but {run} continues texts; give a run of blank_infilling.")
    return decoder.filler.fill_all
