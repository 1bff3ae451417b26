"""Special tokens out of reach of text, their ids in released layouts, and sentence ends."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from support.data.tokenizer_files import (
    BYTE_SYMBOLS,
    CORPUS,
    KIND_OF,
    LITERALS,
    SENTENCEPIECE_SIZE,
    byte_bpe_json,
    roberta_json,
    roberta_vocab,
    texts,
    write_gpt2,
)

from data_utils.common.errors import UserError
from data_utils.common.settings import build
from data_utils.tokenizers.sentencepiece_tokenizer import sentencepiece_special_tokens
from data_utils.tokenizers.special_tokens import NO_TOKEN, SPECIAL_NAMES
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

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
@pytest.mark.parametrize("size", [300, pytest.param(50265, marks=pytest.mark.slow)])
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


def test_released_chinese_layouts(tokenizer_files):
    shared = dict(eos=50000, pad=50000, sep=50001, cls=50002, mask=50003, unk=50004, sop=50006, eop=50007)
    shared |= dict(smask=50008)
    plain, size = sentencepiece_special_tokens(50000, fixed_command_tokens=False)
    assert asdict(plain) == shared | dict(gmask=50007, dblock=50009) and size == 50010
    fixed, size = sentencepiece_special_tokens(50000, fixed_command_tokens=True)
    assert asdict(fixed) == shared | dict(gmask=50009, dblock=50010) and size == 50011
    for option in (True, False):
        config = TokenizerConfig(
            kind="sentencepiece", path=str(tokenizer_files / "sentencepiece"), fixed_command_tokens=option
        )
        tokenizer = load_tokenizer(config)
        assert (tokenizer.special, tokenizer.vocab_size) == sentencepiece_special_tokens(
            SENTENCEPIECE_SIZE, option
        )
        gmask = tokenizer.encode_with_specials("[gMASK]")
        assert tokenizer.decode(gmask) == ("[gMASK]" if option else "<|endofpiece|>")
        assert tokenizer.token_to_text(SENTENCEPIECE_SIZE + 5) == f"[reserved {SENTENCEPIECE_SIZE + 5}]"


def test_tokenizer_json_roles(loaded, tokenizer_files):
    first = asdict(loaded["json"].special)  # the names that train_tokenizer.py writes, in its order
    assert first == {role: i for i, role in enumerate(SPECIAL_NAMES)} and loaded["json"].vocab_size == 431
    unigram = json.loads((tokenizer_files / "unigram" / "tokenizer.json").read_text())
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


def test_roles_of_unusual_names(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(["<begin>", "<end>"])))
    section = {"kind": "hf_json", "path": str(tmp_path), "added_tokens": "none"}
    plain = load_tokenizer(TokenizerConfig(**section))
    named = load_tokenizer(TokenizerConfig(**section, roles={"eos": "<end>", "cls": "<begin>"}))
    assert plain.special.eos == NO_TOKEN and {"cls", "eos"} <= plain.lacking
    assert not {"cls", "eos"} & named.lacking
    names = {role: named.special_names[getattr(named.special, role)] for role in ("cls", "eos")}
    assert names == {"cls": "<begin>", "eos": "<end>"} and "<end>" not in map(
        named.token_to_text, named.encode("<end>")
    )
    assert plain.fingerprint != named.fingerprint  # their corpora have other ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": {"bos": "<s>"}}, r"tokenizer.roles has 'bos'; it must be one of pad, unk, cls,"),
        ({"roles": {"eos": 3}}, r"tokenizer.roles.eos is 3; it must be the token as text"),
        (
            {"roles": {"eos": "<end>"}, "kind": "gpt2_bpe"},
            "roles is set, but in files of tokenizer.kind gpt2_bpe",
        ),
        ({"roles": {"eos": "<nothing>"}}, r"roles.eos is '<nothing>', which is no added token of"),
        *(
            ({"roles": {role: "!"}}, rf"roles.{role} is '!', which is no added token of")
            for role in SPECIAL_NAMES
        ),
    ],
)
def test_roles_that_cannot_be_are_refused(tmp_path, changes, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(["<end>"])))
    with pytest.raises(UserError, match=message):
        load_tokenizer(
            build(TokenizerConfig, {"kind": "hf_json", "path": str(tmp_path), **changes}, "tokenizer.")
        )


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
