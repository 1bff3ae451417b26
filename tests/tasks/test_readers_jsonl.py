"""One's own samples as JSONL for each kind of task, and what every reader refuses."""

import gzip
import json
import os

import pytest
import zstandard
from support.tasks.labelled_files import task

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.settings import build
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import read_records, task_labels


def jsonl(kind="classification", **settings):
    return task("jsonl", settings.pop("name", "mine"), kind, **settings)


YES_NO = jsonl(labels=("no", "yes"))


def test_classification(files):
    lines = [
        {"text": "a", "label": "yes", "source": "web", "year": 2020},
        {"text_a": "b", "text_b": "", "label": "no"},
    ]
    records = files.read(YES_NO, lines)
    assert [record.fields for record in records] == [
        {"text": "a"},
        {"text_a": "b", "text_b": ""},
    ]
    assert [(record.label, record.index) for record in records] == [("yes", 0), ("no", 1)]


@pytest.mark.parametrize(
    ("labels", "value", "name"), [(("false", "true"), True, "true"), (("0", "1"), 1, "1"), (("a",), "a", "a")]
)
def test_labels_are_names(files, labels, value, name):
    (record,) = files.read(jsonl(labels=labels), [{"text": "a", "label": value}])
    assert record.label == name


def test_ones_own_fields(files):
    config = jsonl(labels=("no", "yes"), text_fields=("review", "title"), label_field="class")
    (record,) = files.read(config, [{"review": "r", "title": "t", "class": "no", "idx": "x7"}])
    assert (record.fields["review"], record.fields["title"], record.label) == ("r", "t", "no")
    assert record.index == "x7" and list(record.fields) == ["review", "title"]
    files.refused(config, [{"text": "r"}], "train.txt:1: there is no field 'review' (fields: text)")


def test_fields_of_a_template_must_be_there(files):
    config = jsonl("cloze", template="{a} and {b:strip}: [MASK]", verbalizers={"no": "bad", "yes": "good"})
    assert task_labels(config) == ("no", "yes")
    (record,) = files.read(config, [{"a": "1", "b": "2", "label": "yes"}])
    assert record.fields == {"a": "1", "b": "2"}
    files.refused(config, [{"a": "1", "label": "yes"}], "there is no field 'b' (fields: a, label)")


def test_regression(files):
    (record,) = files.read(jsonl("regression"), [{"text": "a", "label": 2}])
    assert record.label == 2.0
    for bad in ("x", True, [1]):
        files.refused(
            jsonl("regression"), [{"text": "a", "label": bad}], f"label {bad!r} is not a number; regression"
        )


def test_choices(files):
    line = {"inputs_pretokenized": "2 + 2 =", "choices_pretokenized": ["4", "5", "6"], "label": 0}
    (record,) = files.read(jsonl("cloze"), [line])
    assert (record.fields, record.label) == ({"inputs": "2 + 2 =", "choices": ("4", "5", "6")}, 0)
    files.refused(
        jsonl("cloze"),
        [{**line, "label": 3}],
        "train.txt:1: label 3 is not a choice; there are 3, counted from 0",
    )
    files.refused(
        jsonl("cloze"), [{**line, "choices_pretokenized": ["4"]}], "there are 1 choices; a sample needs 2"
    )
    files.refused(
        jsonl("cloze"), [{**line, "choices_pretokenized": [4, 5]}], "must hold a list of texts, not [4, 5]"
    )
    for choices, message in ((["4", " "], "choice 1 is empty"), (["4", "5", "4 "], "contain duplicates")):
        files.refused(jsonl("cloze"), [{**line, "choices_pretokenized": choices}], "train.txt:1: ", message)


def test_race(files):
    line = {"article": "An article.", "id": "high1.txt", "questions": ["Who _ ?", "Why?"],
            "options": [["a", "b"], ["c", "d", "e"]], "answers": ["B", "C"]}  # fmt: skip
    config = jsonl("cloze", name="RACE")
    records = files.read(config, [line])
    assert [(record.index, record.label) for record in records] == [("high1.txt-0", 1), ("high1.txt-1", 2)]
    assert records[1].fields == {"context": "An article.", "question": "Why?", "choices": ("c", "d", "e")}
    for answer in ("C", "AB", "", "b"):
        files.refused(
            config,
            [{**line, "answers": [answer, "C"]}],
            f"question 0 has 2 options and the answer '{answer}'",
        )
    files.refused(config, [{**line, "options": []}], "2 questions have 0 lists of options and 2 answers")


