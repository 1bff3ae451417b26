"""Ids against independent encoders, special tokens out of reach of text, released layouts, damaged files."""

import itertools
import json
import unicodedata
from dataclasses import asdict

import numpy as np
import pytest
import regex
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizer_files import (
    BERT_SPECIALS,
    BYTE_SYMBOLS,
    CORPUS,
    KIND_OF,
    SENTENCEPIECE_SIZE,
    bert_vocab,
    byte_bpe_json,
    files,  # noqa: F401  a fixture
    roberta_json,
    roberta_vocab,
    write_gpt2,
)
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from data_utils.base.errors import ConfigError, DataError
from data_utils.text.tokenizers import (
    HIDDEN,
    SPECIAL_NAMES,
    TokenizerConfig,
    load_tokenizer,
    sentencepiece_special_tokens,
)

LITERALS = [
    *SPECIAL_NAMES.values(),
    *("<s>", "</s>", "<unk>", "<pad>", "<mask>", "<eop>", "<sop>", "<bos>", "<0x0A>"),
    *(HIDDEN + name for name in ("<s>", "[MASK]", "<|endoftext|>", "<unk>")),
]
texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.lists(
    st.sampled_from([*LITERALS, " ", "  ", "\n", "the", "quick", " fox", "é", "今", ".", "'s", "12"]),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def loaded(files):
    """Every tokenizer by the name of its directory."""
    return {n: load_tokenizer(TokenizerConfig(kind=k, path=str(files / n))) for n, k in KIND_OF.items()}


# ---- ids ----


@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_gpt2_ids_agree_with_transformers(files, loaded, text):
    reference = gpt2_reference(files)
    # split_special_tokens: transformers otherwise gives the literal <|endoftext|> its special id
    assert loaded["gpt2"].encode(text) == reference.encode(text, split_special_tokens=True)


_cache = {}


def gpt2_reference(files):
    if files not in _cache:
        _cache[files] = transformers.GPT2Tokenizer(
            vocab=str(files / "gpt2" / "vocab.json"), merges=str(files / "gpt2" / "merges.txt")
        )
    return _cache[files]


# Letters and digits whose Unicode classes have been fixed for long, so that two libraries' tables agree.
@given(text=st.lists(st.sampled_from([*"abXY éßñЖд今天019'’ \t\n.,!?-_…🙂st", " the", "  "])).map("".join))
@settings(deadline=None, max_examples=200)
def test_gpt2_ids_agree_with_a_plain_bpe(files, loaded, text):
    vocab = json.loads((files / "gpt2" / "vocab.json").read_text())
    lines = (files / "gpt2" / "merges.txt").read_text().splitlines()[1:]
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
def test_bert_ids_agree_with_transformers(files, lowercase, text):
    key = ("bert", lowercase)
    if key not in _cache:
        path = str(files / "bert" / "vocab.txt")
        config = TokenizerConfig(kind="bert_wordpiece", path=path, lowercase=lowercase)
        _cache[key] = load_tokenizer(config), transformers.BertTokenizer(vocab=path, do_lower_case=lowercase)
    ours, reference = _cache[key]
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False, split_special_tokens=True)


@given(text=st.text(st.sampled_from("the quick foxé今天。.,!?[]<>|#'\t\nÀÉGM09"), max_size=40))
@settings(deadline=None, max_examples=200)
def test_bert_ids_agree_with_the_plain_python_wordpiece(files, loaded, text):
    if "legacy" not in _cache:
        _cache["legacy"] = BertTokenizerLegacy(str(files / "bert" / "vocab.txt"))
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
def test_sentencepiece_ids_are_the_models_own(files, loaded, text):
    if "sentencepiece" not in _cache:
        path = files / "sentencepiece" / "tokenizer.model"
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


# ---- special tokens ----


@pytest.mark.parametrize("name", KIND_OF)
@given(text=texts)
@settings(deadline=None, max_examples=150)
def test_text_never_becomes_a_special_token(loaded, name, text):
    tokenizer = loaded[name]
    allowed = {tokenizer.special.unk}  # for characters that WordPiece and Unigram do not know
    assert not set(tokenizer.encode(text)) & (tokenizer.special_names.keys() - allowed)


@pytest.mark.parametrize("name", KIND_OF)
@pytest.mark.parametrize("literal", LITERALS)
def test_each_literal_alone_is_text(loaded, name, literal):
    tokenizer = loaded[name]
    ids = tokenizer.encode(f"a {literal} b")
    assert len(ids) > 2
    assert not set(ids) & set(asdict(tokenizer.special).values()) - {tokenizer.special.unk}


