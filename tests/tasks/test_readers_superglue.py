"""SuperGLUE's files: fields, labels and indices of each task, and what is refused."""

import pytest
from support.tasks.labelled_files import task

from data_utils.common.errors import ConfigError
from data_utils.tasks.readers.by_name import task_labels

PASSAGE = {
    "text": "\u201cI am here,\u201d said Ann Lee. Bob\u2019s dog \u2013 Rex \u2013 barked.\n@highlight\nRex barks"
}
ENTITIES = [(18, 24), (27, 29), (39, 41), (39, 41)]  # both ends are in the entity


def superglue(name, **settings):
    return task("superglue", name, "cloze", **settings)


SAMPLES = {
    "boolq": (
        {"question": "is it so", "passage": "It is.", "idx": 7, "label": True},
        {"question": "is it so", "passage": "It is."},
        "true",
    ),
    "CB": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": "neutral", "idx": 7},
        {"premise": "It rains.", "hypothesis": "It is wet."},
        "neutral",
    ),
    "rte": (
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment", "idx": 7},
        {"premise": "It rains.", "hypothesis": "It is wet."},
        "not_entailment",
    ),
    "AX-b": (
        {"sentence1": "It rains.", "sentence2": "It is wet.", "label": "entailment", "idx": 7, "logic": ""},
        {"premise": "It rains.", "hypothesis": "It is wet."},
        "entailment",
    ),
    "ax_g": (
        {"premise": "She left.", "hypothesis": "He left.", "label": "entailment", "idx": 7, "pair_id": 3},
        {"premise": "She left.", "hypothesis": "He left."},
        "entailment",
    ),
    "copa": (
        {"premise": "I fell.", "choice1": "I slipped.", "choice2": "I sat.", "question": "cause", "label": 0, "idx": 7},
        {"premise": "I fell.", "choice1": "I slipped.", "choice2": "I sat.", "question": "cause"},
        0,
    ),
    "wic": (
        {"word": "bank", "sentence1": "A bank.", "sentence2": "The bank.", "idx": 7, "label": False,
         "start1": 2, "start2": 4, "end1": 6, "end2": 8, "version": 1.1},
        {"word": "bank", "sentence1": "A bank.", "sentence2": "The bank.",
         "start1": 2, "end1": 6, "start2": 4, "end2": 8},
        "false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_simple_tasks(files, name):
    line, fields, label = SAMPLES[name]
    (record,) = files.read(superglue(name), [line])
    assert (record.fields, record.label, record.index, record.group) == (fields, label, 7, None)
    assert record.location == f"{files.folder}/train.txt:1"
    del line["label"]
    (record,) = files.read(superglue(name), [line], labelled=False)
    assert (record.fields, record.label) == (fields, None)
    files.refused(superglue(name), [line], "train.txt:1: the label is missing; files for training")


def test_classes_in_the_order_of_their_numbers():
    assert task_labels(superglue("boolq")) == task_labels(superglue("wsc")) == ("false", "true")
    assert task_labels(superglue("multirc")) == ("0", "1")
    assert task_labels(superglue("cb")) == ("entailment", "contradiction", "neutral")
    assert task_labels(superglue("copa")) == task_labels(superglue("record")) == ()


def multirc(*labels):
    answers = [{"text": f"answer {i}", "idx": i, **({} if label is None else {"label": label})} for i, label in
               enumerate(labels)]  # fmt: skip
    questions = [
        {"question": "who", "idx": 4, "answers": answers[:1]},
        {"question": "what", "idx": 5, "answers": answers[1:]},
    ]
    return {"idx": 3, "version": 1.1, "passage": {"text": "A text.", "questions": questions}}


def test_multirc_has_a_sample_for_each_answer(files):
    records = files.read(superglue("multirc"), [multirc(0, 1, 0)])
    assert [record.label for record in records] == ["0", "1", "0"]
    assert [record.index for record in records] == [(3, 4, 0), (3, 5, 1), (3, 5, 2)]
    assert [record.group for record in records] == [(3, 4), (3, 5), (3, 5)]
    assert records[2].fields == {"passage": "A text.", "question": "what", "answer": "answer 2"}
    assert {record.label for record in files.read(superglue("multirc"), [multirc(None)], labelled=False)} == {
        None
    }


def test_a_bad_answer_leaves_out_its_whole_line(files):
    lines = [multirc(0, 1), {**multirc(0, 7), "idx": 4}, {**multirc(1, 1), "idx": 5}]
    files.refused(superglue("multirc"), lines, "train.txt:2: label 7 is unknown; the labels are 0, 1;")
    records = files.read(superglue("multirc", skip_bad_lines=True), lines)
    assert [record.index[0] for record in records] == [3, 3, 5, 5] and records.skipped == 1


def record_line(query="Who is @placeholder\u2019s dog?", entities=ENTITIES, answers=("Rex",)):
    places = [{"start": start, "end": end} for start, end in entities]
    found = {"answers": [{"start": 39, "end": 41, "text": answer} for answer in answers]} if answers else {}
    return {"source": "news", "passage": {**PASSAGE, "entities": places}, "idx": 0,
            "qas": [{"query": query, "idx": 12, **found}]}  # fmt: skip


def test_record(files):
    (record,) = files.read(superglue("record"), [record_line(answers=("Rex", "Bob", "Rex"))])
    assert record.fields["entities"] == ("Ann Lee", "Bob", "Rex")
    assert record.fields["query"] == "Who is @placeholder's dog?"
    assert (
        record.fields["passage"]
        == '"I am here," said Ann Lee. Bob\'s dog - Rex - barked.\n@highlight\nRex barks'
    )
    assert (record.label, record.index) == (("Rex", "Bob"), 12)
    (record,) = files.read(superglue("record"), [record_line(answers=())], labelled=False)
    assert record.label is None


def test_record_refuses(files):
    config = superglue("record")
    files.refused(
        config,
        [record_line("who?")],
        "train.txt:1: the query 'who?' has no @placeholder, which marks the answer",
    )
    files.refused(
        config,
        [record_line(entities=[(18, 99)])],
        "an entity has the characters 18 to 99 (inclusive), but the passage has 73",
    )
    files.refused(config, [record_line(answers=())], "the label is missing")
    line = record_line()
    line["qas"][0]["idx"] = [None]
    files.refused(config, [line], "train.txt:1: field 'idx' is [None]; it must be an integer")


def wsc(text, span2_index, span2_text="him", span1_index=0, span1_text="Ann Lee", **more):
    target = {"span1_index": span1_index, "span1_text": span1_text, "span2_index": span2_index,
              "span2_text": span2_text}  # fmt: skip
    return {"text": text, "target": target, "label": True, "idx": 0, **more}


@pytest.mark.parametrize(
    ("text", "index", "words", "found"),
    [
        ("Ann Lee saw him there.", 3, "Ann Lee saw him there.", 3),
        ("Ann Lee saw him there.", 2, "Ann Lee saw him there.", 3),
        ("Ann Lee saw him there.", 4, "Ann Lee saw him there.", 3),
        ("Ann Lee saw him, and", 3, "Ann Lee saw him , and", 3),
        ("Ann Lee saw him'd and", 3, "Ann Lee saw him 'd and", 3),
        ("Ann Lee saw \u201chim\u201d and", 4, 'Ann Lee saw " him " and', 4),
    ],
)
def test_wsc_finds_the_pronoun(files, text, index, words, found):
    (record,) = files.read(superglue("wsc"), [wsc(text, index)])
    fields = record.fields
    assert (fields["text"], fields["span2_index"]) == (words, found)
    assert fields["text"].split(" ")[found] == fields["span2_text"] == "him"
    assert (record.label, fields["span1_index"], fields["candidates"]) == ("true", 0, ())


def test_wsc_spans_that_are_off_and_candidates(files):
    candidates = [{"text": "Bob"}, {"text": "Bob\u2019s dog"}, {"text": "Bob"}]
    line = wsc("Then ann lee saw him", 4, span1_index=0, candidates=candidates)
    (record,) = files.read(superglue("wsc"), [line])
    assert record.fields["span1_index"] == 1
    assert record.fields["candidates"] == ("Bob", "Bob's dog")
    for bad in (3, ["Bob"], {}):
        files.refused(
            superglue("wsc"), [{**line, "candidates": bad}], "field 'candidates' must hold a list of objects"
        )


@pytest.mark.parametrize("index", [0, 5, -3, 99])
def test_wsc_refuses_a_pronoun_elsewhere(files, index):
    files.refused(superglue("wsc"), [wsc("Ann Lee saw himself", 3)], "the pronoun 'him' is not at word 3")
    files.refused(
        superglue("wsc"),
        [wsc("Ann Lee saw him there now", index)],
        f"train.txt:1: the pronoun 'him' is not at word {index} of the text or next to it",
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cb", {"label": "maybe"}, "label 'maybe' is unknown; the labels are entailment, contradiction, neutral"),
        ("cb", {"label": 0.5}, "the label is a number (0.5); a class must be text"),
        ("cb", {"premise": 3}, "field 'premise' holds a number, not text"),
        ("cb", {"idx": [1]}, "field 'idx' is [1]; it must be an integer or text"),
        ("copa", {"label": 2}, "label 2 is not a choice; there are 2, counted from 0"),
        ("copa", {"label": True}, "field 'label' is True; it must be an integer"),
        ("copa", {"question": "why"}, "field 'question' is 'why'; it must be cause or effect"),
    ],
)  # fmt: skip
def test_bad_lines(files, name, change, message):
    good = SAMPLES["CB" if name == "cb" else name][0] | {
        "idx": 1,
        "label": 0 if name == "copa" else "neutral",
    }
    lines = [good, {**good, "idx": 2, **change}]
    said = files.refused(superglue(name), lines, f"train.txt:2: {message}", "task.skip_bad_lines")
    assert said.count("train.txt") == 1
    records = files.read(superglue(name, skip_bad_lines=True), lines)
    assert (len(records), records.skipped) == (1, 1)


def test_an_index_twice_is_refused_with_both_lines(files):
    line = {"premise": "a", "hypothesis": "b", "label": "neutral", "idx": 1}
    files.refused(
        superglue("cb"), [line, {**line, "idx": 2}, line],
        "train.txt:3: index 1 already appears at", "train.txt:1; it must be unique",
    )  # fmt: skip
    del line["idx"]
    files.refused(superglue("cb"), [{**line, "idx": 1}, line], "train.txt:2: there is no index (idx, id)")


def test_an_unknown_task(files):
    files.refused(superglue("rotten"), [{}], "task.name is 'rotten'", "boolq, cb, copa", "Use jsonl")
    with pytest.raises(ConfigError, match=r"task\.label_field is 'y', but task\.reader superglue"):
        files.read(superglue("cb", label_field="y"), [{}])
