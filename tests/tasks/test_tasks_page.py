"""docs/tasks.md: its example and its table of lines are read as they stand."""

import json
import re

import pytest
import yaml
from support.project import ROOT
from support.tasks.labelled_files import task
from support.tasks.synthetic_tasks import MORE

from data_utils.common.errors import DataError
from data_utils.common.settings import build
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import read_records, task_labels
from data_utils.tasks.readers.synthetic import TASKS, optimum, parsed

PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.S)[1]


def test_the_example(files, monkeypatch):
    tree = yaml.safe_load(block("yaml"))
    shipped = yaml.safe_load((ROOT / "configs/tasks/own.yaml").read_text(encoding="utf-8"))["task"]
    assert tree["task"] == {key: shipped[key] for key in tree["task"]}
    small = yaml.safe_load((ROOT / "configs/tasks/own-small.yaml").read_text(encoding="utf-8"))
    changed = {
        "sequence_length": yaml.safe_load((ROOT / "configs/tiny.yaml").read_text())["model"]["max_position"]
    }
    assert small["task"] == shipped | changed and small["optimizer"]["lr"] == 1e-3
    files.write("data/own/train.jsonl", block("json"))
    monkeypatch.chdir(files.folder)
    config = build(TaskConfig, tree["task"])
    first, *_ = read_records(config, config.train, labelled=True)
    assert task_labels(config) == ("negative", "positive")
    assert (first.fields["text"], first.label) == ("A warm and funny film.", "positive")


def test_the_message(files, monkeypatch):
    good = block("json").splitlines()[0] + "\n"
    files.write("data/own/train.jsonl", good * 16 + good.replace("positive", "postive"))
    monkeypatch.chdir(files.folder)
    config = build(TaskConfig, yaml.safe_load(block("yaml"))["task"])
    with pytest.raises(DataError) as caught:
        read_records(config, config.train, labelled=True)
    assert f"error: {caught.value}\n" in PAGE


def test_lines_of_every_type(files):
    rows = re.findall(r"^\| ([^|]*`\w+`[^|]*) \| ([^|]*\{\"[^|]*) \|$", PAGE, re.M)
    assert rows
    labels = {
        "typing": ("person",),
        "tagging": ("O", "B-PER"),
        "classification": ("positive", "1"),
        "cloze": ("positive", "1"),
    }
    for kinds, cell in rows:
        for kind in re.findall(r"`(\w+)`", kinds):
            for line in re.findall(r"`(\{.*?\})`", cell):
                line = line.replace('"answer_start": 12', '"answer_start": 0')
                tree = json.loads(line.replace('"..."', '"one two word"'))
                (record,) = files.read(task("jsonl", "own", kind, labels=labels.get(kind, ())), [tree])
                assert record.label is not None


def test_tables():
    shown = {
        "BoolQ": "false, true",
        "CB": "entailment, contradiction, neutral",
        "MNLI": "contradiction, entailment, neutral",
        "qnli": "entailment, not_entailment",
    }
    for name, classes in shown.items():
        assert task_labels(task("glue", name)) == tuple(classes.split(", ")) and f"| {classes} |" in PAGE
    section = PAGE.partition("## Synthetic tasks")[2].partition("\n## ")[0]
    named = {spec.partition(":")[0]: spec for spec in re.findall(r"`(\w+(?::[\w=.,]+)?)`", section)}
    assert TASKS.keys() - MORE.keys() <= named.keys()
    assert all(parsed(spec) for name, spec in named.items() if name in TASKS)
    assert round(optimum(named["noisy_votes"])["accuracy"], 3) == 0.837
