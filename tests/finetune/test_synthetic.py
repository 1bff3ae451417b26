"""Every kind learns a synthetic task to the best score that is possible, and never beyond it.

A score may lie 3 standard errors of its file below the optimum, and as many above: more above would be a leak.
"""

import json
import math

import pytest
import yaml
from support.distributed import run_ranks
from support.tasks.synthetic_tasks import MORE

from data_utils.common.settings import merge
from data_utils.tasks.readers.synthetic import optimum, synthetic_vocabulary
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare

SAMPLES = 400  # evaluated
assert MORE  # most of these tasks are in tests/support
MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position": 64, "init_std": 0.1,
    "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0, "task_head": {"dropout": 0.0},
}  # fmt: skip
# With all weights at 0.1 the word of one of two keys is guessed: 0.5.
LARGE = {"init_words_std": 0.8, "init_positions_std": 0.8, "tie_word_embeddings": False}
SPANS = {"kind": "spans", "question_length": 8, "answer_length": 8}
PATTERN = {"template": "{text} is [MASK]", "verbalizers": {"no": "blue", "yes": "red"}}


def learn(context, directory, name, settings, task):
    finetune(
        prepare(load_tree([], write_files(directory, name, settings, task), [])), directory / "out", context
    )
    (of_file,) = json.loads((directory / "out/results.json").read_text())["files"].values()
    return of_file["mean"]


def write_files(directory, name, settings, task):
    """The path of a YAML with all that learning a synthetic task needs; its directory holds the vocabulary."""
    directory.mkdir(exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *synthetic_vocabulary()]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n")
    given = "".join(f",{key}={value}" for key, value in settings.items())
    tree = {
        "model": {**MODEL, **task.pop("model", {})},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt")},
        "data": {"sequence_length": 32},
        "training": {"precision": "fp32"},
        "batch": {"micro_batch_size": 32, "global_batch_size": 32},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        "run": {"log_interval": 1000, "tensorboard": False, "directory": str(directory)},
        "task": {
            "name": name,
            "reader": "synthetic",
            "train": f"{name}:samples={task.pop('train', 600)},seed=1{given}",
            "validation": [f"{name}:samples={SAMPLES},seed=2{given}"],
            "sequence_length": 48,
            "target_length": 16,
        },
        "finetune": {"epochs": task.pop("epochs", 6)},
    }
    path = directory / "task.yaml"
    tree["objectives"] = {task.pop("objective", "blank_infilling"): 1}
    path.write_text(yaml.safe_dump(merge(tree, {"task": task})))
    return str(path)


def within(score, best):
    error = math.sqrt(max(best * (1 - best), 1 / SAMPLES) / SAMPLES)
    assert abs(score - best) <= 3 * error, (score, best, error)


CASES = {
    "votes as classes": ("noisy_votes", {"n": 5, "p": 0.7}, {"kind": "classification"}, "accuracy"),
    "tags": ("tags", {}, {"kind": "tagging"}, "entity_f1"),
    "choices": ("choice", {}, {"kind": "cloze", "template": "{inputs} [MASK]"}, "accuracy"),
    "word of a key": ("recall", {"pairs": 1}, {"kind": "seq2seq"}, "exact_match"),
}
LONG = {
    "votes as cloze": ("noisy_votes", {"n": 5, "p": 0.7}, {"kind": "cloze", **PATTERN}, "accuracy"),
    "copy": ("copy", {"noise": 0.0}, {"kind": "seq2seq"}, "exact_match"),
    "copy by diffusion": (
        "copy",
        {"noise": 0.0},
        {"kind": "seq2seq", "objective": "masked_diffusion", "epochs": 8},
        "exact_match",
    ),
    "periodic": ("periodic", {}, {"kind": "blanks", "epochs": 10}, "bleu"),
    "two words together": ("xor", {}, {"kind": "classification", "train": 1600}, "accuracy"),
    "span": ("span", {}, {**SPANS, "train": 1600, "epochs": 8}, "answer_em"),
    "word of two keys": (
        "recall",
        {"pairs": 2},
        {"kind": "seq2seq", "train": 48_000, "epochs": 1, "model": LARGE},
        "exact_match",
    ),
}


FURTHER = ("votes as classes", "choices", *LONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["word of a key", "tags", *FURTHER])
def test_a_kind_reaches_the_optimum(tmp_path, case):
    name, settings, task, metric = (CASES | LONG)[case]
    given = "".join(f",{key}={value}" for key, value in settings.items())
    best = 100.0 if metric == "bleu" else optimum(f"{name}:samples={SAMPLES}{given}")[metric]
    (measured,) = run_ranks(learn, 1, tmp_path, name, settings, dict(task))
    whole = 100 if metric == "bleu" else 1
    within(measured[metric] / whole, best / whole)