@pytest.mark.parametrize("name", KIND_OF)
def test_prompts_give_the_three_masks_their_ids(loaded, name):
    tokenizer = loaded[name]
    special = tokenizer.special
    ids = tokenizer.encode_with_specials("the [MASK] fox[sMASK] [gMASK]")
    expected = [
        *tokenizer.encode("the"),
        special.mask,
        *tokenizer.encode(" fox"),
        special.smask,
        special.gmask,
    ]
    assert ids == expected
    others = "".join(n for n in SPECIAL_NAMES.values() if n not in ("[MASK]", "[sMASK]", "[gMASK]"))
    assert tokenizer.encode_with_specials(others) == tokenizer.encode(others)


def test_decode_shows_special_tokens_by_name(loaded):
    shown = {
        "gpt2": "the[MASK] fox<|startofpiece|> dog<|endofpiece|><|endoftext|>",
        "json": "the[MASK] fox<|startofpiece|> dog<|endofpiece|><|endoftext|>",
        "bert": "the [MASK] fox <|startofpiece|> dog <|endofpiece|> [PAD]",  # BERT's eos is [PAD]
        "unigram": "the[MASK] fox<|startofpiece|> dog<|endofpiece|></s>",
        "sentencepiece": "the[MASK] fox<|startofpiece|> dog<|endofpiece|><|endoftext|>",
    }
    for name, expected in shown.items():
        tokenizer, s = loaded[name], loaded[name].special
        encode = tokenizer.encode
        ids = [*encode("the"), s.mask, *encode(" fox"), s.sop, *encode(" dog"), s.eop, s.eos]
        assert tokenizer.decode(ids) == expected
        assert tokenizer.decode(np.array(ids), skip_special=True) == "the fox dog"


@pytest.mark.parametrize("name", KIND_OF)
def test_every_id_has_a_text_and_no_other_id_does(loaded, name):
    tokenizer = loaded[name]
    assert all(tokenizer.token_to_text(i) for i in range(tokenizer.vocab_size))
    for outside in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.decode([outside])


@pytest.mark.parametrize("name", KIND_OF)
def test_roles_have_ids_of_their_own(loaded, name):
    special = asdict(loaded[name].special)
    shared = {("pad", "eos")}  # GPT-2, BERT, SentencePiece
    if name == "roberta":
        shared |= {("sep", "eos"), ("sep", "pad")}
    roles = sorted(special)
    for i, first in enumerate(roles):
        for second in roles[i + 1 :]:
            assert special[first] != special[second] or (second, first) in shared
    assert max(special.values()) < loaded[name].vocab_size


def test_released_bert_layout(tmp_path):
    lines = [f"[unused{i}]" for i in range(30522)]
    for token_id, name in {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}.items():
        lines[token_id] = name
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(tmp_path / "vocab.txt")))
    assert tokenizer.vocab_size == 30527
    assert asdict(tokenizer.special) == {
        **dict(pad=0, eos=0, unk=100, cls=101, sep=102, mask=103, sop=30522, eop=30523),
        **dict(gmask=30524, smask=30525, dblock=30526),
    }


def test_released_gpt2_layout(tmp_path):
    names = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(50256 - 256)), "<|endoftext|>"]
    write_gpt2(tmp_path, {name: i for i, name in enumerate(names)}, [])
    tokenizer = load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path)))
    assert tokenizer.vocab_size == 50266
    assert asdict(tokenizer.special) == {
        **dict(eos=50256, pad=50256, sop=50257, eop=50258, cls=50259, mask=50260, sep=50261, unk=50262),
        **dict(gmask=50263, smask=50264, dblock=50265),
    }
    assert (
        load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path / "vocab.json"))).vocab_size
        == 50266
    )


ROBERTA_TEXT = "The fox <s> <|endoftext|> </s>"


@pytest.mark.parametrize("kind", ["hf_json", "gpt2_bpe"])
@pytest.mark.parametrize("size", [300, 50265])
def test_released_roberta_layout(tmp_path, kind, size):
    vocab = roberta_vocab(size)
    write_gpt2(tmp_path, vocab, [])
    (tmp_path / "tokenizer.json").write_text(roberta_json(vocab))
    tokenizer = load_tokenizer(TokenizerConfig(kind=kind, path=str(tmp_path)))
    assert asdict(tokenizer.special) == {
        **dict(cls=0, eos=2, pad=2, sep=2, unk=3, mask=size - 1, sop=size, eop=size + 1),
        **dict(gmask=size + 2, smask=size + 3, dblock=size + 4),
    }
    assert tokenizer.vocab_size == size + 5
    ids = tokenizer.encode(ROBERTA_TEXT)
    assert not set(ids) & tokenizer.special_names.keys() and tokenizer.decode(ids) == ROBERTA_TEXT
    assert tokenizer.special_names[1] == "<pad>" and tokenizer.special_names[size - 5] == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode_with_specials("a [MASK]")) == "a<mask>"


