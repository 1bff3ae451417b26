"""GPT-2's byte-level BPE and BERT's WordPiece, compiled: one to two orders of magnitude faster than the library.

They cut the text into words and cache the ids of each word, because text repeats its words. The compiled loops are in
byte_level_kernels.py and word_piece_kernels.py; encoders.py decides whether they are used.

The ids must be the library's, so these encoders know as little as possible about Unicode. They ask the library's own
normalizer and pre-tokenizer how a character separates words and what it is normalized to, for 256 characters when a
text first needs one of them. Two kinds of word go to the library as they are: words with characters whose effect
depends on their neighbours (marks that NFD reorders), and words too long for the compiled loop. This is exact because
no rule of these pipelines looks across the places where text is cut.

Trade-offs: an encoder holds 20 to 40 MB of cache and tables and is not shared between processes. Documents that consist
of one word, or only of new words, gain little.
"""

from __future__ import annotations

import abc
import itertools
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import orjson
import tokenizers
from tokenizers import normalizers

from data_utils.tokenizers.byte_symbols import byte_symbols
from data_utils.tokenizers.fast import byte_level_kernels as byte_level
from data_utils.tokenizers.fast import encoder_kernels as kernels
from data_utils.tokenizers.fast import word_piece_kernels as word_piece
from data_utils.tokenizers.fast.library_encoders import utf8

Array = np.ndarray
CACHE_SLOTS = 2**19  # half of it words; a power of two
PAGE = 256  # code points whose classes are asked for at a time
_SURROGATES = range(0xD800, 0xE000)


