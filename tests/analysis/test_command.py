"""scripts/analyze.py: a trained run of known structure, and mistakes."""

import json
import math

import numpy as np
import pytest
import torch
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.project import small_run
from support.tasks.tasks import write_task
from support.training.training import fit, records

from data_utils.common.settings import merge
from megatron_lite.analysis.head_scores import write_pruned
from megatron_lite.analysis.heads import Head, projections, remove
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.run import finetune
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.inference.open_run import load_run


def learn(context, files, output, *overrides):
    tree = load_tree([files[0]], files[1], overrides)
    return finetune(prepare(merge(tree, {"run": {"directory": str(output)}})), output, context)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that knows the majority of five votes; its directory."""
    directory = tmp_path_factory.mktemp("analyze")
    files = write_task(directory / "task", train=192)
    run_ranks(learn, 1, files, directory / "out", "finetune.epochs=12", "model.num_attention_heads=4")
    return directory / "out/seed_1234/best"


@pytest.fixture(scope="module")
def corpus_run(corpus, tmp_path_factory):
    """A run of two steps on text."""
    directory = tmp_path_factory.mktemp("analyze_text") / "run"
    run_ranks(fit, 1, small_run(corpus, directory))
    return directory


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "texts.txt"
    rows = [" ".join(rng.permutation(["good", "bad", "film", "plot", "was"])[:4]) for _ in range(30)]
    path.write_text("\n".join(rows) + "\n")
    return path


def analyze(*arguments):
    result = forked("scripts/analyze.py", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def accuracy(path):
    (found,) = evaluate(path, {}, 16).files.values()
    return found.metrics["accuracy"]


@pytest.mark.slow
def test_the_least_important_half_is_not_needed_and_the_most_important_half_is(run, tmp_path):
    """A majority of votes needs one mean over the words: one layer."""
    files = {name: tmp_path / name for name in ("a.json", "pruned", "a.png")}
    said = analyze("heads", "--checkpoint", run, "--prune", 0.5, "--keep", 0, "--raw", "--ablate", "--greedy", 2,
                   "--json", files["a.json"], "--output", files["pruned"], "--plot", files["a.png"])  # fmt: skip
    found = json.loads(files["a.json"].read_text())
    assert found["score"] == accuracy(run) == 1.0 and found["measure"] == "accuracy"
    removed = [Head(*head) for head in found["removed"]]
    assert len(removed) == 4 and accuracy(files["pruned"]) == found["pruned_score"] > 0.95
    assert f"{found['pruned_score']:.4f} without 4 of 8 heads" in said
    pruned = load_run(files["pruned"])
    for head in removed:
        assert not projections(pruned.model)[head.group].weight.unflatten(1, (4, -1))[:, head.number].any()
    whole = load_run(run)
    for name, parameter in whole.model.named_parameters():
        if not name.endswith("attention.dense.weight"):
            assert torch.equal(parameter, pruned.model.get_parameter(name)), name
    rest = [Head(name, n) for name, sizes in found["importance"].items() for n in range(len(sizes))]
    others = [head for head in rest if head not in removed]
    # The same script removes the rest from the whole run: what is removed there is what was kept here.
    assert without(run, tmp_path / "others", others) < 0.8
    assert found["without"]["layer 0"][0] <= 1.0 and len(found["greedy"]) == 2
    assert files["a.png"].stat().st_size > 5000


def without(run, directory, heads):
    """The accuracy of a copy of the checkpoint whose output projections have zeros for these heads."""
    opened = load_run(run)
    remove(opened.model, heads)
    write_pruned(opened, heads, directory)
    return accuracy(directory)


def test_a_run_without_a_task_is_judged_by_its_validation_loss(corpus_run, tmp_path):
    analyze(
        "heads", "--checkpoint", corpus_run, "--samples", 16, "--per", "token", "--json", tmp_path / "a.json"
    )
    found = json.loads((tmp_path / "a.json").read_text())
    logged = records(corpus_run, "validation")[6]["loss"]
    assert found["score"] == pytest.approx(-logged, rel=1e-5)


def test_attention_maps(run, texts, tmp_path):
    said = analyze("attention", "--checkpoint", run, "--input", texts, "--json", tmp_path / "a.json",
                   "--plot", tmp_path / "a.png")  # fmt: skip
    means = json.loads((tmp_path / "a.json").read_text())["means"]
    assert np.shape(means["entropy"]) == (2, 4) and "layer head" in said
    # Four words between CLS and the end of the text: shares are of the weight, entropy at most that of six tokens.
    assert (np.array(means["entropy"]) <= math.log(6) + 1e-6).all()
    for name in ("before_text", "after_text", "itself", "previous", "next"):
        assert ((np.array(means[name]) >= 0) & (np.array(means[name]) <= 1)).all()
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_features_and_contextuality_read_the_same_vectors(run, texts, tmp_path):
    analyze("features", "--checkpoint", run, "--input", texts, "--output", tmp_path / "a.npz", "--batch", 7)
    arrays = np.load(tmp_path / "a.npz")
    vectors, words, owner = arrays["vectors"], arrays["words"], arrays["text"]
    assert vectors.shape == (120, 3, 32) and words.tolist() == texts.read_text().split()
    said = analyze("contextuality", "--checkpoint", run, "--input", texts, "--json", tmp_path / "a.json",
                   "--plot", tmp_path / "a.png")  # fmt: skip
    found = json.loads((tmp_path / "a.json").read_text())
    own = vectors[words == "good", 2].astype(float)
    units = own / np.linalg.norm(own, axis=1, keepdims=True)
    cosines = (units @ units.T)[~np.eye(len(own), dtype=bool)]
    word = found["words"]["good"]
    assert word["contexts"] == len(own) == len(set(owner[words == "good"].tolist()))
    adjusted = cosines.mean() - found["baseline"]["self_similarity"][2]
    assert word["self_similarity_adjusted"][2] == pytest.approx(adjusted, abs=1e-6)
    assert "self-similarity" in said and (tmp_path / "a.png").stat().st_size > 5000


def test_a_probe_knows_the_majority_in_a_layer_that_was_trained_for_it(run, tmp_path):
    rng = np.random.default_rng(1)
    drawn = rng.integers(0, 2, (80, 5))
    rows = [" ".join("good" if vote else "bad" for vote in row) for row in drawn]
    (tmp_path / "texts").write_text("\n".join(rows) + "\n")
    (tmp_path / "labels").write_text("".join(f"{int(row.sum() > 2)}\n" for row in drawn))
    analyze("probe", "--checkpoint", run, "--input", tmp_path / "texts", "--labels", tmp_path / "labels",
            "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")  # fmt: skip
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["accuracies"]) == 3 and np.mean(found["accuracies"][-1]) > 0.95 > found["largest_class"]


def refused(*arguments):
    return forked("scripts/analyze.py", *arguments)


def test_mistakes_are_one_line(run, texts, tmp_path):
    own = ["--checkpoint", run]
    heads, look = ["heads", *own], ["contextuality", *own, "--input", texts]
    assert_refused(refused(*heads, "--prune", 1.5), "--prune is 1.5; it must be between 0 and 1.")
    assert_refused(refused(*heads, "--output", tmp_path / "x"), "--output needs --prune")
    assert_refused(refused(*heads, "--prune", 0.5, "--output", tmp_path), "exists; choose a new directory")
    assert_refused(refused(*heads, "--greedy", 8), "--greedy is 8, but the model has 8 heads")
    assert_refused(refused(*look, "--min-contexts", 40), "no word of")
    assert_refused(refused(*look, "--batch", 0), "--batch is 0; it must be at least 1.")
    assert_refused(
        refused("features", *own, "--input", texts, "--output", "a.txt"), "its name must end in .npz"
    )
    (tmp_path / "labels").write_text("a\nb\n")
    said = refused("probe", *own, "--input", texts, "--labels", tmp_path / "labels")
    assert_refused(said, "has 2 labels for 30 sentences")
