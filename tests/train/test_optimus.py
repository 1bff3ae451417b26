"""Training of two stacks and a latent vector: layouts, resume, where stacks begin, what is reported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.systems.latent import RandomSentences, latent_config
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, to_tree
from data_utils.objectives import LOSS_NAMES
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import PlainEngine, make_engine
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.train.start import check_start, load_start
from megatron_lite.train.trainer import Trainer
from megatron_lite.transformer.flops import parameter_shapes

STEPS = 6
# After six AdamW steps in fp32: sums over ranks in another order. Weights are about 0.02, a step moves them by 1e-3.
TOLERANCE = 2e-6


def config_of(directory: Path, **changes) -> Config:
    dropout = {"output_dropout": 0.1, "attention_dropout": 0.1}
    training = {"steps": STEPS, "precision": "fp32", "eval_interval": 3, "eval_samples": 8}
    changes = {
        "model": dropout,
        "decoder": dropout,
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 0},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "checkpoint": {"save_interval": 3},
        "run": {"directory": str(directory), "log_interval": 1},
        "optimus": {"free_bits": 0.05, "cycles": 2},
        **changes,
    }
    changes["training"] = {**training, **changes.get("training", {})}
    return latent_config(**changes)


def train(context, config: Config) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    engine = make_engine(config, context, len(LOSS_NAMES))
    data = RandomSentences(config), RandomSentences(config, seed=10**6)
    Trainer(config, context, engine, *data, LOSS_NAMES).fit()
    return {name: p.detach().clone() for name, p in engine.named_parameters.items()}


def whole(directory: Path) -> dict[str, torch.Tensor]:
    return load_weights(find_manifest(directory))


def records(directory: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("one") / "run"
    run_ranks(train, 1, config_of(directory))
    return directory


@pytest.mark.parametrize(
    ("ranks", "stage", "recompute"),
    [
        pytest.param(2, 1, "full", marks=pytest.mark.slow),
        pytest.param(2, 2, "none", marks=pytest.mark.slow),
        (2, 3, "none"),
    ],
)
def test_every_layout_trains_as_one_process(one, tmp_path, ranks, stage, recompute):
    directory = tmp_path / "run"
    parallel = {"zero_stage": stage}
    config = config_of(directory, parallel=parallel, training={"recompute": recompute})
    run_ranks(train, ranks, config, parallel=ParallelConfig(**parallel))
    expected, found = whole(one), whole(directory)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert (weight - found[name]).abs().max() <= TOLERANCE, name
    for before, after in zip(records(one, "validation"), records(directory, "validation"), strict=True):
        for key in before.keys() & {"loss", "loss/kl", "loss/reconstruction", "mutual_information"}:
            assert after[key] == pytest.approx(before[key], rel=1e-5)
        assert after["active_units"] == before["active_units"]


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(one, tmp_path):
    """Stopped in the middle of a cycle of the divergence's weight."""
    directory = tmp_path / "run"
    run_ranks(train, 1, config_of(directory, training={"stop_after_step": 4}))
    run_ranks(train, 1, config_of(directory))
    expected, found = whole(one), whole(directory)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    steps = [(r["step"], r["loss"], r["beta"]) for r in records(directory, "train")]
    assert steps == [(r["step"], r["loss"], r["beta"]) for r in records(one, "train")]


def test_what_is_reported(one):
    """Two cycles of three steps, half of each without divergence, a quarter of them rising."""
    betas = [record["beta"] for record in records(one, "train")]
    assert betas == pytest.approx([0.0, 0.0, 2 / 3, 0.0, 0.0, 2 / 3])
    for record in records(one, "train") + records(one, "validation"):
        total = record["loss/reconstruction"] + record["loss/kl"]
        assert record["loss"] == pytest.approx(total, rel=1e-6)
    last = records(one, "validation")[-1]
    # The estimate's terms do not share their noise: of sentences that z does not tell apart it may lie below 0.
    assert 0 <= last["active_units"] <= 8 and -1 < last["mutual_information"] <= np.log(24)
    tokens = RandomSentences(config_of(one), 10**6).batch(np.arange(8)).loss_tokens
    assert last["perplexity"] == pytest.approx(np.exp(last["loss"] * 24 / tokens), rel=1e-5)


