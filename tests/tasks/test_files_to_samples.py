"""Every file of configs/tasks: a small file of its format is read, and its samples are made for a run of its form."""

import copy
import dataclasses
import gzip
import json
import os
import random
from pathlib import Path

import pytest
from support.project import ROOT
from support.tasks.task_inputs import form, tokenizer

from data_utils.common.errors import UserError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build
from data_utils.tasks.base import HEADS
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers import files as module
from data_utils.tasks.readers.by_name import read_records, task_labels
from data_utils.tasks.readers.files import plain_name
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.render import Renderer

# Name of a file in configs/tasks -> its section `task`.
SECTIONS = {
    path.stem: load_yaml(path).get("task") for path in sorted((ROOT / "configs/tasks").glob("*.yaml"))
}
FILES = [name for name, section in SECTIONS.items() if section]
OBJECTIVE = {"unilm": "unilm", "unilmv2": "unilmv2"}  # by the end of the file's name
ENTAILED = {"premise": "rain falls in the city .", "hypothesis": "the street is wet"}
QUESTION = {"id": "q", "question": "where is rain ?", "answers": [{"text": "city", "answer_start": 10}]}
PASSAGE = {"text": "the rain in Rome is cold", "entities": [{"start": 4, "end": 7}, {"start": 12, "end": 15}]}

SUPERGLUE = {
    "boolq": {"question": "is rain cold", "passage": "rain is cold .", "label": True},
    "cb": {**ENTAILED, "label": "neutral"},
    "copa": {**ENTAILED, "choice1": "it was wet .", "choice2": "he runs .", "question": "effect", "label": 0},
    "rte": {**ENTAILED, "label": "entailment"},
    "axb": {"sentence1": "rain falls", "sentence2": "it is wet", "label": "entailment"},
    "axg": {**ENTAILED, "label": "entailment"},
    "wic": {"word": "run", "sentence1": "a run", "sentence2": "we run", "label": False},
    "wsc": {"text": "the man said he runs", "label": True, "idx": 0,
            "target": {"span1_index": 0, "span1_text": "the man", "span2_index": 3, "span2_text": "he"}},
    "multirc": {"idx": 0, "passage": {"text": "rain is cold", "questions": [
        {"idx": 0, "question": "is it", "answers": [{"idx": 0, "text": "yes", "label": 1}]}]}},
    "record": {"idx": 0, "passage": PASSAGE, "qas": [
        {"idx": 0, "query": "where is @placeholder .", "answers": [{"text": "Rome"}]}]},
}  # fmt: skip
GLUE = {
    "cola": "g\t1\t\train falls\n",
    "sst2": "sentence\tlabel\nit is cold\t0\n",
    "mrpc": "Quality\t#1 String\t#2 String\n1\train\tit is rain\n",
    "qqp": "id\tquestion1\tquestion2\tis_duplicate\n3\train ?\tcold ?\t0\n",
    "stsb": "index\tsentence1\tsentence2\tscore\n3\train\tcold\t2.5\n",
    "qnli": "index\tquestion\tsentence\tlabel\n3\train ?\tit is\tentailment\n",
    **dict.fromkeys(("mnli", "ax"), "index\tsentence1\tsentence2\tgold_label\n3\train\tcold\tneutral\n"),
    "rte": "index\tsentence1\tsentence2\tlabel\n3\train\tcold\tentailment\n",
    "wnli": "index\tsentence1\tsentence2\tlabel\n3\train\tcold\t1\n",
}
JSONL = {
    "agnews": {"text_a": "rain", "text_b": "it is cold", "label": 1},
    "yahoo": {"text_a": "rain ?", "text_b": "it is cold", "label": 9},
    "yelp2": {"text": "it is good", "label": 1},
    "yelp5": {"text": "it is good", "label": 5},
    "race": {"article": "rain falls", "questions": ["rain _"], "options": [["falls", "runs"]], "answers": ["A"]},
    "choices": {"inputs_pretokenized": "rain", "choices_pretokenized": ["falls", "runs"], "label": 0},
    "own": {"text": "it is good", "label": "positive"},
    "openentity": {"text": "the rain in Rome is cold", "mention": [12, 16], "label": ["place", "location"],
                   "entities": [[12, 16, "Q220", 0.9]]},
    "tacred": {"text": "the man in Rome runs", "head": [4, 7], "tail": [11, 15], "label": "no_relation"},
}  # fmt: skip


