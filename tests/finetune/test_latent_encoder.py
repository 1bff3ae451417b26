"""OPTIMUS's encoder tuned on a task: low-resource classification, on its features and with all parameters."""

import json

import pytest
import torch
from support.distributed import run_ranks
from support.systems.optimus_runs import write_run
from support.tasks.tasks import votes, write_task, write_vocabulary
from support.training.whole_weights import load_weights

from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.models.optimus.open_run import open_latent
from megatron_lite.train.start import check_start

SETTINGS = [
    "batch.global_batch_size=16",
    "batch.micro_batch_size=8",
    "optimizer.lr=0.01",
    "model.task_head.dropout=0",
]


def pretrained(directory, **changes):
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = {"path": str(write_vocabulary(directory))}
    return write_run(directory, tokenizer=tokenizer, run={"tensorboard": False}, **changes)


@pytest.fixture(scope="module", params=["pooler", pytest.param("cls", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """A run of OPTIMUS with random weights, and a task."""
    root = tmp_path_factory.mktemp(request.param)
    path, weights = pretrained(root / "optimus", optimus={"feature": request.param})
    _, task = write_task(root / "task", train=64)
    return path, weights, task


def learn(context, run, task, output, settings):
    tree = load_tree([], task, settings, find_manifest(run).trainer_state().config)
    tree = merge(tree, {"run": {"directory": str(output)}, "checkpoint": {"initialize_from": str(run)}})
    task = prepare(tree)
    check_start(task.config)
    return finetune(task, output, context)


def tuned(run, task, output, *settings):
    run_ranks(learn, 1, run, task, output, [*SETTINGS, *settings])
    best = output / "seed_7/best"
    return best, load_weights(find_manifest(best))


def test_a_head_on_the_feature_is_all_that_trains(run, tmp_path):
    """softmax(W f) of few labels: the encoder stays bit for bit, and f is what the latent vector is made of."""
    path, weights, task = run
    best, found = tuned(path, task, tmp_path / "out", "finetune.trained=head", "finetune.epochs=2")
    encoder = {n.removeprefix("encoder."): w for n, w in weights.items() if n.startswith("encoder.")}
    assert found.keys() - encoder.keys() == {"heads.task.classifier.weight", "heads.task.classifier.bias"}
    assert all(torch.equal(found[name], weight) for name, weight in encoder.items())
    latent = open_latent(path, device=torch.device("cpu"))
    features = latent.features(latent.read([vote["text"] for vote in votes(1, 32)]))
    classes = features @ found["heads.task.classifier.weight"].T + found["heads.task.classifier.bias"]
    (measured,) = evaluate(best, {}, 8).files.values()
    assert [str(int(number)) for number in classes.argmax(1)] == measured.predictions
    (of_file,) = json.loads((tmp_path / "out/results.json").read_text())["files"].values()
    assert of_file["mean"]["accuracy"] == measured.metrics["accuracy"]


@pytest.mark.slow
def test_all_parameters_learn_the_task(run, tmp_path):
    path, weights, task = run
    best, found = tuned(path, task, tmp_path / "out", "finetune.epochs=12")
    layer = "layers.0.attention.dense.weight"
    assert not torch.equal(found[layer], weights[f"encoder.{layer}"])
    (measured,) = evaluate(best, {}, 8).files.values()
    assert measured.metrics["accuracy"] >= 0.85


def test_few_labels_are_drawn_by_the_seed(run, tmp_path):
    path, _, task = run
    few = ["finetune.trained=head", "finetune.epochs=1", "task.train_samples=16", "finetune.seeds=[1,2]"]
    run_ranks(learn, 1, path, task, tmp_path / "out", [*SETTINGS, *few])
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [seed["train_samples"] for seed in results["seeds"]] == [16, 16]


def test_a_run_of_optimus_answers_no_task_itself(run, tmp_path):
    path, _, task = run
    tree = {"task": load_tree(["configs/tiny.yaml"], task, [])["task"]}
    with pytest.raises(
        ConfigError, match=r"cannot be evaluated on a task; fine-tune its encoder with scripts/finetune\.py"
    ):
        evaluate(path, tree, 8)


def test_corpora_of_two_vocabularies_are_left_behind(tmp_path):
    corpus = {"prefix": "read", "decoder_prefix": "written"}
    path, _ = pretrained(tmp_path / "optimus", data={"train": [corpus]})
    _, task = write_task(tmp_path / "task", train=16)
    tree = load_tree([], task, SETTINGS, find_manifest(path).trainer_state().config)
    assert prepare(tree).config.data.train == ()
