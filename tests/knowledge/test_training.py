"""Training with entities: every layout against one process, restart, what is refused."""

import json

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.knowledge import NOISE, TREE, EntityCase, RandomVectors, entity_config, rows_of
from support.parity import outcomes_of
from support.whole_weights import load_weights

from data_utils.base.errors import ConfigError
from data_utils.base.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.checkpoint.existing import find_manifest
from megatron_lite.config.tree import Config
from megatron_lite.knowledge.batch import EntityBatch
from megatron_lite.train.engine.plain import make_engine
from megatron_lite.train.loop.trainer import Trainer

# As in parity_cases.py, but for the head of sentences: gradients of its few labels nearly cancel. Measured: half of it.
MOST = {"loss": 1e-5, "norm": 1e-5, "gradients": 5e-5, "weights": 5e-5}
CASES = [
    EntityCase(2, 1, 1, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    EntityCase(1, 1, 2, 3, recompute="full", dropout=0.1),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            EntityCase(1, 1, 2, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
            EntityCase(2, 1, 2, 1, recompute="selective", attention_dropout=0.1),
            EntityCase(4, 1, 1, 3),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_equals_one_process(case):
    (outcome,) = outcomes_of([case])
    assert {kind: value for kind, value in outcome.largest.items() if value > MOST[kind]} == {}, outcome.where


class Samples:
    """The samples of a run: rows of the objective, as a loader would give them."""

    def batch(self, indices: np.ndarray) -> EntityBatch:
        rows = np.concatenate([rows_of(1, int(index)) for index in indices])
        return EntityBatch(rows, indices, NOISE, RandomVectors())

    def prefetch(self, indices: np.ndarray) -> None:
        """Nothing to read ahead."""

    def fingerprint(self) -> list[dict[str, object]]:
        return [{"random": 0}]


def run_config(directory, **training):
    return entity_config(
        training=training,
        optimizer={"lr": 1e-3},
        schedule={"warmup_steps": 0},
        batch={"micro_batch_size": 2, "global_batch_size": 8},
        checkpoint={"save_interval": 3},
        run={"directory": str(directory), "log_interval": 1},
    )


def train(context, config):
    engine = make_engine(config, context, len(LOSS_NAMES))
    Trainer(config, context, engine, Samples(), Samples(), LOSS_NAMES).fit()


def records(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_a_resumed_run_is_the_unbroken_one(tmp_path):
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    run_ranks(train, 1, run_config(unbroken))
    run_ranks(train, 1, run_config(resumed, stop_after_step=4))
    run_ranks(train, 1, run_config(resumed))
    expected, found = (load_weights(find_manifest(directory)) for directory in (unbroken, resumed))
    assert expected.keys() == found.keys() and not any("vectors" in name for name in found)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    for one, other in zip(records(unbroken), records(resumed), strict=True):
        assert one["loss"] == other["loss"]
        parts = [one[f"loss/{name}"] for name in ("masked", "next_sentence", "entities")]
        assert one["loss"] == pytest.approx(sum(parts), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, ("pipeline_parallel_size is 2", "between stages", "set it to 1")),
        (
            {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
            ("sequence_parallel is True", "not split", "set it to False"),
        ),
        ({"training": {"label_smoothing": 0.1}}, ("label_smoothing is 0.1", "set it to 0")),
        ({"training": {"z_loss": 0.1}}, ("z_loss is 0.1", "set it to 0")),
        ({"model": {"norm": "pre"}}, ("model.norm is 'pre'", "'post'")),
        ({"model": {"sentence_classes": 0}}, ("model.sentence_classes is 0", "set it to 2")),
        ({"model": {"share_layers": "all"}}, ("model.share_layers is 'all'", "'none'")),
        ({"entities": {"heads": 5}}, ("entities.heads (5)", "entities.size (12)", "divisor")),
        ({"entities": {"layer_types": ["mix"]}}, ("layer_types is ['mix']", "give 4", "sim, mix, norm")),
        ({"entities": {"layer_types": ["sim", "sim", "mix", "nrm"]}}, ("'nrm'", "each one of sim, mix, norm")),
        ({"entities": {"replaced_ratio": 0.6, "removed_ratio": 0.5}}, ("1.1 together", "1 at most")),
        ({"objectives": {"masked_lm": 1}}, ("entities, masked_lm", "stands alone")),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused_in_one_line(changes, parts):
    with pytest.raises(ConfigError) as error:
        entity_config(**changes)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


def test_one_divisor_for_all_losses_is_refused():
    training = {name: value for name, value in TREE["training"].items() if not name.startswith("loss")}
    with pytest.raises(ConfigError, match=r"loss_normalization is global_tokens.*per_objective"):
        build(Config, TREE | {"training": training})
