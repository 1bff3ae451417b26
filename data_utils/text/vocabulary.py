"""A tokenizer's vocabulary as objectives see it: its size, and which tokens end sentences and begin words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data_utils.text.special_tokens import SpecialTokens

if TYPE_CHECKING:  # it brings the libraries of tokenizers
    from data_utils.text.tokenizers import Tokenizer

_CONTINUES = "##"  # marks a WordPiece that continues a word
_SPACES = (" ", "\n", "\t", "\u3000")


@dataclass(frozen=True)
class Vocabulary:
    """The special tokens and tables of a vocabulary."""

    special: SpecialTokens
    size: int  # ids without a token counted
    sentence_end: np.ndarray | None = None  # bool [size]: tokens that end a sentence; None: not known
    word_start: np.ndarray | None = None  # bool [size]: tokens that begin a word; None: not known
    token_texts: tuple[str, ...] | None = None  # text of every id, for segmenters; None: not known
    lacking: frozenset[str] = frozenset()  # roles without a token, whose ids stand for something else
    num_tokens: int | None = None  # ids below this have a token; None: all
    decoder: Vocabulary | None = None  # that of a decoder with a tokenizer of its own


def vocabulary_of(tokenizer: Tokenizer, decoder: Tokenizer | None = None) -> Vocabulary:
    """The tables of a tokenizer, and of that of a decoder with one of its own.

    A token begins a word if it starts with a space (byte-level BPE, SentencePiece) or is no `##` piece
    (WordPiece); special tokens and Chinese characters are words of their own. Of GPT's BPE it is not known: there
    tokens say where words end.
    """
    shown = [tokenizer.token_to_text(i) for i in range(tokenizer.vocab_size)]
    # A vocabulary of whole words has no `##` piece.
    pieces = tokenizer.config.kind == "bert_wordpiece" or any(text.startswith(_CONTINUES) for text in shown)
    starts = [
        i in tokenizer.special_names
        or (not text.startswith(_CONTINUES) if pieces else text.startswith(_SPACES))
        or is_chinese(text)
        for i, text in enumerate(shown)
    ]
    texts = [text.removeprefix(_CONTINUES) if pieces else text for text in shown]
    return Vocabulary(
        special=tokenizer.special,
        size=tokenizer.vocab_size,
        num_tokens=tokenizer.num_tokens,
        sentence_end=tokenizer.sentence_end_ids(),
        word_start=None if tokenizer.config.kind == "gpt_bpe" else np.array(starts, np.bool_),
        token_texts=tuple(texts),
        lacking=tokenizer.lacking,
        decoder=None if decoder is None else vocabulary_of(decoder),
    )


def is_chinese(text: str) -> bool:
    """Whether all of a text is Chinese characters."""
    return bool(text) and all("\u4e00" <= character <= "\u9fff" for character in text)
