"""configs/tasks: each file is read, its task exists, and its numbers are the published ones."""

import pytest
from support.project import ROOT

from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.metrics_by_task import METRICS_BY_TASK, plain_name
from data_utils.tasks.readers.by_name import task_labels
from data_utils.tasks.templates.patterns import PATTERNS, chosen_pattern
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.tree import Config
from megatron_lite.finetune.setup import load_tree

_ALL = {path.stem: load_yaml(path) for path in sorted((ROOT / "configs/tasks").glob("*.yaml"))}
SEVERAL = {name: tree for name, tree in _ALL.items() if "tasks" in tree}
FILES = {name: tree for name, tree in _ALL.items() if name not in SEVERAL}
TASKS = {name: build(TaskConfig, tree["task"]) for name, tree in FILES.items()}
TRAINED = [name for name, task in TASKS.items() if task.train is not None]
NOT_TRAINED = {"ax", "axb", "axg"}

# GLM-Large on SuperGLUE: file -> epochs, lr, batch, tokens of input, pattern.
PUBLISHED = {
    "copa": (50, 1e-5, 16, 256, 0),
    "wsc": (50, 1e-5, 16, 128, 2),
    "rte": (50, 1e-5, 16, 256, 0),
    "boolq": (20, 1e-5, 16, 256, 4),
    "wic": (30, 1e-5, 16, 256, 1),
    "cb": (50, 1e-5, 16, 256, 3),
    "multirc": (15, 1e-5, 64, 512, 0),
    "record": (5, 1e-5, 64, 512, 0),
}
# On sequences: file -> epochs, lr, tokens of input and output; fewest tokens, length penalty, beams, n of n-grams.
PUBLISHED_SEQUENCES = {
    "gigaword": (10, 3e-5, 192, 32, 0, 0.6, 5, 3),
    "cnn_dm": (15, 3e-5, 608, 160, 55, 0.7, 5, 3),
    "cnn_dm_original": (10, 1e-5, 608, 160, 55, 0.7, 5, 3),
    "xsum": (6, 1e-5, 608, 60, 10, 1.0, 6, 3),
    "squad_questions": (10, 2e-5, 464, 48, 0, 0.7, 5, 0),
    "squad_answers": (5, 1e-5, 512, 64, 0, 0.0, 5, 0),
    "squad2_answers": (10, 1e-5, 512, 64, 0, 0.0, 5, 0),
    "yahoo_blanks": (5, 1e-5, 256, 200, 0, 1.0, 1, 3),
}


@pytest.mark.parametrize("name", FILES)
def test_sections(name):
    tree, task = FILES[name], TASKS[name]
    assert set(tree) <= {"task", "generation", "finetune", "training", "optimizer", "schedule", "batch"}
    assert set(tree) == {"task"} or {"finetune", "optimizer", "schedule", "batch"} < set(tree)
    assert set(tree.get("finetune", {})) <= {"epochs", "warmup_share"}
    paths = [path for path in (task.train, *task.validation, *task.test) if path is not None]
    assert paths and all(path.startswith("data/") or task.reader == "synthetic" for path in paths)


@pytest.mark.parametrize("name", FILES)
def test_on_top_of_a_model(name):
    """The whole configuration is valid."""
    tree = load_tree([str(ROOT / "configs/glm-large.yaml")], str(ROOT / f"configs/tasks/{name}.yaml"), [])
    config = build(Config, merge({"training": {"steps": 1}, "schedule": {"warmup_steps": 0}}, tree))
    assert config.task == TASKS[name]
    assert config.training.label_smoothing == (0.1 if TASKS[name].kind in ("seq2seq", "blanks") else 0.0)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_tasks_match_the_files_of_one(name):
    tree = load_tree([str(ROOT / "configs/roberta-large.yaml")], name, [])
    config = build(Config, merge({"training": {"steps": 1}, "schedule": {"warmup_steps": 0}}, tree))
    assert config.task == config.tasks[0] and len(config.tasks) == len(SEVERAL[name]["tasks"])
    for task in config.tasks:
        (own,) = [one for one in TASKS.values() if one.train == task.train]
        assert (task.name, task.validation, task.test) == (own.name, own.validation, own.test)


def test_tasks_without_training():
    assert set(TASKS) - set(TRAINED) == NOT_TRAINED
    assert all(set(FILES[name]) == {"task"} for name in NOT_TRAINED)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.kind == "cloze"])
def test_patterns_have_words_for_the_classes(name):
    words = chosen_pattern(TASKS[name]).verbalizers
    brings_choices = name in ("copa", "record", "wsc")
    is_own = not words and plain_name(name) not in METRICS_BY_TASK
    assert set(words) == set(task_labels(TASKS[name])) or is_own or brings_choices


def test_every_pattern_and_template_has_a_file():
    names = {plain_name(task.name) for task in TASKS.values()}
    assert set(PATTERNS) - {"mnlimm", "ax"} <= names  # other files of MNLI
    assert {"cnndmoriginal", "squadquestions", "squadanswers"} <= names


@pytest.mark.parametrize("name", PUBLISHED)
def test_superglue_of_glm(name):
    tree, task = FILES[name], TASKS[name]
    numbers = (tree["finetune"]["epochs"], tree["optimizer"]["lr"], tree["batch"]["global_batch_size"])
    assert (*numbers, task.sequence_length, task.pattern) == PUBLISHED[name]
    assert tree["finetune"]["warmup_share"] == tree["optimizer"]["weight_decay"] == 0.1
    assert tree["schedule"] == {"kind": "linear", "min_lr_ratio": 0.0}


@pytest.mark.parametrize("name", PUBLISHED_SEQUENCES)
def test_sequences_of_glm(name):
    tree, task = FILES[name], TASKS[name]
    written = build(GenerationConfig, tree["generation"])
    beams = written.num_beams if written.strategy == "beam" else 1
    numbers = (tree["finetune"]["epochs"], tree["optimizer"]["lr"], task.sequence_length, task.target_length)
    decoding = (written.min_length, written.length_penalty, beams, written.no_repeat_ngram_size)
    assert numbers + decoding == PUBLISHED_SEQUENCES[name]
    assert (tree["finetune"]["warmup_share"], tree["optimizer"]["weight_decay"]) == (0.06, 0.1)
