"""Training on every objective at once: each has its own loss, and the model learns. XLNet's memory in training."""

from __future__ import annotations

import math

import pytest
import torch
from support.distributed import run_ranks
from support.training.training import fit, make_trainer, records

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC
from data_utils.common.settings import build, merge
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.tree import Config

ALONE = (
    "optimus",
    "electra",
    "entities",
    "capitalization",  # its corpus is another (tests/train/test_class_heads.py), as corpora of pairs are
    "discourse_relation",
    "relevance",
    "contrastive",
    "tsdae",
)  # their models are not one Transformer; the samples of optimus and tsdae are rows of whole documents
MIXED = {name: made for name, made in OBJECTIVES.items() if name not in ALONE}
SENTINELS = {"sentinel_first": 30, "sentinel_count": 9}  # words of the vocabulary, which has no <extra_id_0>


def test_a_mixture_of_all_objectives_trains(settings, tmp_path):
    mixed = {
        "objectives": {name: 1.0 for name in MIXED},
        "masked_lm": {"next_sentence": True},
        **dict.fromkeys(("t5", "ul2"), SENTINELS),
        "model": {
            "max_position": 80, "sentence_classes": 2, "span_boundary_places": 10, "segments": 6,
            "class_heads": ["sentence_reordering:9", "sentence_distance:3", "token_document:2"],
        },
        "training": {"steps": 8},
        "batch": {"micro_batch_size": 26, "global_batch_size": 52},
    }  # fmt: skip
    run_ranks(fit, 1, merge(settings, mixed))
    losses = records(tmp_path / "run")
    seen = {name for step in losses.values() for name in step}
    declared = {loss.name for objective in MIXED.values() for loss in objective.losses}
    assert seen >= {f"loss/{name}" for name in declared - {"mtp"}}  # which needs a block of its own
    assert all(math.isfinite(loss) for step in losses.values() for loss in step.values())
    assert losses[8]["loss"] < losses[1]["loss"] - 0.05


@pytest.mark.slow
def test_an_encoder_and_a_decoder_learn_their_objectives(settings, tmp_path):
    """Validated and saved on the way, with dropout."""
    dropout = {name: 0.1 for name in ("embedding_dropout", "attention_dropout", "output_dropout")}
    mixed = {
        "objectives": {"t5": 1.0, "bart": 1.0, "mass": 1.0, "prefix_lm": 1.0, "ul2": 1.0},
        **dict.fromkeys(("t5", "ul2"), SENTINELS),
        "model": {"decoder_layers": 2, "max_position": 80, "positions": "learned", **dropout},
        "training": {"steps": 8, "eval_interval": 4},
        "checkpoint": {"save_interval": 4},
        "batch": {"micro_batch_size": 26, "global_batch_size": 52},
    }
    run_ranks(fit, 1, merge(settings, mixed))
    losses = records(tmp_path / "run")
    names = {
        f"loss/{name}" for name in ("span_corruption", "denoising", "fragment", "prefix", "continuations")
    }
    assert {name for step in losses.values() for name in step} >= names
    assert losses[8]["loss"] < losses[1]["loss"] - 0.05
    assert all(math.isfinite(loss) for loss in records(tmp_path / "run", "validation")[8].values())
    assert list((tmp_path / "run/checkpoints").glob("step_*8"))


def with_memory(settings):
    """XLNet's own model, with a memory at the beginning of longer texts."""
    changes = {
        "objectives": {"xlnet": 1.0},
        "xlnet": {"memory_length": 12},
        "training": {"steps": 4},
        "checkpoint": {"save_interval": 2},
    }
    return merge(merge(settings, {"model": {"system": "xlnet"}}), changes)


def rows_and_fit(context, tree):
    """Whether the rows of the first step hold memories and texts without one; the weights at the end."""
    trainer = make_trainer(context, tree)
    rows = trainer.train_data.batch(torch.arange(8).numpy())
    is_memory = rows[:, BLOCK_POSITION_IDS] == 1
    assert 0 < 2 * is_memory.sum() < (rows[:, DOC] >= 0).sum()
    trainer.fit()
    return {name: p.detach().clone() for name, p in trainer.engine.named_parameters.items()}


def test_a_run_with_xlnets_memory_is_resumed_bit_for_bit(settings, tmp_path):
    """No state passes from step to step: the memory is part of its sample."""
    tree = with_memory(settings)
    (whole,) = run_ranks(rows_and_fit, 1, tree)
    losses = records(tmp_path / "run")
    assert losses[4]["loss"] < losses[1]["loss"]
    parts = merge(tree, {"run": {"directory": str(tmp_path / "parts")}})
    run_ranks(fit, 1, merge(parts, {"training": {"stop_after_step": 2}}))
    (resumed,) = run_ranks(fit, 1, parts)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


RESUMED = {
    "masked_diffusion": {},
    "ul2": {
        "ul2": {"extreme_token": 5, "sequential_token": 6, **SENTINELS},
        "model": {"decoder_layers": 1},
    },
}


@pytest.mark.parametrize("name", ["masked_diffusion", pytest.param("ul2", marks=pytest.mark.slow)])
def test_a_run_of_drawn_ways_is_resumed_bit_for_bit(settings, tmp_path, name):
    """Which way a text is hidden follows from its sample's number."""
    changes = {"objectives": {name: 1.0}, "training": {"steps": 4}, "checkpoint": {"save_interval": 2}}
    tree = merge(merge(settings, changes), RESUMED[name])
    (whole,) = run_ranks(fit, 1, tree)
    parts = merge(tree, {"run": {"directory": str(tmp_path / "parts")}})
    run_ranks(fit, 1, merge(parts, {"training": {"stop_after_step": 2}}))
    (resumed,) = run_ranks(fit, 1, parts)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_a_task_of_a_model_trained_with_a_memory_has_none(settings):
    tree = with_memory(settings)
    assert build(Config, tree).has_memory
    task = {"task": {"name": "one", "kind": "classification", "reader": "jsonl"}}
    assert not build(Config, merge(tree, {**task, "data": {"sequence_length": 16}})).has_memory
