"""Blanks that a run fills at evaluations: a model that fills all of them alike is warned of, once."""

from __future__ import annotations

import itertools

import pytest
from support.training.report_runs import FILLED

from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.inference.samples import IN_A_ROW, LEAST_BLANKS, SampleFillings

ALIKE, VARIED = itertools.repeat(20), itertools.cycle(range(10, 50))  # tokens


@pytest.fixture
def filled(settings, monkeypatch, caplog):
    """Fills blanks with the next tokens of an iterator. Returns the warnings until then."""
    config = build(Config, merge(settings, FILLED))
    tokenizer = load_tokenizer(config.tokenizer)
    data = open_datasets(config.data, config.objective_choices, tokenizer, config.training.seed)
    fillings = SampleFillings(data.validation, tokenizer, 8, 32)
    mask = tokenizer.special.mask

    def fill(tokens):
        monkeypatch.setattr(BlankFiller, "__init__", lambda self, *_: None)
        monkeypatch.setattr(
            BlankFiller,
            "fill_all",
            lambda self, contexts: [[[next(tokens)] for t in text if t == mask] for text in contexts],
        )
        assert fillings(None)["blanks"] >= LEAST_BLANKS
        return [record.getMessage() for record in caplog.records]

    return fill


def test_blanks_that_are_filled_alike_are_reported_once(filled):
    for tokens in (ALIKE, ALIKE, VARIED, *[ALIKE] * (IN_A_ROW - 1)):
        assert filled(tokens) == []
    (message,) = filled(ALIKE)
    assert "1 different spans" in message and "docs/learning.md" in message
    assert filled(ALIKE) == [message]


def test_a_run_whose_answers_differ_is_left_alone(filled):
    """Also if none of them is as in the text, as for most of a small model's training."""
    for _ in range(2 * IN_A_ROW):
        assert filled(VARIED) == []
