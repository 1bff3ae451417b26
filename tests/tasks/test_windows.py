"""Windows of a text: each token, or each but the first, predicted exactly once, from those before it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_count
from hypothesis import strategies as st
from support.tasks.task_inputs import inputs
from support.transformer.mask_rule import allowed, reachable

from data_utils.common.errors import ConfigError
from data_utils.tasks.templates.continuations import Continuations
from data_utils.tasks.templates.windows import continued, windows

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


@example_count(max_examples=80, deadline=None)
@given(st.sampled_from(FORMS), st.integers(2, 90), st.integers(8, 40), st.integers(1, 38))
def test_each_token_but_the_first_is_predicted_once_from_those_before_it(
    form_and_way, tokens, length, stride
):
    objective, both = form_and_way
    made, text = inputs(objective, kind="blanks"), np.arange(1000, 1000 + tokens)
    found = []
    for window in windows(tokens, length - 1, min(stride, length - 2)):
        ids = text[window.start : window.end].tolist()
        example = continued(made, ids, window.end - window.new, bidirectional=both)
        rows = np.flatnonzero(example.weights)
        found += example.targets[rows].tolist()
        reach = reachable(allowed(example.doc, example.ord, example.grp))
        for row, target in zip(rows, example.targets[rows], strict=True):
            seen = set(example.tokens[reach[row]].tolist())
            assert seen >= {*range(1000 + window.start, target)} and not seen & {*range(target, 9999)}
        in_window = set(example.tokens.tolist()) & set(text.tolist())
        assert in_window == set(ids[:-1]), "the last is no input"
        assert max(example.position_ids.max(), example.block_position_ids.max()) <= length
    assert found == text[1:].tolist()


def second_window(objective, both=True):
    """The input of a text's second window, and what it predicts."""
    made = inputs(objective, kind="blanks", sequence_length=8, stride=3)
    template = Continuations(made, first_token=False, bidirectional=both)
    sample = template.windows("rain falls in wet city he runs north and south")[1]
    decode = made.tokenizer.decode
    return decode(sample.documents[0].tokens), decode(sample.target_groups[0].targets)


def test_the_layouts_of_a_later_window():
    new = "north and south"
    assert second_window("blank_infilling") == (
        "[CLS] wet city he runs [MASK] <|startofpiece|> north and",
        new,
    )
    left_to_right = "[CLS] wet [MASK] <|startofpiece|> city he runs north and"
    assert second_window("blank_infilling", both=False) == (left_to_right, new)
    assert second_window("causal") == ("[PAD] wet city he runs north and", new)
    assert second_window("prefix_lm") == ("[CLS] wet city he runs <|startofpiece|> north and", new)


def test_windows_that_would_leave_a_token_without_a_context_are_refused():
    template = Continuations(inputs(kind="blanks", sequence_length=8, stride=7))
    with pytest.raises(ConfigError, match=r"the stride \(7\) must be below the window size \(7\)"):
        template.check_texts()