def test_names_of_roberta_beside_those_of_glm_mean_glm(tmp_path):
    """A tokenizer.json that has [MASK] of its own is read as before."""
    names = ["<s>", "</s>", "<unk>", "<mask>", "[MASK]", "[PAD]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(names)))
    special = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path))).special
    assert (special.mask, special.pad, special.eos, special.cls) == (4, 5, 1, 0)
    assert special.sep > 5


def test_released_chinese_layouts(files):
    shared = dict(eos=50000, pad=50000, sep=50001, cls=50002, mask=50003, unk=50004, sop=50006, eop=50007)
    shared |= dict(smask=50008)
    plain, size = sentencepiece_special_tokens(50000, fixed_command_tokens=False)
    assert asdict(plain) == shared | dict(gmask=50007, dblock=50009) and size == 50010
    fixed, size = sentencepiece_special_tokens(50000, fixed_command_tokens=True)
    assert asdict(fixed) == shared | dict(gmask=50009, dblock=50010) and size == 50011
    for option in (True, False):
        config = TokenizerConfig(
            kind="sentencepiece", path=str(files / "sentencepiece"), fixed_command_tokens=option
        )
        tokenizer = load_tokenizer(config)
        assert (tokenizer.special, tokenizer.vocab_size) == sentencepiece_special_tokens(
            SENTENCEPIECE_SIZE, option
        )
        gmask = tokenizer.encode_with_specials("[gMASK]")
        assert tokenizer.decode(gmask) == ("[gMASK]" if option else "<|endofpiece|>")
        assert tokenizer.token_to_text(SENTENCEPIECE_SIZE + 5) == f"[reserved {SENTENCEPIECE_SIZE + 5}]"


def test_tokenizer_json_roles(loaded, files):
    first = asdict(loaded["json"].special)  # the names that train_tokenizer.py writes, in its order
    assert first == {role: i for i, role in enumerate(SPECIAL_NAMES)} and loaded["json"].vocab_size == 431
    unigram = json.loads((files / "unigram" / "tokenizer.json").read_text())
    after = unigram["added_tokens"][-1]["id"] + 1
    assert asdict(loaded["unigram"].special) == {
        **dict(pad=0, cls=1, eos=2, unk=3),
        **dict(sop=after, eop=after + 1, mask=after + 2, sep=after + 3),
        **dict(gmask=after + 4, smask=after + 5, dblock=after + 6),
    }
    think = loaded["unigram"].encode("a <think> b")
    assert unigram["added_tokens"][-2]["id"] in think  # an added token that is not special stays one token


@pytest.mark.parametrize(
    ("names", "eos"),
    [(["[PAD]", "[SEP]"], "[PAD]"), (["[SEP]"], "[SEP]"), ([], "<|endoftext|>"), (["</s>"], "</s>")],
)
def test_eos_falls_back(tmp_path, names, eos):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(names)))
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    assert tokenizer.decode([tokenizer.special.eos]) == eos
    assert tokenizer.decode([tokenizer.special.pad]) == ("[PAD]" if "[PAD]" in names else eos)


def test_dropout_of_a_tokenizer_json_is_switched_off(tmp_path, loaded):
    tree = byte_bpe_json(list(SPECIAL_NAMES.values()))
    tree["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    assert tokenizer.encode(CORPUS[0]) == loaded["json"].encode(CORPUS[0])


# ---- sentence ends ----


@pytest.mark.parametrize("name", KIND_OF)
def test_sentence_ends(loaded, name):
    tokenizer = loaded[name]
    ends = tokenizer.sentence_end_ids()
    assert ends.shape == (tokenizer.vocab_size,) and ends.dtype == bool
    assert not ends[list(tokenizer.special_names)].any()
    for i in range(tokenizer.vocab_size):
        text = tokenizer.token_to_text(i)
        if i not in tokenizer.special_names and text.strip():
            assert not (ends[i] and text.strip()[-1].isalnum())
            assert ends[i] or text.strip()[-1] not in ".?!;:。？！；…"
    for mark in ".?!;:":
        assert ends[tokenizer.encode(f"fox{mark}")[-1]] and not ends[tokenizer.encode("fox")[-1]]


def test_sentence_ends_of_newlines_quotes_and_chinese(tmp_path):
    names = [
        *BYTE_SYMBOLS,
        "Ċ",
        "ĊĊ",
        '."',
        "?)",
        "Ġ.",
        ".5",
        "://",
        "!Ġ",
        "ãĢĤ",
        "âĢ¦",
        "'",
        "<|endoftext|>",
    ]
    names = list(dict.fromkeys(names))
    write_gpt2(tmp_path, {name: i for i, name in enumerate(names)}, [])
    ends = load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path))).sentence_end_ids()
    found = {name for name, end in zip(names, ends, strict=False) if end}
    assert found == {*".?!;:", "Ċ", "ĊĊ", '."', "?)", "Ġ.", "!Ġ", "ãĢĤ", "âĢ¦"}


