"""Windows of language modelling: each token but the first predicted exactly once; LAMBADA's last word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_count
from hypothesis import strategies as st
from support.mask_rule import allowed, reachable
from support.task_inputs import ALL_MASKS, form, predicted, record, renderer, settings, shown, tokenizer

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.templates.render import Renderer
from data_utils.tasks.templates.windows import windows

FORMS = [("blank_infilling", True), ("blank_infilling", False), ("causal", True), ("prefix_lm", True)]


def test_windows_of_the_reference():
    """ceil((n - W) / s) + 1 windows, the i-th covers [i s, i s + W)."""
    for tokens in range(2, 60):
        for size in range(2, 20):
            for stride in range(1, size):
                found = windows(tokens, size, stride)
                assert len(found) == max(-(-(tokens - size) // stride) + 1, 1)
                assert [window.start for window in found] == [i * stride for i in range(len(found))]
                assert all(window.end == min(window.start + size, tokens) for window in found)
                new = [i for window in found for i in range(window.new, window.end)]
                assert new == [*range(1, tokens)]
                assert all(window.start < window.new for window in found), "there is a context"


def text_of(tokens: int) -> np.ndarray:
    return np.arange(1000, 1000 + tokens, dtype=np.int32)


def document_windows(made, tokens):
    """The samples of a document of distinct tokens, which no tokenizer makes."""
    ids, size = text_of(tokens), made.task_type.size
    for window in windows(tokens, size, made.inputs.config.stride):
        fields = {"tokens": ids[window.start : window.end], "new": window.end - window.new}
        yield window, made.sample(TaskRecord(0, fields), 0).documents[0]


@example_count(max_examples=80, deadline=None)
@given(st.sampled_from(FORMS), st.integers(2, 90), st.integers(8, 40), st.integers(1, 38))
def test_each_token_but_the_first_is_predicted_once_from_those_before_it(
    form_and_way, tokens, length, stride
):
    objective, both = form_and_way
    made = renderer(
        objective,
        kind="language_modelling",
        sequence_length=length,
        stride=min(stride, length - 2),
        bidirectional=both,
    )
    found = []
    for window, example in document_windows(made, tokens):
        rows = np.flatnonzero(example.weights)
        found += example.targets[rows].tolist()
        reach = reachable(allowed(example.doc, example.ord, example.grp))
        for row, target in zip(rows, example.targets[rows], strict=True):
            seen = set(example.tokens[reach[row]].tolist())
            assert seen >= {*range(1000 + window.start, target)} and not seen & {*range(target, 9999)}
        in_window = set(example.tokens.tolist()) & set(text_of(tokens).tolist())
        assert in_window == set(text_of(tokens)[window.start : window.end - 1].tolist()), (
            "the last is no input"
        )
        assert max(example.position_ids.max(), example.block_position_ids.max()) <= length
    assert found == text_of(tokens)[1:].tolist()


def test_the_layouts_of_a_later_window():
    def text(objective, both=True, masks=ALL_MASKS):
        config = settings(kind="language_modelling", sequence_length=8, stride=3, bidirectional=both)
        made = Renderer(config, tokenizer(), form(objective, masks=masks), 7)
        made.check()
        given = record(None, text="rain falls in wet city he runs north and south")
        second = made.prepare([given], training=False)[1]
        assert second.index == (0, 1) and second.group == 0
        example = made.sample(second, 0).documents[0]
        return shown(example, made), made.inputs.tokenizer.decode(example.targets[example.weights > 0])

    new = "north and south"
    assert text("blank_infilling") == ("[CLS] wet city he runs [gMASK] <|startofpiece|> north and", new)
    assert text("blank_infilling", masks=("mask",))[0].startswith("[CLS] wet city he runs [MASK]")
    left_to_right = "[CLS] wet [gMASK] <|startofpiece|> city he runs north and"
    assert text("blank_infilling", both=False) == (left_to_right, new)
    assert text("causal") == ("[PAD] wet city he runs north and", new)
    assert text("prefix_lm") == ("[CLS] wet city he runs <|startofpiece|> north and", new)


def test_a_vocabulary_without_an_end_predicts_all_but_the_first_token_too():
    made = Renderer(
        settings(kind="language_modelling", sequence_length=16, stride=4),
        tokenizer("bert", "none"),
        form("causal"),
        7,
    )
    records = made.prepare([record(None, text="rain falls in wet city")], training=False)
    (example,) = made.sample(records[0], 0).documents
    assert made.inputs.tokenizer.decode(example.targets[example.weights > 0]) == "falls in wet city"


def test_refusals():
    with pytest.raises(ConfigError, match=r"task.stride \(7\) must be below sequence_length - 1 \(7\)"):
        renderer(kind="language_modelling", sequence_length=8, stride=7)
    for kind in ("language_modelling", "lambada"):
        with pytest.raises(
            ConfigError, match=r"format is bert \(masked_lm\), which gives no likelihood of a text"
        ):
            renderer("masked_lm", kind=kind, stride=4)
    made = renderer(kind="language_modelling", sequence_length=8, stride=4)
    with pytest.raises(DataError, match=r"data.jsonl:1: the text has 1 tokens; it needs 2"):
        made.prepare([record(None, text="rain")], training=False)


# ---- LAMBADA ----


@pytest.mark.parametrize(
    ("objective", "both", "expected"),
    [
        ("blank_infilling", True, "[CLS] rain falls in [MASK] [PAD] <|startofpiece|> x"),
        ("blank_infilling", False, "[CLS] rain [MASK] <|startofpiece|> falls in x"),
        ("causal", True, "[PAD] rain falls in x"),
        ("prefix_lm", True, "[CLS] rain falls in <|startofpiece|> x"),
    ],
)
def test_the_last_word_is_predicted_without_an_end(objective, both, expected):
    made = renderer(objective, kind="lambada", bidirectional=both)
    sample = made.sample(record("xy", text=" rain falls in xy "), 0)
    (example,), (part,) = sample.documents, sample.target_groups
    assert shown(example, made) == expected and made.head == "choices" and sample.right == 0
    assert predicted(part, made) == "xy" and part.positions.tolist() == [
        len(example.tokens) - 2,
        len(example.tokens) - 1,
    ]
    assert not example.weights.any()


def test_lambada_loses_the_beginning_of_its_context():
    made = renderer("blank_infilling", "gpt2", kind="lambada", sequence_length=12)
    sample = made.sample(record("xy", text="rain falls in the city xy"), 0)
    (example,) = sample.documents
    assert len(example.tokens) <= 12 and sample.cut > 0 and "city[MASK]" in shown(example, made)
    assert predicted(sample.target_groups[0], made) == " xy"
    with pytest.raises(DataError, match="the text has one word"):
        made.sample(record("xy", text="xy"), 0)
    with pytest.raises(DataError, match=r"the last word has \d+ tokens, which leave no tokens"):
        made.sample(record("xy", text="a " + "1" * 30), 0)
