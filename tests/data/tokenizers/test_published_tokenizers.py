"""The tokenizers of published systems against their transformers classes: equal ids of texts, roles, sentinels."""

from __future__ import annotations

import json

import pytest
from support.data.tokenizer_files import CORPUS, byte_bpe_json, unigram_json, write_gpt2
from transformers import AlbertTokenizer, RobertaTokenizer, T5Tokenizer, XLNetTokenizer

from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

TEXTS = [*CORPUS[:3], "The FOX, naïve; jumps over 1999 dogs!", "  two  spaces ", "今天 ɸ"]
PIECES = [(piece, score) for piece, score in unigram_json()["model"]["vocab"] if not piece.startswith("<")]
XLNET = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")


def names(*given):
    return [(name, 0.0) for name in given]


def made(name):
    """The class with a small vocabulary in the order of the released one."""
    if name == "t5":
        sentinels = [f"<extra_id_{i}>" for i in range(99, -1, -1)]
        return T5Tokenizer(vocab=[*names("<pad>", "</s>", "<unk>"), *PIECES, *names(*sentinels)])
    if name == "albert":
        return AlbertTokenizer(vocab=[*names("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), *PIECES])
    return XLNetTokenizer(vocab=[*names(*XLNET), *PIECES])


def loaded(theirs, path):
    theirs.save_pretrained(path)
    return load_tokenizer(TokenizerConfig(kind="hf_json", path=str(path), added_tokens="none"))


def require_equal_ids(ours, theirs):
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("t5", {"pad": 0, "eos": 1, "unk": 2}),
        ("albert", {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "eos": 3}),
        ("xlnet", {"unk": 0, "cls": 3, "sep": 4, "pad": 5, "mask": 6, "eos": 7}),
    ],
)
def test_tokenizer_json_of_a_sentencepiece_system(name, roles, tmp_path):
    theirs = made(name)
    ours = loaded(theirs, tmp_path)
    assert ours.vocab_size == len(theirs)
    assert {role: getattr(ours.special, role) for role in roles} == roles
    assert not roles.keys() & ours.lacking and {"sop", "eop"} <= ours.lacking
    require_equal_ids(ours, theirs)
    literal = ours.encode("a <pad> [MASK] <mask> </s> <extra_id_0> <eod>")
    assert not set(literal) & (ours.special_names.keys() - {ours.special.unk})
    if name == "t5":
        assert [ours.token_to_text(ours.vocab_size - 1 - i) for i in (0, 99)] == [
            "<extra_id_0>",
            "<extra_id_99>",
        ]


@pytest.mark.parametrize("kind", ["gpt2_bpe", "hf_json"])
def test_roberta_and_bart_read_what_their_class_reads(kind, tmp_path):
    model = byte_bpe_json([])["model"]
    order = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *reversed(model["vocab"]),
        "<mask>",
    ]  # not the order of GPT-2's file
    vocab = {name: i for i, name in enumerate(order)}
    merges = [tuple(pair) for pair in model["merges"]]
    write_gpt2(tmp_path / "files", vocab, merges)
    theirs = RobertaTokenizer(vocab=vocab, merges=merges)
    theirs.save_pretrained(tmp_path / "json")
    path = tmp_path / ("files" if kind == "gpt2_bpe" else "json")
    ours = load_tokenizer(TokenizerConfig(kind=kind, path=str(path), added_tokens="none"))
    assert ours.vocab_size == len(theirs) == len(order)
    special = ours.special
    assert (special.cls, special.pad, special.eos, special.sep, special.unk) == (0, 1, 2, 2, 3)
    assert special.mask == theirs.mask_token_id == len(order) - 1
    require_equal_ids(ours, theirs)
    assert json.loads((tmp_path / "files/vocab.json").read_text())["</s>"] == 2
