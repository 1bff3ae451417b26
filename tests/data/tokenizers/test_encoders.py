"""Fast encoders against the libraries they replace: equal ids on every text, and the library wherever not."""

import ast
import json
import logging
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.caching import FunctionCache
from support.selection import slow_but
from tokenizers import models, normalizers, pre_tokenizers, trainers

from data_utils.common.random_streams import source_digest
from data_utils.tokenizers.fast import (
    byte_level_kernels,
    compiled_encoders,
    encoder_kernels,
    library_encoders,
    word_piece_kernels,
)
from data_utils.tokenizers.fast.compiled_encoders import ByteLevelEncoder, WordPieceEncoder
from data_utils.tokenizers.fast.encoders import (
    SAMPLE,
    CheckedEncoder,
    fast_encoder,
    first_difference,
    library_or_faster,
)
from data_utils.tokenizers.fast.library_encoders import LibraryEncoder

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1999, isn't it? Yes; they're here!\n\nNew line: done…",
    "Größe und naïve Café: déjà vu. Привет, мир! 今天天气很好。你好？是的；好！ 🙂 emoji 한국어 नमस्ते",
    "def f(x):\n    return x ** 2  # a comment\n",
] * 20
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [
    *SPECIALS,
    *(prefix + c for c in "abcdefghijklmnopqrstuvwxyzABé0123456789ᄒ\u1161ᆫ" for prefix in ("", "##")),
    *(
        "the",
        "quick",
        "##ick",
        "##ing",
        "un",
        "##affable",
        "ß",
        "今",
        "天",
        "豈",
        "。",
        ",",
        ".",
        "!",
        "'",
        "-",
    ),
    *("=", "+", "[", "]", "<", ">", "|", "#", "🙂", "е", "ё", "नमस", "##ते", "##i\u0307"),
]
LITERALS = [*SPECIALS, "<|endoftext|>", "<s>", "</s>", "<unk>", "\ufdd0[MASK]", "\ufdd0<|endoftext|>"]
MARKS = [chr(p) for p in range(0x20000) if unicodedata.combining(chr(p))]
PARTS = [
    *(*LITERALS, *CORPUS[0].split(), "'s", "'ll", "'", " '", "12", "½", "É", "é", "e\u0301", "İ", "ΣΑΣ", "ﬁ"),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "\x00",
        "\x07",
        "\ufffd",
        "\u200b",
    ),
    *(
        "今天",
        "。",
        "豈",
        "한국어",
        "각",
        "東京",
        "が",
        "नमस्ते",
        "ไทย",
        "שָׁלוֹם",
        "🙂",
        "👨\u200d👩",
        "\u302e",
        "\U0001d165",
    ),
    *("x" * 99, "x" * 101, "-" * 65, "é" * 129, "a" * 16, "a" * 17, "q" * 300, "\ud800", "≠", "\u0344"),
]
texts = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(codec="utf-8", categories=["L", "M", "Zs", "Cc", "Cf", "Po"]), max_size=20),
    st.text(st.sampled_from([*MARKS, "a", "É", " ", "今", "!"]), max_size=12),
    st.lists(st.sampled_from(PARTS), max_size=12).map("".join),
)
blocks = st.lists(texts, max_size=4)


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece(**options):
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(PIECES))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(**options)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


PIPELINES = {
    "byte level": (byte_level, ByteLevelEncoder),
    "uncased": (lambda: word_piece(lowercase=True), WordPieceEncoder),
    "cased": (lambda: word_piece(lowercase=False), WordPieceEncoder),
    "cased, accents stripped": (lambda: word_piece(lowercase=False, strip_accents=True), WordPieceEncoder),
    "raw": (lambda: word_piece(clean_text=False, handle_chinese_chars=False), WordPieceEncoder),
}


class OneByOne:
    """The library without its threads, as the oracle."""

    def __init__(self, backend):
        self.backend = backend

    def encode(self, texts):
        clean = map(library_encoders.without_lone_surrogates, texts)
        return library_encoders.flatten(
            [np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32) for text in clean]
        )


@pytest.fixture(scope="module")
def pairs():
    """Name -> (fast encoder, oracle)."""
    made = {}
    for name, (make, family) in PIPELINES.items():
        backend = make()
        made[name] = fast_encoder(backend), OneByOne(backend)
        assert type(made[name][0]) is family
    return made


def check(fast, oracle, texts):
    ids, lengths = fast.encode(texts)
    right_ids, right_lengths = oracle.encode(texts)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64
    assert ids.tolist() == right_ids.tolist()
    assert lengths.tolist() == right_lengths.tolist()


# ---- equality ----


@pytest.mark.parametrize("name", PIPELINES)
@given(block=blocks)
@settings(deadline=None, max_examples=100)
def test_ids_are_the_librarys(pairs, name, block):
    check(*pairs[name], block)


@pytest.mark.parametrize("name", PIPELINES)
def test_the_sample_passes(pairs, name):
    assert first_difference(*pairs[name], SAMPLE) is None


