"""Vocabularies as published: nothing is added, roles have the published ids. Existing tokenizers stay as they are."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from support.data.tokenizer_files import (
    BYTE_SYMBOLS,
    CORPUS,
    bert_vocab,
    roberta_json,
    roberta_vocab,
    unigram_json,
    write_gpt2,
)
from tokenizers import models, normalizers, pre_tokenizers, trainers

from data_utils.common.errors import DataError
from data_utils.tokenizers.special_tokens import NO_TOKEN
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of

GLMS = {"sop", "eop", "smask", "gmask", "dblock"}


def load(path, kind, **options):
    return load_tokenizer(TokenizerConfig(kind=kind, path=str(path), **{"added_tokens": "none", **options}))


def ids_of(tokenizer, *roles):
    return tuple(getattr(tokenizer.special, role) for role in roles)


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (30522, {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}),
        (28996, {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}),
        (17964, {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[UNK]": 17963}),
    ],
)
def test_bert_and_ernie_end_documents_with_sep(tmp_path, size, places):
    lines = [f"[unused{i}]" for i in range(size)]
    for name, token_id in places.items():
        lines[token_id] = name
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n")
    tokenizer = load(tmp_path, "bert_wordpiece")
    assert tokenizer.vocab_size == size and tokenizer.lacking == GLMS
    assert ids_of(tokenizer, "pad", "unk", "cls", "sep", "mask") == tuple(
        places[f"[{role}]"] for role in ("PAD", "UNK", "CLS", "SEP", "MASK")
    )
    assert tokenizer.special.eos == places["[SEP]"]
    rows = load(tmp_path, "bert_wordpiece", vocab_size=size + 36)
    assert (rows.vocab_size, rows.special) == (size + 36, tokenizer.special)
    assert vocabulary_of(rows).num_tokens == size and vocabulary_of(rows).size == size + 36
    assert rows.token_to_text(size) == f"[reserved {size}]"


@pytest.mark.parametrize("kind", ["hf_json", "gpt2_bpe"])
def test_roberta_and_bart_have_fairseqs_ids(tmp_path, kind):
    """`vocab.json` as transformers' RobertaTokenizer reads it: <s> 0, <pad> 1, </s> 2, <unk> 3, text, <mask> last."""
    vocab = roberta_vocab(50265)
    write_gpt2(tmp_path, vocab, [])
    (tmp_path / "tokenizer.json").write_text(roberta_json(vocab))
    tokenizer = load(tmp_path, kind)
    assert tokenizer.vocab_size == 50265 and tokenizer.lacking == GLMS
    assert ids_of(tokenizer, "cls", "pad", "sep", "eos", "unk", "mask") == (0, 1, 2, 2, 3, 50264)
    assert tokenizer.encode("a!") == [vocab["a"], vocab["!"]]
    assert not set(tokenizer.encode("<s> <pad> <mask> <|endoftext|>")) & tokenizer.special_names.keys()


