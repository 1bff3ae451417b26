"""Damaged and hostile tokenizer files are refused in one line."""

import json

import pytest
import tokenizers
from support.data.tokenizer_files import (
    BERT_SPECIALS,
    BYTE_SYMBOLS,
    byte_bpe_json,
)

from data_utils.common.errors import ConfigError, DataError
from data_utils.tokenizers.byte_symbols import byte_symbols
from data_utils.tokenizers.tokenizer import (
    TokenizerConfig,
    load_tokenizer,
)

# ---- damaged files ----


def test_unknown_kind():
    with pytest.raises(ConfigError, match="'wordpiece'; it must be one of bert_wordpiece"):
        TokenizerConfig(kind="wordpiece", path="x")


def damage_json(change):
    tree = byte_bpe_json(["[PAD]"])
    change(tree)
    return json.dumps(tree)


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(tree):
        for key in path:
            tree = tree[key]
        tree[last] = value

    return change


BYTES_VOCAB = json.dumps({name: i for i, name in enumerate([*BYTE_SYMBOLS, "<|endoftext|>"])})
DAMAGED = {
    "no such path": ("bert_wordpiece", None, "does not exist"),
    "no vocab.txt": ("bert_wordpiece", {"other": "x"}, "vocab.txt: No such file"),
    "empty vocab": ("bert_wordpiece", {"vocab.txt": ""}, "is empty"),
    "no mask": ("bert_wordpiece", {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\nfox\n"}, r"no \[MASK\]"),
    "repeated": (
        "bert_wordpiece",
        {"vocab.txt": "\n".join([*BERT_SPECIALS, "fox", "fox"])},
        "'fox' appears twice",
    ),
    "not UTF-8": ("bert_wordpiece", {"vocab.txt": b"\xff\xfe"}, "not UTF-8"),
    "no merges": ("gpt2_bpe", {"vocab.json": BYTES_VOCAB}, "merges.txt: No such file"),
    "no vocab.json": ("gpt2_bpe", {"merges.txt": "a b"}, "vocab.json: No such file"),
    "vocab.json is no JSON": ("gpt2_bpe", {"vocab.json": "{", "merges.txt": "a b"}, "not valid JSON"),
    "vocab.json is a list": ("gpt2_bpe", {"vocab.json": "[]", "merges.txt": "a b"}, "not list"),
    "vocab.json is empty": ("gpt2_bpe", {"vocab.json": "{}", "merges.txt": "a b"}, "vocabulary is empty"),
    "gap": ("gpt2_bpe", {"vocab.json": '{"a": 0, "b": 2}', "merges.txt": "a b"}, "each once"),
    "text id": ("gpt2_bpe", {"vocab.json": '{"a": "0"}', "merges.txt": "a b"}, "id of 'a' is '0'"),
    "no eos": ("gpt2_bpe", {"vocab.json": '{"a": 0}', "merges.txt": "a b"}, "no <|endoftext|>"),
    "part of RoBERTa": (
        "gpt2_bpe",
        {"vocab.json": '{"<s>": 0, "</s>": 1, "<unk>": 2, "<|endoftext|>": 3}', "merges.txt": "a b"},
        "has </s>, <s>, <unk> but not <mask>; .* use kind hf_json",
    ),
    "bytes missing": (
        "gpt2_bpe",
        {"vocab.json": '{"<|endoftext|>": 0}', "merges.txt": "a b"},
        r"bytes of ordinary text have no token \(09 0A 20 21",
    ),
    "bad merge": ("gpt2_bpe", {"vocab.json": BYTES_VOCAB, "merges.txt": "a\n"}, "line 1 of merges.txt"),
    "foreign merge": (
        "gpt2_bpe",
        {"vocab.json": BYTES_VOCAB, "merges.txt": "a b\n"},
        "do not belong together",
    ),
    "not SentencePiece": ("sentencepiece", {"x.model": b"garbage" * 50}, "not a SentencePiece model"),
    "truncated": ("sentencepiece", {"x.model": b"\x0a\x10abc"}, "not a SentencePiece model"),
    "empty model": ("sentencepiece", {"x.model": b""}, "is empty"),
    "model without pieces": ("sentencepiece", {"x.model": b"\x12\x00"}, "SentencePiece model"),
    "model or added_tokens is missing": ("sentencepiece", {"x": "y"}, "has none"),
    "two models": ("sentencepiece", {"a.model": "", "b.model": ""}, "has a.model, b.model"),
    "json is no JSON": ("hf_json", {"tokenizer.json": "x"}, "not valid JSON"),
    "json too deep": ("hf_json", {"tokenizer.json": "[" * 100_000}, "not valid JSON"),
    "no model in json": ("hf_json", {"tokenizer.json": "{}"}, "model or added_tokens is missing"),
    "no tokenizer.json": ("hf_json", {"vocab.txt": "x"}, "tokenizer.json: No such file"),
    "json without vocab": ("hf_json", set_in("model", "vocab", None), "has no vocabulary"),
    "huge id": ("hf_json", set_in("added_tokens", 0, "id", 10**9), "has the ids 0 and 1000000000"),
    "added token gap": (
        "hf_json",
        set_in("added_tokens", 0, {"id": 900, "content": "<x>"}),
        "cannot use this file",
    ),
    "bad merges": ("hf_json", set_in("model", "merges", [1]), "must be two tokens"),
    "merge prefix": ("hf_json", set_in("model", "continuing_subword_prefix", "x"), "lacks the prefix"),
    "unknown model": ("hf_json", set_in("model", "type", "X"), "cannot use this file"),
    "byte symbol missing": ("hf_json", lambda tree: tree["model"]["vocab"].pop("~"), r"1 bytes .* \(7E\)"),
    "one id twice": ("hf_json", set_in("model", "vocab", "~", 40), "both have the id 40"),
    "two ids": ("hf_json", set_in("added_tokens", 0, "content", "~"), "'~' has the ids"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_in_one_line(tmp_path, case):
    kind, content, message = DAMAGED[case]
    directory = tmp_path / "tokenizer"
    if content is not None:
        directory.mkdir()
        for name, data in (
            content.items() if isinstance(content, dict) else [("tokenizer.json", damage_json(content))]
        ):
            (directory / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(TokenizerConfig(kind=kind, path=str(directory)))
    assert "\n" not in str(caught.value)


def test_gaps_in_added_ids_are_refused(tmp_path):
    """The library numbers added tokens itself: <x> would silently become the next free id."""
    tree = byte_bpe_json(["[PAD]"])
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 900, "content": "<x>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"'<x>' has id 900 but loads as"):
        load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))


def test_a_special_token_that_text_is_made_of_is_refused(tmp_path):
    """Every one of it would be dropped from the texts."""
    for name in ("!", "".join(byte_bpe_json(["[PAD]"])["model"]["merges"][-1])):
        tree = byte_bpe_json(["[PAD]"])
        token = {**tree["added_tokens"][0], "id": tree["model"]["vocab"][name], "content": name}
        tree["added_tokens"].append(token)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        with pytest.raises(DataError, match=f"special token '{name}' is also ordinary text"):
            load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))


def test_too_large_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data_utils.tokenizers.tokenizer_readers.MAX_FILE_BYTES", 3)
    (tmp_path / "tokenizer.json").write_text("{  }")
    with pytest.raises(DataError, match="larger than 3 bytes"):
        load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))


