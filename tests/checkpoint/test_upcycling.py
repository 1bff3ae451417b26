"""A mixture of experts that begins with a dense checkpoint computes the same, and begins so in every layout."""

from __future__ import annotations

import pytest
import torch
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit, make_trainer, records
from support.training.whole_weights import load_weights, placed_weights

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.train.start import check_start

EXPERTS = {"count": 4, "per_token": 2, "width": 48, "dense_layers": 1, "biased": True}


def tree_of(corpus, directory, **sections):
    model = {"model": {"biases": "none", "ffn": "gated", "ffn_size": 48}}
    return merge(merge(small_run(corpus, directory), model), sections)


@pytest.fixture(scope="module")
def dense(corpus, tmp_path_factory):
    """A run of two steps with averages of its weights, which runs that begin with it take."""
    directory = tmp_path_factory.mktemp("dense")
    changes = {"training": {"stop_after_step": 2}, "ema": {"decay": 0.5, "use": True}}
    run_ranks(fit, 2, tree_of(corpus, directory, **changes))
    return directory


def begin(context, tree):
    return placed_weights(make_trainer(context, tree).engine)


def upcycling(corpus, directory, dense, noise=0.0, **experts):
    checkpoint = {"initialize_from": str(dense), "upcycling_noise": noise}
    return tree_of(corpus, directory, model={"experts": {**EXPERTS, **experts}}, checkpoint=checkpoint)


@pytest.mark.parametrize("choice", [{}, {"scores": "softmax", "biased": False}], ids=str)
def test_the_first_loss_is_that_of_the_dense_model(corpus, dense, tmp_path, choice):
    names = ("experts", "dense")
    from_dense = {"checkpoint": {"initialize_from": str(dense)}}
    trees = (
        upcycling(corpus, tmp_path / "experts", dense, **choice),
        tree_of(corpus, tmp_path / "dense", **from_dense),
    )
    for tree in trees:
        run_ranks(fit, 1, merge(tree, {"training": {"stop_after_step": 1}}))
    losses = [records(tmp_path / name)[1]["loss"] for name in names]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_each_expert_is_the_ffn_with_its_own_noise_in_every_layout(corpus, dense, tmp_path, noise):
    whole = {
        name: weight.view(len(weight), -1) for name, weight in load_weights(find_manifest(dense)).items()
    }
    random = run_ranks(begin, 1, tree_of(corpus, tmp_path, model={"experts": EXPERTS}))[0]
    expected = {name: weight for name, weight in random.items() if ".router." in name} | whole
    for name in random:
        if ".experts." in name:
            ffn = name.replace(".experts." + name.split(".")[4], "")
            expected[name] = whole[ffn] + noise * random[name]
            expected.pop(ffn, None)
    tree = upcycling(corpus, tmp_path, dense, noise)
    for ranks, parallel in (
        (1, {}),
        (2, {"expert_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ):
        weights = run_ranks(
            begin, ranks, merge(tree, {"parallel": parallel}), parallel=ParallelConfig(**parallel)
        )
        assert {name for of_rank in weights for name in of_rank} == set(expected)
        for of_rank in weights:
            for name, weight in of_rank.items():
                is_owned = ~weight.isnan()
                assert torch.equal(weight[is_owned], expected[name][is_owned]), (parallel, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 24}, "only with model.experts.width 48, not 24: set it to 48"),
        ({"shared": 1}, "only with model.experts.shared 0, not 1"),
        ({"normalized": False}, "only with model.experts.normalized True, not False"),
        ({"factor": 2.5}, "only with model.experts.factor 1.0, not 2.5"),
    ],
    ids=str,
)
def test_a_model_that_would_compute_something_else_is_refused(corpus, dense, tmp_path, changes, message):
    config = build(Config, upcycling(corpus, tmp_path, dense, **changes))
    with pytest.raises(CheckpointError, match=message):
        check_start(config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size))


def test_noise_without_copies_is_refused(corpus, dense, tmp_path):
    checkpoint = {"initialize_from": str(dense), "upcycling_noise": 0.5}
    config = build(Config, tree_of(corpus, tmp_path, checkpoint=checkpoint))
    with pytest.raises(
        CheckpointError, match=r"upcycling_noise is 0\.5, but the experts of this run do not begin"
    ):
        check_start(config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size))