def write(files, task: TaskConfig) -> str:
    """A small file of the task's format; returns its path."""
    name = plain_name(task.name)
    if task.reader == "synthetic":
        return f"{task.name}:samples=8"
    if task.reader in ("superglue", "jsonl"):
        lines = (SUPERGLUE if task.reader == "superglue" else JSONL)[name]
        return str(files.write("a.jsonl", json.dumps(lines) + "\n"))
    if task.reader == "pairs":
        files.write("a.target", "it is cold . <S_SEP> it rains .\n")
        return str(files.write("a.source", "rain falls in the wet street of the city\n"))
    if task.reader == "squad":
        paragraph = {"context": "rain in a city", "qas": [QUESTION]}
        return str(files.write("a.json", json.dumps({"data": [{"paragraphs": [paragraph]}]})))
    if task.kind == "blanks":
        files.write("test.txt", "rain falls in the city\n")
        return str(files.write("blank/test.maskratio0.1.blank", "rain <blank> the city\n"))
    content = GLUE[name] if task.reader == "glue" else "Rome NNP I-NP I-LOC\nfalls VB I-VP O\n"
    return str(files.write("a.txt", content))


@pytest.mark.parametrize("name", FILES)
def test_from_its_file_to_samples(name, files):
    task = build(TaskConfig, load_yaml(ROOT / f"configs/tasks/{name}.yaml")["task"])
    records = read_records(task, write(files, task), labelled=True)
    objective = OBJECTIVE.get(name.rpartition("-")[2], "blank_infilling")
    if task.kind == "cloze":  # other words than the small vocabulary's are several tokens
        task = dataclasses.replace(task, scoring="sum")
    made = Renderer(task, tokenizer(), form(objective), 7, task_labels(task))
    made.check()
    assert made.head in HEADS
    for training in (True, False):
        prepared = made.prepare(records, training=training)
        samples = [made.sample(record, number, 0) for number, record in enumerate(prepared)]
        fields, parts = collate(samples)
        assert len(prepared) >= len(records) and fields.shape[0] >= len(samples)
        assert all(
            sample.right is not None for sample in samples if made.head == "choices" and task.kind == "cloze"
        )
        assert made.head == "tokens" or len(parts.positions)


# ------------------------------------------------------------------------------------------------------------
# Damaged files

VALUES = (
    None,
    True,
    -1,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "nan",
    "<blank>",
    "I-PER",
    "0",
    [],
    [1],
    ["a"],
    [[]],
    [{}],
    {},
)
INSERTED = (b"\n", b"\t", b" ", b"\r", b"\xff", b"\x00", b"<blank>", b"-DOCSTART-", b"\xe2\x80\xa8")
CANDIDATES = {"candidates": [{"text": "Bob"}]}


def places(tree, path=()):
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        yield from places(value, (*path, key))


def with_another_value(content: bytes, draw: random.Random) -> bytes:
    """A JSON text in which a value is another one, or missing."""
    tree = json.loads(content)
    *above, last = draw.choice(list(places(tree))[1:])
    at = tree
    for key in above:
        at = at[key]
    if draw.random() < 0.25:
        del at[last]
    else:
        at[last] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(tree).encode()


def with_other_bytes(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(data) + 1)
        data[place : place + draw.randint(0, 3)] = draw.choice([*INSERTED, b"", b"a"])
    return bytes(data)


READERS = ("jsonl", "superglue", "glue", "squad", "conll", "pairs", "text")


@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_with_lines_of_bounded_size_are_read(reader, files, monkeypatch):
    """Nothing waits for the other end of a FIFO or reads a device to its end."""
    kind = {"squad": "spans", "conll": "tagging", "pairs": "seq2seq", "text": "blanks"}.get(reader, "cloze")
    task = TaskConfig(name="rte", kind=kind, reader=reader, labels=("a", "b"))
    os.mkfifo(files.folder / "a.source")
    (files.folder / "a.target").symlink_to("/dev/zero")
    for path in (files.folder / "a.source", "/dev/zero", files.folder):
        with pytest.raises(UserError, match=r"is not a file; check the paths|is not a file of sources"):
            read_records(task, path, labelled=True)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    for name, pack in (("b.source", bytes), ("b.source.gz", gzip.compress)):
        files.write(name.replace("source", "target"), pack(b"a\n"))
        path = files.write(name, pack(b"x" * 5000))
        with pytest.raises(UserError, match=r"the line has more than 1000 bytes") as error:
            read_records(task, path, labelled=True)
        assert "\n" not in str(error.value)


READ_FROM_FILES = [name for name in FILES if SECTIONS[name]["reader"] != "synthetic"]


@pytest.mark.parametrize("name", READ_FROM_FILES)
def test_a_damaged_file_is_read_or_refused_in_one_line(name, files, caplog):
    caplog.set_level("ERROR")
    task = build(TaskConfig, SECTIONS[name])
    path = Path(write(files, task))
    content, draw, refused = path.read_bytes(), random.Random(name), 0
    if name == "wsc":
        content = json.dumps({**json.loads(content), **CANDIDATES}).encode()
    is_json = task.reader in ("superglue", "jsonl", "squad")
    for case in range(60):
        damage = with_another_value if is_json and case % 2 else with_other_bytes
        path.write_bytes(damage(content, draw))
        config = dataclasses.replace(task, skip_bad_lines=case % 3 == 0)
        try:
            assert all(record.location for record in read_records(config, path, labelled=case % 5 > 0))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).endswith(".")
    assert refused
