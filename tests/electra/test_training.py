"""Training of generator and discriminator: every layout against one process, resume, measures, what is refused."""

import pytest
import torch
from support.distributed import run_ranks
from support.hf import own_models
from support.parity import outcomes_of
from support.systems.electra import CASES, TREE, electra_config, make_task_batch, rows_of

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.start import check_start, load_start

MEASURES = ("replaced_accuracy", "replaced_recall", "generator_accuracy")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in CASES[1:])) for case in CASES], ids=str
)
def test_every_layout_equals_one_process(case):
    (outcome,) = outcomes_of([case])
    assert outcome.failures() == []


def run_config(directory, **changes):
    training = {"eval_interval": 3, "eval_samples": 8, **changes.pop("training", {})}
    return electra_config(training=training, **own_models.run_sections(directory), **changes)


def fit(context, config):
    own_models.train(
        context, config, *(own_models.RandomSamples(rows_of, make_task_batch, first) for first in (0, 500))
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one") / "run"
    run_ranks(fit, 1, run_config(directory))
    return directory


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(one, tmp_path):
    directory = tmp_path / "run"
    run_ranks(fit, 1, run_config(directory, training={"stop_after_step": 4}))
    run_ranks(fit, 1, run_config(directory))
    own_models.check_same_run(one, directory)


@pytest.mark.slow
def test_two_ranks_report_what_one_does(one, tmp_path):
    """Other sums of samples on each rank: losses are means over all of them, whatever each holds."""
    directory, parallel = tmp_path / "run", {"zero_stage": 2}
    config = run_config(directory, parallel=parallel)
    run_ranks(fit, 2, config, parallel=ParallelConfig(**parallel))
    for kind in ("train", "validation"):
        for before, after in zip(
            own_models.records(one, kind), own_models.records(directory, kind), strict=True
        ):
            for key in ("loss", "loss/masked", "loss/replaced", *MEASURES * (kind == "validation")):
                assert after[key] == pytest.approx(before[key], rel=1e-5), key
    for name, weight in own_models.weights_of(one).items():
        assert (weight - own_models.weights_of(directory)[name]).abs().max() <= 2e-6, name


def test_what_is_reported(one):
    for record in own_models.records(one, "train") + own_models.records(one, "validation"):
        total = record["loss/masked"] + 50 * record["loss/replaced"]
        assert record["loss"] == pytest.approx(total, rel=1e-5)
    last = own_models.records(one, "validation")[-1]
    assert 0.5 < last["replaced_accuracy"] < 1 and 0 <= last["replaced_recall"] <= 1
    assert 0 <= last["generator_accuracy"] < 0.5


def begin(context, config):
    engine = make_engine(config, context, len(LOSS_NAMES))
    load_start(config, engine, context, [], {})
    return {name: p.detach().clone() for name, p in engine.named_parameters.items()}


def test_a_run_begins_with_another_or_with_its_discriminator_alone(one, tmp_path):
    begins = {"checkpoint": {"initialize_from": str(one)}, "run": {"directory": str(tmp_path / "run")}}
    (weights,) = run_ranks(begin, 1, electra_config(**begins))
    expected = own_models.weights_of(one)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name][: len(weight)], weight), name
    tree = {name: section for name, section in TREE.items() if name != "electra"}
    alone = build(Config, merge(tree | {"objectives": {"masked_lm": 1}}, begins))
    check_start(alone)
    (weights,) = run_ranks(begin, 1, alone)
    bodies = [name for name in expected if name.startswith("encoder.")]
    assert bodies
    for name in bodies:
        assert torch.equal(weights[name.removeprefix("encoder.")][: len(expected[name])], expected[name])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, ("pipeline_parallel_size is 2", "set it to 1")),
        ({"parallel": {"tensor_parallel_size": 4}}, ("tensor_parallel_size (4)", "2 heads", "generator_heads")),
        ({"training": {"loss_weights": {"replaced": 0.0}}}, ("loss_weights.replaced is 0", "above 0")),
        ({"training": {"label_smoothing": 0.1}}, ("label_smoothing is 0.1", "set it to 0")),
        ({"training": {"z_loss": 0.1}}, ("z_loss is 0.1", "set it to 0")),
        ({"model": {"head_bias": True}}, ("model.head_bias is true", "set it to false")),
        ({"model": {"sentence_classes": 2}}, ("model.sentence_classes is 2", "set it to 0")),
        ({"model": {"relative": "buckets"}}, ("model.relative is buckets", "set it to none or to disentangled")),
        ({"electra": {"generator_size": 0.5, "generator_heads": 5}}, ("a width of 24", "5 heads", "divisor")),
        ({"objectives": {"masked_lm": 1}}, ("electra, masked_lm", "stands alone")),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused_in_one_line(changes, parts):
    own_models.check_refusal(lambda: electra_config(**changes), parts)


def test_one_divisor_for_both_losses_is_refused():
    training = {name: value for name, value in TREE["training"].items() if not name.startswith("loss")}
    with pytest.raises(
        ConfigError, match=r"loss_normalization is global_tokens.*per_objective.*replaced: 50"
    ):
        build(Config, TREE | {"training": training})
