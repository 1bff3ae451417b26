"""scripts/latent.py: every command on a model whose latent space is known, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.systems.linear_gaussian import LinearGaussian

from data_utils.common.errors import ConfigError, DataError
from scripts import latent

WEIGHT = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.5, 0.0, 0.0]])


@pytest.fixture
def model():
    return LinearGaussian(WEIGHT, torch.tensor([0.5, -1.0, 0.0]), 0.7)


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys):
    """A function that runs a command on the model, and returns the lines it prints."""
    opened = []

    def open_latent(path, tokenizer, decoder_tokenizer):
        opened.append((path, tokenizer, decoder_tokenizer))
        return model

    module = SimpleNamespace(open_latent=open_latent)
    monkeypatch.setitem(sys.modules, "megatron_lite.models.optimus.open_run", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/checkpoints").mkdir(parents=True)

    def call(command, *arguments):
        latent.main([command, "--checkpoint", "run", *map(str, arguments)])
        return capsys.readouterr().out.splitlines()

    call.opened = opened
    return call


def write_sentences(path, model, count):
    """Lines, and the sign of their first latent component as labels."""
    x = model.draw(count, seed=1)
    path.write_text("".join(sentence.text + "\n" for sentence in model.sentences(x)))
    labels = ["high" if value > 0 else "low" for value in model.exact(x)[0][:, 0]]
    path.with_name("labels.txt").write_text("\n".join(labels) + "\n")
    return x


def test_evaluate_prints_and_writes_the_known_numbers(run, model, tmp_path):
    x = write_sentences(tmp_path / "in.txt", model, 40)
    options = ("--samples", 4, "--chunk", 2, "--json", "out.json", "--picture", "space.png")
    lines = run("evaluate", "--input", "in.txt", *options)
    found = json.loads((tmp_path / "out.json").read_text())
    evidence = model.evidence(x)
    assert found["bound"] == pytest.approx(evidence.mean().item(), abs=1e-9)  # the posterior is the exact one
    assert found["perplexity"] == pytest.approx(math.exp(-evidence.sum() / (40 * 4)))
    assert found["perplexity_with_bos"] == pytest.approx(math.exp(-evidence.sum() / (40 * 5)))
    assert found["active_units"] == 2 and len(found["divergence_by_component"]) == 3
    assert (found["samples"], found["sentences"], found["tokens"]) == (4, 40, 160)
    text = "\n".join(lines)
    assert f"perplexity              {found['perplexity']:12.4f}" in text and "2 of 3" in text
    assert "bound L_4" in text and f"at most {math.log(40):.2f}" in text
    assert (tmp_path / "space.png").exists() and lines[-1] == "space.png"


def test_encode_writes_arrays(run, model, tmp_path):
    x = write_sentences(tmp_path / "in.txt", model, 7)
    run("encode", "--input", "in.txt", "--output", "latent.npz", "--batch", 3)
    arrays = np.load(tmp_path / "latent.npz", allow_pickle=False)
    for name, exact in zip(("mu", "logvar"), model.exact(x), strict=True):
        np.testing.assert_allclose(arrays[name], exact.numpy(), rtol=1e-6)
        assert arrays[name].dtype == np.float32


def written(lines):
    return [line.split("\t") for line in lines]


def test_reconstruct_writes_each_sentence_from_its_mean(run, model, tmp_path):
    x = write_sentences(tmp_path / "in.txt", model, 5)
    texts = [sentence.text for sentence in model.sentences(x)]
    lines = written(run("reconstruct", "--input", "in.txt", "--text", "1 2 3", "--json", "out.json"))
    assert [place for place, _ in lines] == ["1 2 3", *texts]
    mu, _ = model.exact(torch.cat([torch.tensor([[1.0, 2.0, 3.0]]).double(), x]))
    assert [text for _, text in lines] == model.decode(mu, latent.GenerationConfig())
    found = json.loads((tmp_path / "out.json").read_text())
    assert [[one["place"], one["text"]] for one in found["written"]] == lines and len(found["given"]) == 6


def test_interpolate_goes_from_one_reconstruction_to_the_other(run):
    ends = [text for _, text in written(run("reconstruct", "--text", "1 2 3", "--text", "0 0 0"))]
    lines = written(run("interpolate", "--text", "1 2 3", "--text", "0 0 0", "--points", 5))
    assert [place for place, _ in lines] == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert [lines[0][1], lines[-1][1]] == ends and len({text for _, text in lines}) == 5


def test_analogy_moves_the_third_as_the_first_to_the_second(run, model):
    """The posterior's mean is affine in x, so that C + B - A is also the latent vector of the x of that sum."""
    (plain,) = written(run("analogy", *("--text", "0 0 0", "--text", "3 0 0", "--text", "1 2 3")))
    assert plain == ["analogy", written(run("reconstruct", "--text", "4 2 3"))[0][1]]
    (half,) = written(run("analogy", "--text", "0 0 0", "--text", "3 0 0", "--text", "1 2 3", "--scale", 0.5))
    assert half[1] == written(run("reconstruct", "--text", "2.5 2 3"))[0][1]


def test_sample_draws_by_its_seed(run):
    first = run("sample", "--count", 4, "--seed", 1)
    assert len(first) == 4 and run("sample", "--count", 2, "--seed", 1) == first[:2]
    assert run("sample", "--count", 4, "--seed", 2) != first
    drawn = run("sample", "--count", 4, "--seed", 1, "--strategy", "sample", "--top-k", 3)
    assert drawn != first and run("sample", "--count", 4, "--seed", 1, "--strategy", "sample") == drawn


