"""A run that is continued with other corpora, another order of them or other weights is refused, with exact numbers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.project import small_run
from support.stores import serving
from support.training import fit, records

from data_utils.common.errors import CheckpointError
from data_utils.common.seeds import derive_seed
from data_utils.common.settings import build, merge, to_tree
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.loader import SampleLoader
from data_utils.loader.mixture import Mixture, samples_of_corpora
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.runtime.changed_corpora import changed_corpora, require_same_corpora

LENGTH = 16  # of a window; a document of 12 tokens fills one
CONSUMED, NEXT = 200_000, 40_000


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The prefixes of three datasets, with 200,034, 300,000 and 50,000 windows."""
    directory = tmp_path_factory.mktemp("corpora")
    for number, (name, documents) in enumerate({"a": 200_034, "b": 300_000, "c": 50_000}.items()):
        with IndexedDatasetWriter(directory / name, 100) as writer:
            tokens = LENGTH - DOCUMENT_OVERHEAD
            writer.add(np.full(documents * tokens, number), np.full(documents, tokens))
            writer.finish({"eos": 0})
    return {name: str(directory / name) for name in "abc"}


def mixture(corpora, weights, seed=7):
    parts = [
        (WindowIndex(IndexedDataset(corpora[name]), LENGTH, DOCUMENT_OVERHEAD), weight)
        for name, weight in weights
    ]
    return Mixture(parts, derive_seed(seed, "train"))


def config_of(corpora, weights, **checkpoint):
    tree = {
        "data": {
            "train": [{"prefix": corpora[name], "weight": weight} for name, weight in weights],
            "sequence_length": LENGTH,
        },
        "checkpoint": checkpoint,
    }
    return build(Config, merge(small_run(Path("absent"), Path("run")), tree))


def state_of(corpora, weights, consumed=CONSUMED):
    """As a checkpoint of a run on these corpora has it."""
    numbers = dict.fromkeys(("step", "consumed_tokens", "skipped_steps", "skipped_in_a_row"), 0)
    return TrainerState(
        **numbers,
        consumed_samples=consumed,
        config=to_tree(config_of(corpora, weights)),
        data=json.loads(json.dumps(SampleLoader(mixture(corpora, weights), None).fingerprint())),
    )


def counted(corpora, before, after, name):
    """By reading: of the next samples of a corpus, those read before; of its unread windows, those passed over."""
    places = [[name for name, _ in weights].index(name) for weights in (before, after)]
    corpus, epoch, window = mixture(corpora, before).locate(np.arange(CONSUMED))
    read = set(zip(epoch[corpus == places[0]], window[corpus == places[0]], strict=True))
    first = mixture(corpora, after).locate(np.arange(CONSUMED + 10 * NEXT))
    corpus, epoch, window = (array[CONSUMED:] for array in first)
    coming = list(zip(epoch[corpus == places[1]], window[corpus == places[1]], strict=True))
    soon = int((corpus[:NEXT] == places[1]).sum())
    again = [pair in read for pair in coming]
    mine = first[0][:CONSUMED] == places[1]
    passed = set(zip(first[1][:CONSUMED][mine], first[2][:CONSUMED][mine], strict=True)) - read
    return sum(again), sum(again[:soon]), soon, len(passed)


def test_other_weights_make_samples_come_again_and_leave_others_out(corpora):
    before, after = [("a", 0.9), ("b", 0.1)], [("a", 0.3), ("b", 0.7)]
    again, again_soon, soon, _ = counted(corpora, before, after, "a")
    *_, passed = counted(corpora, before, after, "b")
    assert again_soon == soon == 12_014  # of A, while 20,034 of its windows are unread
    assert again == 119_976 and passed == 119_976
    change = changed_corpora(config_of(corpora, after), state_of(corpora, before))
    assert change.effect == (
        f"{corpora['a']} (weight 0.9 of 1 -> 0.3 of 1) would repeat {again:,} samples; "
        f"{corpora['b']} (weight 0.1 of 1 -> 0.7 of 1) would skip {passed:,} samples"
    )


@pytest.mark.parametrize("consumed", [0, 1, 4095, 4096, 100_001])
def test_the_samples_of_each_corpus_are_counted_as_they_are_dealt(corpora, consumed):
    weights = [("a", 0.5), ("b", 0.3), ("c", 0.2)]
    corpus, _, _ = mixture(corpora, weights).locate(np.arange(consumed))
    counts = samples_of_corpora(derive_seed(7, "train"), [weight for _, weight in weights], consumed)
    assert counts.tolist() == np.bincount(corpus, minlength=3).tolist()


def test_what_leaves_the_samples_as_they_are_is_no_change(corpora, tmp_path):
    before = [("a", 0.9), ("b", 0.1)]
    state = state_of(corpora, before)
    copied = {**corpora, "a": str(tmp_path / "elsewhere")}
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"elsewhere{suffix}").symlink_to(corpora["a"] + suffix)
    for names, weights in ((corpora, before), (corpora, [("a", 9.0), ("b", 1.0)]), (copied, before)):
        assert changed_corpora(config_of(names, weights), state) is None
    assert changed_corpora(config_of(corpora, [("a", 0.5)]), TrainerState.beginning({})) is None


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([("b", 0.1), ("a", 0.9)], ["b has another index", "may repeat its 20,019 samples"]),
        ([("c", 0.9), ("b", 0.1)], ["c is new and would skip its first 179,981", "a is removed"]),
        ([("a", 0.9), ("b", 0.1), ("c", 1.0)], ["a (weight 0.9 of 1 -> 0.9 of 2) would repeat", "c is new"]),
        ([("a", 0.9)], ["a (weight 0.9 of 1 -> 0.9 of 0.9) would skip 20,019 samples", "b is removed"]),
    ],
)
def test_other_corpora_and_another_order_are_named(corpora, after, words):
    change = changed_corpora(config_of(corpora, after), state_of(corpora, [("a", 0.9), ("b", 0.1)]))
    assert all(word in change.effect for word in words), change


def test_the_refusal_is_a_line_with_the_remedies(corpora, tmp_path):
    after = [("a", 0.3), ("b", 0.7)]
    state = state_of(corpora, [("a", 0.9), ("b", 0.1)])
    with pytest.raises(CheckpointError) as error:
        require_same_corpora(config_of(corpora, after), tmp_path, state)
    assert str(error.value).startswith(
        f"data.train differs from {tmp_path}, which numbers its 200,000 samples"
    )
    for remedy in ("former corpora and weights", f"initialize_from={tmp_path}", "accept_changed_data=true"):
        assert remedy in str(error.value)
    assert "\n" not in str(error.value)
    require_same_corpora(config_of(corpora, after, accept_changed_data=True), tmp_path, state)


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
        assert any(
            "data.train: " in event and "(weight 0.9 of 1 -> 0.1 of 1) would repeat" in event
            for event in events
        )
        assert "(weight 0.9 of 1 -> 0.1 of 1)" in (tmp_path / run / "metrics.jsonl").read_text()


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
    assert_refused(refused, "by which max_epochs changes the weights")
    numbers = re.findall(r"(?:corpus_train|weight): (\d+), (?:corpus_validation: )?(\d+)", refused.stderr)
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
