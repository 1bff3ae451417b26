"""A corpus whose facts only entities tell, from JSON lines to a trained model: the optimum with them, guesses without.

Each word has two entities, one of a good and one of a bad thing. `word3 is good .` is true of one, `word3 is bad .` of
the other, and both come equally often.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.commands import forked
from support.distributed import run_ranks
from support.hf.own_models import weights_of
from support.training.training import fit, make_trainer

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, TARGETS, TOKENS, WEIGHTS
from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import build, merge
from data_utils.dataset.vectors import Vectors, convert_vectors
from data_utils.loader.loader import open_datasets
from data_utils.objectives import LOSSES
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.models.ernie_thu.batch import EntityBatch, Noise
from megatron_lite.train.start import check_start
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import prepare

WORDS, FILLERS, SIZE = 4, 6, 8
LABELS = ("bad", "good")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Configuration tree of a run on the corpus."""
    directory = tmp_path_factory.mktemp("planted")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"word{i}" for i in range(WORDS)] + [f"then{i}" for i in range(FILLERS)]
    (directory / "vocab.txt").write_text("\n".join([*special, ".", "is", *LABELS, *words]) + "\n")
    rng = np.random.default_rng(0)
    good = (
        rng.permutation([0, 1] * WORDS).reshape(WORDS, 2).argsort(1)
    )  # of each word's entities, which is good
    lines = []
    for _ in range(1500):
        word, which, then = rng.integers(WORDS), rng.integers(2), rng.integers(FILLERS)
        text = f"then{then} word{word} is {LABELS[good[word, which]]} ."
        lines.append(json.dumps({"text": text, "entities": [[6, 11, f"Q{2 * word + which}"]]}))
    (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
    names = [f"Q{entity}\t{entity}" for entity in range(2 * WORDS)]
    (directory / "ids.txt").write_text("\n".join([str(2 * WORDS), *names]) + "\n")
    vectors = rng.normal(size=(2 * WORDS, SIZE))
    (directory / "vectors.txt").write_text(
        "\n".join("\t".join(map(repr, row)) for row in vectors.tolist()) + "\n"
    )
    assert convert_vectors(str(directory / "vectors.txt"), str(directory / "vectors.npy")) == (
        2 * WORDS,
        SIZE,
    )
    assert np.allclose(np.load(directory / "vectors.npy"), vectors, atol=1e-6)
    tree = {
        "model": {
            "system": "bert", "num_layers": 2, "init_std": 0.1, "hidden_size": 32, "num_attention_heads": 4,
            "max_position": 40, "sentence_classes": 0,
            "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt"), "added_tokens": "none"},
        "data": {"train": [{"prefix": str(directory / "corpus")}], "sequence_length": 36},
        "objectives": {"entities": 1},
        "entities": {
            "vectors": str(directory / "vectors.npy"), "size": SIZE, "heads": 2, "next_sentence": False,
            "masked_ratio": 0.3,
        },
        "training": {"steps": 200, "precision": "fp32", "seed": 1, "loss_normalization": "per_objective"},
        "batch": {"micro_batch_size": 16, "global_batch_size": 16},
        "optimizer": {"lr": 1e-2, "beta2": 0.99},
        "schedule": {"warmup_steps": 10},
        "checkpoint": {"save_interval": 0},
        "run": {"directory": str(directory / "run"), "log_interval": 50, "tensorboard": False, "peak_tflops": 1.0},
    }  # fmt: skip
    options = {"entities_key": "entities", "entity_ids": str(directory / "ids.txt")}
    config = BuildConfig(inputs=[str(directory / "text.jsonl")], output=str(directory / "corpus"), **options)
    build_corpus(config, partial(load_tokenizer, build(Config, tree).tokenizer))
    return tree


@torch.no_grad()
def accuracy(model, config, fields, noise):
    """Share of the labels that the model predicts where all of them are masked, and nothing else."""
    vectors = Vectors(config.objective_choices[0].section.vectors, SIZE)
    inputs = prepare(
        EntityBatch(fields, np.arange(len(fields)), noise, vectors), torch.device("cpu"), config.model
    )
    inputs = inputs.to(torch.device("cpu"))
    hidden = model.run(inputs.tokens, inputs.ids, inputs.plan, None, condition=inputs.extra_inputs)
    logits, _ = model._logits_and_classes(hidden, inputs)
    return (logits.argmax(1) == inputs.targets).float().mean().item()