def encoder_for(backend: tokenizers.Tokenizer) -> CompiledEncoder | None:
    """The encoder for a pipeline of the library; None if there is none, or no compiler."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None  # the loops need the compiler
    pipeline = orjson.loads(backend.to_str())
    # Exactly known pipelines alone: anything else stays with the library.
    for family in (ByteLevelEncoder, WordPieceEncoder):
        if family.supports(pipeline):
            return family(backend, pipeline)
    return None


class CompiledEncoder(abc.ABC):
    """Base of the two fast encoders: hands over documents as bytes, fills pages of characters, asks the library."""

    def __init__(self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]):
        """Args: pipeline: the description of `backend`, as in a tokenizer.json."""
        self._backend = backend
        self._classes = np.full(kernels.CODE_POINTS, kernels.UNKNOWN, np.uint8)
        self._cache = kernels.new_word_cache(CACHE_SLOTS)
        self._lock = threading.Lock()  # the compiled loop releases the GIL and changes the cache

    @classmethod
    @abc.abstractmethod
    def supports(cls, pipeline: dict[str, Any]) -> bool:
        """Whether this class gives the ids of a pipeline."""

    @abc.abstractmethod
    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        """Call the compiled loop."""

    @abc.abstractmethod
    def _fill_page(self, code_points: list[int]) -> None:
        """Ask the library for the classes of some code points."""

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [utf8(text) for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        data = np.frombuffer(b"".join([*encoded, kernels.PADDING]), np.uint8)
        # All arrays come from here: compiled code frees an array at its last mention, and a pointer is no
        # mention.
        out = np.empty(len(data), np.int32)  # never more ids than bytes
        out_ends = np.zeros(len(ends), np.int64)
        state = np.zeros(kernels.STATE_SIZE, np.int64)
        with self._lock:
            while (status := self._run(data, ends, out, out_ends, state)) != kernels.DONE:
                if status == kernels.NEEDS_PAGE:
                    start = int(state[kernels.PENDING]) // PAGE * PAGE
                    page = range(start, start + PAGE)
                    self._fill_page([point for point in page if point not in _SURROGATES])
                else:
                    out = self._append_from_library(data, out, state, status)
        return out[: state[kernels.WRITTEN]].copy(), np.diff(out_ends, prepend=0)

    def _append_from_library(
        self, data: np.ndarray, out: np.ndarray, state: np.ndarray, status: int
    ) -> np.ndarray:
        """Encode the pending word with the library. Returns: `out`, or a larger copy of it."""
        start, stop, written = (int(state[i]) for i in (kernels.POSITION, kernels.PENDING, kernels.WRITTEN))
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
        self._byte_ids = np.array([vocab[symbol] for symbol in byte_symbols()], np.int32)
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        lefts = np.fromiter((vocab[left] for left, _ in pairs), np.int64, len(pairs))
        rights = np.fromiter((vocab[right] for _, right in pairs), np.int64, len(pairs))
        merged = np.fromiter((vocab[left + right] for left, right in pairs), np.int64, len(pairs))
        self._merges = byte_level.new_merges(lefts, rights, merged, self._byte_ids)
        self._scratch = byte_level.new_merge_scratch()

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
            and model["vocab"].keys() >= set(byte_symbols())
            and max(model["vocab"].values()) <= byte_level.MAX_ID
            and len(model["merges"]) <= byte_level.MAX_MERGES
        )

    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        return byte_level.encode_byte_level(
            data, ends, self._classes, self._cache, self._byte_ids, self._merges, self._scratch,
            out, out_ends, state,
        )  # fmt: skip

    def _fill_page(self, code_points: list[int]) -> None:
        text = "".join(map(chr, code_points))
        for mark, expression in _CHARACTER_CLASSES.items():
            text = normalizers.Replace(tokenizers.Regex(expression), mark).normalize_str(text)
        self._classes[code_points] = [_CLASS_OF_MARK.get(mark, byte_level.OTHER) for mark in text]


# The classes in GPT-2's expression, as the library's regular expressions see them. Each mark belongs to its own class.
_CHARACTER_CLASSES = {"a": r"\p{L}", "1": r"\p{N}", " ": r"\s"}
_CLASS_OF_MARK = {"a": byte_level.LETTER, "1": byte_level.NUMBER, " ": byte_level.SPACE}


class WordPieceEncoder(CompiledEncoder):
    """BERT's WordPiece, cased or not."""

    def __init__(self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any]):
        super().__init__(backend, pipeline)
        model = pipeline["model"]
        self._vocab: dict[str, int] = model["vocab"]
        self._unknown = self._vocab[model["unk_token"]]
        prefix = model["continuing_subword_prefix"]
        self._values = np.zeros(kernels.CODE_POINTS, np.int32)
        self._expansions = np.zeros(0, np.int32)
        self._reorders = backend.normalizer.normalize_str("\u302e\U0001d165") != "\u302e\U0001d165"
        self._edges, self._node_ids, continuation_node = self._make_trie(prefix)
        max_characters = model["max_input_chars_per_word"]
        self._options = np.array([continuation_node, self._unknown, max_characters], np.int64)
        self._scratch = np.empty((2, max_characters + 1), np.int32)

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

    def _make_trie(self, prefix: str) -> tuple[word_piece.TrieEdges, np.ndarray, int]:
        """Edges and ids of the vocabulary's trie, and the node of `prefix`, where continuations of a word begin."""
        strings = [prefix, *self._vocab]  # first, and without an id unless the vocabulary gives it one
        ids = np.array([-1, *self._vocab.values()], np.int64)
        code_points = np.frombuffer("".join(strings).encode("utf-32-le"), np.uint32).astype(np.int64)
        ends = np.cumsum(np.fromiter(map(len, strings), np.int64, len(strings)))
        edges = word_piece.new_trie_edges(len(code_points))
        node_ids = np.full(len(code_points) + 1, -1, np.int32)
        num_nodes, prefix_node = word_piece.fill_trie(edges, node_ids, code_points, ends, ids)
        return edges, node_ids[:num_nodes].copy(), prefix_node

    def _run(self, data: Array, ends: Array, out: Array, out_ends: Array, state: Array) -> int:
        return word_piece.encode_word_piece(
            data, ends, self._classes, self._values, self._expansions, self._cache,
            self._edges, self._node_ids, self._options, self._scratch, out, out_ends, state,
        )  # fmt: skip

    def _fill_page(self, code_points: list[int]) -> None:
        """Ask what each character does between two letters: separate them, stand alone, or join their word."""
        # The pipeline itself is asked, so that no rule of Unicode is written a second time; "zz" marks the end
        # of what each character gives.
        text = "".join(f"a{chr(code_point)}a zz " for code_point in code_points)
        normalized = self._backend.normalizer.normalize_str(text)
        words = iter([word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(normalized)])
        expansions: list[int] = []
        for code_point in code_points:
            words_between = list(itertools.takewhile(lambda word: word != "zz", words))
            self._classes[code_point], self._values[code_point] = self._class_and_value(
                code_point, words_between, expansions
            )
        self._expansions = np.concatenate([self._expansions, np.array(expansions, np.int32)])

    def _class_and_value(self, code_point: int, words: list[str], expansions: list[int]) -> tuple[int, int]:
        """The class of a code point and its entry of `values`, see word_piece_kernels.py.

        Args:
            words: what the library makes of the code point between two "a".
            expansions: of this page; receives that of the code point if it has one.
        """
        if words == ["a", "a"]:
            return word_piece.SEPARATOR, 0
        if len(words) == 3 and words[0] == words[2] == "a" and len(words[1]) == 1:
            return word_piece.STANDALONE, self._vocab.get(words[1], self._unknown)
        if len(words) != 1:
            return word_piece.LEFT_TO_LIBRARY, 0
        normalized = words[0][1:-1]
        # The compiled loop has room for as many ids as bytes.
        if len(normalized) > len(chr(code_point).encode()):
            return word_piece.LEFT_TO_LIBRARY, 0
        if self._reorders and any(map(_may_be_moved, normalized)):
            return word_piece.LEFT_TO_LIBRARY, 0
        if len(normalized) == 1:
            return word_piece.MAPPED, ord(normalized)
        index = len(self._expansions) + len(expansions)
        expansions += [len(normalized), *map(ord, normalized)]
        return word_piece.EXPANDED, index


def _may_be_moved(character: str) -> bool:
    """Whether NFD may move it among its neighbours. The combining class of an assigned character never changes."""
    return unicodedata.combining(character) != 0 or unicodedata.category(character) == "Cn"


def _is_plain(pipeline: dict[str, Any]) -> bool:
    """Whether the pipeline has no added tokens in raw text, no truncation and no padding."""
    return (
        all(token["special"] for token in pipeline["added_tokens"])
        and pipeline["truncation"] is None
        and pipeline["padding"] is None
    )
