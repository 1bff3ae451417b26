"""What every script makes of a run of OPTIMUS: scripts of runs work, scripts of one Transformer refuse in a line."""

import json
import sys

import pytest
import torch
import yaml
from support.distributed import run_ranks
from support.project import ROOT
from support.systems.latent import corpus_tree
from support.training.report_runs import train, write_records
from support.training.training import fit

import pretrain_glm
from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge
from scripts import checkpoints, evaluate, generate, inspect_batch, profile_step, report


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run of four steps with evaluations and norms of single layers."""
    directory = tmp_path_factory.mktemp("scripts") / "run"
    training = {"gradient_norm_interval": 2, "eval_interval": 2}
    more = {"training": training, "run": {"log_interval": 1}, "checkpoint": {"save_interval": 2}}
    tree = merge(corpus_tree(corpus, directory), more)
    run_ranks(fit, 1, tree)
    config = directory.parent / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    return directory, config


def called(monkeypatch, main, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    return main()


def records(directory, kind):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_gradient_norms_of_both_stacks_and_the_latent_vector_are_recorded(run):
    found = records(run[0], "gradient_norms")
    assert [record["step"] for record in found] == [2, 4]
    norms = {line["step"]: line["grad_norm"] for line in records(run[0], "train")}
    for record in found:
        layers = {k: v for k, v in record.items() if k.startswith(("encoder.", "decoder.", "latent."))}
        assert {"encoder.layers.1", "decoder.layers.2", "latent.posterior", "latent.memory"} <= layers.keys()
        whole = torch.tensor(list(layers.values())).double().norm().item()
        assert whole == pytest.approx(norms[record["step"]], rel=1e-5)


def test_the_report_shows_the_latent_space(run, tmp_path):
    report.main([str(run[0]), "--output", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    for text in (
        "Loss, nats per sentence", "reconstruction", ">kl<", "Latent space", "active units", "mutual information",
        "KL weight (beta)", "optimus.latent_size",
    ):  # fmt: skip
        assert text in page, text


def test_the_report_of_both_kinds_says_which_losses_are_of_sentences(run, tmp_path):
    other = write_records(tmp_path / "other", [train(step) for step in (1, 2)])
    report.main([str(run[0]), str(other), "--output", str(tmp_path / "page.html")])
    assert "nats per sentence or nats per token" in (tmp_path / "page.html").read_text()
    report.main([str(other), "--output", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "nats per token<" in page and "Latent space" not in page


def test_the_plot_is_of_sentences(run, tmp_path):
    report.main([str(run[0]), "--plot", "--output", str(tmp_path / "loss.svg")])
    assert (tmp_path / "loss.svg").stat().st_size > 5000


def test_checkpoints_are_listed_and_verified(run, monkeypatch, capsys):
    assert called(monkeypatch, checkpoints.main, "verify", run[0]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["step_00000002", "step_00000004"]


def test_samples_are_shown(run, monkeypatch, capsys):
    called(monkeypatch, inspect_batch.main, "--config", run[1], "--samples", 0)
    assert "[CLS]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (pretrain_glm.main, ["--dry-run", 1], "decoder is set"),
        (profile_step.main, ["--processes", 1], "decoder is set"),
    ],
    ids=["dry run", "profile"],
)
def test_traces_of_one_transformer_refuse_two(run, monkeypatch, main, arguments, message):
    with pytest.raises(ConfigError, match=message):
        called(monkeypatch, main, "--config", run[1], *arguments)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (generate.main, ["--text", "a word"], r"use scripts/latent\.py"),
        (generate.main, ["--text", "a [MASK]"], r"use scripts/latent\.py"),
        (
            evaluate.main,
            ["--task", ROOT / "configs/tasks/noisy_votes.yaml"],
            r"cannot be evaluated on a task; fine-tune its encoder with scripts/finetune\.py",
        ),
    ],
    ids=["generate", "blanks", "evaluate"],
)
def test_scripts_of_one_transformer_refuse_the_run(run, monkeypatch, main, arguments, message):
    with pytest.raises(ConfigError, match=message):
        called(monkeypatch, main, "--checkpoint", run[0], *arguments)
