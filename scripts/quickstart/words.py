"""Whole words of a run's validation text as blanks, one in a text, drawn at random and the same for every model."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import DataError
from data_utils.loader.blanks import blank_tokens
from data_utils.loader.config import CorpusConfig, DataConfig
from data_utils.loader.loader import SampleLoader, open_datasets
from data_utils.objectives.blank_infilling import DOCUMENT, SENTENCE, TOKEN
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of

if TYPE_CHECKING:  # it brings torch
    from megatron_lite.inference.open_run import Run

SIDE = 8  # tokens that a text has at least on each side of the blank
LONGEST = 6  # tokens of a word
_SEED = 1234


@dataclass(frozen=True)
class WordBlank:
    """Token ids of a text with CLS: those before a word, the word and those after it."""

    before: list[int]
    word: list[int]
    after: list[int]


def word_blanks(loader: SampleLoader, tokenizer: Tokenizer, num_samples: int) -> list[WordBlank]:
    """A blank in each long enough text of the first samples. Raises DataError if there is none."""
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary.word_start is None:
        raise DataError(f"{vocabulary.words_unknown}; score a run with another tokenizer.")
    draws = np.random.default_rng(_SEED)
    found = []
    for text in _texts(loader, tokenizer, num_samples):
        begins = np.flatnonzero(vocabulary.word_starts(np.array(text, np.int64)))
        words = [
            (int(begin), int(end))
            for begin, end in itertools.pairwise(begins)
            if begin >= SIDE and end <= len(text) - SIDE and end - begin <= LONGEST
        ]
        words = [(begin, end) for begin, end in words if _is_word(tokenizer.decode(text[begin:end]))]
        if words:
            begin, end = words[int(draws.integers(len(words)))]
            before, word, after = np.split(np.array(text), [begin, end])
            found.append(WordBlank([tokenizer.special.cls, *before.tolist()], word.tolist(), after.tolist()))
    if not found:
        raise DataError(
            f"no text of the first {num_samples} validation samples has a word to leave out; raise --samples."
        )
    return found


def _is_word(text: str) -> bool:
    word = text.strip()
    return len(word) > 1 and word.isalpha()


def _texts(loader: SampleLoader, tokenizer: Tokenizer, num_samples: int) -> Iterator[list[int]]:
    """The documents of blank infilling's samples with their blanks filled, without CLS."""
    special = tokenizer.special
    masks = {special.mask, special.smask, special.gmask}
    for index in range(num_samples):
        for example in Example.from_fields(loader.batch(np.array([index]))[0]).documents():
            if example.objective[0] not in (TOKEN, SENTENCE, DOCUMENT):
                continue
            spans = iter(blank_tokens(example, special))
            context = example.tokens[example.ord == 0].tolist()[1:]
            yield [token for one in context for token in (next(spans) if one in masks else [one])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and other corpora for one that was copied without its own."""
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="a run of pretrain_glm.py")
    for name in ("train", "validation"):
        parser.add_argument(
            f"--{name}",
            type=Path,
            action="append",
            default=[],
            metavar="PREFIX",
            help=f"dataset to take instead of data.{name} of the run; may be repeated",
        )


def open_loader(run: Run, args: argparse.Namespace) -> tuple[SampleLoader, DataConfig]:
    """The loader of validation samples, and the corpora of the run or those given. Raises DataError without any."""
    data = _data_of(run.config.data, {"train": args.train, "validation": args.validation})
    loader = open_datasets(
        data, run.config.objective_choices, run.tokenizer, run.config.training.seed
    ).validation
    if loader is None:
        raise DataError("the run has no validation corpus; give --validation PREFIX.")
    return loader, data


def _data_of(data: DataConfig, given: dict[str, list[Path]]) -> DataConfig:
    def corpora(name: str) -> tuple[CorpusConfig, ...]:
        return tuple(CorpusConfig(prefix=str(path)) for path in given[name]) or getattr(data, name)

    data = replace(data, train=corpora("train"), validation=corpora("validation"))
    for name in given:
        for corpus in getattr(data, name):
            if not Path(f"{corpus.prefix}.json").exists():
                raise DataError(
                    f"{corpus.prefix}, a corpus of the run, is not there; give --{name} PREFIX, or work in the "
                    "directory in which the run was started."
                )
    return data
