"""A run with experts is the same in every layout: its losses, the loads in its records, and the biases that move."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import make_trainer
from support.training.whole_weights import compare_weights, placed_weights

from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.common.settings import merge
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.sections import ParallelConfig

STEPS = 3
EXPERTS = {
    "count": 4, "per_token": 2, "width": 32, "dense_layers": 1, "biased": True, "bias_rate": 0.01, "balance_loss": 0.5,
    "z_loss": 0.1,
}  # fmt: skip
MEASURES = (
    "loss", "grad_norm", "balance_loss", "router_z_loss", "router_entropy", "expert_load_highest",
    "expert_load_lowest", "expert_bias_range",
)  # fmt: skip


def train(context, settings):
    trainer = make_trainer(context, settings)
    trainer.fit()
    return placed_weights(trainer.engine)


def records(settings):
    lines = (Path(settings["run"]["directory"]) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.fixture(scope="module")
def alone():
    return {}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
        pytest.param(
            4, {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2}, marks=pytest.mark.slow
        ),
        pytest.param(2, {"expert_parallel_size": 2, "zero_stage": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_a_run_does_not_depend_on_the_layout(settings, alone, tmp_path, ranks, parallel):
    settings = merge(
        settings,
        {
            "model": {"biases": "none", "experts": EXPERTS},
            "batch": {"micro_batch_size": 2, "global_batch_size": 16},
            "training": {"steps": STEPS, "precision": "fp32"},
            "schedule": {"warmup_steps": 0},
            "run": {"directory": str(tmp_path / "one"), "log_interval": 1},
        },
    )
    if not alone:
        alone["weights"] = run_ranks(train, 1, settings)[0]
        alone["records"] = records(settings)
    expected = alone["records"]
    assert len(expected) == STEPS
    for record in expected:
        assert record["expert_load_lowest"] < 1 < record["expert_load_highest"] < 4
        assert record["balance_loss"] > 0.99 and 0 < record["router_entropy"] < 1.3863
    assert expected[0]["expert_bias_range"] == pytest.approx(0.02)  # some moved up, and some down
    settings = merge(settings, {"parallel": parallel, "run": {"directory": str(tmp_path / "several")}})
    weights = run_ranks(train, ranks, settings, parallel=ParallelConfig(**parallel))
    for record, one in zip(records(settings), expected, strict=True):
        assert {name: record[name] for name in MEASURES} == pytest.approx(
            {name: one[name] for name in MEASURES}, rel=1e-5
        )
    compare_weights(weights, alone["weights"])


def many_words(directory):
    """A corpus of so many words that none is a large part of an expert's tokens."""
    words = [f"word{number}" for number in range(2000)]
    (directory / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n"
    )
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(words, 600))}) for _ in range(400)]
    (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(directory / "vocab.txt"))
    build = BuildConfig(
        inputs=[str(directory / "text.jsonl")],
        output=str(directory / "corpus"),
        split="train=0.8,validation=0.2",
    )
    build_corpus(build, lambda: load_tokenizer(tokenizer))
    return directory


@pytest.mark.slow
def test_biases_balance_the_loads(tmp_path):
    """From twice the mean to within 5 % of it, as means of the last ten steps; without biases they stay apart."""
    changes = {
        "model": {
            "num_layers": 1, "biases": "none", "init_std": 0.1,
            "experts": {"count": 4, "per_token": 2, "width": 24, "biased": True},
        },
        "objectives": {"causal": 1},
        "training": {"steps": 130},
        "batch": {"micro_batch_size": 128, "global_batch_size": 256},
        "optimizer": {"lr": 3e-4},
        "schedule": {"warmup_steps": 0, "kind": "linear", "decay_steps": 100, "min_lr_ratio": 0.0},
    }  # fmt: skip
    tree = merge(small_run(many_words(tmp_path), tmp_path / "run"), changes)
    means = {}
    for rate in (0.0, 0.003):
        directory = {"directory": str(tmp_path / str(rate)), "log_interval": 1}
        run = merge(tree, {"model": {"experts": {"bias_rate": rate}}, "run": directory})
        run_ranks(train, 1, run)
        logged = [(record["expert_load_lowest"], record["expert_load_highest"]) for record in records(run)]
        assert logged[0][1] > 1.5
        means[rate] = np.mean(logged[-10:], axis=0)
    assert means[0.0][1] > 1.5
    assert 0.95 < means[0.003][0] < means[0.003][1] < 1.05