def test_sequence_to_sequence(files):
    lines = [{"src": "a b", "tgt": "c"}, {"src": ["un", "##able", "to"], "tgt": ["go"]}]
    records = files.read(jsonl("seq2seq"), lines)
    assert [record.fields for record in records] == [
        {"source": "a b", "target": "c"},
        {"source": "unable to", "target": "go"},
    ]
    assert [record.label for record in records] == ["c", "go"]
    (record,) = files.read(jsonl("seq2seq"), [{"src": "a"}], labelled=False)
    assert (record.fields, record.label) == ({"source": "a"}, None)
    config = jsonl("seq2seq", text_fields=("question",), label_field="answer")
    assert files.read(config, [{"question": "q", "answer": "a"}])[0].fields == {"source": "q", "target": "a"}
    files.refused(
        jsonl("seq2seq"), [{"src": "a", "tgt": " "}], "train.txt:1: field 'tgt' is empty; a pair needs"
    )
    files.refused(jsonl("seq2seq"), [{"src": [], "tgt": "a"}], "field 'src' is empty")


def test_spans_and_tags(files):
    line = {
        "id": "q",
        "question": "who?",
        "context": "It is Ann.",
        "answers": [{"text": "Ann", "answer_start": 6}],
    }
    (record,) = files.read(jsonl("spans"), [line])
    assert (record.index, record.label, record.fields["answers"]) == ("q", ("Ann",), (("Ann", 6),))
    files.refused(
        jsonl("spans"),
        [{**line, "context": "It's Ann."}],
        "train.txt:1: the answer 'Ann' is not at character 6",
    )
    config = jsonl("tagging", labels=("O", "B-PER", "I-PER"))
    (record,) = files.read(config, [{"words": ["Ann", "Lee", "left"], "label": ["B-PER", "I-PER", "O"]}])
    assert (record.fields, record.label) == ({"words": ("Ann", "Lee", "left")}, ("B-PER", "I-PER", "O"))
    files.refused(config, [{"words": ["a"], "label": ["O", "O"]}], "there are 2 tags for 1 words")
    files.refused(
        config,
        [{"words": ["a"], "label": ["I-PER"]}],
        "tag I-PER follows O, so it does not continue an entity",
    )
    files.refused(
        config, [{"words": ["a"], "label": ["X"]}], "label 'X' is unknown; the labels are O, B-PER, I-PER"
    )
    files.refused(config, [{"words": [" "], "label": ["O"]}], "no word may be empty")


def test_texts(files):
    assert files.read(jsonl("blanks"), [{"text": "a b"}])[0].label == "a b"
    files.refused(jsonl("blanks"), [{"text": " "}], "the text is empty")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "malformed JSON"),
        (b"[1, 2]", "the line holds an array, not an object"),
        (b'{"text": "\xff", "label": "no"}', "invalid UTF-8: byte 0xff"),
        (b'{"label": "no"}', "there is no field 'text' (fields: label)"),
        (b'{"text": 3, "label": "no"}', "field 'text' holds a number, not text"),
        (b'{"text": " ", "label": "no"}', "the text is empty (text)"),
        (b'{"text": "a"}', "the label is missing"),
        (b'{"text": "a", "label": "maybe"}', "label 'maybe' is unknown; the labels are no, yes"),
        (b'{"text": "a", "label": null}', "the label is missing"),
        (b'{"text": "a", "label": {}}', "the label is an object ({}); a class must be text"),
    ],
)
def test_bad_lines(files, line, message):
    good = b'{"text": "a", "label": "no"}\n\n'
    files.refused(
        YES_NO, good + line + b"\n", f"train.txt:3: {message}", "; correct or remove it, or skip such"
    )


