"""Deterministic sums and TF32: the settings reach torch, what CUDA's libraries read is set before torch is imported."""

from __future__ import annotations

import json
import os

import pytest
import torch
import yaml
from support.commands import pretrain
from support.distributed import run_ranks

from data_utils.common.settings import merge
from megatron_lite.config.sections import TrainingConfig
from megatron_lite.parallel.launch import prepare_environment
from megatron_lite.runtime.process import set_numerics

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def environment(monkeypatch):
    """Sets what the user set; returns what is set after `prepare_environment`."""

    def prepare(deterministic: bool, **of_the_user: str) -> dict[str, str]:
        for name in VARIABLES:
            monkeypatch.setenv(name, "")  # so that monkeypatch restores it
            monkeypatch.delenv(name)
        for name, value in of_the_user.items():
            monkeypatch.setenv(name, value)
        prepare_environment(deterministic)
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}

    return prepare


def test_the_environment_is_prepared(environment):
    assert environment(False) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment(True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_set_stays(environment, name):
    prepared = environment(True, **{name: "mine"})
    assert prepared[name] == "mine"
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} <= prepared.keys()


def flags(context, training, device):
    set_numerics(training, torch.device(device))
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cuda", (False, False, "highest")),
        ({"tf32": True}, "cuda", (False, False, "high")),
        ({"tf32": True}, "cpu", (False, False, "highest")),
        ({"deterministic": True}, "cuda", (True, False, "highest")),
    ],
)
def test_the_settings_reach_torch(settings, device, expected):
    assert run_ranks(flags, 1, TrainingConfig(steps=1, **settings), device) == [expected]


# Writes what is set when torch is imported, and torch's flags at the end.
WITNESS = """
import atexit, json, os, sys

seen = {}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            seen.setdefault("environment", dict(os.environ))

def write():
    import torch
    seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
    with open(os.environ["WITNESS"], "w") as file:
        json.dump(seen, file)

sys.meta_path.insert(0, Finder())
atexit.register(write)
"""


@pytest.mark.slow
def test_a_deterministic_run_trains(settings, tmp_path):
    """On a CPU, where no operation of a step may refuse."""
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    changed = {"training": {"steps": 2, "deterministic": True}, "schedule": {"warmup_steps": 1}}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(merge(settings, changed)))
    witness = tmp_path / "seen.json"
    done = pretrain("--config", str(tmp_path / "given.yaml"), PYTHONPATH=str(tmp_path), WITNESS=str(witness))
    assert done.returncode == 0, done.stderr
    seen = json.loads(witness.read_text())
    assert seen["deterministic"]
    assert seen["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert seen["environment"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