def test_probe_compares_with_an_untrained_encoder_and_the_largest_class(run, model, tmp_path):
    write_sentences(tmp_path / "in.txt", model, 80)
    options = ("--labels-per-class", 2, 20, "--json", "out.json", "--picture", "space.svg", "--axes", 0, 2)
    lines = run("probe", "--input", "in.txt", "--labels", "labels.txt", *options)
    found = json.loads((tmp_path / "out.json").read_text())
    accuracy = {
        (row["features"], row["labels_per_class"]): np.mean(row["accuracies"]) for row in found["probes"]
    }
    assert {count for _, count in accuracy} == {2, 20} and len(accuracy) == 6
    assert accuracy["latent vector (mu)", 20] > 0.9
    assert accuracy["latent vector (mu)", 20] > accuracy["same, untrained model", 20] + 0.2
    assert 0.5 <= found["largest_class"] < 0.7 and f"accuracy {found['largest_class']:.4f}" in "\n".join(
        lines
    )
    assert (
        "component 2" in (tmp_path / "space.svg").read_text()
        or (tmp_path / "space.svg").stat().st_size > 9000
    )
    assert len(lines) == 8


def test_tokenizers_that_moved_are_handed_on(run):
    run("sample", "--count", 1, "--tokenizer", "a", "--decoder-tokenizer", "b")
    assert [str(part) for part in run.opened[0]] == ["run", "a", "b"]


TEXT = ("--text", "1 2 3")
MISTAKES = {
    "samples": (["evaluate", "--samples", "0"], "--samples is 0; it must be at least 1"),
    "chunk": (
        ["evaluate", "--samples", "10", "--chunk", "4"],
        r"--samples \(10\) is no multiple of --chunk \(4\)",
    ),
    "one sentence": (["evaluate", "--input", "one.txt"], "one.txt has 1 sentence"),
    "picture of one": (
        ["encode", "--input", "one.txt", "--output", "a.npz", "--picture", "a.png"],
        "a picture needs",
    ),
    "empty line": (["evaluate", "--input", "gap.txt"], "gap.txt: line 2 is empty"),
    "empty text": (["reconstruct", "--text", " "], "a --text is empty"),
    "no text": (["reconstruct"], "no text given"),
    "two of analogy": (["analogy", *TEXT * 2], "analogy takes 3 texts"),
    "four of analogy": (["analogy", *TEXT * 4], "4 are given; pass --text 3 times"),
    "one end": (["interpolate", *TEXT], "interpolate takes 2 texts"),
    "one point": (["interpolate", *TEXT * 2, "--points", "1"], "--points is 1; it must be at least 2"),
    "scale": (["analogy", *TEXT * 3, "--scale", "nan"], "--scale is nan; it must be a finite number"),
    "count": (["sample", "--count", "0"], "--count is 0"),
    "strategy": (["sample", "--top-k", "3"], "top_k is 3, but strategy is greedy"),
    "one class": (
        ["probe", "--input", "in.txt", "--labels", "same.txt"],
        "same.txt has the class 'low' only",
    ),
    "labels": (["probe", "--input", "in.txt", "--labels", "one.txt"], "one.txt has 1 labels for 8 sentences"),
    "trials": (["probe", "--labels", "labels.txt", "--trials", "0"], "--trials is 0"),
    "few": (["probe", "--labels", "labels.txt", "--labels-per-class", "5"], "with 5 of each to learn"),
    "none": (["probe", "--labels", "labels.txt", "--labels-per-class", "0"], "--labels-per-class is 0"),
    "picture": (
        ["evaluate", "--picture", "space.txt"],
        "--picture is 'space.txt'; its name must end in .png",
    ),
    "output": (["encode", "--output", "latent.txt"], "--output is 'latent.txt'; its name must end in .npz"),
    "axes alone": (["evaluate", "--axes", "0", "1"], "--axes needs --picture"),
    "equal axes": (
        ["evaluate", "--axes", "1", "1", "--picture", "a.png"],
        "--axes is 1 1; it must be two different",
    ),
    "axes": (
        ["evaluate", "--axes", "0", "3", "--picture", "a.png"],
        "--axes has 3, but the latent size is 3",
    ),
    "too long": (["reconstruct", "--text", "1 2 3 4"], "text 1 has 4 numbers"),
    "directory": (["evaluate", "--json", "run"], "--json 'run' is a directory"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_reported(run, model, tmp_path, kind):
    arguments, message = MISTAKES[kind]
    write_sentences(tmp_path / "in.txt", model, 8)
    (tmp_path / "labels.txt").write_text("low\nhigh\n" * 4)
    (tmp_path / "same.txt").write_text("low\n" * 8)
    (tmp_path / "one.txt").write_text("1 2 3\n")
    (tmp_path / "gap.txt").write_text("1 2 3\n\n1 2 3\n")
    before = sorted(tmp_path.iterdir())
    if arguments[0] in ("evaluate", "encode", "probe") and "--input" not in arguments:
        arguments = [*arguments, "--input", "in.txt"]
    with pytest.raises((ConfigError, DataError), match=message):
        run(*arguments)
    assert sorted(tmp_path.iterdir()) == before
    assert not run.opened or kind in ("axes", "too long")
