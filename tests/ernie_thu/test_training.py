"""Training with entities: every layout against one process, restart, what is refused."""

import pytest
from support.distributed import run_ranks
from support.hf import own_models
from support.parity import outcomes_of
from support.systems.entity_models import CASES, TREE, entity_config, make_task_batch, rows_of

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.tree import Config


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in CASES[1:])) for case in CASES], ids=str
)
def test_every_layout_equals_one_process(case):
    (outcome,) = outcomes_of([case])
    assert outcome.failures() == []


def run_config(directory, **training):
    return entity_config(training=training, **own_models.run_sections(directory))


def fit(context, config):
    samples = own_models.RandomSamples(rows_of, make_task_batch)
    own_models.train(context, config, samples, samples)


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(tmp_path):
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    run_ranks(fit, 1, run_config(unbroken))
    run_ranks(fit, 1, run_config(resumed, stop_after_step=4))
    run_ranks(fit, 1, run_config(resumed))
    own_models.check_same_run(unbroken, resumed)
    assert not any("vectors" in name for name in own_models.weights_of(resumed))
    for record in own_models.records(resumed):
        parts = [record[f"loss/{name}"] for name in ("masked", "next_sentence", "entities")]
        assert record["loss"] == pytest.approx(sum(parts), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, ("pipeline_parallel_size is 2", "pipeline", "set it to 1")),
        (
            {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
            ("sequence_parallel is true", "not split", "set it to false"),
        ),
        ({"training": {"label_smoothing": 0.1}}, ("label_smoothing is 0.1", "set it to 0")),
        ({"training": {"z_loss": 0.1}}, ("z_loss is 0.1", "set it to 0")),
        ({"model": {"norm": "pre"}}, ("model.norm is pre", "to post")),
        ({"model": {"sentence_classes": 0}}, ("model.sentence_classes is 0", "set it to 2")),
        ({"model": {"share_layers": "all"}}, ("model.share_layers is all", "to none")),
        ({"entities": {"heads": 5}}, ("entities.heads (5)", "entities.size (12)", "divisor")),
        ({"entities": {"layer_types": ["mix"]}}, ("layer_types is ['mix']", "needs 4 entries", "sim, mix, norm")),
        ({"entities": {"layer_types": ["sim", "sim", "mix", "nrm"]}}, ("'nrm'", "each one of sim, mix, norm")),
        ({"entities": {"replaced_ratio": 0.6, "removed_ratio": 0.5}}, ("sum to 1.1", "at most 1")),
        ({"objectives": {"masked_lm": 1}}, ("entities, masked_lm", "stands alone")),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused_in_one_line(changes, parts):
    own_models.check_refusal(lambda: entity_config(**changes), parts)


def test_one_divisor_for_all_losses_is_refused():
    training = {name: value for name, value in TREE["training"].items() if not name.startswith("loss")}
    with pytest.raises(ConfigError, match=r"loss_normalization is global_tokens.*per_objective"):
        build(Config, TREE | {"training": training})