def test_bad_lines_are_counted_and_said_once(files, caplog):
    config = jsonl(labels=("no", "yes"), skip_bad_lines=True)
    good = {"text": "a", "label": "no"}
    records = files.read(config, [good, {"text": "b"}, {"text": 3}, good])
    assert ([record.index for record in records], records.skipped) == ([0, 3], 2)
    (said,) = caplog.messages
    assert (
        "train.txt: 2 lines are skipped; the first: " in said and "train.txt:2: the label is missing" in said
    )
    files.refused(config, [{"text": "b"}], "train.txt has no sample; 1 lines were skipped; the first")


def test_files_that_are_missing_empty_or_damaged(files):
    with pytest.raises(
        Exception, match=r"absent\.jsonl does not exist; check the paths in the section task\.$"
    ):
        read_records(YES_NO, files.folder / "absent.jsonl", labelled=True)
    with pytest.raises(Exception, match="is not a file"):
        read_records(YES_NO, files.folder, labelled=True)
    for content in ("", "\n\n", b"\xef\xbb\xbf"):
        files.refused(YES_NO, content, "train.txt has no sample; check the file and task.reader")
    whole = gzip.compress(json.dumps({"text": "a", "label": "no"}).encode() * 9)
    files.refused(YES_NO, whole[:-9], "the compressed data is truncated", name="train.jsonl.gz")


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_compressed_lines_are_the_same(files, compress, monkeypatch):
    monkeypatch.setattr("data_utils.tasks.readers.files._CHUNK_BYTES", 7)
    name = {bytes: "a.jsonl", gzip.compress: "a.jsonl.gz"}.get(compress, "a.jsonl.zst")
    lines = [{"text": "x" * n, "label": "no"} for n in range(1, 9)]
    records = files.read(YES_NO, compress("".join(json.dumps(each) + "\n" for each in lines).encode()), name)
    assert [len(record.fields["text"]) for record in records] == list(range(1, 9))
    assert [record.location.rpartition(":")[2] for record in records] == [*"12345678"]


def test_labels_of_a_task_without_any(files):
    files.refused(
        jsonl(),
        [{"text": "a", "label": "no"}],
        "task.labels is empty, and task 'mine' has no predefined classes",
    )
    assert task_labels(jsonl(name="AG-News")) == ("1", "2", "3", "4")
    verbalizers = build(TaskConfig, {"name": "m", "kind": "cloze", "reader": "jsonl",
                                     "verbalizers": {False: "bad", 1: "good"}})  # fmt: skip
    assert task_labels(verbalizers) == ("false", "1")
    with pytest.raises(ConfigError, match="contains a name twice"):
        task_labels(jsonl(labels=("a", "a")))
    with pytest.raises(ConfigError, match=r"task\.verbalizers: the label is a number \(0\.5\).*in quotes"):
        task_labels(jsonl("cloze", verbalizers={0.5: "good"}))


def test_fields_within_fields(files):
    config = jsonl(labels=("no", "yes"), text_fields=("meta.text",), label_field="meta.class")
    (record,) = files.read(config, [{"meta": {"text": "r", "class": "no"}}])
    assert (dict(record.fields), record.label) == ({"meta.text": "r"}, "no")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a", "label": "no", "label": "yes"}\n',
            r"a\.jsonl:1: the field 'label' appears",
        ),
        ("a.jsonl", gzip.compress(b'{"text": "a", "label": "no"}\n'), "compressed by gzip"),
        ("a.jsonl", '{"text": "a", "label": "no"}\n'.encode("utf-16"), "is UTF-16, .*iconv"),
        ("a.jsonl", b"text,label\na,no\n", "Rename it to .csv"),
    ],
)
def test_files_in_another_form_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_records(YES_NO, tmp_path / name, labelled=True)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is not a file"):
        read_records(YES_NO, tmp_path / "a.jsonl", labelled=True)


def test_endings_in_upper_case(tmp_path):
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "a", "label": "no", "score": NaN}\n'))
    (record,) = read_records(YES_NO, tmp_path / "A.JSONL.GZ", labelled=True)
    assert record.label == "no"
