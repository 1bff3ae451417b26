"""Texts that a model writes for a task: the target of a source, or the fillings of a text's blanks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from data_utils.common.errors import ConfigError
from data_utils.objectives import ObjectiveChoice
from data_utils.tasks.templates.input_formats import choose_input_format
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.tree import Config
from megatron_lite.inference.decoders import BlankDecoder, make_decoder_for
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)

MOST_PARTS = 4  # words into which a tokenizer may decode one with marks in it; more follow the last word
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
    if task.kind == "lambada":
        return _word_writer(model, config, tokenizer, objectives, run)
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


def _word_writer(
    model: Transformer, config: Config, tokenizer: Tokenizer, objectives: Sequence[ObjectiveChoice], run: str
) -> Write | None:
    """Greedy words, with the template that scores them. None, with one warning, if the run cannot generate with it."""
    task = config.task
    assert task is not None
    form = choose_input_format(task.form, config.objective_choices)
    own = [choice for choice in objectives if choice.name == form.objective]
    if not own or (form.name == "glm" and (not task.bidirectional or model.config.decoder_layers)):
        _warn_once(f"{run} in the form {form.name}{'' if task.bidirectional else ', left to right,'}")
        return None

    def stops(answer: list[int]) -> bool:
        return len(tokenizer.decode(answer, skip_special=True).split()) > MOST_PARTS

    decoder = make_decoder_for(
        model, tokenizer, own, GenerationConfig(max_length=task.target_length), run, stops
    )
    return lambda contexts: [[answer] for answer in decoder.generate(contexts)]


@functools.cache
def _warn_once(what: str) -> None:
    log.warning(
        "%s scores last words but cannot generate them: predictions are right or wrong, without the word.",
        what,
    )
