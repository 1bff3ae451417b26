"""Inputs of heads: the layout of every form, tags of words, windows of a context and the answer's own characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_count
from hypothesis import strategies as st
from support.tasks.task_inputs import record, renderer, shown

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.templates.inputs import overlapping_windows

PAIR = {"text_a": "rain falls", "text_b": "it is wet"}
LABELS = ("no", "yes")


def classify(objective, given=None, kind_of_tokenizer="bert", **more):
    more = {"kind": "classification", "labels": LABELS, **more}
    made = renderer(objective, kind_of_tokenizer, **more)
    return made, made.sample(given or record("yes", **PAIR), 0)


@pytest.mark.parametrize(
    ("objective", "text", "segments", "row"),
    [
        ("blank_infilling", "[CLS] rain falls [SEP] it is wet [PAD]", [0] * 8, 0),  # eos has [PAD]'s id here
        ("masked_lm", "[CLS] rain falls [SEP] it is wet [SEP]", [0] * 4 + [1] * 4, 0),
        ("unilm", "[CLS] rain falls [SEP] it is wet [SEP]", [0] * 4 + [1] * 4, 0),
        ("unilmv2", "[CLS] rain falls [SEP] it is wet [SEP]", [0] * 4 + [1] * 4, 0),
        ("xlnet", "rain falls [SEP] it is wet [SEP] [CLS]", [0] * 3 + [1] * 5, 7),
        ("prefix_lm", "[CLS] rain falls [SEP] it is wet", [0] * 7, 0),
        ("causal", "[PAD] rain falls it is wet", [0] * 6, 5),
    ],
)
def test_a_pair_of_texts_in_every_form(objective, text, segments, row):
    made, sample = classify(objective)
    (example,), (part,) = sample.documents, sample.target_groups
    assert made.head == "classes" and shown(example, made) == text
    assert example.segment_ids.tolist() == segments
    assert part.positions.tolist() == [row] and part.targets.tolist() == [1]
    assert example.ord.tolist() == ([*range(6)] if objective == "causal" else [0] * len(segments))
    assert not example.weights.any() and sample.right is None


def test_texts_of_other_names():
    def text(given, **more):
        made, sample = classify("masked_lm", given, **more)
        return shown(sample.documents[0], made)

    assert text(record("no", text="rain")) == "[CLS] rain [SEP]"
    boolean = record("no", question="is it", passage="rain")
    assert text(boolean, name="BoolQ") == "[CLS] rain [SEP] is it [SEP]"
    own = record("no", title="rain", body="is wet")
    assert text(own, text_fields=("body",)) == "[CLS] is wet [SEP]"
    with pytest.raises(DataError, match=r"data.jsonl:1: the pattern needs the text 'text_a'"):
        text(own)


def test_the_longer_text_is_cut():
    long = record("no", text_a="rain falls", text_b="wet " * 30)
    made, sample = classify("masked_lm", long, sequence_length=12)
    assert (
        shown(sample.documents[0], made) == "[CLS] rain falls [SEP]" + " wet" * 7 + " [SEP]"
        and sample.cut == 23
    )


def test_a_second_text_has_its_space_only_where_nothing_stands_between():
    made, sample = classify("causal", kind_of_tokenizer="gpt2")
    assert shown(sample.documents[0], made) == "<|endoftext|>rain falls it is wet"
    made, sample = classify("blank_infilling", kind_of_tokenizer="gpt2")
    assert shown(sample.documents[0], made) == "[CLS]rain falls[SEP]it is wet<|endoftext|>"


def test_labels_and_numbers():
    _, sample = classify("masked_lm", record(None, text="rain"))
    assert sample.target_groups[0].targets.tolist() == []
    with pytest.raises(DataError, match=r"data.jsonl:1: label 'up' is unknown; the labels are no, yes"):
        classify("masked_lm", record("up", text="rain"))
    with pytest.raises(ConfigError, match=r"needs 2 or more: set task\.labels"):
        renderer("masked_lm", kind="classification")
    made = renderer("masked_lm", kind="regression")
    (part,) = made.sample(record(2.5, text="rain"), 0).target_groups
    assert made.head == "values" and part.value == 2.5 and part.targets.tolist() == []
    with pytest.raises(ConfigError, match=r"input format is encoder_decoder \(t5\)"):
        renderer("t5", kind="classification", labels=LABELS)


# ---- tagging ----

TAGS = ("O", "B-PER")


@pytest.mark.parametrize("objective", ["blank_infilling", "masked_lm", "xlnet", "causal"])
def test_the_first_piece_of_a_word_has_its_tag(objective):
    made = renderer(objective, kind="tagging", labels=TAGS)
    words = ("rain", "xyz", "\u200b", "falls")
    sample = made.sample(record(("O", "B-PER", "O", "B-PER"), words=words), 0)
    (example,), (part,) = sample.documents, sample.target_groups
    pieces = [made.inputs.tokenizer.token_to_text(i) for i in example.tokens[part.positions]]
    assert pieces == ["rain", "x", "[UNK]", "falls"], "a word that has no token gets one"
    assert made.head == "tags" and part.targets.tolist() == [0, 1, 0, 1]


@example_count(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["rain", "xyz", "x" * 30]), min_size=1, max_size=20), st.integers(8, 30))
def test_each_word_has_one_row_however_long_the_sentence(words, length):
    made = renderer("masked_lm", kind="tagging", labels=TAGS, sequence_length=length)
    tags = tuple(TAGS[i % 2] for i in range(len(words)))
    sample = made.sample(record(tags, words=tuple(words)), 0)
    assert all(len(example.tokens) <= length for example in sample.documents)
    assert np.concatenate([part.targets for part in sample.target_groups]).tolist() == [
        i % 2 for i in range(len(words))
    ]
    first = [made.inputs.tokenizer.encode(word)[0] for word in words]
    found = [sample.documents[part.document].tokens[part.positions] for part in sample.target_groups]
    assert np.concatenate(found).tolist() == first
    unlabelled = made.sample(record(None, words=tuple(words)), 0)
    assert sum(len(part.positions) for part in unlabelled.target_groups) == len(words)
    assert not any(len(part.targets) for part in unlabelled.target_groups)


def test_words_and_tags_go_together():
    made = renderer("masked_lm", kind="tagging", labels=TAGS)
    with pytest.raises(DataError, match="2 words have 1 tags"):
        made.sample(record(("O",), words=("a", "b")), 0)
    with pytest.raises(DataError, match="label 'I-LOC' is unknown; the labels are O, B-PER"):
        made.sample(record(("I-LOC",), words=("a",)), 0)
    with pytest.raises(ConfigError, match="needs 2 or more"):
        renderer("masked_lm", kind="tagging")


# ---- spans ----

CONTEXT = (
    "The  man, naïve Café (1999) ran. He's cold;\nrain falls on the \N{SLIGHTLY SMILING FACE} city today"
)
SHORT = {"kind": "spans", "question_length": 4, "answer_length": 4, "stride": 5}


def question(text="", context=CONTEXT, **more):
    answers = ((text, context.index(text)),) if text else ()
    return record(
        tuple(a for a, _ in answers), question="who ran? and why", context=context, answers=answers, **more
    )


@pytest.mark.parametrize("kind_of_tokenizer", ["bert", "gpt2"])
@pytest.mark.parametrize("objective", ["masked_lm", "blank_infilling", "xlnet"])
@pytest.mark.parametrize(
    "text", ["man", "Café (1999)", "He", "rain falls", "\N{SLIGHTLY SMILING FACE}", "city today"]
)
def test_an_answer_is_found_and_cut_from_the_original_characters(objective, kind_of_tokenizer, text):
    made = renderer(objective, kind_of_tokenizer, **SHORT, sequence_length=30)
    given = question(text)
    sample = made.sample(given, 0)
    assert made.head == "spans" and len(sample.documents) == len(sample.target_groups) > 1
    found = []
    for number, part in enumerate(sample.target_groups):
        example = sample.documents[part.document]
        assert len(example.tokens) <= 30 and part.document == number
        assert example.tokens[part.positions[0]] == made.inputs.special.cls
        assert made.inputs.special.sep not in example.tokens[part.positions[1:]]
        answer = made.task_type.answer_text(given, number, *part.targets.tolist())
        if part.targets.any():
            found.append(answer)
        else:
            assert answer == "", "a window without the answer points at CLS"
    assert found and set(found) == {text} and sample.cut > 0, "the question is cut"
    trained = [made.sample(window, 0) for window in made.prepare([given], training=True)]
    assert made.prepare([given], training=False) == [given]
    for whole, part, (alone,) in zip(
        sample.documents, sample.target_groups, (each.target_groups for each in trained), strict=True
    ):
        (document,) = trained[part.document].documents
        assert (document.tokens == whole.tokens).all() and alone.document == 0
        assert (alone.positions == part.positions).all() and (alone.targets == part.targets).all()


@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 80))
def test_windows_cover_the_context(length, max_tokens, step):
    windows = overlapping_windows(length, max_tokens, step)
    assert windows[0][0] == 0 and windows[-1][1] == length
    assert {i for start, end in windows for i in range(start, end)} == set(range(length))
    assert all(end < length for _, end in windows[:-1]), "no window is more than needed"
    assert all(end - start <= max_tokens for start, end in windows)


def test_questions_without_an_answer_and_without_a_label():
    made = renderer("masked_lm", **SHORT, sequence_length=30)
    assert all(part.targets.tolist() == [0, 0] for part in made.sample(question(), 0).target_groups)
    unknown = record(None, question="who", context=CONTEXT, answers=())
    assert all(part.targets.tolist() == [] for part in made.sample(unknown, 0).target_groups)


def test_settings_that_leave_no_room_are_refused():
    with pytest.raises(ConfigError, match=r"leaves 3 tokens for the context besides question_length \(4\)"):
        renderer("masked_lm", **SHORT, sequence_length=10)
    with pytest.raises(ConfigError, match=r"format is causal \(causal\), which sees no later tokens"):
        renderer("causal", **SHORT)
