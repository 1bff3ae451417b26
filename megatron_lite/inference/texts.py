"""Texts in, answers out: a run fills the blanks of texts, or writes on whole ones."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from data_utils.objectives.t5 import SentinelConfig
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.decoders import (
    TextDecoder,
    decoder_of,
    ignored_tokens,
    may_write,
    refuse_options_of_others,
)
from megatron_lite.inference.filling import BlankFiller, insert_spans
from megatron_lite.inference.open_run import OpenRun, Run
from megatron_lite.inference.search import Found

TOGETHER = 16  # texts that are computed at a time
Worker = BlankFiller | TextDecoder


class Answer(NamedTuple):
    text: str
    parts: list[
        str
    ]  # what the text says, a blank's filling, what it says, ...; or the text and what is written on it
    context: list[int]  # the text's tokens, special ones included
    found: list[list[Found]]  # for each blank, or the whole text: answers, the best first


def fills_blanks(run: OpenRun, blanks: Collection[str]) -> bool:
    """Whether a run fills blanks; else it writes on whole texts. Args: blanks: [MASK], ..., that the texts have.

    Raises: ConfigError if it does neither.
    """
    if may_write(run, has_blanks=bool(blanks)):
        return False
    run.require_blank_infilling(blanks)
    return True


def worker_of(run: Run, config: GenerationConfig, fills: bool) -> Worker:
    """Answers texts with a run. Args: fills: see `fills_blanks`. Raises: ConfigError for options of other runs."""
    if fills:
        refuse_options_of_others(run, config)
        return BlankFiller(run.model, run.tokenizer.special, config, ignored_tokens(run.tokenizer, config))
    decoder = decoder_of(run, config)
    assert isinstance(decoder, TextDecoder), "may_write says so"
    return decoder


def with_sentinels(run: OpenRun, texts: list[list[int]]) -> list[list[int]]:
    """Encoded texts, the k-th [MASK] of each as the k-th sentinel with which T5 and UL2 were trained."""
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


def answers(run: Run, worker: Worker, texts: Sequence[str]) -> Iterator[Answer]:
    """The answers to texts, in their order. Raises: DataError for any text before the first answer is made."""
    encoded = with_sentinels(run, [run.tokenizer.encode_with_specials(text) for text in texts])
    contexts = [worker.context(tokens) for tokens in encoded]
    for context in contexts:
        worker.require_room(context)
    for first in range(0, len(texts), TOGETHER):
        for number, found in enumerate(worker.found(contexts[first : first + TOGETHER]), start=first):
            best = [each[0].tokens for each in found]
            if isinstance(worker, BlankFiller):
                pieces = insert_spans(encoded[number], best, run.tokenizer.special)
                parts = [run.tokenizer.decode(piece) for piece in pieces]
            else:
                parts = [texts[number], run.tokenizer.decode(best[0])]
            yield Answer(texts[number], parts, contexts[number], found)
