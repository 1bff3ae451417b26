"""Marks around mentions, and entities on their tokens: against plain insertions, in files, in long texts."""

import numpy as np
import pytest
from support.tasks.labelled_files import task
from support.tasks.task_inputs import form, record, renderer, settings, shown, tokenizer

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.readers.marked import task_marks
from data_utils.tasks.templates.marked import MarkedText
from data_utils.tasks.templates.render import Renderer

LABELS = ("person", "place", "work")
PAIR = {"kind": "classification", "labels": ("no", "yes"), "marks": {"head": "#", "tail": "$"}}


def typing(**settings):
    return task("jsonl", kind="typing", labels=LABELS, **settings)


def line(text="rain falls in the city", mention=(0, 4), label=("work",), **more):
    return {"text": text, "mention": list(mention), "label": list(label), **more}


def test_marks_are_inserted_and_positions_follow_them():
    """Random spans that are apart or within each other, against letters that are inserted one by one."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("ab "), 12))
        inner = sorted(rng.choice(13, 4, replace=False).tolist())
        spans = (
            [(*inner[:2], "#"), (*inner[2:], "$")]
            if rng.integers(2)
            else [(inner[0], inner[3], "#"), (*inner[1:3], "$")]
        )
        made = MarkedText(text, spans if rng.integers(2) else spans[::-1])
        expected = ""
        for place in range(len(text) + 1):
            expected += "".join(
                f" {mark}" for start, end, mark in sorted(spans, reverse=True) if end == place
            )
            expected += "".join(f"{mark} " for start, end, mark in sorted(spans) if start == place)
            expected += text[place : place + 1]
        assert made.text == expected
        for start, end, mark in spans:
            found = made.text[made.start(start) : made.end(end)]
            others = [other for other in "#$" if other != mark]
            assert found.replace(f"{others[0]} ", "").replace(f" {others[0]}", "") == text[start:end]
        for place in range(len(text)):
            assert made.text[made.start(place)] == text[place] == made.text[made.end(place + 1) - 1]


def test_typing_has_the_mark_of_the_source():
    assert task_marks(settings(kind="typing")) == {"mention": "\u3002"}
    assert task_marks(settings(kind="classification")) == {}


@pytest.mark.parametrize("objective", ["masked_lm", "blank_infilling", "causal", "xlnet"])
def test_a_relation_is_read_between_its_marks(objective):
    # The vocabulary of `renderer` has neither # nor $.
    made = renderer(objective, **{**PAIR, "marks": {"head": "/", "tail": "*"}})
    text = "rain falls in wet city he runs"
    sample = made.sample(record("yes", text=text, head=(18, 22), tail=(0, 4)), 0)
    (example,) = sample.documents
    assert " * rain * falls in wet / city / he runs" in " " + shown(example, made)
    assert sample.target_groups[0].targets.tolist() == [1]


def test_long_texts_keep_their_marks():
    made = renderer("masked_lm", kind="typing", labels=LABELS, marks={"mention": "/"}, sequence_length=12)
    words = [
        "rain",
        "falls",
        "wet",
        "street",
        "man",
        "city",
        "river",
        "cold",
        "runs",
        "north",
        "south",
        "box",
        "red",
        "blue",
        "green",
    ]
    text = " ".join(words)
    for number, word in enumerate(words):
        start = text.index(word)
        sample = made.sample(record(("place",), text=text, mention=(start, start + len(word))), 0)
        tokens = shown(sample.documents[0], made).split()
        first = max(
            0, number + 3 - 10
        )  # 10 tokens without CLS and SEP; the marks end 3 tokens after the word's place
        with_marks = [*words[:number], "/", word, "/", *words[number + 1 :]]
        assert (
            tokens == ["[CLS]", *with_marks[first : first + 10], "[SEP]"]
            and sample.cut == len(words) + 2 - 10
        )
        assert sample.target_groups[0].targets.tolist() == [0, 1, 0]
    long = record(("place",), text=text, mention=(0, len(text)))
    with pytest.raises(
        DataError, match=r"^data.jsonl:1: the marked .* need 19 tokens, but task.sequence_length is 12; set"
    ):
        made.sample(long, 0)


def ids_file(path, count=3):
    path.write_text(f"{count}\n" + "".join(f"Q{i}\t{count - 1 - i}\n" for i in range(count)))
    return str(path)


def test_entities_stand_on_the_first_tokens_of_their_mentions(files, tmp_path):
    config = typing(
        entity_ids=ids_file(tmp_path / "ids.txt"), min_score=0.3, marks={"mention": "/"}, sequence_length=16
    )
    text = "rain falls in the city"
    linked = [[18, 22, "Q0", 0.3], [0, 10, "Q2", 1], [11, 13, "Q1", 0.29], [14, 17, "Q9"]]
    (found,) = files.read(config, [line(text, (0, 4), entities=linked)])
    assert found.fields == {"text": text, "mention": (0, 4), "entities": ((0, 10, 0), (18, 22, 2))}
    for objective, expected in (("entities", {"rain": 1, "city": 3}), ("masked_lm", {})):
        made = Renderer(config, tokenizer(), form(objective), 7, LABELS)
        (example,) = made.sample(found, 0).documents
        words = [tokenizer().decode([token]).strip() for token in example.tokens]
        assert words[:4] == ["[CLS]", "/", "rain", "/"]
        entities = {
            words[at]: int(example.block_position_ids[at])
            for at in np.flatnonzero(example.block_position_ids)
        }
        assert entities == expected
        assert isinstance(example, Example) and len(example.block_position_ids) == len(example.tokens)


def test_an_entity_of_half_a_word_is_left_out_and_cut_texts_keep_theirs(tmp_path):
    config = settings(
        kind="typing", entity_ids=ids_file(tmp_path / "ids.txt"), marks={"mention": "/"}, sequence_length=8
    )
    made = Renderer(config, tokenizer(), form("entities"), 7, LABELS)
    text = "rain falls wet street man city"
    given = record(
        ("work",), text=text, mention=(26, 30), entities=((0, 4, 0), (16, 21, 1), (22, 25, 2), (26, 30, 0))
    )
    (example,) = made.sample(given, 0).documents
    assert shown(example, made).split() == ["[CLS]", "wet", "street", "man", "/", "city", "/", "[SEP]"]
    assert example.block_position_ids.tolist() == [0, 0, 0, 3, 0, 1, 0, 0]


BAD = {
    "no list": ({"label": "work"}, "the label is 'work'; typing needs a list of labels, which may be empty"),
    "unknown": ({"label": ["work", "song"]}, "label 'song' is unknown; the labels are person, place, work"),
    "null": ({"label": [None]}, "the label [None] contains a NUL character"),
    "no span": (
        {"mention": None},
        "field 'mention' is None; it must be [start, end], a non-empty range within the 22",
    ),
    "one number": ({"mention": [3]}, "field 'mention' is [3]; it must be [start, end]"),
    "outside": ({"mention": [18, 23]}, "field 'mention' is [18, 23]; it must be [start, end]"),
    "backwards": ({"mention": [4, 0]}, "field 'mention' is [4, 0]"),
    "empty": ({"mention": [4, 5]}, "field 'mention' is [4, 5]"),
    "truth": ({"mention": [False, True]}, "field 'mention' is [False, True]"),
    "no entities": ({"entities": None}, "there is no list 'entities' of [start, end, \"name\"]"),
    "half an entity": ({"entities": [[0, 4]]}, 'the mention [0, 4] is not [start, end, "name"]'),
    "a far entity": (
        {"entities": [[0, 40, "Q1"]]},
        "the mention [0, 40, 'Q1'] is not within the text of 22 characters",
    ),
    "overlapping": ({"entities": [[0, 4, "Q1"], [2, 6, "Q2"]]}, "two mentions overlap: [0, 4] and [2, 6]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_refused_in_one_line_or_left_out(files, tmp_path, name):
    changes, message = BAD[name]
    config = typing(entity_ids=ids_file(tmp_path / "ids.txt"))
    good = line(entities=[])
    files.refused(config, [good, {**good, **changes}], "train.txt:2: ", message, "correct or remove it")
    kept = files.read(typing(entity_ids=config.entity_ids, skip_bad_lines=True), [good, {**good, **changes}])
    assert len(kept) == 1 and kept.skipped == 1


def test_spans_that_cross_are_no_relation(files):
    """Their marks would stand in an order from which nobody reads which is whose; within each other they may be."""
    config = task("jsonl", **PAIR)
    given = {"text": "rain falls in the city", "head": [0, 10], "tail": [5, 13], "label": "yes"}
    files.refused(config, [given], "train.txt:1: the spans head [0, 10] and tail [5, 13] overlap")
    for tail in ([5, 10], [0, 4], [11, 13], [0, 10]):
        assert files.read(config, [{**given, "tail": tail}])[0].fields["tail"] == tuple(tail)


def test_a_mark_of_two_tokens_is_refused():
    for mark, message in (("rain falls", "which is 2 tokens"), ("\u2603", "which is no token")):
        with pytest.raises(ConfigError, match=message):
            renderer("masked_lm", **{**PAIR, "marks": {"head": mark, "tail": "*"}}).check()


def test_labels_are_sets_in_the_order_of_the_task(files):
    lines = [line(label=["work", "person", "work"]), line(label=[])]
    assert [each.label for each in files.read(typing(), lines)] == [("person", "work"), ()]
    (test,) = files.read(typing(), [{"text": "a b", "mention": [0, 1]}], labelled=False)
    assert test.label is None
    files.refused(typing(), [{"text": "a b", "mention": [0, 1]}], "the label is missing")


def test_a_file_of_numbers_that_cannot_be_read_is_named(files, tmp_path):
    path = tmp_path / "ids.txt"
    for content, message in (
        ("2\nQ1\t0\n", "the first line is '2', but 1 lines follow"),
        ("1\nQ1 0\n", "it must be a name, a tab"),
    ):
        path = tmp_path / f"ids{len(content)}.txt"
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            files.read(typing(entity_ids=str(path)), [line(entities=[])])