# ---- fingerprints ----


def test_fingerprint_depends_on_contents_and_options_only(files, tmp_path):
    def fingerprint(path, **options):
        return load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(path), **options)).fingerprint

    original = (files / "bert" / "vocab.txt").read_bytes()
    same, other = tmp_path / "same.txt", tmp_path / "other.txt"
    same.write_bytes(original)
    other.write_bytes(original.replace(b"brown", b"crown"))
    base = fingerprint(files / "bert")
    assert len(base) == 64
    assert fingerprint(same) == base
    assert fingerprint(same, fixed_command_tokens=False) == base  # an option of another kind
    assert fingerprint(other) != base
    assert fingerprint(same, lowercase=False) != base


def test_fingerprints_of_all_kinds_differ(loaded, files):
    config = TokenizerConfig(
        kind="sentencepiece", path=str(files / "sentencepiece"), fixed_command_tokens=False
    )
    all_tokenizers = [*loaded.values(), load_tokenizer(config)]
    assert len({tokenizer.fingerprint for tokenizer in all_tokenizers}) == len(all_tokenizers)


def test_fingerprint_covers_the_merges(files, tmp_path):
    vocab = json.loads((files / "gpt2" / "vocab.json").read_text())
    merges = [m.split() for m in (files / "gpt2" / "merges.txt").read_text().splitlines()[1:]]
    prints = set()
    for name, kept in (("all", merges), ("fewer", merges[:-1])):
        write_gpt2(tmp_path / name, vocab, kept)
        prints.add(load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path / name))).fingerprint)
    assert len(prints) == 2


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
        "256 of the 256",
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
    "no model": ("sentencepiece", {"x": "y"}, "has none"),
    "two models": ("sentencepiece", {"a.model": "", "b.model": ""}, "has a.model, b.model"),
    "json is no JSON": ("hf_json", {"tokenizer.json": "x"}, "not valid JSON"),
    "json too deep": ("hf_json", {"tokenizer.json": "[" * 100_000}, "not valid JSON"),
    "no model in json": ("hf_json", {"tokenizer.json": "{}"}, "no model"),
    "no tokenizer.json": ("hf_json", {"vocab.txt": "x"}, "tokenizer.json: No such file"),
    "json without vocab": ("hf_json", set_in("model", "vocab", None), "has no vocabulary"),
    "huge id": ("hf_json", set_in("added_tokens", 0, "id", 10**9), "must be 0"),
    "added token gap": (
        "hf_json",
        set_in("added_tokens", 0, {"id": 900, "content": "<x>"}),
        "cannot use this file",
    ),
    "bad merges": ("hf_json", set_in("model", "merges", [1]), "must be two pieces"),
    "merge prefix": ("hf_json", set_in("model", "continuing_subword_prefix", "x"), "lacks the prefix"),
    "unknown model": ("hf_json", set_in("model", "type", "X"), "cannot use this file"),
    "byte symbol missing": ("hf_json", lambda tree: tree["model"]["vocab"].pop("Ā"), "1 of the 256"),
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


def test_a_special_token_that_merges_make_is_refused(tmp_path):
    tree = byte_bpe_json(["[PAD]"])
    merged = "".join(tree["model"]["merges"][-1])
    tree["added_tokens"].append(
        {**tree["added_tokens"][0], "id": tree["model"]["vocab"][merged], "content": merged}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match="also a merge result"):
        load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))


def test_too_large_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data_utils.text.tokenizer_readers.MAX_FILE_BYTES", 3)
    (tmp_path / "tokenizer.json").write_text("{  }")
    with pytest.raises(DataError, match="larger than 3 bytes"):
        load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