def test_gpt2_has_one_special_token(tmp_path):
    names = [*BYTE_SYMBOLS, *(f"a{i}" for i in range(50256 - 256)), "<|endoftext|>"]
    write_gpt2(tmp_path, {name: i for i, name in enumerate(names)}, [])
    tokenizer = load(tmp_path, "gpt2_bpe")
    assert tokenizer.vocab_size == 50257 and tokenizer.special_names == {50256: "<|endoftext|>"}
    assert ids_of(tokenizer, "eos", "pad", "sop") == (50256, 50256, 50256)
    assert tokenizer.lacking == GLMS | {"cls", "sep", "mask", "unk"}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """Files as GPT's: merges that mark the end of a word."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    path = tmp_path_factory.mktemp("gpt")
    write_gpt2(path, model["vocab"], model["merges"])
    return path


def test_gpt_encodes_as_transformers_does(gpt):
    from transformers import OpenAIGPTTokenizer

    vocab = json.loads((gpt / "vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (gpt / "merges.txt").read_text().splitlines()[1:]]
    theirs, ours = OpenAIGPTTokenizer(vocab=vocab, merges=merges), load(gpt, "gpt_bpe")
    assert ours.vocab_size == len(vocab)
    for text in (*CORPUS[:3], "The FOX, naïve; jumps!", "ɸ unknown", "<unk> [MASK]"):
        expected = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if "<unk>" not in text:
            assert ours.encode(text) == expected
    assert ours.decode(ours.encode("The lazy dog .")) == "the lazy dog ."
    ids = np.array(ours.encode("The lazy dog ."))
    words = np.split(ids, np.flatnonzero(vocabulary_of(ours).word_starts(ids)))
    assert [ours.decode(word) for word in words] == ["the", "lazy", "dog", "."]


def test_gpt_has_no_end_of_document(gpt):
    tokenizer = load(gpt, "gpt_bpe")
    assert tokenizer.special.eos == NO_TOKEN and "eos" in tokenizer.lacking
    assert tokenizer.special_names == {tokenizer.special.unk: "<unk>"}
    assert min(ids_of(tokenizer, "pad", "cls", "mask", "sop")) >= 0  # rows hold them as ids
    with_glms = load(gpt, "gpt_bpe", added_tokens="glm")
    assert with_glms.special.eos == tokenizer.vocab_size and not with_glms.lacking


@pytest.mark.parametrize("kind", ["gpt_bpe", "gpt2_bpe"])
def test_the_two_kinds_of_bpe_refuse_each_others_files(tmp_path, gpt, kind):
    write_gpt2(tmp_path, {name: i for i, name in enumerate([*BYTE_SYMBOLS, "<|endoftext|>"])}, [])
    with pytest.raises(DataError, match="gpt2_bpe"):
        load(tmp_path if kind == "gpt_bpe" else gpt, kind)


def sentencepiece_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in CORPUS for line in text.splitlines()),
        model_writer=model, vocab_size=150, num_threads=1, minloglevel=2, hard_vocab_limit=False, **options,
    )  # fmt: skip
    (path / "spiece.model").write_bytes(model.getvalue())
    return path


def test_albert(tmp_path):
    path = sentencepiece_model(
        tmp_path, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols=["[CLS]", "[SEP]", "[MASK]"]
    )
    tokenizer = load(path, "sentencepiece")
    assert ids_of(tokenizer, "pad", "unk", "cls", "sep", "mask", "eos") == (0, 1, 2, 3, 4, 3)
    assert (
        tokenizer.vocab_size == sentencepiece.SentencePieceProcessor(str(path / "spiece.model")).vocab_size()
    )
    assert tokenizer.lacking == GLMS
    assert not set(tokenizer.encode("[CLS] fox [MASK]")) & {0, 2, 3, 4}


def test_xlnet_ends_documents_with_its_own_token(tmp_path):
    path = sentencepiece_model(
        tmp_path, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, user_defined_symbols=["<eop>"],
        control_symbols=["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
    )  # fmt: skip
    tokenizer = load(path, "sentencepiece")
    names = {
        role: tokenizer.token_to_text(getattr(tokenizer.special, role))
        for role in ("cls", "sep", "pad", "mask")
    }
    assert names == {"cls": "<cls>", "sep": "<sep>", "pad": "<pad>", "mask": "<mask>"}
    assert tokenizer.token_to_text(tokenizer.special.eos) == "<eod>" and tokenizer.special.unk == 0
    assert tokenizer.lacking == GLMS


def test_t5_has_its_sentinels_and_rows_without_a_token(tmp_path):
    path = sentencepiece_model(tmp_path, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    plain = load(path, "sentencepiece")
    size = plain.vocab_size
    tokenizer = load(path, "sentencepiece", added_tokens="t5", vocab_size=size + 128)
    assert tokenizer.vocab_size == size + 128 and plain.special == tokenizer.special
    assert ids_of(tokenizer, "pad", "eos", "unk") == (0, 1, 2)
    assert tokenizer.token_to_text(size + 99) == "<extra_id_0>"  # id 32,099 of 32,000 pieces
    assert tokenizer.token_to_text(size) == "<extra_id_99>"
    assert tokenizer.token_to_text(size + 100) == f"[reserved {size + 100}]"
    assert {"cls", "sep", "mask"} <= tokenizer.lacking
    assert vocabulary_of(tokenizer).sentinels == tuple(range(size + 99, size - 1, -1))
    assert vocabulary_of(plain).sentinels == ()
    ids = [*tokenizer.encode("the fox"), size + 99]
    assert tokenizer.decode(ids) == "the fox<extra_id_0>"


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_json_has_its_own_sentinels_beside_mask(tmp_path, special):
    """Ascending, and ordinary tokens in some files."""
    tree = unigram_json()
    first = max(token["id"] for token in tree["added_tokens"]) + 1
    names = ["[MASK]", *(f"<extra_id_{i}>" for i in range(12))]
    like = {**tree["added_tokens"][0], "special": special}
    tree["added_tokens"] += [{**like, "id": first + i, "content": name} for i, name in enumerate(names)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    known = vocabulary_of(load(tmp_path, "hf_json"))
    assert known.sentinels == tuple(range(first + 1, first + 13)) and known.special.mask == first


def test_too_few_ids_are_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n")
    with pytest.raises(DataError, match=r"tokenizer.vocab_size is 7, but .* tokens.* or to null"):
        load(tmp_path, "bert_wordpiece", vocab_size=7)


def test_added_tokens_are_part_of_the_fingerprint_and_ids_without_a_token_are_not(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n")
    fingerprints = [
        load(tmp_path, "bert_wordpiece", added_tokens=value).fingerprint
        for value in ("glm", "none", "t5", "optimus")
    ]
    assert len(set(fingerprints)) == 4
    size = len(bert_vocab())
    for rows in (size, size + 3):
        assert load(tmp_path, "bert_wordpiece", vocab_size=rows).fingerprint == fingerprints[1]


def test_fingerprints_of_existing_datasets_stay(tmp_path):
    """As computed before `added_tokens` existed; datasets and checkpoints record them."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]) + "\n")
    before = "e9715f7a3f3b640001177185d867d68e20d19e3eb061bb8814b32614a8e0649e"
    assert load(tmp_path, "bert_wordpiece", added_tokens="glm").fingerprint == before


