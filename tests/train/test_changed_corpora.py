"""A run that is continued with other corpora, another order of them or other weights is refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.commands import assert_refused, forked
from support.data.stores import serving
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit, records

from data_utils.common.seeds import derive_seed
from data_utils.common.settings import build, merge, to_tree
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.loader import SampleLoader
from data_utils.loader.mixture import Mixture
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.runtime.changes import differences

LENGTH = 16  # of a window; a document of 12 tokens fills one


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The prefixes of three datasets."""
    directory = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate("abc"):
        with IndexedDatasetWriter(directory / name, 100) as writer:
            tokens = LENGTH - DOCUMENT_OVERHEAD
            writer.add(np.full(50 * tokens, number), np.full(50, tokens))
            writer.finish({"eos": 0})
    return {name: str(directory / name) for name in "abc"}


def config_of(corpora, weights):
    train = [{"prefix": corpora[name], "weight": weight} for name, weight in weights]
    tree = {"data": {"train": train, "sequence_length": LENGTH}}
    return build(Config, merge(small_run(Path("absent"), Path("run")), tree))


def state_of(corpora, weights):
    """As a checkpoint of step 5 of a run on these corpora has it."""
    config = config_of(corpora, weights)
    parts = [
        (WindowIndex(IndexedDataset(corpora[name]), LENGTH, DOCUMENT_OVERHEAD), weight)
        for name, weight in weights
    ]
    fingerprint = SampleLoader(Mixture(parts, derive_seed(7, "train")), None).fingerprint()
    return replace(
        TrainerState.at_step_0(to_tree(config)),
        step=5,
        consumed_samples=config.phase_plan.consumed(5),
        data=json.loads(json.dumps(fingerprint)),
    )


def test_what_leaves_the_samples_as_they_are_is_no_change(corpora, tmp_path):
    before = [("a", 0.9), ("b", 0.1)]
    copied = {**corpora, "a": str(tmp_path / "elsewhere")}
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"elsewhere{suffix}").symlink_to(corpora["a"] + suffix)
    for names, weights in (
        (corpora, before),
        (corpora, [("a", 9.0), ("b", 1.0)]),
        (copied, before),
        (corpora, [*before, ("c", 0.0)]),
    ):
        assert not differences(config_of(names, weights), state_of(corpora, before))
    imported = TrainerState.at_step_0(to_tree(config_of(corpora, before)))
    assert not differences(config_of(corpora, [("a", 0.5)]), imported)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([("a", 0.3), ("b", 0.7)], ["weights of data.train: {a: 0.9, b: 0.1} -> {a: 0.3, b: 0.7}"]),
        ([("b", 0.9), ("a", 0.1)], ["data.train[0]: A -> B", "data.train[1]: B -> A"]),
        ([("c", 0.9), ("b", 0.1)], ["data.train[0]: A -> C"]),
        ([("a", 0.9), ("b", 0.1), ("c", 1.0)], ["{a: 0.9, b: 0.1} -> {a: 0.9, b: 0.1, c: 1}"]),
        ([("a", 0.9)], ["data.train[1]: B -> None", "{a: 0.9, b: 0.1} -> {a: 0.9}"]),
    ],
)
def test_other_corpora_weights_and_another_order_are_named(corpora, after, words):
    found = differences(config_of(corpora, after), state_of(corpora, [("a", 0.9), ("b", 0.1)]))
    for word in words:
        for name in "abc":
            word = word.replace(name.upper(), corpora[name])
        assert any(word in each.text and each.kind == "samples" for each in found), found


# Runs


