"""Training on every objective at once: each has its own loss, and the model learns."""

from __future__ import annotations

import math

from support.distributed import run_ranks
from support.training import fit, records

from data_utils.base.settings import merge
from data_utils.objectives import OBJECTIVES

ALONE = ("optimus",)  # its samples are rows of whole documents, and its model has a latent vector
MIXED = {name: made for name, made in OBJECTIVES.items() if name not in ALONE}


def test_a_mixture_of_all_objectives_trains(settings, tmp_path):
    mixed = {
        "objectives": {name: 1.0 for name in MIXED},
        "masked_lm": {"next_sentence": True},
        "model": {"max_position": 80, "sentence_classes": 2, "span_boundary_places": 10, "segments": 6},
        "training": {"steps": 8},
        "batch": {"micro_batch_size": 26, "global_batch_size": 52},
    }
    run_ranks(fit, 1, merge(settings, mixed))
    losses = records(tmp_path / "run")
    seen = {name for step in losses.values() for name in step}
    assert seen >= {f"loss/{loss.name}" for objective in MIXED.values() for loss in objective.losses}
    assert all(math.isfinite(loss) for step in losses.values() for loss in step.values())
    assert losses[8]["loss"] < losses[1]["loss"] - 0.05


def test_an_encoder_and_a_decoder_learn_their_objectives(settings, tmp_path):
    """Validated and saved on the way, with dropout."""
    dropout = {name: 0.1 for name in ("embedding_dropout", "attention_dropout", "output_dropout")}
    mixed = {
        "objectives": {"t5": 1.0, "bart": 1.0, "mass": 1.0, "prefix_lm": 1.0},
        "model": {"decoder_layers": 2, "max_position": 80, "positions": "learned", **dropout},
        "training": {"steps": 8, "eval_interval": 4},
        "checkpoint": {"save_interval": 4},
        "batch": {"micro_batch_size": 26, "global_batch_size": 52},
    }
    run_ranks(fit, 1, merge(settings, mixed))
    losses = records(tmp_path / "run")
    names = {f"loss/{name}" for name in ("span_corruption", "denoising", "fragment", "prefix")}
    assert {name for step in losses.values() for name in step} >= names
    assert losses[8]["loss"] < losses[1]["loss"] - 0.05
    assert all(math.isfinite(loss) for loss in records(tmp_path / "run", "validation")[8].values())
    assert list((tmp_path / "run/checkpoints").glob("step_*8"))
