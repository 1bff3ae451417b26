"""Rates of a DeepSpeed file's scheduler, step by step, against DeepSpeed's own classes on an optimizer of torch."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from support.configs import TINY

from megatron_lite.config.tree import load_config

STEPS = 60


def deepspeeds_rates(name: str, params: dict, peak: float) -> list[float]:
    """The rate that each optimizer step takes: the engine moves the scheduler after the step."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
    return rates


CASES = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 3e-3}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}),
    ("WarmupLR", {}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 500, "warmup_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 7, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 30}),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 10, "warmup_type": "linear", "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 3, "warmup_min_ratio": 0.2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params"), CASES)
def test_rates_are_deepspeeds(tmp_path, name, params):
    base, path = tmp_path / "base.yaml", tmp_path / "ds.json"
    base.write_text(yaml.safe_dump({**TINY, "training": {"steps": STEPS}, "schedule": {"warmup_steps": 5}}))
    optimizer = {"type": "AdamW", "params": {"lr": 4e-4}}
    path.write_text(json.dumps({"optimizer": optimizer, "scheduler": {"type": name, "params": params}}))
    config = load_config([base], [], path)
    rates = [config.phase_plan.learning_rate(step) for step in range(1, STEPS + 1)]
    # Both are a few operations in double precision.
    assert rates == pytest.approx(deepspeeds_rates(name, params, 4e-4), rel=1e-12, abs=1e-18)