def test_a_run_continues_with_other_weights_only_if_told_so(corpus, tmp_path):
    def tree(run, weights, **checkpoint):
        train = [
            {"prefix": str(corpus / f"corpus_{name}"), "weight": weight}
            for name, weight in zip(("train", "validation"), weights, strict=True)
        ]
        changes = {"data": {"train": train, "validation": []}, "training": {"steps": 3 if run == "a" else 4}}
        return merge(small_run(corpus, tmp_path / run), {**changes, "checkpoint": checkpoint})

    def refused(tree):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        assert_refused(
            forked("pretrain_glm.py", "--config", str(tmp_path / "config.yaml")), "accept_changed_data=true"
        )

    run_ranks(fit, 1, tree("a", [0.9, 0.1]))
    first = list_checkpoints(tmp_path / "a/checkpoints")[-1]
    longer = {"training": {"steps": 4}}
    refused(merge(tree("a", [0.1, 0.9]), longer))
    branch = {"initialize_from": str(first), "initialize": "all"}
    refused(tree("b", [0.1, 0.9], **branch))
    assert not (tmp_path / "b").exists()
    for run, more in (("a", {}), ("b", branch)):
        run_ranks(fit, 1, merge(tree(run, [0.1, 0.9], accept_changed_data=True, **more), longer))
        last = read_checkpoint(list_checkpoints(tmp_path / run / "checkpoints")[-1]).trainer_state()
        events = [entry["event"] for entry in last.events["history"]]
        change = "corpus_train: 0.9, corpus_validation: 0.1} -> {corpus_train: 0.1, corpus_validation: 0.9}"
        assert any(change in event for event in events)
        assert change in (tmp_path / run / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([], marks=pytest.mark.slow),
        [{"steps": 2}, {"batch": {"global_batch_size": 4}}],
    ],
)
def test_a_capped_run_resumes_bit_for_bit_and_keeps_its_weights_when_it_is_longer(corpus, tmp_path, phases):
    """More steps would make other weights. The refusal says the present ones, and with these the run goes on."""
    train = [
        {"prefix": str(corpus / "corpus_train"), "tokens": 0.2},
        {"prefix": str(corpus / "corpus_validation"), "tokens": 0.8, "max_epochs": 0.4},
    ]
    changes = {"data": {"train": train, "validation": []}, "training": {"steps": 6}, "phases": phases}

    def start(run, more):
        tree = merge(merge(small_run(corpus, tmp_path / run), changes), more)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        return forked("pretrain_glm.py", "--config", str(tmp_path / "config.yaml"))

    for run, steps in (("whole", 6), ("stopped", 3), ("stopped", 6)):
        done = start(run, {"training": {"stop_after_step": steps}})
        assert done.returncode == 0, done.stderr
    assert records(tmp_path / "whole") == records(tmp_path / "stopped")
    read = re.search(
        r"corpus_validation: .*? ([\d,]+) windows; (\d+) samples .*read ([\d.]+) times", done.stdout
    )
    windows, samples, epochs = (float(number) for number in read.groups())
    assert 0.4 * windows - 2 < samples <= 0.4 * windows and epochs == pytest.approx(
        samples / windows, abs=0.005
    )

    longer = {"training": {"steps": 12}}
    refused = start("stopped", longer)
    assert_refused(refused, "max_epochs makes other weights for another length of the run")
    old, _ = refused.stderr.split(" -> ")
    numbers = re.findall(r"corpus_train: (\d+), corpus_validation: (\d+)", old)
    kept = [dict(zip(("corpus_train", "corpus_validation"), map(int, pair), strict=True)) for pair in numbers]
    assert [sum(weights.values()) for weights in kept] == [4096] * max(1, len(phases))
    weights = [{"prefix": str(corpus / name), "weight": weight} for name, weight in kept[0].items()]
    begun = [{**phase, "weights": same} for phase, same in zip(phases, kept, strict=False)]
    done = start("stopped", merge(longer, {"data": {"train": weights}, "phases": begun}))
    assert done.returncode == 0, done.stderr
    assert list(records(tmp_path / "stopped")) == list(range(1, 13))


def test_a_run_of_a_dataset_in_a_store_resumes_with_shares_of_tokens(corpus, tmp_path):
    files = {
        f"/d{suffix}": Path(f"{corpus}/corpus_train{suffix}").read_bytes()
        for suffix in (".bin", ".idx", ".json")
    }
    with serving(files) as server:
        data = {
            "train": [
                {"prefix": f"{server.url}/d", "tokens": 0.5},
                {"prefix": str(corpus / "corpus_validation"), "tokens": 0.5},
            ],
            "validation": [],
            "local_directory": str(tmp_path / "local"),
        }
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(merge(small_run(corpus, tmp_path / "run"), {"data": data}))
        )
        for step in (1, 2):
            start = ["--config", tmp_path / "config.yaml", f"training.stop_after_step={step}"]
            done = forked("pretrain_glm.py", *start)
            assert done.returncode == 0, done.stderr
    assert list(records(tmp_path / "run")) == [1, 2]
