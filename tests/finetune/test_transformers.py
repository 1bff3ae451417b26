"""Thirty steps of fine-tuning equal the class of transformers under plain torch AdamW, on the same samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from support.data.tokenizer_files import write_bert
from support.distributed import run_ranks
from support.hf.class_tuning import classification_loss, initial_head, tuned_losses
from support.hf.published import random_model
from support.tasks.tasks import write_lines

from data_utils.common.batch_fields import TARGETS, TOKENS, WEIGHTS
from data_utils.common.settings import merge
from data_utils.tasks.templates.collate import collate
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForMultipleChoice, GLMForSequenceClassification
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.heads import TASK_CLASSES
from megatron_lite.hf.published.verify_inputs import encoder_decoder_inputs, scatter_targets
from megatron_lite.inference.open_run import load_run
from megatron_lite.telemetry.records import read_metrics

STEPS, BATCH, LR, DECAY, WARMUP = 30, 8, 1e-3, 0.05, 5
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"word{i}" for i in range(394))]
NO_DROPOUT = {
    **dict.fromkeys(("embedding_dropout", "attention_dropout", "output_dropout"), 0.0),
    "task_head": {"dropout": 0.0},
}
BASE = {
    "training": {"steps": 1, "precision": "fp32", "seed": 7},
    "data": {"sequence_length": 40},
    "model": NO_DROPOUT,
}
OBJECTIVES = {
    **{name: {"objectives": {"masked_lm": 1}} for name in ("bert", "modernbert", "electra", "deberta-v2")},
    "t5": {"objectives": {"t5": 1}, "t5": {"sentinel_first": 399}},
}
# The case of support/hf/published.py with its sizes, and the class that was pretrained.
CLASSES = {
    "bert": ("bert", None), "modernbert": ("modernbert", None),
    "electra": ("electra_generator", "ElectraForPreTraining"), "deberta-v2": ("deberta_v3", None),
}  # fmt: skip
TASKS = {
    "classification": {"kind": "classification", "labels": ["0", "1", "2"]},
    "cloze": {"kind": "cloze", "template": "{text} word300 [MASK] .", "verbalizers": {
        "0": "word301", "1": "word302 word303", "2": "word304 word305 word306"}},
    "seq2seq": {"kind": "seq2seq"},
}  # fmt: skip
# fp32: 30 steps add up the rounding of sums in another order.
TOLERANCE = 1e-4


def lines_of(kind):
    rng = np.random.default_rng(3)
    lines = []
    for _ in range(120):
        words = [f"word{n}" for n in rng.integers(0, 60, rng.integers(4, 12))]
        if kind == "seq2seq":
            lines.append({"src": " ".join(words), "tgt": " ".join(words[::-1][:4])})
        else:
            label = int(rng.integers(3))
            lines.append({"text": " ".join([*words, f"word{70 + label}"]), "label": str(label)})
    return lines


def glm_run(directory):
    """The configuration of a small GLM."""
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return merge(BASE, {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_position": 63, "init_std": 0.1},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt")},
    })  # fmt: skip


def task_tree(directory, kind, smoothing):
    train = write_lines(directory / f"{kind}.jsonl", lines_of(kind))
    task = {"name": "own", "reader": "jsonl", "train": train, "sequence_length": 40, "target_length": 8}
    return {
        "task": task | TASKS[kind],
        "training": {"steps": STEPS, "label_smoothing": smoothing, "eval_interval": STEPS},
        "schedule": {"kind": "linear", "warmup_steps": WARMUP, "min_lr_ratio": 0.0},
        "batch": {"micro_batch_size": 4, "global_batch_size": BATCH},
        "optimizer": {"lr": LR, "weight_decay": DECAY, "clip_grad_norm": 1.0, "eps": 1e-6, "beta2": 0.98},
        "run": {"log_interval": 1, "tensorboard": False},
    }  # fmt: skip


def prepared(run_config, directory, kind, smoothing, start):
    path = directory / "task.yaml"
    path.write_text(yaml.safe_dump(task_tree(directory, kind, smoothing)))
    pooled = {} if kind != "classification" else {"task_head": {"pooler": run_config.parent.name == "run"}}
    tree = merge(load_tree([str(run_config)], str(path), []), {"model": merge(NO_DROPOUT, pooled)})
    if start is not None:
        tree = merge(tree, {"checkpoint": {"initialize_from": str(start)}})
    return prepare(tree)


def ours(context, run_config, directory, kind, smoothing, start, steps=STEPS):
    """Losses of the steps."""
    task = prepared(run_config, directory, kind, smoothing, start)
    finetune(task, directory / "out", context)
    records = read_metrics(directory / "out/seed_7")
    return [record["loss"] for record in records if record["kind"] == "train"]


def of_choices(model, samples):
    """GLMForMultipleChoice takes a sample with all its choices."""
    total = 0.0
    for sample in samples:
        fields, parts = collate([sample])
        tensors = torch.from_numpy(fields.astype(np.int64))
        labels = torch.full_like(tensors[:, TOKENS], -100)
        labels.view(-1)[torch.from_numpy(parts.positions)] = torch.from_numpy(parts.targets)
        total = (
            total
            + model(
                input_ids=tensors[None, :, TOKENS],
                choice_labels=labels[None],
                attention_mask=(tensors[None, :, 5] >= 0).long(),
                position_ids=tensors[None, :, 1],
                block_position_ids=tensors[None, :, 2],
                labels=torch.tensor([sample.right]),
            ).loss
        )
    return total / len(samples)


def of_targets(model, samples):
    fields, _ = collate(samples)
    tensors = torch.from_numpy(fields.astype(np.int64))
    logits = scatter_targets(model(**encoder_decoder_inputs(fields)).logits, fields)
    rows = torch.from_numpy(fields[:, WEIGHTS] != 0)
    return F.cross_entropy(logits[rows], tensors[:, TARGETS][rows], label_smoothing=0.1)


@pytest.mark.parametrize("kind", [pytest.param("classification", marks=pytest.mark.slow), "cloze"])
def test_glm_is_tuned_as_its_exported_classes(tmp_path, kind):
    """They begin with the same export."""
    config = tmp_path / "glm.yaml"
    config.write_text(yaml.safe_dump(glm_run(tmp_path)))
    # A checkpoint to begin with: of a task that trains nothing.
    (tmp_path / "first").mkdir()
    start_tree = [
        "optimizer.lr=1e-30",
        "training.steps=1",
        "schedule.warmup_steps=0",
        "training.eval_interval=1",
    ]
    run_ranks(first_run, 1, config, tmp_path / "first", start_tree)
    start = tmp_path / "first/out/seed_7"
    export_run(start, tmp_path / "export", ExportOptions())
    task = prepared(config, tmp_path, kind, 0.0, start)
    if kind == "cloze":
        model, loss_of = GLMForMultipleChoice.from_pretrained(tmp_path / "export"), of_choices
    else:
        model = GLMForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=3)
        model.score.load_state_dict(initial_head(task).classifier.state_dict())
        loss_of = classification_loss
    expected = tuned_losses(model.eval(), task, STEPS, loss_of)
    (actual,) = run_ranks(ours, 1, config, tmp_path, kind, 0.0, start)
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE)
    assert np.mean(expected[-10:]) < np.mean(expected[:10]) - 0.02  # it learns


def first_run(context, config, directory, overrides):
    path = directory / "task.yaml"
    path.write_text(yaml.safe_dump(task_tree(directory, "cloze", 0.0)))
    return finetune(prepare(load_tree([str(config)], str(path), overrides)), directory / "out", context)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["bert", "t5", "deberta-v2", "modernbert", "electra"],
)
def test_published_systems_are_tuned_as_their_own_classes(tmp_path, case):
    """Texts, with the pretrained layer before the classifier or a new one; T5 with label smoothing."""
    original, kind = tmp_path / "original", "seq2seq" if case == "t5" else "classification"
    write_bert(original, WORDS)
    sizes, of_case = CLASSES.get(case, (case, None))
    random_model(sizes, std=0.05, class_name=of_case, vocab_size=len(WORDS)).save_pretrained(original)
    tokenizer = {"kind": "bert_wordpiece", "path": str(original / "vocab.txt"), "added_tokens": "none"}
    tree = merge(BASE, {"tokenizer": tokenizer} if case == "modernbert" else {})
    import_directory(original, tmp_path / "run", tree | OBJECTIVES[case], verify=False)
    smoothing = 0.1 if kind == "seq2seq" else 0.0
    task = prepared(tmp_path / "run/config.yaml", tmp_path, kind, smoothing, tmp_path / "run")
    if case in CLASSES:
        name = TASK_CLASSES[case]["text"].name
        model = getattr(transformers, name).from_pretrained(original, num_labels=3)
        classifier = model.classifier
        if case == "electra":
            classifier.dense.load_state_dict(initial_head(task).pooler.state_dict())
            classifier = classifier.out_proj
        if case == "deberta-v2":
            model.pooler.dense.load_state_dict(initial_head(task).pooler.state_dict())
        classifier.load_state_dict(initial_head(task).classifier.state_dict())
        loss_of = classification_loss
    else:
        described = json.loads((original / "config.json").read_text())
        model, loss_of = random_model("t5", std=0.05, vocab_size=described["vocab_size"]), of_targets
    expected = tuned_losses(model.eval(), task, STEPS, loss_of)
    (actual,) = run_ranks(ours, 1, tmp_path / "run/config.yaml", tmp_path, kind, smoothing, tmp_path / "run")
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE)
    learnt = 0.005 if case == "electra" else 0.02  # its new layer has a small output at first
    assert np.mean(expected[-10:]) < np.mean(expected[:10]) - learnt
    export_run(tmp_path / "out/seed_7", tmp_path / "export", ExportOptions())  # with its proof
    if case in ("bert", "deberta-v2"):
        comes_back(tmp_path, task)


def comes_back(directory, task):
    """The class says of texts what the run says, and an import of the export is the run again, its pooler too."""
    import_directory(directory / "export", directory / "again", BASE | OBJECTIVES["bert"])
    first, again = (load_run(directory / name) for name in ("out/seed_7", "again"))
    tensors = first.model.state_dict(), again.model.state_dict()
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert again.config.task.labels == task.renderer.labels
    pipeline = transformers.pipeline("text-classification", str(directory / "export"))
    assert pipeline(WORDS[10])[0]["label"] in task.renderer.labels
    own = {
        "task": {
            "name": "own",
            "kind": "classification",
            "reader": "jsonl",
            "labels": list(task.renderer.labels),
        }
    }
    file = task.settings.train
    tree = merge(own, {"task": {"validation": [file], "sequence_length": 40}})
    tree |= {"data": BASE["data"]} | OBJECTIVES["bert"]
    found = [evaluate(directory / name, tree, 8) for name in ("out/seed_7", "export")]
    assert found[0].files[file].predictions == found[1].files[file].predictions
