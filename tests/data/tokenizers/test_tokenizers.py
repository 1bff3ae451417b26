"""Ids against independent encoders, decoding, and fingerprints."""

import itertools
import json
import unicodedata

import numpy as np
import pytest
import regex
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.tokenizer_files import (
    KIND_OF,
    bert_vocab,
    texts,
    write_gpt2,
)
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from data_utils.tokenizers.tokenizer import (
    TokenizerConfig,
    load_tokenizer,
)

# ---- ids ----


@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_gpt2_ids_agree_with_transformers(tokenizer_files, loaded, text):
    reference = gpt2_reference(tokenizer_files)
    # split_special_tokens: transformers otherwise gives the literal <|endoftext|> its special id
    assert loaded["gpt2"].encode(text) == reference.encode(text, split_special_tokens=True)


@given(text=texts)
@settings(deadline=None, max_examples=60)
def test_places_of_tokens_in_the_text(loaded, text):
    for name, tokenizer in loaded.items():
        ids, places = tokenizer.encode_with_offsets(text)
        assert ids == tokenizer.encode(text) and len(places) == len(ids)
        assert all(0 <= start <= end <= len(text) for start, end in places)
        assert [start for start, _ in places] == sorted(start for start, _ in places)
        if name in (
            "gpt2",
            "json",
            "sentencepiece",
        ):  # nothing is left out, except spaces and control characters
            covered = {i for start, end in places for i in range(start, end)}
            dropped = [text[i] for i in set(range(len(text))) - covered]
            assert all(one.isspace() or unicodedata.category(one)[0] == "C" for one in dropped)


def test_places_show_the_words_of_tokens(loaded):
    text = "The  quick cafe, naive"
    _, places = loaded["bert"].encode_with_offsets(text)
    words = [text[start:end] for start, end in places]
    assert "".join(words) == "Thequickcafe,naive" and words[:2] == ["The", "quick"]


_cache = {}


def gpt2_reference(tokenizer_files):
    if tokenizer_files not in _cache:
        _cache[tokenizer_files] = transformers.GPT2Tokenizer(
            vocab=str(tokenizer_files / "gpt2" / "vocab.json"),
            merges=str(tokenizer_files / "gpt2" / "merges.txt"),
        )
    return _cache[tokenizer_files]


# Letters and digits whose Unicode classes have been fixed for long, so that two libraries' tables agree.
@given(text=st.lists(st.sampled_from([*"abXY éßñЖд今天019'’ \t\n.,!?-_…🙂st", " the", "  "])).map("".join))
@settings(deadline=None, max_examples=200)
def test_gpt2_ids_agree_with_a_plain_bpe(tokenizer_files, loaded, text):
    vocab = json.loads((tokenizer_files / "gpt2" / "vocab.json").read_text())
    lines = (tokenizer_files / "gpt2" / "merges.txt").read_text().splitlines()[1:]
    assert loaded["gpt2"].encode(text) == plain_bpe(
        text, vocab, {tuple(m.split()): i for i, m in enumerate(lines)}
    )


