"""Texts -> completions: a run fills the blanks of texts, or continues them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from data_utils.objectives.t5 import SentinelConfig
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.decoders import (
    TextDecoder,
    check_generation_options,
    ignored_tokens,
    make_decoder,
    writes_whole_texts,
)
from megatron_lite.inference.filling import BlankFiller, insert_spans
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.inference.search import Hypothesis

TEXTS_PER_BATCH = 16  # texts of a batch
TextGenerator = BlankFiller | TextDecoder


class Completion(NamedTuple):
    """A text with what a run generated for it."""

    text: str
    # Text, filled span, text, filled span, ..., text; or the text and its continuation.
    segments: list[str]
    context: list[int]  # the text's tokens, with special tokens
    found: list[list[Hypothesis]]  # for each blank, or for the whole text: the best first


def fills_blanks(run: OpenRun, blanks: Collection[str]) -> bool:
    """Whether a run fills blanks; otherwise it continues texts. Args: blanks: [MASK], ..., that the texts contain.

    Raises: ConfigError if it does neither.
    """
    if writes_whole_texts(run, has_blanks=bool(blanks)):
        return False
    run.require_blank_infilling(blanks)
    return True


def make_text_generator(run: Run, config: GenerationConfig, fills: bool) -> TextGenerator:
    """The generator that completes texts. Args: fills: see `fills_blanks`. Raises: ConfigError for unused options."""
    if fills:
        check_generation_options(run, config)
        return BlankFiller(run.model, run.tokenizer.special, config, ignored_tokens(run.tokenizer, config))
    decoder = make_decoder(run, config)
    assert isinstance(decoder, TextDecoder), "writes_whole_texts is checked before"
    return decoder


def with_sentinels(run: OpenRun, texts: list[list[int]]) -> list[list[int]]:
    """Encoded texts with the k-th [MASK] replaced by the k-th sentinel, as T5 and UL2 are trained."""
    mask = run.tokenizer.special.mask
    sections = [choice.section for choice in run.objectives if isinstance(choice.section, SentinelConfig)]
    if not sections or not any(mask in tokens for tokens in texts):
        return texts
    first, step, count = sections[0].sentinels(vocabulary_of(run.tokenizer))
    made = []
    for tokens in texts:
        numbers = itertools.count()
        made.append([first + step * (next(numbers) % count) if token == mask else token for token in tokens])
    return made


def complete(run: Run, generator: TextGenerator, texts: Sequence[str]) -> Iterator[Completion]:
    """The completions of texts, in their order. Raises: DataError before the first if any text is unusable."""
    encoded = with_sentinels(run, [run.tokenizer.encode_with_specials(text) for text in texts])
    contexts = [generator.context(tokens) for tokens in encoded]
    for context in contexts:
        generator.check_length(context)
    for first in range(0, len(texts), TEXTS_PER_BATCH):
        for number, found in enumerate(
            generator.hypotheses(contexts[first : first + TEXTS_PER_BATCH]), start=first
        ):
            best = [each[0].tokens for each in found]
            if isinstance(generator, BlankFiller):
                tokens = insert_spans(encoded[number], best, run.tokenizer.special)
                segments = [run.tokenizer.decode(segment) for segment in tokens]
            else:
                segments = [texts[number], run.tokenizer.decode(best[0])]
            yield Completion(texts[number], segments, contexts[number], found)
