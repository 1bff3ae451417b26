"""Scores of filled words: n-grams by hand, by their sum and by trying everything, blanks, a model's probabilities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.common.errors import ConfigError, DataError
from data_utils.loader.config import CorpusConfig, DataConfig
from data_utils.loader.loader import collate
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from data_utils.tokenizers.word_marks import WordMarks, WordToken
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer
from scripts.quickstart import words
from scripts.quickstart.ngram import BEAMS, DISCOUNT, NGram
from scripts.quickstart.scores import (
    exact_match,
    model_log_probabilities,
    ngram_scores,
    require_countable,
    table,
    token_scores,
    told_lengths,
)
from scripts.quickstart.words import SIDE, WordBlank, word_blanks

SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=4, gmask=5, sop=6, eop=7, eos=8, pad=9, unk=10, dblock=11)


def test_kneser_ney_by_hand() -> None:
    model = NGram(np.array([0, 1, 0, 1, 2]), 3, order=2)
    # Different tokens before 0, 1 and 2: 1, 1, 1, of 3. The last order-2 gram starts at token 1.
    once = np.array([1, 1, 1]) / 3 * (1 - DISCOUNT) + DISCOUNT / 3
    assert model.probabilities([]) == pytest.approx(once)
    # After 1: 0 once, 2 once. After 0: 1 twice.
    after_one = np.array([1 - DISCOUNT, 0, 1 - DISCOUNT]) / 2 + once * DISCOUNT
    assert model.probabilities([1]) == pytest.approx(after_one)
    assert model.probabilities([0])[1] == pytest.approx((2 - DISCOUNT) / 2 + once[1] * DISCOUNT / 2)
    assert model.probabilities([2]) == pytest.approx(once)  # nothing follows it: the shorter context
    assert model.filled([0], 1) == [1]


def test_an_order_of_one_counts_tokens() -> None:
    p = NGram(np.array([0, 0, 0, 2]), 4, order=1).probabilities([1, 2])
    assert p[0] == pytest.approx((3 - DISCOUNT) / 4 + 2 * DISCOUNT / 4 / 4) and p[1] == p[3] > 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.lists(st.integers(0, 5), max_size=8))
@settings(max_examples=60, deadline=None)
def test_probabilities_sum_to_one(tokens, before) -> None:
    p = NGram(np.array(tokens), 6).probabilities(before)
    assert p.sum() == pytest.approx(1) and (p > 0).all()


TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


@given(TOKENS, st.lists(st.integers(0, 4), max_size=8))
@settings(max_examples=60, deadline=None)
def test_one_token_of_many_texts_is_as_likely_as_among_all_tokens(tokens, before) -> None:
    model = NGram(np.array(tokens), 5)
    texts = np.array([[*before, token] for token in range(5)])
    np.testing.assert_allclose(model.likelihoods(texts), model.probabilities(before), rtol=1e-12)


def joint(model: NGram, before, middle, after) -> float:
    """The probability of a middle and of the text that sees it, token by token."""
    text, p = list(before), 1.0
    for token in [*middle, *after[: model.order - 1]]:
        p *= model.probabilities(text)[token]
        text.append(token)
    return p


@given(TOKENS, st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_gap_is_filled_by_both_sides_as_by_trying_everything(tokens, before, after) -> None:
    model = NGram(np.array(tokens), 5)
    everything = {
        middle: joint(model, before, middle, after) for middle in itertools.product(range(5), repeat=2)
    }
    assert len(everything) <= BEAMS
    best = tuple(model.filled(before, 2, after))
    assert everything[best] == pytest.approx(max(everything.values()))
    one = np.array([joint(model, before, [token], after) for token in range(5)])
    np.testing.assert_allclose(model.between(before, after), one / one.sum(), rtol=1e-9)


def test_large_vocabularies_are_refused() -> None:
    require_countable(6208)
    NGram(np.array([6207] * 6), 6208)
    with pytest.raises(
        ConfigError, match="the tokenizer has 32,000 tokens; the 5-gram model counts at most 6,208"
    ):
        require_countable(32000)


class Words:
    """A tokenizer of 20 "a", 21 "b", ... up to 45 "z"; 50 " a", 51 " b", ... begin a word; 80 is " 1"."""

    special, vocab_size, num_tokens, special_names, lacking = SPECIAL, 90, 90, {}, frozenset()

    class config:
        kind, path = "hf_json", "words"

    word_marks, sentinels = WordMarks("space", " "), ()

    def is_unknown(self, token: int) -> bool:
        return False

    def word_token(self, token: int) -> WordToken:
        return self.word_marks.word_token(self.decode([token]))

    def sentence_end_ids(self) -> None:
        return None

    def decode(self, tokens) -> str:
        letters = [
            chr(ord("a") + token - 20) if token < 46 else f" {chr(ord('a') + token - 50)}" for token in tokens
        ]
        return "".join(letters).replace(f" {chr(ord('a') + 30)}", " 1")


class Loader:
    """Every sample holds the same text, drawn by blank infilling as configured."""

    def __init__(self, text, **config):
        self.text = np.array(text, np.int32)
        vocabulary = Vocabulary(SPECIAL, 90, np.zeros(90, bool), np.arange(90) >= 50)
        self.rows = BlankInfilling(BlankInfillingConfig(**config), vocabulary, 3, 64)

    def batch(self, indices):
        (index,) = indices
        return collate(self.rows, self.text, [len(self.text)], [1], [index])


TEXT = [
    50,
    21,
    51,
    22,
    80,
    23,
    52,
    20,
    53,
    80,
    54,
    25,
    26,
    55,
    30,
    56,
    31,
    57,
    58,
    33,
    59,
    34,
    60,
    61,
    62,
    63,
]


@pytest.mark.parametrize(
    "kind", [{"token_prob": 1.0}, {"token_prob": 0.0}, {"token_prob": 0.5, "sentence_prob": 0.5}]
)
def test_a_word_is_left_out_of_each_text_whatever_a_run_masks(kind) -> None:
    blanks = word_blanks(Loader(TEXT, **kind), Words(), 60)
    assert len(blanks) == 60
    found = set()
    for blank in blanks:
        assert [*blank.before, *blank.word, *blank.after] == [SPECIAL.cls, *TEXT]
        assert len(blank.before) - 1 >= SIDE and len(blank.after) >= SIDE
        found.add(tuple(blank.word))
    # No " 1", no word of one letter, nothing near the ends.
    assert found == {(54, 25, 26), (55, 30), (56, 31)}
    assert blanks == word_blanks(Loader(TEXT, **kind), Words(), 60)


def test_texts_without_a_word_to_leave_out() -> None:
    with pytest.raises(DataError, match="no text of the first 3 validation samples has a word"):
        word_blanks(Loader(TEXT[:14]), Words(), 3)


def test_corpora_of_a_copied_run_may_be_given(tmp_path) -> None:
    gone = DataConfig(train=(CorpusConfig(prefix="gone/a"),), validation=(CorpusConfig(prefix="gone/b"),))
    with pytest.raises(DataError, match="gone/a, a corpus of the run, is not there; give --train PREFIX"):
        words._data_of(gone, {"train": [], "validation": []})
    (tmp_path / "new.json").touch()
    with pytest.raises(DataError, match=r"gone/b, .* give --validation PREFIX"):
        words._data_of(gone, {"train": [tmp_path / "new"], "validation": []})
    found = words._data_of(gone, {"train": [tmp_path / "new"], "validation": [tmp_path / "new"] * 2})
    assert [corpus.prefix for corpus in found.train + found.validation] == [str(tmp_path / "new")] * 3


BLANKS = [WordBlank([1, 20], [40], [21, 22]), WordBlank([1, 20, 40, 21], [30, 31], [23])]


def test_exact_matches_and_token_scores() -> None:
    assert exact_match(BLANKS, [[40], [30]]) == 0.5
    uniform = np.log(np.array([0.5, 0.25, 0.25]))
    scores = token_scores([(0, uniform), (2, uniform)])
    assert scores == {"token accuracy": 0.5, "nats per token": pytest.approx(1.5 * np.log(2))}


def test_each_word_is_asked_for_with_its_length() -> None:
    asked = []

    def fill(shortest, longest, some):
        assert shortest == longest == len(some[0].word)
        asked.append(longest)
        return [blank.word[::-1] for blank in some]

    assert told_lengths([*BLANKS, *BLANKS], fill) == [[40], [31, 30], [40], [31, 30]] and asked == [1, 2]


def test_ngrams_score_what_they_have_counted() -> None:
    learned = np.array([1, 20, 40, 21, 30, 31] * 3)
    scores = ngram_scores(NGram(learned, 50), BLANKS, sees_right=False)
    assert scores["token accuracy"] == scores["exact match"] == 1.0
    rows = table(
        {"unigram": scores, "model": scores | {"exact match, free length": 0.5}}, BLANKS
    ).splitlines()
    assert rows[0].startswith("2 words of as many validation texts, 3 tokens")
    assert rows[2].split() == ["token", "accuracy", "100.0%", "100.0%"]
    assert rows[5].split() == ["exact", "match,", "free", "length", "50.0%"]


def test_the_text_to_the_right_tells_what_the_left_cannot() -> None:
    """After 20 stand 30 and 31 equally often; what follows them differs."""
    learned = np.array([20, 30, 40] * 20 + [20, 31, 41] * 20)
    blank = WordBlank([1, 20], [31], [41])
    assert ngram_scores(NGram(learned, 50), [blank], sees_right=True)["exact match"] == 1.0
    right = ngram_scores(NGram(learned, 50), [blank], sees_right=True)["nats per token"]
    assert right < 0.1 < ngram_scores(NGram(learned, 50), [blank], sees_right=False)["nats per token"]


def test_a_model_is_scored_as_it_fills() -> None:
    """One pass over the training row, against token by token with cached keys; no blank ends early."""
    config = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50, max_position=16)
    model = Transformer(config).eval()
    initialize_parameters(model.named_parameters(), config, 3)
    scored = list(model_log_probabilities(model, BLANKS, SPECIAL))
    assert [target for target, _ in scored] == [40, 30, 31]
    filler = BlankFiller(model, SPECIAL, GenerationConfig())
    expected = []
    with torch.no_grad():
        for blank in BLANKS:
            plan = filler.encoded([[*blank.before, SPECIAL.mask, *blank.after]])
            for i, token in enumerate([SPECIAL.sop, *blank.word[:-1]], start=1):
                logits = filler.write(plan, [[token]], [len(blank.before)], i)[0, -1]
                logits[SPECIAL.eop] = -torch.inf
                expected.append(logits.log_softmax(-1).numpy())
    for (_, log_p), wanted in zip(scored, expected, strict=True):
        np.testing.assert_allclose(log_p, wanted, atol=1e-5)
