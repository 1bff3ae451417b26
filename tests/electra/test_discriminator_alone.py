"""ELECTRA's discriminator tuned on a task, and commands that are for one Transformer."""

import pytest
import torch
from support.distributed import run_ranks
from support.systems.electra import TREE
from support.tasks.tasks import write_task, write_vocabulary
from support.training.whole_weights import load_weights

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSSES
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.tree import Config
from megatron_lite.estimate.step_estimate import require_one_transformer
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.inference.open_run import load_run
from megatron_lite.train.start import check_start
from megatron_lite.transformer.build import build_model, model_spec

SETTINGS = [
    "batch.global_batch_size=16",
    "batch.micro_batch_size=8",
    "optimizer.lr=0.01",
    "finetune.epochs=8",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with initial weights, and a task."""
    root = tmp_path_factory.mktemp("electra")
    tokenizer = {"kind": "bert_wordpiece", "path": str(write_vocabulary(root)), "added_tokens": "none"}
    tree = merge(
        TREE, {"tokenizer": tokenizer, "run": {"directory": str(root / "run"), "tensorboard": False}}
    )
    tree["model"] = {name: value for name, value in tree["model"].items() if name != "vocab_size"}
    config = build(Config, tree)
    config = config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)
    named, shapes = (
        dict(build_model(config, len(LOSSES)).named_parameters()),
        model_spec(config).shapes(config),
    )
    weights = Weights(shapes, lambda name: named[name].detach()[: shapes[name][0]])
    write_training_checkpoint(root / "run/checkpoints/step_00000000", weights, config)
    _, task = write_task(root / "task", train=64)
    return root / "run", config, task


def learn(context, run, task, output):
    tree = load_tree([], task, SETTINGS, find_manifest(run).trainer_state().config)
    tree = merge(tree, {"run": {"directory": str(output)}, "checkpoint": {"initialize_from": str(run)}})
    prepared = prepare(tree)
    check_start(prepared.config)
    return finetune(prepared, output, context)


def test_the_discriminator_learns_a_task(run, tmp_path):
    path, _, task = run
    run_ranks(learn, 1, path, task, tmp_path / "out")
    best = tmp_path / "out/seed_7/best"
    found, before = load_weights(find_manifest(best)), load_weights(find_manifest(path))
    assert "heads.task.classifier.weight" in found
    bodies = {name.removeprefix("encoder.") for name in before if name.startswith("encoder.")}
    assert bodies <= found.keys() and not any(name.startswith("generator.") for name in found)
    layer = "layers.0.attention.dense.weight"
    assert not torch.equal(found[layer], before[f"encoder.{layer}"])
    (measured,) = evaluate(best, {}, 8).files.values()
    assert measured.metrics["accuracy"] >= 0.8


def test_commands_for_one_transformer_refuse_both(run):
    path, config, task = run
    with pytest.raises(ConfigError, match="trains a generator and a discriminator; tune the latter") as error:
        load_run(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="trains a generator and a discriminator"):
        evaluate(path, load_tree([], task, []), 8)
    with pytest.raises(ConfigError, match=r"objectives has electra.*--dry-run") as error:
        require_one_transformer(config)
    assert "\n" not in str(error.value)
