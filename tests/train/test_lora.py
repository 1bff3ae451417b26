"""Runs that train low-rank updates alone: what they leave as it is and continue from, as a user starts them.

That steps are peft's: tests/hf/test_lora.py; that layouts compute the same: test_parity.py.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit, records
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.merge import merge as merge_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.train.start import check_start
from megatron_lite.transformer.flops import trained_count
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
OTHER_SCALE = {"rank_stabilized": True}  # 4 instead of 2


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    run_ranks(fit, 1, merge(small_run(corpus, directory), {"training": {"stop_after_step": 2}}))
    return directory


def last(directory):
    return read_checkpoint(list_checkpoints(directory / "checkpoints")[-1])


def settings(corpus, directory, base, **changes):
    tree = small_run(corpus, directory)
    begin = {"model": {"lora": LORA}, "checkpoint": {"initialize_from": str(base)}}
    return merge(merge(tree, begin), changes)


def test_updates_alone_are_trained_and_kept_and_a_resumed_run_repeats_the_whole_one(corpus, base, tmp_path):
    run_ranks(fit, 1, settings(corpus, tmp_path / "whole", base))
    whole, begun = last(tmp_path / "whole"), load_weights(last(base))
    found = load_weights(whole)
    assert all(torch.equal(found[name], weight) for name, weight in begun.items())
    new = found.keys() - begun.keys()
    assert len(new) == 2 * 4 * 2 and all(found[name].abs().sum() > 0 for name in new)
    stored = {(each.name, each.state_name) for each in whole.slices}
    assert stored == {(name, "weight") for name in begun} | {
        (name, kind) for name in new for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    run_ranks(fit, 1, settings(corpus, tmp_path / "resumed", base, training={"stop_after_step": 3}))
    for number, parallel in enumerate([{}, {"tensor_parallel_size": 2}]):
        directory = shutil.copytree(tmp_path / "resumed", tmp_path / str(number))
        ranks = 2 if parallel else 1
        tree = settings(corpus, directory, base, parallel=parallel)
        run_ranks(fit, ranks, tree, parallel=ParallelConfig(**parallel))
        again = last(directory)
        assert again.optimizer["adam_step"] == whole.optimizer["adam_step"] == 6.0
        for name, weight in load_weights(again).items():
            if name in begun or not parallel:
                assert torch.equal(weight, found[name]), name
            else:
                torch.testing.assert_close(weight, found[name], rtol=1e-4, atol=2e-5, msg=name)


def test_what_would_lose_or_average_updates_is_refused(corpus, base, tmp_path):
    directory = tmp_path / "run"
    run_ranks(fit, 1, settings(corpus, directory, base, training={"stop_after_step": 1}))
    with pytest.raises(CheckpointError, match="has updates of LoRA, and a mean of factors"):
        merge_checkpoints([last(directory), last(directory)], [0.5, 0.5], tmp_path / "mean")
    lost = r"has updates of LoRA, but model\.lora is null"
    for own, message in ((directory, r"with other settings: model\.lora: "), (tmp_path / "another", lost)):
        tree = merge(small_run(corpus, own), {"checkpoint": {"initialize_from": str(directory)}})
        config = build(Config, tree)
        with pytest.raises(CheckpointError, match=message):
            look(config)
        same, other = (
            settings(corpus, own, directory, model={"lora": LORA | more}) for more in ({}, OTHER_SCALE)
        )
        look(build(Config, same))
        scaled = r"by 4, .* were trained with 2\b.*model\.lora\.alpha=8 .*rank_stabilized=false"
        changed = r"with other settings: model\.lora\.rank_stabilized: "
        with pytest.raises(CheckpointError, match=changed if own == directory else scaled):
            look(build(Config, other))


@pytest.mark.parametrize(
    ("begin", "message"),
    [({}, r"with other settings: model\.lora: "), ({"initialize": "all"}, "has no updates of LoRA")],
)
def test_a_run_without_updates_does_not_get_them_on_the_way(corpus, base, tmp_path, begin, message):
    directory = tmp_path if begin else base
    with pytest.raises(CheckpointError, match=rf"{message}.*checkpoint\.initialize_from=\S+step_"):
        look(build(Config, settings(corpus, directory, base, checkpoint=begin)))


def test_updates_of_random_weights_are_refused(corpus, tmp_path):
    tree = merge(small_run(corpus, tmp_path), {"model": {"lora": LORA}})
    with pytest.raises(ConfigError, match=r"random weights.*checkpoint\.initialize_from"):
        look(build(Config, tree))


def look(config):
    check_start(config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size))


def test_a_task_head_counts_as_trained():
    sizes = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position": 8,
    }
    head = {"task_head": {"type": "classes", "classes": 3}}
    for more, outputs in (({}, 0), (head, 3)):
        model = build(ModelConfig, {**sizes, **more, "lora": {"rank": 2}})
        assert trained_count(model) == 2 * (32 + 96 + 32 + 32 + 2 * (32 + 128)) + outputs * (32 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_with_the_base_weights_and_keeps_them_exactly(
    corpus, base, tmp_path, precision
):
    begun, losses = load_weights(last(base)), []
    for stage in (1, 3):
        directory = tmp_path / str(stage)
        changes = {"training": {"precision": precision, "steps": 3}, "parallel": {"zero_stage": stage}}
        run_ranks(fit, 1, settings(corpus, directory, base, **changes))
        found = load_weights(last(directory))
        assert all(torch.equal(found[name], weight) for name, weight in begun.items())
        # Steps were taken: the loss scale of fp16 has left some.
        assert all(found[name].any() for name in found if name.endswith(".b"))
        losses.append([record["loss"] for record in records(directory).values()])
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_initial_factors_are_pefts():
    """A uniform within 1 / sqrt(in), so that its variance is a third of 1 / in; B zero."""
    settings = {
        "num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position": 8,
    }
    model = Transformer(build(ModelConfig, {**settings, "lora": {"rank": 64}}))
    initialize_parameters(model.named_parameters(), model.config, 5)
    factors = {name: p for name, p in model.named_parameters() if ".lora." in name}
    assert len(factors) == 8
    for name, factor in factors.items():
        if name.endswith(".b"):
            assert not factor.any()
            continue
        scaled = factor * factor.shape[1] ** 0.5
        assert 0.999 < scaled.abs().max() <= 1 and abs(scaled.mean()) < 0.02
        assert scaled.square().mean().item() == pytest.approx(1 / 3, rel=0.03)