def test_heads_without_a_part_in_the_loss_stay_as_they_are(one, tmp_path):
    directory = tmp_path / "run"
    run_ranks(train, 1, config_of(directory, training={"stop_after_step": 3}))
    before, after = whole(directory), whole(one)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    heads = {name for name in before if name.startswith("encoder.heads.")}
    pooler = {"encoder.heads.sentence.dense.weight", "encoder.heads.sentence.dense.bias"}
    assert heads - moved == heads - pooler
    assert {name for name in before if name.startswith("latent.")} <= moved


def plain_run(directory: Path, stack: str, objective: str) -> Path:
    """A run of one stack, saved after no step."""
    config = config_of(directory)
    sections = {name: getattr(config, name) for name in ("training", "run", "data")}
    model = to_tree(getattr(config, stack))
    if (stack, objective) not in (("model", "masked_lm"), ("decoder", "causal")):
        del model["system"]  # its class does not read texts so
    tree = {
        **{name: to_tree(section) for name, section in sections.items()},
        "model": model,
        "objectives": {objective: 1},
    }
    alone = build(Config, tree)
    run_ranks(save_at_once, 1, alone)
    return directory


def save_at_once(context, config: Config) -> None:
    engine = PlainEngine(config, context, len(LOSS_NAMES))
    named = {name: p.detach() + 1.0 for name, p in engine.named_parameters.items()}
    shapes = parameter_shapes(config.model)
    weights = Weights(shapes, lambda name: named[name][: shapes[name][0]])
    write_training_checkpoint(Path(config.run.directory) / "checkpoints" / "step_00000000", weights, config)


def test_stacks_begin_with_the_weights_of_runs(tmp_path):
    encoder = plain_run(tmp_path / "encoder", "model", "masked_lm")
    decoder = plain_run(tmp_path / "decoder", "decoder", "causal")
    begins = {"encoder_from": str(encoder), "decoder_from": str(decoder)}
    config = config_of(tmp_path / "run", optimus=begins, optimizer={"lr": 1e-30, "weight_decay": 0.0})
    check_start(config)
    run_ranks(train, 2, config)
    found = whole(tmp_path / "run")
    for prefix, run in (("encoder.", encoder), ("decoder.", decoder)):
        for name, weight in whole(run).items():
            assert torch.equal(found[prefix + name], weight)


@pytest.mark.parametrize(
    ("key", "stack", "objective", "message"),
    [
        (
            "encoder_from",
            "model",
            "causal",
            "objective causal; give a run of a bidirectional objective",
        ),
        (
            "decoder_from",
            "decoder",
            "masked_lm",
            "objective masked_lm; give a run of objective causal alone",
        ),
        ("encoder_from", "decoder", "masked_lm", "another model"),
    ],
)
def test_a_stack_does_not_begin_with_another_type_of_run(tmp_path, key, stack, objective, message):
    other = plain_run(tmp_path / "other", stack, objective)
    with pytest.raises(CheckpointError, match=message):
        check_start(config_of(tmp_path / "run", optimus={key: str(other)}))


@pytest.mark.parametrize(
    "change", [{"feature": "cls"}, {"latent_size": 4}, {"memory": False}, {"embedding": False}]
)
def test_a_run_does_not_go_on_with_another_latent_vector(one, change):
    ((key, value),) = change.items()
    with pytest.raises(CheckpointError, match=rf"other settings: .*optimus\.{key}: \S+ -> {value}"):
        check_start(config_of(one, optimus=change))


def test_the_encoder_alone_can_be_trained_on(one, tmp_path):
    """Weights of OPTIMUS's encoder for a run of one Transformer, such as a task's."""
    config = config_of(one)
    tree = {
        "model": to_tree(config.model),
        "data": to_tree(config.data),
        "objectives": {"masked_lm": 1},
        "training": to_tree(config.training),
        "run": {"directory": str(tmp_path / "run")},
        "checkpoint": {"initialize_from": str(one)},
    }
    alone = build(Config, tree)
    check_start(alone)
    (weights,) = run_ranks(begin, 1, alone)
    for name, weight in whole(one).items():
        if name.startswith("encoder."):
            assert torch.equal(weights[name.removeprefix("encoder.")][: len(weight)], weight)


def begin(context, config: Config) -> dict[str, torch.Tensor]:
    engine = PlainEngine(config, context, len(LOSS_NAMES))
    load_start(config, engine, context, [], {})
    return {name: p.detach().clone() for name, p in engine.named_parameters.items()}
