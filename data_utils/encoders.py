"""The fastest exact encoder for each family of tokenizers, checked against the library before use.

`LibraryEncoder` and `SentencePieceEncoder` hand texts to the libraries. `ByteLevelEncoder` (GPT-2's BPE) and
`WordPieceEncoder` (BERT) cut the text into words, keep the ids of the words in a cache and compute those of a
new word themselves: one to two orders of magnitude faster, because text repeats its words. See
encoder_kernels.py for the loops.

The ids must be the library's, so as little as possible is known here about Unicode. How a character
separates words and what it is normalised to is asked of the library's own normaliser and pre-tokenizer, for
256 characters when a text first needs one of them. A word with characters whose effect depends on their
neighbours (marks that NFD reorders), or too long for the compiled loop, is given to the library as it is.
This is exact because the places where text is cut are certain: no rule of these pipelines looks across them.

`CheckedEncoder` decides. The first texts go to the library: compiling or loading the fast encoder takes up to
some seconds, which a prompt or a test should not pay. Then the fast encoder has to give the library's ids for
a list of awkward strings; if it does not, the library stays in use and a warning says so.

Trade-offs: an encoder holds 20 to 40 MB of cache and tables and is not shared between processes. Documents
that consist of one word, or of ever new words, gain little.
"""

from __future__ import annotations

import abc
import logging
import threading
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numba
import numpy as np
import orjson
import sentencepiece
import tokenizers
from tokenizers import normalizers

from data_utils import encoder_kernels as kernels

Array = np.ndarray
log = logging.getLogger(__name__)

FAST_FROM_CHARACTERS = 2**16  # texts encoded by the library before the fast encoder is made ready
CACHE_SLOTS = 2**19  # half of it words; a power of two
PAGE = 256  # code points whose classes are found at a time
_SURROGATES = range(0xD800, 0xE000)

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


def fast_encoder(backend: tokenizers.Tokenizer) -> CompiledEncoder | None:
    """The compiled encoder for a pipeline, None if there is none."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None  # the loops are for the compiler only
    pipeline = orjson.loads(backend.to_str())
    for family in (ByteLevelEncoder, WordPieceEncoder):
        if family.supports(pipeline):
            return family(backend, pipeline)
    return None


class CompiledEncoder(abc.ABC):
    """What the two fast encoders share: documents as bytes, pages of characters, words for the library."""

    def __init__(self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]):
        """Args: pipeline: the description of `backend`, as in a tokenizer.json."""
        self._backend = backend
        self._classes = np.full(kernels.CODE_POINTS, kernels.UNKNOWN, np.uint8)
        self._cache = kernels.new_word_cache(CACHE_SLOTS)
        self._lock = threading.Lock()  # the compiled loop works outside the GIL, on one cache

    @classmethod
    @abc.abstractmethod
    def supports(cls, pipeline: dict[str, Any]) -> bool:
        """Whether this class gives the ids of a pipeline."""

    @abc.abstractmethod
    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        """Call the compiled loop."""

    @abc.abstractmethod
    def _fill_page(self, points: list[int]) -> None:
        """Find the classes of some code points."""

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [_utf8(text) for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        data = np.frombuffer(b"".join([*encoded, kernels.PADDING]), np.uint8)
        out = np.empty(len(data), np.int32)  # never more ids than bytes
        out_ends = np.zeros(len(ends), np.int64)
        state = np.zeros(kernels.STATE_SIZE, np.int64)
        with self._lock:
            while (status := self._run(data, ends, out, out_ends, state)) != kernels.DONE:
                if status == kernels.NEEDS_PAGE:
                    start = int(state[kernels.POINT]) // PAGE * PAGE
                    self._fill_page([p for p in range(start, start + PAGE) if p not in _SURROGATES])
                else:
                    out = self._append_from_library(data, out, state, status)
        return out[: state[kernels.WRITTEN]].copy(), np.diff(out_ends, prepend=0)

    def _append_from_library(
        self, data: np.ndarray, out: np.ndarray, state: np.ndarray, status: int
    ) -> np.ndarray:
        """Encode the pending word with the library. Returns: `out`, or a larger copy of it."""
        start, stop, written = (int(state[i]) for i in (kernels.POSITION, kernels.POINT, kernels.WRITTEN))
        word = data[start:stop].tobytes().decode()
        ids = np.array(self._backend.encode(word, add_special_tokens=False).ids, np.int32)
        if status == kernels.NEEDS_LIBRARY_AND_CACHE:
            kernels.remember(self._cache, data, start, stop, ids)
        needed = written + len(ids) + len(data) - stop
        if needed > len(out):
            out = np.concatenate([out[:written], np.empty(needed - written, np.int32)])
        out[written : written + len(ids)] = ids
        state[kernels.POSITION], state[kernels.WRITTEN] = stop, written + len(ids)
        return out


class ByteLevelEncoder(CompiledEncoder):
    """GPT-2's byte-level BPE: its pre-tokenizer, merges over bytes, nothing else."""

    def __init__(self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]):
        super().__init__(backend, pipeline)
        model = pipeline["model"]
        vocab = model["vocab"]
        self._byte_ids = np.array([vocab[symbol] for symbol in _byte_symbols()], np.int32)
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        lefts = np.fromiter((vocab[left] for left, _ in pairs), np.int64, len(pairs))
        rights = np.fromiter((vocab[right] for _, right in pairs), np.int64, len(pairs))
        merged = np.fromiter((vocab[left + right] for left, right in pairs), np.int64, len(pairs))
        self._merges = kernels.new_pair_table(len(pairs))
        kernels.fill_pair_table(self._merges, lefts, rights, np.arange(len(pairs)), merged)

    @classmethod
    def supports(cls, pipeline: dict[str, Any]) -> bool:
        model, pre_tokenizer = pipeline["model"], pipeline["pre_tokenizer"] or {}
        extras = (
            "dropout",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "byte_fallback",
            "ignore_merges",
        )
        return (
            _is_plain(pipeline)
            and pipeline["normalizer"] is None
            and model["type"] == "BPE"
            and not any(model.get(extra) for extra in extras)
            and pre_tokenizer.get("type") == "ByteLevel"
            and pre_tokenizer.get("add_prefix_space") is False
            and pre_tokenizer.get("use_regex", True) is True
            and model["vocab"].keys() >= set(_byte_symbols())
        )

    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        return kernels.encode_byte_level(
            data, ends, self._classes, self._cache, self._byte_ids, self._merges, out, out_ends, state
        )

    def _fill_page(self, points: list[int]) -> None:
        text = "".join(map(chr, points))
        for mark, expression in _CHARACTER_CLASSES.items():
            text = normalizers.Replace(tokenizers.Regex(expression), mark).normalize_str(text)
        self._classes[points] = [_CLASS_OF_MARK.get(mark, kernels.OTHER) for mark in text]


