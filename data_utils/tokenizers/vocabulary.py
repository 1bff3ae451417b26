"""A tokenizer's vocabulary as objectives see it: its size, and which tokens end sentences and begin words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_utils.common.errors import DataError
from data_utils.tokenizers.special_tokens import SpecialTokens

if TYPE_CHECKING:  # it brings the libraries of tokenizers
    from data_utils.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens and tables of a vocabulary."""

    special: SpecialTokens
    size: int  # ids without a token counted
    sentence_end: np.ndarray | None = None  # bool [size]: tokens that end a sentence; None: not known
    word_start: np.ndarray | None = None  # bool [size]: tokens that begin a word; None: words are not known
    token_texts: tuple[str, ...] | None = None  # text of every id, for segmenters; None: not known
    lacking: frozenset[str] = frozenset()  # roles without a token, whose ids stand for something else
    num_tokens: int | None = None  # ids below this have a token; None: all
    decoder: Vocabulary | None = None  # that of a decoder with a tokenizer of its own
    word_end: np.ndarray | None = None  # bool [size]: tokens after which a word begins; None: none tells it
    sentinels: tuple[int, ...] = ()  # ids of <extra_id_0>, <extra_id_1>, ..., T5's
    words_unknown: str = "the start of words is unknown for this vocabulary"  # without `word_start`: why

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Where words begin among tokens, bool. The first token is a word's too, whatever is said of it.

        Raises: DataError for an id beyond the vocabulary.
        """
        assert self.word_start is not None
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self.word_start):
            raise DataError(
                f"the text has token ids {tokens.min()} to {tokens.max()}, but the vocabulary has {self.size} "
                "tokens; the dataset was built with another tokenizer: rebuild it."
            )
        starts: np.ndarray = self.word_start[tokens]
        if self.word_end is not None:
            starts[1:] |= self.word_end[tokens[:-1]]
        return starts


def vocabulary_of(tokenizer: Tokenizer, decoder: Tokenizer | None = None) -> Vocabulary:
    """The tables of a tokenizer, and those of the decoder's tokenizer where that is another one.

    word_marks.py says how tokens mark words. Chinese characters and what is no text are words of their own.
    """
    tokens = [tokenizer.word_token(i) for i in range(tokenizer.vocab_size)]
    starts, ends = np.array([token.begins for token in tokens]), np.array([token.ends for token in tokens])
    special = tokenizer.special_names
    is_text = np.array([i not in special and not tokenizer.is_unknown(i) for i in range(len(tokens))])
    starts |= bool(starts[is_text].all())  # no token continues a word: what is unknown is a word too
    unknown = tokenizer.word_marks.unknown
    if not unknown and not (starts | ends)[is_text].any():
        unknown = "its tokens should mark the start of words, but none of them does"
    return Vocabulary(
        special=tokenizer.special,
        size=tokenizer.vocab_size,
        num_tokens=tokenizer.num_tokens,
        sentence_end=tokenizer.sentence_end_ids(),
        word_start=None if unknown else starts,
        word_end=None if unknown or starts.all() or not ends[is_text].any() else ends,
        words_unknown=unknown
        and f"the tokenizer {tokenizer.config.path} does not show where words begin: {unknown}",
        token_texts=tuple(token.text for token in tokens),
        lacking=tokenizer.lacking,
        sentinels=tokenizer.sentinels,
        decoder=None if decoder is None else vocabulary_of(decoder),
    )
