"""Which tokens begin words, for each family of tokenizers."""

from __future__ import annotations

import json

import numpy as np

from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of


def test_wordpiece(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "un", "##aff", "##able", "中", "##国"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(tmp_path / "vocab.txt")))
    known = vocabulary_of(tokenizer)
    assert known.size == tokenizer.vocab_size and known.special == tokenizer.special
    assert np.flatnonzero(~known.word_start).tolist() == [7, 8, 10]
    assert known.token_texts[6:11] == ("un", "aff", "able", "中", "国")
    assert known.sentence_end[5] and not known.sentence_end[6]


def test_byte_level_bpe(tmp_path):
    """A word begins at its space; the first token of a piece is a unit anyway."""
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    vocab = {text: i for i, text in enumerate([*alphabet, "Ġt", "Ġth", "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ t\nĠt h\nh e\n", encoding="utf-8")
    tokenizer = load_tokenizer(TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path)))
    known = vocabulary_of(tokenizer)
    ids = tokenizer.encode(" the")
    assert [bool(known.word_start[i]) for i in ids] == [True, False]
    assert not known.word_start[vocab["he"]]


def test_words_of_a_vocabulary_without_pieces_begin_words(tmp_path):
    """WordPiece without a single `##`: each token is a word."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue"]) + "\n")
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(path)))
    word_start = vocabulary_of(tokenizer).word_start
    assert word_start is not None and word_start.all()