# The classes in GPT-2's expression, seen by the regular expressions of the library; a mark is in its class.
_CHARACTER_CLASSES = {"a": r"\p{L}", "1": r"\p{N}", " ": r"\s"}
_CLASS_OF_MARK = {"a": kernels.LETTER, "1": kernels.NUMBER, " ": kernels.SPACE}


class WordPieceEncoder(CompiledEncoder):
    """BERT's WordPiece, cased or not."""

    def __init__(self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]):
        super().__init__(backend, pipeline)
        model = pipeline["model"]
        self._vocab: dict[str, int] = model["vocab"]
        self._unknown = self._vocab[model["unk_token"]]
        prefix = model["continuing_subword_prefix"]
        self._values = np.zeros(kernels.CODE_POINTS, np.int32)
        self._images = np.zeros(0, np.int32)
        self._reorders = backend.normalizer.normalize_str("\u302e\U0001d165") != "\u302e\U0001d165"
        self._edges, self._tokens, continuation = self._make_trie(prefix)
        self._options = np.array([continuation, self._unknown, model["max_input_chars_per_word"]], np.int64)

    @classmethod
    def supports(cls, pipeline: dict[str, Any]) -> bool:
        model = pipeline["model"]
        return (
            _is_plain(pipeline)
            and (pipeline["normalizer"] or {}).get("type") == "BertNormalizer"
            and (pipeline["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
            and model["type"] == "WordPiece"
            and model["unk_token"] in model["vocab"]
            and 0 < model["max_input_chars_per_word"] <= kernels.MAX_CACHED_BYTES * 2
        )

    def _make_trie(self, prefix: str) -> tuple[kernels.PairTable, np.ndarray, int]:
        names = [prefix, *self._vocab]  # first, and without an id unless the vocabulary gives it one
        ids = np.array([-1, *self._vocab.values()], np.int64)
        points = np.frombuffer("".join(names).encode("utf-32-le"), np.uint32).astype(np.int64)
        ends = np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))
        edges = kernels.new_pair_table(len(points))
        tokens = np.full(len(points) + 1, -1, np.int32)
        nodes, continuation = kernels.fill_trie(edges, tokens, points, ends, ids)
        return edges, tokens[:nodes].copy(), continuation

    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        return kernels.encode_word_piece(
            data, ends, self._classes, self._values, self._images, self._cache,
            self._edges, self._tokens, self._options, out, out_ends, state,
        )  # fmt: skip

    def _fill_page(self, points: list[int]) -> None:
        """What a character does between two letters: part them, stand alone, or join their word."""
        text = "".join(f"a{chr(point)}a zz " for point in points)
        normalised = self._backend.normalizer.normalize_str(text)
        pieces = [piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(normalised)]
        images: list[int] = []
        for point in points:
            end = pieces.index("zz")
            self._classes[point], self._values[point] = self._class_and_value(point, pieces[:end], images)
            del pieces[: end + 1]
        self._images = np.concatenate([self._images, np.array(images, np.int32)])

    def _class_and_value(self, point: int, pieces: list[str], images: list[int]) -> tuple[int, int]:
        if pieces == ["a", "a"]:
            return kernels.BLANK, 0
        if len(pieces) == 3 and pieces[0] == pieces[2] == "a" and len(pieces[1]) == 1:
            return kernels.ALONE, self._vocab.get(pieces[1], self._unknown)
        if len(pieces) != 1:
            return kernels.UNUSUAL, 0
        image = pieces[0][1:-1]
        if len(image) > len(chr(point).encode()) or (self._reorders and any(map(_may_be_moved, image))):
            return kernels.UNUSUAL, 0
        if len(image) == 1:
            return kernels.PLAIN, ord(image)
        place = len(self._images) + len(images)
        images += [len(image), *map(ord, image)]
        return kernels.EXPANDED, place


def _may_be_moved(character: str) -> bool:
    """Whether NFD may move it among its neighbours. Combining classes of assigned characters never change."""
    return unicodedata.combining(character) != 0 or unicodedata.category(character) == "Cn"


def _is_plain(pipeline: dict[str, Any]) -> bool:
    """No tokens that are looked for in the raw text, nothing cut off or filled up."""
    return (
        all(token["special"] for token in pipeline["added_tokens"])
        and pipeline["truncation"] is None
        and pipeline["padding"] is None
    )


def _byte_symbols() -> list[str]:
    """The character that stands for each byte: itself if printable, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def flatten(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one int32 array and their int64 lengths."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return (np.concatenate(rows) if len(rows) else np.empty(0, np.int32)), lengths


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each surrogate, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return without_lone_surrogates(text).encode()
