"""Scores of filled blanks: the n-gram model by hand and by its sum, exact matches, a model's probabilities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.base.errors import ConfigError
from data_utils.base.planes import FIELDS, OBJECTIVE, ORD, POSITION_IDS, TARGETS, TOKENS, Example
from data_utils.text.special_tokens import SpecialTokens
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.generate.filling import BlankFiller
from megatron_lite.model.trunk.glm import GLM, initialize_parameters
from scripts.quickstart.ngram import DISCOUNT, NGram
from scripts.quickstart.scores import (
    MODELS,
    exact_match,
    model_log_probabilities,
    ngram_scores,
    require_countable,
    table,
    text_of,
    token_scores,
)

SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=4, gmask=5, sop=6, eop=7, eos=8, pad=9, unk=10, dblock=11)


def example() -> Example:
    """20 [MASK] 21 [MASK], filled with 40 and 30 31; the second blank comes first in part B."""
    planes = np.zeros((len(FIELDS), 10), np.int32)
    planes[TOKENS] = [1, 20, 3, 21, 3, 6, 30, 31, 6, 40]
    planes[TARGETS, 5:] = [30, 31, 7, 40, 7]
    planes[POSITION_IDS] = [0, 1, 2, 3, 4, 4, 4, 4, 2, 2]
    planes[FIELDS.index("block_position_ids"), 5:] = [1, 2, 3, 1, 2]
    planes[ORD, 5:] = [1, 2, 3, 4, 5]
    planes[OBJECTIVE] = 0
    return Example.from_planes(planes)


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
    assert model.continued([0], 2) == [1, int(after_one.argmax())]


def test_an_order_of_one_counts_tokens() -> None:
    p = NGram(np.array([0, 0, 0, 2]), 4, order=1).probabilities([1, 2])
    assert p[0] == pytest.approx((3 - DISCOUNT) / 4 + 2 * DISCOUNT / 4 / 4) and p[1] == p[3] > 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.lists(st.integers(0, 5), max_size=8))
@settings(max_examples=60, deadline=None)
def test_probabilities_sum_to_one(tokens, before) -> None:
    p = NGram(np.array(tokens), 6).probabilities(before)
    assert p.sum() == pytest.approx(1) and (p > 0).all()


def test_large_vocabularies_are_refused() -> None:
    require_countable(6208)
    NGram(np.array([6207] * 6), 6208)
    with pytest.raises(
        ConfigError, match="the tokenizer has 32,000 tokens; the 5-gram model counts at most 6,208"
    ):
        require_countable(32000)


def test_a_text_knows_its_blanks_and_what_stands_before_them() -> None:
    text = text_of(example(), SPECIAL)
    assert text.context == [1, 20, 3, 21, 3]
    assert [blank.original for blank in text.blanks] == [[40], [30, 31]]
    assert [blank.before for blank in text.blanks] == [[1, 20], [1, 20, 40, 21]]


def test_exact_matches_and_token_scores() -> None:
    texts = [text_of(example(), SPECIAL)]
    assert exact_match(texts, lambda text: [[40], [30]]) == 0.5
    uniform = np.log(np.array([0.5, 0.25, 0.25]))
    scores = token_scores(texts, lambda text: iter([(0, uniform), (2, uniform)]))
    assert scores == {"token accuracy": 0.5, "nats per token": pytest.approx(1.5 * np.log(2))}


def test_ngrams_score_what_they_have_counted() -> None:
    texts = [text_of(example(), SPECIAL)]
    learned = np.array([1, 20, 40, 21, 30, 31] * 3)
    scores = ngram_scores(NGram(learned, 50), texts)
    assert scores["token accuracy"] == scores["exact match"] == 1.0
    rows = table(dict.fromkeys(MODELS, scores), texts).splitlines()
    assert rows[0].startswith("2 blanks of 1 validation texts: 3 tokens; 2 blanks are short")
    assert rows[2].split() == ["token", "accuracy", "100.0%", "100.0%", "100.0%"]


def test_a_model_is_scored_as_it_fills() -> None:
    """One pass over the training row, against token by token with cached keys, in the order of part B."""
    config = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50, max_position=16)
    model = GLM(config).eval()
    initialize_parameters(model.named_parameters(), config, 3)
    text = text_of(example(), SPECIAL)
    scored = list(model_log_probabilities(model, text, SPECIAL))
    assert sorted(target for target, _ in scored) == [30, 31, 40]
    filler = BlankFiller(model, SPECIAL, GenerationConfig())
    with torch.no_grad():
        plan = filler.encoded([text.context])
        expected = {}
        for position, span in ((4, [30, 31]), (2, [40])):
            for i, (token, target) in enumerate(
                itertools.pairwise([SPECIAL.sop, *span, SPECIAL.eop]), start=1
            ):
                logits = filler.write(plan, [[token]], [position], i)[0, -1]
                expected[target] = logits.log_softmax(-1).numpy()
    for target, log_p in scored:
        np.testing.assert_allclose(log_p, expected[target], atol=1e-5)
