"""The unigram baseline: the value by hand, and the same targets as the trainer's evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.project import small_corpus, small_run

from data_utils.common.batch_fields import FIELDS, OBJECTIVE, TARGETS, WEIGHTS
from data_utils.common.errors import DataError
from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.telemetry.records import last_validation, read_metrics
from megatron_lite.telemetry.reports import objective_losses
from scripts.quickstart.unigram_baseline import (
    classes_of,
    log_frequencies,
    loss_sums,
    table,
    target_counts,
    unigram_losses,
)


class FakeLoader:
    """Sample i has one row with loss: target i % 3, weight 0.5 for even i, of objective i % 2."""

    def batch(self, indices: np.ndarray) -> np.ndarray:
        batch = np.zeros((len(indices), len(FIELDS), 4), np.int32)
        batch[:, TARGETS, 1] = indices % 3
        batch[:, WEIGHTS].view(np.float32)[:, 1] = np.where(indices % 2, 1.0, 0.5)
        batch[:, OBJECTIVE, 1] = indices % 2
        return batch


def test_cross_entropy_by_hand() -> None:
    # Counts 3, 1, 0 of a vocabulary of 3 become probabilities 4/7, 2/7, 1/7.
    nats = -log_frequencies(np.array([3.0, 1.0, 0.0]))
    assert nats == pytest.approx([math.log(7 / 4), math.log(7 / 2), math.log(7)])
    # Two losses over tokens share one histogram; one target of token 0 and two of token 2. Labels have their own.
    seen = np.array([[3.0, 0, 0], [0, 1.0, 0], [2.0, 1.0, 0]])
    wanted = np.array([[1.0, 0, 2.0], [0, 0, 0], [0, 4.0, 0]])
    sums = loss_sums(seen, wanted, [0, 0, 2])
    assert sums[:, 1].tolist() == [3, 0, 4]
    assert sums[:, 0] == pytest.approx([math.log(7 / 4) + 2 * math.log(7), 0, 4 * math.log(5 / 2)])
    # Labels of another loss are three classes, with frequencies of their own: 6, 1 and 3 of 10.
    seen, wanted = np.vstack([seen, [5.0, 0, 2.0]]), np.vstack([wanted, [0, 1.0, 1.0]])
    sums = loss_sums(seen, wanted, [0, 0, 2, 3])
    expected = [math.log(7 / 4) + 2 * math.log(7), 0, 4 * math.log(5 / 2), math.log(10) + math.log(10 / 3)]
    assert sums[:, 0] == pytest.approx(expected)


def test_heads_name_their_classes() -> None:
    model = SimpleNamespace(class_heads=("sentence_reordering:9", "token_document:2"))
    names = ("masked", "sentence_reordering", "token_document", "next_sentence")
    assert classes_of(SimpleNamespace(model=model), names) == [0, 9, 2, 2]


def test_targets_are_counted_by_weight_and_objective() -> None:
    counts = target_counts(FakeLoader(), range(6), (2, 5))
    assert counts.tolist() == [[0.5, 0.5, 0.5, 0, 0], [1, 1, 1, 0, 0]]


def test_counts_do_not_depend_on_batches() -> None:
    counts = target_counts(FakeLoader(), range(199), (2, 5))  # four batches, the last one shorter
    assert counts.sum() == 100 * 0.5 + 99 * 1.0


def test_targets_of_all_phases_count(tmp_path: Path) -> None:
    """Those of every step's own batch, whatever its length and size."""
    settings = small_run(small_corpus(tmp_path), tmp_path / "run")
    ramp = {"ramp": {"start": 4, "by": 2, "samples": 12}, "micro_batch_size": 2, "global_batch_size": 8}
    lengths = [{"steps": 3, "sequence_length": 32}, {"batch": ramp}]
    config = build(Config, merge(settings, {"phases": lengths, "training": {"steps": 9}}))
    tokenizer, seed = load_tokenizer(config.tokenizer), config.training.seed
    data = open_datasets(
        config.data, config.objective_choices, tokenizer, seed, phases=config.phase_plan.samples
    )
    counts = np.zeros((len(data.loss_names), tokenizer.vocab_size))
    for step in range(9):
        end, size = config.phase_plan.consumed(step + 1), config.phase_plan.batch_size(step)
        for row in data.train.batch(np.arange(end - size, end)):
            weights = row[WEIGHTS].view(np.float32)
            np.add.at(counts, (row[OBJECTIVE], row[TARGETS]), weights)
    wanted = target_counts(data.validation, range(16), counts.shape)
    sums = loss_sums(counts, wanted, [0] * len(counts))
    assert unigram_losses(config) == pytest.approx(objective_losses(sums, data.loss_names))
    first = build(Config, merge(settings, {"training": {"steps": 9}}))
    assert unigram_losses(config)["loss"] != unigram_losses(first)["loss"]


def write_metrics(run: Path, *records: dict, tail: str = "") -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(text + tail)


def test_metrics_of_repeated_steps_and_a_cut_last_line(tmp_path: Path) -> None:
    old, new = ({"kind": "validation", "step": 10, "loss": loss} for loss in (5.0, 4.0))
    first = {"kind": "validation", "step": 5, "loss": 6.0}
    write_metrics(tmp_path, first, old, {"kind": "train", "step": 20, "loss": 1.0}, new, tail='{"kind": "val')
    assert [record["step"] for record in read_metrics(tmp_path)] == [5, 10, 20]
    assert last_validation(tmp_path) == new


def test_steps_after_a_rewind_are_not_those_before(tmp_path: Path) -> None:
    made = [
        ("train", 10),
        ("train", 20),
        ("validation", 20),
        ("train", 30),
        ("validation", 30),
        ("start", 10),
        ("train", 20),
    ]
    write_metrics(tmp_path, *({"kind": kind, "step": step, "at": i} for i, (kind, step) in enumerate(made)))
    assert [(record["kind"], record["at"]) for record in read_metrics(tmp_path)] == [
        ("train", 0),
        ("start", 5),
        ("train", 6),
    ]


def test_metrics_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_metrics(tmp_path)
    write_metrics(tmp_path, {"kind": "train", "step": 1})
    with pytest.raises(DataError, match="holds no validation"):
        last_validation(tmp_path)
    write_metrics(tmp_path, {"step": 1})
    with pytest.raises(DataError, match=":1: not a metrics record"):
        read_metrics(tmp_path)


def test_table_shows_the_gain() -> None:
    unigram = {"loss": 6.0, "loss/token": 5.0, "loss/document": 7.0}
    lines = table(unigram, {"step": 7, "loss": 4.5, "loss/token": 4.0}).splitlines()
    assert lines[0] == "validation at step 7, nats per token"
    assert [line.split() for line in lines[2:]] == [
        ["all", "6.000", "4.500", "1.500"],
        ["token", "5.000", "4.000", "1.000"],
    ]
