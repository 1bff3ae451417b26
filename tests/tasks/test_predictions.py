"""Files of predictions against lines as the servers take them."""

import json
import os

import numpy as np
import pytest
from support.tasks.task_inputs import predicted, renderer

from data_utils.common.errors import DataError
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.decode_outputs import prediction, references
from data_utils.tasks.metrics.metrics import measure
from data_utils.tasks.metrics.prediction_files import file_name, write_predictions


def task(name, reader):
    return TaskConfig(name=name, kind="cloze", reader=reader)


def written(tmp_path, config, indices, predictions):
    path = tmp_path / "new" / file_name(config)
    write_predictions(path, config, indices, predictions)
    assert os.listdir(path.parent) == [path.name]  # and nothing else
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "name, prediction, line",
    [
        ("BoolQ", "true", '{"idx": 7, "label": "true"}'),
        ("cb", "neutral", '{"idx": 7, "label": "neutral"}'),
        ("COPA", 1, '{"idx": 7, "label": 1}'),
        ("copa", np.int64(0), '{"idx": 7, "label": 0}'),
        ("RTE", "not_entailment", '{"idx": 7, "label": "not_entailment"}'),
        ("WiC", "false", '{"idx": 7, "label": "false"}'),
        ("WSC", "false", '{"idx": 7, "label": "False"}'),
        ("ReCoRD", "Zürich", '{"idx": 7, "label": "Zürich"}'),
    ],
)
def test_superglue(tmp_path, name, prediction, line):
    assert written(tmp_path, task(name, "superglue"), [7], [prediction]) == [line]


def test_indices_of_record_stay_as_they_are(tmp_path):
    index = {"passage": 0, "query": 3}
    (line,) = written(tmp_path, task("record", "superglue"), [index], ["Rome"])
    assert json.loads(line) == {"idx": index, "label": "Rome"}


def test_answers_of_multirc_are_nested(tmp_path):
    indices = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (4, 5, 6)]
    lines = written(tmp_path, task("multirc", "superglue"), indices, ["1", "0", "0", 1])
    assert [json.loads(line) for line in lines] == [
        {"idx": 0, "passage": {"questions": [
            {"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]},
            {"idx": 1, "answers": [{"idx": 2, "label": 0}]}]}},
        {"idx": 4, "passage": {"questions": [{"idx": 5, "answers": [{"idx": 6, "label": 1}]}]}},
    ]  # fmt: skip


def test_glue(tmp_path):
    lines = written(tmp_path, task("mnli", "glue"), [0, 1], ["entailment", "neutral"])
    assert lines == ["index\tprediction", "0\tentailment", "1\tneutral"]
    lines = written(tmp_path / "b", task("sts-b", "glue"), [0, 1, 2], [5.2, -0.1, 3.14159])
    assert lines[1:] == ["0\t5.000", "1\t0.000", "2\t3.142"]


def test_squad(tmp_path):
    (line,) = written(tmp_path, task("squad2", "squad"), ["a", "b"], ["im Jahr 1066", ""])
    assert json.loads(line) == {"a": "im Jahr 1066", "b": ""}


def test_ones_own_task(tmp_path):
    lines = written(tmp_path, task("tags", "conll"), [0, np.int32(1)], [["O", "B-PER"], np.array(["O"])])
    assert lines == ['{"idx": 0, "label": ["O", "B-PER"]}', '{"idx": 1, "label": ["O"]}']


def test_ones_own_task_in_files_of_a_benchmark_has_the_probabilities(tmp_path):
    """A benchmark's server takes none, and is not meant here."""
    own, path = task("own", "glue"), tmp_path / file_name(task("own", "glue"))
    write_predictions(path, own, [3], ["b"], beside={"scores": [{"a": 0.2, "b": 0.8}]})
    assert path.name == "own.jsonl"
    assert json.loads(path.read_text()) == {"idx": 3, "label": "b", "scores": {"a": 0.2, "b": 0.8}}


def test_names_of_files():
    names = [("boolq", "superglue"), ("ax_b", "superglue"), ("rte", "glue"), ("MNLI", "glue"), ("sst2", "glue"),
             ("squad2", "squad"), ("RTE", "jsonl"), ("../my task", "jsonl")]  # fmt: skip
    assert [file_name(task(*each)) for each in names] == [
        "BoolQ.jsonl", "AX-b.jsonl", "RTE.tsv", "MNLI-m.tsv", "SST-2.tsv", "squad2.json", "RTE.jsonl",
        ".._my_task.jsonl",
    ]  # fmt: skip


def test_what_does_not_fit_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "MultiRC.jsonl"
    path.write_text("old")
    with pytest.raises(DataError, match="2 predictions for 1 samples"):
        write_predictions(path, task("rte", "glue"), [0], ["a", "b"])
    with pytest.raises(
        DataError, match=r"prediction 'yes' is not the index of a choice; the server accepts 0 or 1"
    ):
        write_predictions(path, task("multirc", "superglue"), [(0, 0, 0)], ["yes"])
    assert path.read_text() == "old"
    with pytest.raises(DataError, match="--predictions"):
        write_predictions(path / "below", task("rte", "glue"), [0], ["a"], "--predictions")


def test_an_answer_of_record_is_submitted_as_the_passage_spells_it(files):
    """The server compares characters; the model reads typographic signs as ASCII, as it was trained on them."""
    text = "Rex is \u201cBob\u2019s\u201d dog \u2013 a big one, says Bob's wife."
    quoted, last = "\u201cBob\u2019s\u201d", "Bob's"
    entities = [(text.index(name), text.index(name) + len(name) - 1) for name in ("Rex", quoted, last)]
    line = {"passage": {"text": text, "entities": [{"start": a, "end": b} for a, b in entities]}, "idx": 0,
            "qas": [{"query": "@placeholder\u2019s dog", "idx": 5, "answers": [{"text": quoted}]}]}  # fmt: skip
    config = TaskConfig(name="record", kind="cloze", reader="superglue")
    records = files.read(config, [line])
    made = renderer(name="record", reader="superglue")
    sample = made.sample(records[0], 0)
    read = [predicted(part, made) for part in sample.target_groups]
    assert not any(sign in "".join(read) for sign in "\u201c\u201d\u2019\u2013")
    found = []
    for choice in range(len(sample.target_groups)):
        answers = np.array([[float(part == choice), 0.0] for part in range(len(sample.target_groups))])
        found.append(prediction(made, records[0], sample, answers))
        write_predictions(files.folder / "ReCoRD.jsonl", config, [records[0].index], [found[-1]])
        submitted = json.loads((files.folder / "ReCoRD.jsonl").read_text("utf-8"))["label"]
        assert submitted in {text[a : b + 1] for a, b in entities}
    assert sorted(found) == sorted(["Rex", quoted, last])
    right = found[sample.right]
    assert right == quoted and measure(["answer_em"], [right], references(records)) == {"answer_em": 1.0}
    (trained,) = made.prepare(records, training=True)
    assert predicted(made.sample(trained, 0).target_groups[0], made) == read[sample.right]