@pytest.mark.slow
def test_facts_of_entities_are_learnt_with_them_and_guessed_without(run):
    (weights,) = run_ranks(fit, 1, run)
    tree = merge(run, {})
    tokenizer = load_tokenizer(build(Config, tree).tokenizer)
    config = build(Config, tree).with_vocab_size(tokenizer.vocab_size)
    model = build_model(config, len(LOSSES)).eval()
    model.load_state_dict(weights)
    loader = open_datasets(config.data, config.objective_choices, tokenizer, 9).train
    fields = loader.batch(np.arange(64))
    masked = fields[:, WEIGHTS] != 0
    fields[:, TOKENS] = np.where(masked, fields[:, TARGETS], fields[:, TOKENS])
    labels = np.isin(fields[:, TOKENS], tokenizer.encode(" ".join(LABELS)))
    for row, label in zip(
        fields, labels, strict=True
    ):  # a window may cut a text between its mention and its label
        label &= np.isin(row[DOC], row[DOC][row[BLOCK_POSITION_IDS] > 0])
    fields[:, TARGETS] = np.where(labels, fields[:, TOKENS], 0)
    fields[:, TOKENS] = np.where(labels, tokenizer.special.mask, fields[:, TOKENS])
    fields[:, WEIGHTS].view(np.float32)[:] = labels
    assert labels.sum() > 150
    assert accuracy(model, config, fields, Noise(0, 0.0, 0.0)) == 1.0
    assert 0.4 < accuracy(model, config, fields, Noise(0, 0.0, 1.0)) < 0.6


def test_vectors_and_corpora_that_do_not_belong_together_are_refused(run, tmp_path):
    def refused(error, message, **changes):
        with pytest.raises(AssertionError, match=rf"{error.__name__}: .*{message}"):  # of the rank
            run_ranks(make_trainer, 1, merge(run, changes))

    np.save(tmp_path / "more.npy", np.zeros((9, SIZE), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((8, SIZE)))
    (tmp_path / "text.npy").write_text("1 2 3")
    for name, message in (
        ("more", "has 8 entities, but entities.vectors .* has 9 rows"),
        ("double", r"holds float64 \[8, 8\]; it must be float32 with 8 columns"),
        ("text", "it is not a NumPy array; make it with: python scripts/dataset.py vectors"),
        ("none", "No such file or directory; make it with"),
    ):
        refused(DataError, message, entities={"vectors": str(tmp_path / f"{name}.npy")})
    refused(ConfigError, "entities.vectors is null; give", entities={"vectors": None})
    tokenizer = build(Config, run).tokenizer
    source = run["data"]["train"][0]["prefix"].replace("corpus", "text.jsonl")
    prefix = str(tmp_path / "plain")
    build_corpus(BuildConfig(inputs=[source], output=prefix), partial(load_tokenizer, tokenizer))
    refused(
        DataError, "has no entities, which the objective needs; rebuild", data={"train": [{"prefix": prefix}]}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("1 2\n1\n", ":2: the line must hold 2 finite numbers"),
        ("1 x\n", ":1: the line must hold"),
        ("nan\n", ":1:"),
    ],
)
def test_bad_lines_of_vectors(tmp_path, text, message):
    (tmp_path / "v.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        convert_vectors(str(tmp_path / "v.txt"), str(tmp_path / "v.npy"))
    assert [path.name for path in tmp_path.iterdir()] == ["v.txt"]


def test_other_vectors_do_not_continue_a_run(run, tmp_path):
    short = {"training": {"stop_after_step": 1}, "run": {"directory": str(tmp_path / "run")}}
    run_ranks(fit, 1, merge(run, short))
    np.save(tmp_path / "other.npy", np.ones((8, SIZE), np.float32))
    same, other = (
        build(Config, merge(run, {**short, "entities": entities}))
        for entities in ({}, {"vectors": str(tmp_path / "other.npy")})
    )
    size = load_tokenizer(same.tokenizer).vocab_size
    check_start(same.with_vocab_size(size))
    with pytest.raises(CheckpointError, match=r"other\.npy differ from the vectors that "):
        check_start(other.with_vocab_size(size))


def test_a_pretrained_run_is_tuned_and_measured_from_a_shell(run, tmp_path):
    """Its settings that are not a task's, such as the means of its losses, are left out."""
    short = {"training": {"stop_after_step": 1}, "run": {"directory": str(tmp_path / "run")}}
    run_ranks(fit, 1, merge(run, short))
    ids = Path(run["entities"]["vectors"]).with_name("ids.txt")
    lines = [
        {
            "text": f"then1 word{i % 4} is",
            "mention": [6, 11],
            "label": [LABELS[i % 2]],
            "entities": [[6, 11, f"Q{i}"]],
        }
        for i in range(8)
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "name": "types", "kind": "typing", "reader": "jsonl", "labels": list(LABELS), "marks": {"mention": "."},
        "train": str(tmp_path / "lines.jsonl"), "validation": [str(tmp_path / "lines.jsonl")],
        "sequence_length": 16, "entity_ids": str(ids),
    }  # fmt: skip
    (tmp_path / "task.yaml").write_text(yaml.safe_dump({"task": task, "finetune": {"epochs": 1}}))
    given = ("--checkpoint", tmp_path / "run", "--task", tmp_path / "task.yaml", "--output", tmp_path / "out")
    tuned = forked("scripts/finetune.py", *given, "batch.global_batch_size=4", "batch.micro_batch_size=4")
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    found = forked("scripts/evaluate.py", "--checkpoint", tmp_path / "out")
    assert found.returncode == 0 and "loose_micro_f1" in found.stdout, found.stderr
    weights = (weights_of(tmp_path / path) for path in ("run", "out/seed_1"))
    before, after = (
        {name: x for name, x in each.items() if name.startswith("entity_head.")} for each in weights
    )
    assert before and all(torch.equal(weight, after[name]) for name, weight in before.items())
