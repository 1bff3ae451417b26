"""The exact encoder for each family of tokenizers, the fastest there is, checked against the library before use.

`LibraryEncoder` and `SentencePieceEncoder` hand texts to the libraries; compiled_encoders.py has faster ones
for GPT-2's BPE and BERT's WordPiece. `CheckedEncoder` decides. The first texts go to the library: compiling
or loading the fast encoder takes up to some seconds and 50 MB, which a prompt, a test or a process that only
plans the work should not pay. Then the fast encoder has to give the library's ids for a list of awkward
strings; if it does not, the library stays in use and a warning says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import sentencepiece
import tokenizers

log = logging.getLogger(__name__)

FAST_FROM_CHARACTERS = 2**16  # texts encoded by the library before the fast encoder is made ready

# ruff: noqa: RUF001 - characters that look alike are what is checked
# White space and controls of all kinds, contractions, scripts, marks in and out of order, expansions under
# lower-casing and NFD, code points unassigned or recent, names of special tokens, words at the limits.
SAMPLE = (
    *("", " ", "  ", "\n", "\r\n\t", " \n x", "a  b   c \n\n d", "\u00a0\u3000\u2028\u2029\x85"),
    *("\x00\x07\x7f\ufffd\ufeff", "a\x00b", "a\u200bb\u200c\u200d\u2060\u00ad", "'", "''", " '", "x 's"),
    *("it's we're they've I'll he'd I'm can't 'tis O'Neill''s 'S 'LL 's 're", "'re've'"),
    *("Hello, World! (see [1]); a+b=c  ^ ~ $5 @home #tag_1", "def f(x):\n    return  x**2\n\n\n"),
    *("12 345,678.90 ½ ² Ⅷ ٣٤ १२ x1y2", "Größe NAÏVE café cafe\u0301 Ångström İstanbul ǅ ﬁ ẞ"),
    *("ΟΔΥΣΣΕΥΣ Σ ς ΐ", "Привет, Мир! Ёлка й", "שָׁלוֹם עולם", "السَّلام عليكم"),
    *("नमस्ते दुनिया कि", "ไทย ภาษา", "ကမ္ဘာ", "한국어 각 ᄒ", "東京タワーがぎ ｶﾞ"),
    *("今天天气很好。你好？ABC混合abc，１２３", "豈 \uf900\U0002f800 \U00020000\U0003134f", "⼀〇々〆"),
    *("🙂👍🏽 👨\u200d👩\u200d👧 🇩🇪 \ufe0f", "≠ ≮ ⁇ \u037e \u1fef \u212b", "´`¨^", "\u0301", "\u0344"),
    *("a\u0323\u0307 a\u0307\u0323", "\u302e\U0001d165 a\u302e\U0001d165", "\U0001d15e\U0001d16d"),
    *("\ue000\uf8ff\U0010ffff\ufdd0", "\u0378 \U0001e030 \U00011f02 \U0001f6dc \u0897", "\ud800 a\udfff"),
    *("x" * 100, "x" * 101, "é" * 100, "e\u0301" * 101, "ab" * 150, "-" * 70, "=" * 300, "今" * 200),
    *("한" * 60, "a" * 64, "a" * 17 + " " + "a" * 16 + " " + "a" * 15 + "\x00 " + "a" * 15),
    *("[MASK] [CLS][SEP] <s></s> <|endoftext|> <unk> <pad> <0x0A> ##ing #", "▁a ▁ _"),
    *("http://www.example.org/~x?y=1&z=%20", "\\n \\u0041 \\"),
)  # fmt: skip


class Encoder(Protocol):
    """Texts to ids."""

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts in one int32 array, and the number of ids of each as int64."""
        ...


class LibraryEncoder:
    """A pipeline of the `tokenizers` library: what the others have to agree with."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        clean = [without_lone_surrogates(text) for text in texts]
        encodings = self._backend.encode_batch_fast(clean, add_special_tokens=False)
        return flatten([np.array(encoding.ids, np.int32) for encoding in encodings])


class SentencePieceEncoder:
    """A SentencePiece model, in one thread. The library hands over arrays: no list of ids is made."""

    def __init__(self, model: sentencepiece.SentencePieceProcessor):
        self._model = model

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        clean = [without_lone_surrogates(text) for text in texts]
        return flatten(self._model.encode(clean, return_type="numpy", num_threads=1))


class CheckedEncoder:
    """The library for the first texts, then the fast encoder, if there is one and it agrees."""

    def __init__(
        self,
        library: Encoder,
        make_fast: Callable[[], Encoder | None],
        sample: Sequence[str] = SAMPLE,
        fast_from_characters: int = FAST_FROM_CHARACTERS,
    ):
        self._encoder = library
        self._make_fast: Callable[[], Encoder | None] | None = make_fast
        self._sample = sample
        self._characters_left = fast_from_characters
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._make_fast is not None:
            self._characters_left -= sum(map(len, texts))
            if self._characters_left <= 0:
                self.choose()
        return self._encoder.encode(texts)

    def choose(self) -> Encoder:
        """Make and check the fast encoder, unless that has been done. Returns: the encoder in use."""
        with self._lock:
            if self._make_fast is None:
                return self._encoder
            fast = self._make_fast()
            wrong = None if fast is None else first_difference(fast, self._encoder, self._sample)
            if wrong is not None:
                log.warning(
                    "%s and the library disagree on %r; the library is used, which is slower",
                    type(fast).__name__,
                    wrong[:100],
                )
            elif fast is not None:
                self._encoder = fast
            self._make_fast = None
            return self._encoder


def first_difference(one: Encoder, other: Encoder, sample: Sequence[str]) -> str | None:
    """The first text that the two encode differently, None if there is none."""
    for text in sample:  # one by one: a batch would start the library's threads
        if not np.array_equal(one.encode([text])[0], other.encode([text])[0]):
            return text
    ids, lengths = one.encode(sample)  # whatever they carry over from text to text
    other_ids, other_lengths = other.encode(sample)
    if np.array_equal(ids, other_ids) and np.array_equal(lengths, other_lengths):
        return None
    return "".join(sample)


def library_or_faster(backend: tokenizers.Tokenizer, names: Sequence[str] = ()) -> Encoder:
    """The encoder for a pipeline of the `tokenizers` library, whose special tokens text cannot reach.

    Args: names: further strings for the check, such as those of the special tokens.
    """
    return CheckedEncoder(LibraryEncoder(backend), lambda: fast_encoder(backend), (*SAMPLE, *names))


def fast_encoder(backend: tokenizers.Tokenizer) -> Encoder | None:
    """The compiled encoder for a pipeline, None if there is none."""
    from data_utils.text.fast import compiled_encoders  # brings the compiler

    return compiled_encoders.encoder_for(backend)


def flatten(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one int32 array and their int64 lengths."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return (np.concatenate(rows) if len(rows) else np.empty(0, np.int32)), lengths


def byte_symbols() -> list[str]:
    """The character that stands for each byte: itself if printable, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each surrogate, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
