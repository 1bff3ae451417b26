"""Files -> Records -> samples: what readers give is what kinds of tasks take."""

from __future__ import annotations

import pytest
from support.project import ROOT
from support.tasks.labelled_files import task
from support.tasks.synthetic_tasks import MORE
from support.tasks.task_inputs import ALL_MASKS, form, predicted, shown, tokenizer

from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build
from data_utils.common.target_groups import NO_RIGHT
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import read_records, task_labels
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.render import Renderer

FILES = {path.stem: load_yaml(path) for path in sorted((ROOT / "configs/tasks").glob("*.yaml"))}
CONFIGS = {name: tree["task"] for name, tree in FILES.items() if "task" in tree}  # others list files of these


def made_of(config, objective="blank_infilling", kind_of_tokenizer="gpt2"):
    made = Renderer(
        config, tokenizer(kind_of_tokenizer), form(objective, masks=ALL_MASKS), 7, task_labels(config)
    )
    made.check()
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_every_task_of_the_configurations_can_be_rendered(name):
    config = build(TaskConfig, CONFIGS[name])
    objective = {"unilm": "unilm", "unilmv2": "unilmv2"}.get(name.rpartition("-")[2], "blank_infilling")
    made_of(config, objective)


PASSAGE = {
    "text": "Tom ran.\n@highlight\nIt is \u201cwet\u201d",
    "entities": [{"start": 0, "end": 2}, {"start": 20, "end": 21}],
}
QUESTIONS = [
    {
        "idx": 0,
        "question": "Who ran?",
        "answers": [{"idx": 0, "text": "Tom", "label": 1}, {"idx": 1, "text": "it", "label": 0}],
    }
]
# Line of a file, the context of the first sample, the parts' answers and the right one.
SUPERGLUE = {
    "BoolQ": (
        {"question": "is it wet", "passage": "Rain.", "label": True},
        "Rain. Question: is it wet? Answer:[MASK].",
        ["No", "Yes"],
        1,
    ),
    "CB": (
        {"premise": "Rain.", "hypothesis": "It is wet!", "label": "neutral"},
        '"It is wet" ?[MASK], "Rain."',
        ["Yes", "No", "Maybe"],
        2,
    ),
    "RTE": (
        {"premise": "Rain.", "hypothesis": "Wet!", "label": "not_entailment"},
        '"Wet" ?[MASK], "Rain."',
        ["Yes", "No"],
        1,
    ),
    "AX-b": (
        {"sentence1": "Rain.", "sentence2": "Wet!", "label": "entailment"},
        '"Wet" ?[MASK], "Rain."',
        ["Yes", "No"],
        0,
    ),
    "COPA": (
        {"premise": "He ran.", "choice1": "Rain.", "choice2": "It is wet.", "question": "cause", "label": 1},
        '"rain" or "it is wet"? He ran because[MASK].',
        ["rain", "it is wet"],
        1,
    ),
    "WiC": (
        {"word": "ran", "sentence1": "He ran.", "sentence2": "It ran dry.", "label": False},
        '"He ran." / "It ran dry." Similar sense of "ran"?[MASK].',
        ["No", "Yes"],
        0,
    ),
    "WSC": (
        {
            "text": "Tom ran (he) home.",
            "target": {"span1_index": 0, "span1_text": "Tom", "span2_index": 1, "span2_text": "he"},
            "label": True,
        },
        "Tom ran ( *he* ) home. The pronoun '*he*' refers to[MASK].",
        ["Tom"],
        0,
    ),
    "MultiRC": (
        {"passage": {"text": "Tom ran.", "questions": QUESTIONS}},
        "Tom ran. Question: Who ran? Is it Tom?[MASK].",
        ["No", "Yes"],
        1,
    ),
    "ReCoRD": (
        {
            "passage": PASSAGE,
            "qas": [{"idx": 0, "query": "@placeholder is wet", "answers": [{"text": "It"}]}],
        },
        'Tom ran.\n- It is "wet"[MASK] is wet',
        ["It", "Tom"],
        0,
    ),
}


@pytest.mark.parametrize("name", SUPERGLUE)
def test_superglue_from_the_file_to_the_document(files, name):
    line, context, answers, right = SUPERGLUE[name]
    config = task("superglue", name, "cloze", scoring="sum")
    records = files.read(config, [{**line, "idx": 0}])
    made = made_of(config)
    samples = [
        made.sample(record, number) for number, record in enumerate(made.prepare(records, training=False))
    ]
    sample = samples[0]
    text = shown(sample.documents[0], made, slice(sample.target_groups[0].positions[0]))
    assert text == f"[CLS]{context}<|endoftext|>"
    end = "<|endofpiece|>"
    assert [predicted(part, made) for part in sample.target_groups] == [
        f" {answer}{end}" for answer in answers
    ]
    assert sample.right == right
    assert len(samples) == (2 if name == "MultiRC" else 1)
    trained = made.prepare(records, training=True)
    assert len(trained) == (2 if name in ("MultiRC", "COPA") else 1)
    _, parts = collate([made.sample(record, number) for number, record in enumerate(trained)])
    assert NO_RIGHT not in parts.right


SYNTHETIC = {
    "noisy_votes": "classification",
    "xor": "cloze",
    "word_pair": "classification",
    "choice": "cloze",
    "unequal_choice": "cloze",
    "copy": "seq2seq",
    "span": "spans",
    "tags": "tagging",
    "recall": "seq2seq",
    "periodic": "blanks",
}
assert SYNTHETIC.keys() - MORE.keys() == {"noisy_votes", "recall"}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_tasks_become_batches(name):
    path = f"{name}:samples=3,seed=1"
    kind = SYNTHETIC[name]
    more = {"stride": 16, "question_length": 8, "answer_length": 8, "sequence_length": 64}
    if name == "xor":
        more |= {"template": "{text} ? [MASK]", "verbalizers": {"no": "no", "yes": "yes"}}
    elif kind == "cloze":
        more |= {"template": "{inputs} [MASK]"}
    config = TaskConfig(name=name, kind=kind, reader="synthetic", train=path, **more)
    made = made_of(config, kind_of_tokenizer="bert")
    records = made.prepare(read_records(config, path, labelled=True), training=True)
    fields, parts = collate([made.sample(record, number) for number, record in enumerate(records)])
    assert len(records) >= 3 and fields.shape[2] <= 2 * 64
    assert made.head == "tokens" or len(parts.targets)