def test_the_tokens_of_optimus_follow_gpt2s(tmp_path):
    """50257, 50258 and 50259 after GPT-2's 50,257. Text that spells them stays text."""
    write_gpt2(tmp_path, {name: i for i, name in enumerate([*BYTE_SYMBOLS, "<|endoftext|>"])}, [])
    plain = load(tmp_path, "gpt2_bpe")
    tokenizer = load(tmp_path, "gpt2_bpe", added_tokens="optimus")
    size = plain.vocab_size
    assert ids_of(tokenizer, "pad", "sop", "eop", "eos") == (size, size + 1, size + 2, plain.special.eos)
    assert tokenizer.vocab_size == size + 3 and tokenizer.lacking == plain.lacking - {"sop", "eop"}
    ids = [tokenizer.special.sop, *tokenizer.encode("a <BOS> b"), tokenizer.special.eop]
    assert max(ids[1:-1]) < size and tokenizer.decode(ids) == "<BOS>a <BOS> b<EOS>"
    assert tokenizer.decode(ids, skip_special=True) == "a <BOS> b"
    assert tokenizer.fingerprint != plain.fingerprint


def test_the_tokens_of_optimus_are_those_that_a_vocabulary_lacks(tmp_path):
    """BERT pads already; SentencePiece's models have none of the three here."""
    (tmp_path / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n")
    bert, size = load(tmp_path, "bert_wordpiece", added_tokens="optimus"), len(bert_vocab())
    assert ids_of(bert, "pad", "sop", "eop") == (0, size, size + 1) and bert.vocab_size == size + 2
    path = sentencepiece_model(tmp_path, unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1)
    tokenizer = load(path, "sentencepiece", added_tokens="optimus")
    size = tokenizer.vocab_size - 3
    assert ids_of(tokenizer, "pad", "sop", "eop") == (size, size + 1, size + 2)
    ids = [size + 1, *tokenizer.encode("the fox"), size + 2]
    assert tokenizer.decode(ids) == "<BOS> the fox<EOS>"
    assert tokenizer.decode(ids, skip_special=True) == "the fox"


def test_a_sentencepiece_model_with_a_piece_that_is_no_text_is_refused(tmp_path):
    path = sentencepiece_model(tmp_path, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    file = next(path.glob("*.model"))
    file.write_bytes(file.read_bytes().replace(b"<pad>", b"\xff\xfe\xfdd>", 1))
    with pytest.raises(DataError, match=r"is not a SentencePiece model; give the \.model file"):
        load(path, "sentencepiece")