def byte_json(tmp_path, *lacking):
    """A tokenizer.json of bytes without merges, and without the symbols of some bytes."""
    names = [symbol for byte, symbol in enumerate(byte_symbols()) if byte not in lacking]
    tree = byte_bpe_json(["[PAD]"])
    tree["model"] |= {"vocab": {name: i for i, name in enumerate(["[PAD]", *names])}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    return TokenizerConfig(kind="hf_json", path=str(tmp_path))


def test_bytes_that_utf8_never_has_need_no_token(tmp_path, caplog):
    """SmolLM2's vocabulary lacks all of them."""
    tokenizer = load_tokenizer(byte_json(tmp_path, 0xC0, 0xC1, *range(0xF5, 0x100)))
    text = "".join(map(chr, [*range(0x250), 0x20AC, 0x1F642, 0x10FFFF]))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not caplog.records


def test_rare_bytes_without_a_token_are_reported_and_dropped_as_the_library_does(tmp_path, caplog):
    config = byte_json(tmp_path, 0x04, 0xF1)
    tokenizer = load_tokenizer(config)
    assert "2 bytes of UTF-8 (04 F1)" in caplog.text and "U+0004, U+40000" in caplog.text
    theirs = tokenizers.Tokenizer.from_file(f"{config.path}/tokenizer.json")
    for text in ("a\x04b", "one \U00040000 two"):
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


@pytest.mark.parametrize("names", [("Qzk", "qzk"), ("qzk", "Qzk")])
def test_added_tokens_that_the_normalizer_makes_equal_are_refused(tmp_path, names):
    tree = byte_bpe_json(["[PAD]"]) | {"normalizer": {"type": "Lowercase"}}
    first = max(tree["model"]["vocab"].values()) + 1
    tree["added_tokens"] += [
        {**tree["added_tokens"][0], "id": first + i, "content": name, "special": False, "normalized": True}
        for i, name in enumerate(names)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=f"{names[0]!r} and {names[1]!r} are equal after normalization"):
        load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    tree["added_tokens"][-1]["normalized"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    ids = {
        tuple(load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path))).encode("qzk Qzk"))
        for _ in range(8)
    }
    assert len(ids) == 1