@pytest.mark.parametrize("name", slow_but(["byte level"], ["byte level", "uncased", "cased"]))
def test_characters_of_all_scripts(pairs, name):
    """Next to letters, itself and a space, so that a wrong class shows. Few of the long uniform ranges."""
    uniform = [*range(0x3400, 0xD800, 61), *range(0xE000, 0xF900, 61), *range(0x12400, 0x20000, 17)]
    points = [
        *range(0x3400),
        *range(0xF900, 0x12400),
        *range(0x1D100, 0x1D200),
        *range(0x2F800, 0x2FB00),
        *uniform,
    ]
    characters = list(map(chr, points))
    check(
        *pairs[name],
        ["".join(f"a{c}b1{c}{c} {c}!" for c in characters[i : i + 997]) for i in range(0, len(points), 997)],
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_a_full_cache_is_emptied(name, monkeypatch):
    monkeypatch.setattr(compiled_encoders, "CACHE_SLOTS", 16)
    backend = PIPELINES[name][0]()
    words = " ".join(f"word{i}{'x' * (i % 70)} {chr(0x4E00 + i)}é{i}" for i in range(400))
    check(fast_encoder(backend), OneByOne(backend), [words, "", words])


@pytest.mark.parametrize("name", PIPELINES)
def test_a_huge_document(pairs, name):
    rng = np.random.default_rng(0)
    document = "".join(PARTS[i] for i in rng.integers(0, len(PARTS), 40_000))
    check(*pairs[name], [document, "the end"])


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("word", ["a", "é", "\u0301", "\u302e", "1", "=", " ", "\x00", "今"])
def test_words_at_the_limits(pairs, name, word):
    lengths = [
        1,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        99,
        100,
        101,
        127,
        128,
        129,
        255,
        256,
        257,
        5000,
    ]
    check(*pairs[name], [f"x {word * n} y" for n in lengths] + [word * n for n in lengths])


def test_long_words_merge_in_the_librarys_order():
    """Words of three letters have equal pairs side by side, and many merges; new ones of every length to the limit."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abc"), size=n)) for n in [*range(1, 257)] * 4]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(words[::3], trainer)
    fast = fast_encoder(backend)
    assert isinstance(fast, ByteLevelEncoder) and len(json.loads(backend.to_str())["model"]["merges"]) > 2000
    check(fast, OneByOne(backend), words)


def test_compiled_code_makes_no_arrays():
    """Numba frees an array at its last mention, and a pointer to it is no mention."""
    files = [kernels.__file__ for kernels in (encoder_kernels, byte_level_kernels, word_piece_kernels)]
    compiled = [
        function
        for file in files
        for function in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(function, ast.FunctionDef)
        and any("njit" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]
    makers = {"empty", "zeros", "full", "array", "arange", "empty_like", "zeros_like", "concatenate", "copy"}
    called = {
        node.func.attr
        for function in compiled
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert len(compiled) > 20 and not called & makers


def test_cached_code_is_compiled_anew_after_a_change_of_the_shared_file():
    """Numba's cache on disk compares the entry point's own file, and the values that it closes over."""
    digest = source_digest(encoder_kernels.__file__)
    functions = [*vars(byte_level_kernels).values(), *vars(word_piece_kernels).values()]
    cached = {f for f in functions if isinstance(getattr(f, "_cache", None), FunctionCache)}
    assert len(cached) == 4
    for function in cached:
        assert digest in [cell.cell_contents for cell in function.py_func.__closure__]


def test_an_image_longer_than_its_character(pairs):
    """More ids than bytes: characters that the library expands, one after the other."""
    check(*pairs["uncased"], ["\U0001d15e" * 50, "\U0001d160\u302e" * 50, "ΐ" * 200])


@pytest.mark.parametrize("name", PIPELINES)
def test_no_texts_and_empty_texts(pairs, name):
    check(*pairs[name], [])
    check(*pairs[name], ["", "", ""])
    check(*pairs[name], ["", "a", ""])


def test_special_names_in_text_stay_text(pairs):
    fast, oracle = pairs["uncased"]
    ids, _ = fast.encode([" ".join(LITERALS)])
    special = {oracle.backend.token_to_id(name) for name in SPECIALS if name != "[UNK]"}
    assert not special & set(ids.tolist())


# ---- the choice ----


class Wrong:
    """The library, but for the last id of a text that holds `trigger`."""

    def __init__(self, library, trigger):
        self.library, self.trigger = library, trigger

    def encode(self, texts):
        ids, lengths = self.library.encode(texts)
        if any(self.trigger in text for text in texts) and len(ids):
            ids[-1] += 1
        return ids, lengths


class LosesADocument(Wrong):
    """The right ids, in a batch under the wrong text."""

    def encode(self, texts):
        ids, lengths = self.library.encode(texts)
        return ids, lengths[::-1]


@pytest.mark.parametrize(
    "plant", [Wrong, lambda library, _: LosesADocument(library, "")], ids=["wrong id", "wrong document"]
)
@pytest.mark.parametrize("trigger", ["'s", "今", "\u0301", "[MASK]", "x" * 101, "\x00"])
def test_a_wrong_encoder_is_found_and_replaced(plant, trigger, caplog):
    library = OneByOne(byte_level())
    encoder = CheckedEncoder(library, lambda: plant(library, trigger), fast_from_characters=0)
    with caplog.at_level(logging.WARNING):
        check(encoder, library, [f"before {trigger} after"])
    assert "disagree" in caplog.text and "slower" in caplog.text
    assert encoder.choose() is library
    caplog.clear()
    check(encoder, library, [trigger])
    assert not caplog.records  # said once


def test_a_right_encoder_is_taken(caplog):
    library = OneByOne(byte_level())
    encoder = CheckedEncoder(
        library, lambda: Wrong(library, "no such text in the sample"), fast_from_characters=0
    )
    encoder.encode(["a"])
    assert isinstance(encoder.choose(), Wrong) and not caplog.records


def test_the_library_encodes_the_first_texts():
    made = []
    library = OneByOne(byte_level())
    encoder = CheckedEncoder(library, lambda: made.append(1) or library, fast_from_characters=10)
    encoder.encode(["12345", "6789"])
    assert not made
    encoder.encode(["0"])
    encoder.encode(["more"])
    assert made == [1]


def changed(backend, change):
    tree = json.loads(backend.to_str())
    change(tree)
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(tree):
        for key in path:
            tree = tree[key]
        tree[last] = value

    return change


def add_token(special):
    token = {"id": 0, "content": "the", "single_word": False, "lstrip": False, "rstrip": False}
    return set_in("added_tokens", [{**token, "normalized": False, "special": special}])


REFUSED = {
    "prefix space": (byte_level, set_in("pre_tokenizer", "add_prefix_space", True)),
    "no expression": (byte_level, set_in("pre_tokenizer", "use_regex", False)),
    "other pre-tokenizer": (byte_level, set_in("pre_tokenizer", {"type": "Whitespace"})),
    "no pre-tokenizer": (byte_level, set_in("pre_tokenizer", None)),
    "normalizer": (byte_level, set_in("normalizer", {"type": "NFC"})),
    "dropout": (byte_level, set_in("model", "dropout", 0.1)),
    "whole words first": (byte_level, set_in("model", "ignore_merges", True)),
    "word ends": (byte_level, set_in("model", "end_of_word_suffix", "</w>")),
    "byte missing": (byte_level, lambda tree: tree["model"]["vocab"].pop("Ā")),
    "ids of more than 20 bits": (byte_level, lambda tree: tree["model"]["vocab"].update(zzz=2**20)),
    "BPE token in the text": (byte_level, add_token(special=False)),
    "WordPiece token in the text": (word_piece, add_token(special=False)),
    "other normalizer": (word_piece, set_in("normalizer", {"type": "NFC"})),
    "no normalizer": (word_piece, set_in("normalizer", None)),
    "split at white space": (word_piece, set_in("pre_tokenizer", {"type": "Whitespace"})),
    "very long words": (word_piece, set_in("model", "max_input_chars_per_word", 1000)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_pipelines_are_left_to_the_library(case):
    make, change = REFUSED[case]
    assert fast_encoder(make()) is not None
    backend = changed(make(), change)
    assert fast_encoder(backend) is None
    assert type(library_or_faster(backend).choose()) is LibraryEncoder


@pytest.mark.parametrize("name", PIPELINES)
def test_special_added_tokens_are_no_obstacle(name):
    """With encode_special_tokens they are not looked for in text."""
    backend = changed(PIPELINES[name][0](), add_token(special=True))
    backend.encode_special_tokens = True
    encoder = library_or_faster(backend)
    check(encoder.choose(), OneByOne(backend), [" ".join(LITERALS), "the the", "xthex"])


def test_interpreted_the_library_is_used(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert type(library_or_faster(byte_level()).choose()) is LibraryEncoder


def test_other_word_piece_options():
    """Another prefix, none at all, short words, pieces that cannot continue."""
    for options in (
        {"continuing_subword_prefix": "@"},
        {"continuing_subword_prefix": ""},
        {"continuing_subword_prefix": "##", "max_input_chars_per_word": 3},
        {"continuing_subword_prefix": "no such prefix"},
    ):
        backend = changed(word_piece(), lambda tree, options=options: tree["model"].update(options))
        fast = library_or_faster(backend).choose()
        assert isinstance(fast, WordPieceEncoder)
        check(fast, OneByOne(backend), ["the quickest unaffable @b fox", "abcd abc ab @@ no such prefix"])


def test_threads_share_an_encoder(pairs):
    fast, oracle = pairs["byte level"]
    blocks = [[f"{text} {i}" for text in CORPUS] for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        for got, block in zip(pool.map(fast.encode, blocks), blocks, strict=True):
            assert got[0].tolist() == oracle.encode(block)[0].tolist()
