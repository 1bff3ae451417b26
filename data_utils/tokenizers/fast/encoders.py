"""The choice of an encoder: the fastest one that gives the library's ids.

`CheckedEncoder` starts with the library, because compiling or loading the fast encoder takes up to some seconds and
50 MB. A prompt, a test or a process that only plans the work should not pay that. Later it makes the fast encoder of
compiled_encoders.py and compares its ids with the library's for a list of difficult strings. Where they differ, the
library stays in use and a warning says so.

A build may name its encoder. Then that one encodes from the first text, and a difference is an error.
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers

from data_utils.common.errors import ConfigError
from data_utils.tokenizers.fast.library_encoders import Encoder, LibraryEncoder, flatten
from data_utils.tokenizers.fast.package_encoders import GIGATOKEN, gigatoken_encoder

log = logging.getLogger(__name__)

ENCODERS = ("auto", "compiled", GIGATOKEN, "library")  # of a build; auto: library_or_faster
FAST_FROM_CHARACTERS = 2**16  # of texts that the library encodes before the fast encoder is made

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
            difference = None if fast is None else first_difference(fast, self._encoder, self._sample)
            if difference is not None:
                log.warning(
                    "%s and the tokenizers library disagree on %r; the slower library is used",
                    type(fast).__name__,
                    difference[:100],
                )
            elif fast is not None:
                self._encoder = fast
            self._make_fast = None
            return self._encoder


def first_difference(encoder: Encoder, reference: Encoder, sample: Sequence[str]) -> str | None:
    """The first text that `encoder` encodes in another way than `reference`, None if there is none."""
    expected = []
    for text in sample:  # one by one: a batch would start the library's threads
        expected.append(reference.encode([text])[0])
        if not np.array_equal(encoder.encode([text])[0], expected[-1]):
            return text
    ids, lengths = encoder.encode(sample)  # state may pass from text to text
    right_ids, right_lengths = flatten(expected)
    if np.array_equal(ids, right_ids) and np.array_equal(lengths, right_lengths):
        return None
    return "".join(sample)


def library_or_faster(backend: tokenizers.Tokenizer, names: Sequence[str] = ()) -> Encoder:
    """The encoder for a pipeline of the `tokenizers` library, whose special tokens text cannot reach.

    Args: names: further strings for the check, such as those of the special tokens.
    """
    return CheckedEncoder(LibraryEncoder(backend), lambda: fast_encoder(backend), (*SAMPLE, *names))


def fast_encoder(backend: tokenizers.Tokenizer) -> Encoder | None:
    """The compiled encoder for a pipeline, None if there is none."""
    from data_utils.tokenizers.fast import compiled_encoders  # brings the compiler

    return compiled_encoders.encoder_for(backend)


def named_encoder(name: str, backend: tokenizers.Tokenizer, names: Sequence[str] = ()) -> Encoder:
    """The encoder of ENCODERS for a pipeline of the `tokenizers` library, whose special tokens text cannot reach.

    Args: names: as of `library_or_faster`.
    Raises: ConfigError if it has no encoder for this pipeline, its package is missing, or its ids differ.
    """
    library = LibraryEncoder(backend)
    if name == "auto":
        return library_or_faster(backend, names)
    if name == "library":
        return library
    encoder = fast_encoder(backend) if name == "compiled" else gigatoken_encoder(backend)
    if encoder is None:
        raise ConfigError(
            "--encoder compiled has no encoder for this tokenizer's normalizer, pre-tokenizer and model; choose "
            "--encoder auto."
        )
    sample = [*SAMPLE, *names]
    if name == GIGATOKEN:
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        sample += [*(f"a{text}b {text} {text.upper()}" for text in added), *characters_in_context()]
    difference = first_difference(encoder, library, sample)
    if difference is not None:
        raise ConfigError(
            f"--encoder {name} and the tokenizers library give different ids for {difference[:100]!r}; choose "
            "--encoder auto."
        )
    return encoder


def characters_in_context() -> list[str]:
    """Characters whose class or normal form may depend on the version of Unicode, between letters, digits and marks.

    Found with them: under NFC gigatoken 0.10.0 leaves 150 marks of Unicode 11 and later in place; the library
    orders them.
    """
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200)]
    # Most are letters without case, of private use or unassigned, which behave alike: of these every 16th.
    alike = ("Lo", "Co", "Cn")
    chosen = [chr(p) for p in points if p % 16 == 0 or unicodedata.category(chr(p)) not in alike]
    chosen += [chr(p) for p in range(0x300, 0x3000) if unicodedata.category(chr(p)) == "Cn"]
    texts = [f"a{c}\u302e{c}1 {c} " for c in chosen]
    return ["".join(texts[i : i + 64]) for i in range(0, len(texts), 64)]