def plain_bpe(text, vocab, ranks):
    """Byte-level BPE by its definition: merge the pair of lowest rank until none is left."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    symbol = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for word in regex.findall(pattern, text):
        pieces = [symbol[byte] for byte in word.encode()]
        while known := [(ranks[p], i) for i, p in enumerate(itertools.pairwise(pieces)) if p in ranks]:
            _, i = min(known)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids += [vocab[piece] for piece in pieces]
    return ids


@pytest.mark.parametrize("lowercase", [True, False])
@given(text=texts)
@settings(deadline=None, max_examples=200)
def test_bert_ids_agree_with_transformers(tokenizer_files, lowercase, text):
    key = ("bert", lowercase)
    if key not in _cache:
        path = str(tokenizer_files / "bert" / "vocab.txt")
        config = TokenizerConfig(kind="bert_wordpiece", path=path, lowercase=lowercase)
        _cache[key] = load_tokenizer(config), transformers.BertTokenizer(vocab=path, do_lower_case=lowercase)
    ours, reference = _cache[key]
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False, split_special_tokens=True)


@given(text=st.text(st.sampled_from("the quick foxé今天。.,!?[]<>|#'\t\nÀÉGM09"), max_size=40))
@settings(deadline=None, max_examples=200)
def test_bert_ids_agree_with_the_plain_python_wordpiece(tokenizer_files, loaded, text):
    if "legacy" not in _cache:
        _cache["legacy"] = BertTokenizerLegacy(str(tokenizer_files / "bert" / "vocab.txt"))
    pieces = _cache["legacy"]._tokenize(unicodedata.normalize("NFC", text), split_special_tokens=True)
    assert loaded["bert"].encode(text) == _cache["legacy"].convert_tokens_to_ids(pieces)


def test_bert_golden(loaded):
    vocab = bert_vocab()
    pieces = ["the", "quick", "fox", "jump", "##s", "!", "[UNK]", "今", "天", "cafe"]
    assert loaded["bert"].encode("The QUICK foX jumps! Ωβ 今天 café") == [
        vocab.index(piece) for piece in pieces
    ]


@given(text=texts)
@settings(deadline=None, max_examples=200)
def test_sentencepiece_ids_are_the_models_own(tokenizer_files, loaded, text):
    if "sentencepiece" not in _cache:
        path = tokenizer_files / "sentencepiece" / "tokenizer.model"
        _cache["sentencepiece"] = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert loaded["sentencepiece"].encode(text) == _cache["sentencepiece"].encode(text)


@pytest.mark.parametrize("name", KIND_OF)
@given(batch=st.lists(texts, max_size=5))
@settings(deadline=None, max_examples=30)
def test_encode_batch_is_encode_one_by_one(loaded, name, batch):
    ids, lengths = loaded[name].encode_batch(batch)
    rows = [loaded[name].encode(text) for text in batch]
    assert ids.dtype == np.int32 and lengths.dtype == np.int64
    assert lengths.tolist() == [len(row) for row in rows]
    assert ids.tolist() == [i for row in rows for i in row]


@pytest.mark.parametrize("name", ["gpt2", "json"])
@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_byte_level_decodes_to_the_same_text(loaded, name, text):
    assert loaded[name].decode(loaded[name].encode(text)) == text


@pytest.mark.parametrize("name", KIND_OF)
def test_lone_surrogates_become_the_replacement_character(loaded, name):
    assert loaded[name].encode("fox \ud800 dog") == loaded[name].encode("fox \ufffd dog")


# ---- fingerprints ----


def test_fingerprint_depends_on_contents_and_options_only(tokenizer_files, tmp_path):
    def fingerprint(path, **options):
        return load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(path), **options)).fingerprint

    original = (tokenizer_files / "bert" / "vocab.txt").read_bytes()
    same, other = tmp_path / "same.txt", tmp_path / "other.txt"
    same.write_bytes(original)
    other.write_bytes(original.replace(b"brown", b"crown"))
    base = fingerprint(tokenizer_files / "bert")
    assert len(base) == 64
    assert fingerprint(same) == base
    assert fingerprint(same, fixed_command_tokens=False) == base  # an option of another kind
    assert fingerprint(other) != base
    assert fingerprint(same, lowercase=False) != base


def test_fingerprints_of_all_types_differ(loaded, tokenizer_files):
    config = TokenizerConfig(
        kind="sentencepiece", path=str(tokenizer_files / "sentencepiece"), fixed_command_tokens=False
    )
    all_tokenizers = [*loaded.values(), load_tokenizer(config)]
    assert len({tokenizer.fingerprint for tokenizer in all_tokenizers}) == len(all_tokenizers)


def test_fingerprint_covers_the_merges(tokenizer_files, tmp_path):
    vocab = json.loads((tokenizer_files / "gpt2" / "vocab.json").read_text())
    merges = [m.split() for m in (tokenizer_files / "gpt2" / "merges.txt").read_text().splitlines()[1:]]
    prints = set()
    for name, kept in (("all", merges), ("fewer", merges[:-1])):
        write_gpt2(tmp_path / name, vocab, kept)
        prints.add(load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path / name))).fingerprint)
    assert len(prints) == 2
