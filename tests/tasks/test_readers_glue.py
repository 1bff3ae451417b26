"""GLUE's tab-separated files: columns of each task, test files, no quoting, and what is refused."""

import pytest
from support.tasks.labelled_files import task

from data_utils.tasks.readers.by_name import task_labels


def glue(name, kind="classification", **settings):
    return task("glue", name, kind, **settings)


MNLI = ("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse",
        "sentence1_parse", "sentence2_parse", "sentence1", "sentence2")  # fmt: skip
STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2")


def lines(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


# name -> file with labels, test file without; the texts are "a" and, in pairs, "b"
CASES = {
    "CoLA": (lines(("gj04", "1", "", "a")), lines(("index", "sentence"), ("5", "a")), "1"),
    "SST-2": (lines(("sentence", "label"), ("a", "0")), lines(("index", "sentence"), ("5", "a")), "0"),
    "mrpc": (
        lines(("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("1", "70", "71", "a", "b")),
        lines(("index", "#1 ID", "#2 ID", "#1 String", "#2 String"), ("5", "70", "71", "a", "b")),
        "1",
    ),
    "sts_b": (
        lines((*STSB, "score"), ("5", *"gfyoss", "a", "b", "3.800")),
        lines(STSB, ("5", *"gfyoss", "a", "b")),
        3.8,
    ),
    "qqp": (
        lines(("id", "qid1", "qid2", "question1", "question2", "is_duplicate"), ("5", "7", "8", "a", "b", "1")),
        lines(("id", "question1", "question2"), ("5", "a", "b")),
        "1",
    ),
    "mnli": (
        lines((*MNLI, "label1", "gold_label"), ("5", *"pigwxyz", "a", "b", "neutral", "entailment")),
        lines(MNLI, ("5", *"pigwxyz", "a", "b")),
        "entailment",
    ),
    "qnli": (
        lines(("index", "question", "sentence", "label"), ("5", "a", "b", "not_entailment")),
        lines(("index", "question", "sentence"), ("5", "a", "b")),
        "not_entailment",
    ),
    "rte": (
        lines(("index", "sentence1", "sentence2", "label"), ("5", "a", "b", "entailment")),
        lines(("index", "sentence1", "sentence2"), ("5", "a", "b")),
        "entailment",
    ),
    "wnli": (
        lines(("index", "sentence1", "sentence2", "label"), ("5", "a", "b", "0")),
        lines(("index", "sentence1", "sentence2"), ("5", "a", "b")),
        "0",
    ),
}  # fmt: skip
SINGLE = ("CoLA", "SST-2")


@pytest.mark.parametrize("name", CASES)
def test_each_task(files, name):
    labelled, test, label = CASES[name]
    config = glue(name, "regression" if name == "sts_b" else "classification")
    texts = {"text_a": "a"} if name in SINGLE else {"text_a": "a", "text_b": "b"}
    (record,) = files.read(config, labelled)
    has_index = labelled.startswith(("index", "id"))
    assert (record.fields, record.label, record.index) == (texts, label, 5 if has_index else 0)
    (record,) = files.read(config, test, labelled=False)
    assert (record.fields, record.label, record.index) == (texts, None, 5)


def test_classes():
    assert task_labels(glue("MNLI")) == ("contradiction", "entailment", "neutral")
    assert task_labels(glue("SST-2")) == ("0", "1")
    assert task_labels(glue("qnli")) == ("entailment", "not_entailment")


def test_quotes_are_characters(files):
    text = 'sentence\tlabel\n"an open quote\t1\n"two" \'x\t0\r\n\n'
    records = files.read(glue("sst2"), text)
    assert [record.fields["text_a"] for record in records] == ['"an open quote', '"two" \'x']
    assert [record.label for record in records] == ["1", "0"]
    assert [record.location.rpartition(":")[2] for record in records] == ["2", "3"]


def test_byte_order_mark_and_other_ends_of_lines(files):
    """Unicode's ends of lines are text; only line feeds end lines."""
    data = b"\xef\xbb\xbf" + "sentence\tlabel\none\u2028two\x0bthree\x85\t1".encode()
    (record,) = files.read(glue("sst2"), data)
    assert record.fields["text_a"] == "one\u2028two\x0bthree\x85"


def test_ones_own_columns(files):
    config = glue(
        "mine",
        text_fields=("title", "body"),
        label_field="topic",
        labels=("art", "money"),
        skip_bad_lines=True,
    )
    records = files.read(
        config, lines(("topic", "body", "title"), ("money", "b", "t"), ("short",), ("art", "c", "u"))
    )
    assert [record.fields for record in records] == [
        {"title": "t", "body": "b"},
        {"title": "u", "body": "c"},
    ]
    assert [(record.label, record.index) for record in records] == [("money", 0), ("art", 2)]
    assert records.skipped == 1
    files.refused(glue("mine"), "a\tb\n", "task.name is 'mine'", "task.text_fields")


def test_bad_lines(files):
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    good = "1\t2\t3\ta\tb\t0\n"
    refused = [
        ("4\t5\t6\ta\n", "train.txt:3: the line has 4 columns, fewer than 6 (id, qid1"),
        ("4\t5\t6\ta\tb\t2\n", "train.txt:3: label '2' is unknown; the labels are 0, 1"),
        ("1\t5\t6\ta\tb\t1\n", "train.txt:3: index 1 already appears at"),
    ]
    for line, message in refused:
        files.refused(glue("qqp"), head + good + line, message, "task.skip_bad_lines: true")
        records = files.read(glue("qqp", skip_bad_lines=True), head + good + line + "9\t2\t3\ta\tb\t1\n")
        assert ([record.index for record in records], records.skipped) == ([1, 9], 1)
    files.refused(
        glue("qqp"),
        head.replace("question2", "q") + good,
        "train.txt:1: there is no column 'question2' (columns: id,",
    )
    files.refused(
        glue("rte"), "index\tsentence1\tsentence2\n0\ta\tb\n", "no column 'label'", "belongs in task.test"
    )
    config = glue("stsb", "regression")
    for score in ("high", "nan", "inf", ""):
        files.refused(
            config, CASES["sts_b"][0].replace("3.800", score), f"train.txt:2: label {score!r} is not a number"
        )
