"""What a start says of the samples that it draws: how much is predicted, and where words begin."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import tokenizers
from support.data.corpora import make
from support.data.word_families import CORPUS, PROSE, families
from tokenizers import Regex, models, pre_tokenizers

from data_utils.loader.config import CorpusConfig, DataConfig, PhaseSamples
from data_utils.loader.drawn_shares import drawn_shares
from data_utils.loader.loader import open_datasets
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from data_utils.tokenizers.word_shares import word_shares


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens a corpus of texts and an objective, with a tokenizer of Metaspace."""
    directory = tmp_path_factory.mktemp("shares")
    families()["bpe, metaspace"][0]().save(str(directory / "tokenizer.json"))
    config = TokenizerConfig(kind="hf_json", path=str(directory))

    def open_one(name, texts, phases=(), **objectives):
        path = directory / name
        if not path.exists():
            path.mkdir()
            make(path, texts, partial(load_tokenizer, config))
        choices = [
            ObjectiveChoice(objective, OBJECTIVES[objective].config_class(**settings))
            for objective, settings in objectives.items()
        ]
        data = DataConfig(train=(CorpusConfig(prefix=str(path / "out" / "corpus")),), sequence_length=128)
        samples = [PhaseSamples(first, data, choices) for first in phases]
        return open_datasets(data, choices, load_tokenizer(config), 3, phases=samples).train

    return open_one


def test_a_start_says_both_shares(opened):
    loader = opened("prose", CORPUS, masked_lm={"whole_words": True}, causal={})
    predicted, words = drawn_shares(loader)
    samples = np.arange(256)
    text, _, _ = loader.mixture.fetch(samples)
    starts = loader.objective.objectives[0].vocabulary.word_starts(text)
    assert f"begin at {100 * starts.mean():.1f} %" in words
    share = float(predicted.split("masked_lm ")[1].split(" %")[0])
    assert share == pytest.approx(15, abs=2) and "causal 100.0 %" in predicted


def test_a_text_that_is_one_word_is_warned_of(opened):
    """Without a space a text is hidden whole, and masks look like masks."""
    loader = opened("long", ["".join(text.split()) for text in CORPUS], masked_lm={"whole_words": True})
    _, _, *warnings = drawn_shares(loader)
    assert [warning.split()[0] for warning in warnings] == ["warning:", "warning:"]
    assert "masked_lm masks whole words" in warnings[0] and "masked_lm predicts" in warnings[1]


def test_a_text_that_is_one_word_is_nobodys_matter_where_tokens_are_hidden(opened):
    loader = opened("tokens", ["".join(text.split()) for text in CORPUS], masked_lm={})
    assert not [line for line in drawn_shares(loader) if line.startswith("warning")]


def test_unknown_words_are_said(tmp_path):
    tree = {"type": "BPE", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "merges": [], "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": tree, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []})
    )
    vocabulary = vocabulary_of(load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path))))
    (line,) = word_shares(np.array([1, 2, 1]), vocabulary, "their")
    assert str(tmp_path) in line and "spaces" in line


READ_BESIDE = (
    "entities",
    "capitalization",
    "discourse_relation",
    "relevance",
    "contrastive",
)  # corpora of their own
ORDINARY = [" ".join([*PROSE] * 6)] * 8


ALWAYS = {
    "blank_infilling",
    "t5",
}  # each compiles its loop, for seconds


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS))
        for name in sorted(OBJECTIVES.keys() - {*READ_BESIDE})
    ],
)
def test_ordinary_text_is_not_warned_of(opened, name):
    """Each objective predicts about the share that its settings say, in documents longer than a sample."""
    texts = ("sentences", [*PROSE] * 20) if name in ("optimus", "tsdae") else ("ordinary", ORDINARY)
    section = {"sentinel_first": 30, "sentinel_count": 9} if name == "t5" else {}  # words of the vocabulary
    objective, *more = drawn_shares(opened(*texts, **{name: section}))
    assert name in objective and not [line for line in more if line.startswith("warning")]
    assert name in ("optimus", "tsdae") or "words begin" in more[0]


def test_no_sample_of_a_later_phase_is_drawn(opened):
    """The first phase of a run may have few samples."""
    predicted, *_ = drawn_shares(opened("ordinary", ORDINARY, phases=(0, 12), masked_lm={}))
    assert "first 12 samples" in predicted


def test_a_vocabulary_of_words_alone_is_told_so(tmp_path):
    """A WordLevel behind a cut into characters: words are known, and each is one token."""
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    made = load_tokenizer(TokenizerConfig(kind="hf_json", path=str(tmp_path)))
    (line,) = word_shares(np.array([1, 2, 2, 1]), vocabulary_of(made), "their")
    assert line.startswith("words begin at 100.0 % of their tokens: each token is a word")
