"""Texts that a model writes for a task: the target of a source, or the fillings of a text's blanks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from data_utils.base.errors import ConfigError
from data_utils.objectives import ObjectiveChoice
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.generate.decoders import BlankDecoder, decoder_for
from megatron_lite.model.trunk.glm import GLM

# Contexts -> for each the spans of its blanks.
Write = Callable[[Sequence[Sequence[int]]], list[list[list[int]]]]


def writer(
    model: GLM, config: Config, tokenizer: Tokenizer, objectives: Sequence[ObjectiveChoice], run: str
) -> Write | None:
    """The function that writes the texts of a task with a model; None for kinds without texts.

    Raises: ConfigError for a run that has not learnt to write.
    """
    task = config.task
    assert task is not None
    if not task.writes_text:
        return None
    generation = replace(
        config.generation, max_length=max(task.target_length, config.generation.min_length + 1)
    )
    decoder = decoder_for(model, tokenizer, objectives, generation, run)
    if task.kind == "seq2seq":
        return lambda contexts: [[answer] for answer in decoder.generate(contexts)]
    if not isinstance(decoder, BlankDecoder):
        raise ConfigError(
            f"task.kind is blanks, but {run} writes what follows a text; give a run of blank_infilling."
        )
    return decoder.filler.fill_all
