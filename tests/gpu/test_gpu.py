"""On GPUs, what the CPU computes: attention, ZeRO and all layouts, every objective, resumed runs, apex.

Each check runs on CPU ranks too, in a reduced form, so that it is known to work before a GPU is there. On GPUs, ranks
are new interpreters: forked processes cannot use CUDA.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml
from support import gpu_checks, gpus, parity
from support.commands import pretrain
from support.data.recipes import RECIPES
from support.distributed import run_ranks
from support.gpu_checks import GpuCase

from data_utils.common.settings import merge
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.attention import IMPLEMENTATIONS

TOLERANCES = {
    torch.float32: 1e-4,
    torch.bfloat16: 0.02,
}  # bf16 has 8 bits: 0.004, and gradients add several terms


def check_attention(dtype, recipes, sequence_length, fresh):
    differences, faults = run_ranks(
        gpu_checks.attention, 1, dtype, recipes, sequence_length, fresh=fresh, limit_seconds=240
    )[0]
    tolerance = TOLERANCES[dtype]
    assert {name: value for name, value in differences.items() if not value <= tolerance} == {}
    for name, (error, change, repeats) in faults.items():
        assert error <= tolerance and change > 0.1 and repeats, (name, error, change, repeats)
    assert (len(differences), len(faults)) == (2 * len(recipes), len(recipes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_is_softmax_over_the_rule(visible_gpus, dtype):
    """And with dropout both passes drop the same weights."""
    check_attention(dtype, list(RECIPES), 512, fresh=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "fa2"])
def test_every_implementation_of_attention_is_softmax_over_the_rule(visible_gpus, name):
    """Each implementation that this machine has; fa2 is in the test above."""
    (found,) = run_ranks(gpu_checks.attention_of, 1, name, list(RECIPES), 512, fresh=True, limit_seconds=240)
    if found is None:
        pytest.skip(f"no package or GPU for {name}")
    tolerance = TOLERANCES[torch.bfloat16]
    assert {recipe: value for recipe, value in found.items() if not value <= tolerance} == {}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_check_of_attention_works(dtype, monkeypatch):
    check_attention(dtype, ["mass", "unilmv2"], 60, fresh=False)
    monkeypatch.setitem(TOLERANCES, dtype, 1e-9)
    with pytest.raises(AssertionError):
        check_attention(dtype, ["mass"], 60, fresh=False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", parity.by_layout(gpu_checks.cases(gpus.count())))
def test_training_matches_plain_torch_on_the_cpu(visible_gpus, layout):
    cases = parity.by_layout(gpu_checks.cases(gpus.count()))[layout]
    assert gpu_checks.beyond(gpu_checks.outcomes_of(cases), gpu_checks.TOLERANCES) == []


@pytest.mark.slow
def test_the_check_of_training_works():
    outcomes = gpu_checks.outcomes_of([GpuCase(zero_stage=3)])
    assert len(outcomes) == 1
    assert gpu_checks.beyond(outcomes, gpu_checks.TOLERANCES) == []
    nothing = {"fp32": dict.fromkeys(gpu_checks.KINDS, 0.0)}
    assert "zero3-none-accumulation1: gradients differ" in " ".join(gpu_checks.beyond(outcomes, nothing))


def test_cases_use_all_gpus_that_layouts_can():
    assert {case.ranks for case in gpu_checks.cases(1)} == {1}
    assert {case.ranks for case in gpu_checks.cases(3)} == {1, 2}
    assert {case.ranks for case in gpu_checks.cases(8)} == {1, 8}
    assert {case.zero_stage for case in gpu_checks.cases(8) if case.ranks == 8} == {1, 2, 3}


@pytest.mark.gpu
def test_fp32_products_are_not_rounded_to_tf32(visible_gpus):
    """TF32, which GPUs have from the A100 on, keeps 11 bits: 5e-4."""
    ((without, with_tf32),) = run_ranks(gpu_checks.product_errors, 1, fresh=True)
    assert without < 1e-5 < with_tf32


def losses_of(settings: dict, name: str, *changes: dict, starts: tuple[str, ...] = ("",)) -> dict:
    """Train in the directory `name` and return {step: loss by name, gradient norm}."""
    run = Path(settings["run"]["directory"]).parent / name
    for change in (*changes, {"run": {"directory": str(run)}}):
        settings = merge(settings, change)
    file = run.parent / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    for override in starts:
        done = pretrain("--config", str(file), *override.split())
        assert done.returncode == 0, done.stdout + done.stderr
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: {k: v for k, v in record.items() if k.startswith("loss") or k == "grad_norm"}
        for record in records
        if record["kind"] == "train"
    }


MIXTURE = {  # of what reads plain text
    "objectives": {
        name: 1.0
        for name, made in OBJECTIVES.items()
        if made.config_class.own_model_advice is None
        and made.config_class().token_annotation is None
        and made.config_class().own_corpora is None
        and name != "tsdae"  # its decoder reads vectors
    },
    "masked_lm": {"next_sentence": True},
    "model": {
        "hidden_size": 128,
        "embedding_dropout": 0.1,  # drops the same elements on every device
        "output_dropout": 0.1,
        "max_position": 80,
        "sentence_classes": 2,
        "span_boundary_places": 10,
        "segments": 6,
        "class_heads": [
            "sentence_distance:3",
            "sentence_reordering:9",
            "token_document:2",
        ],
    },
    "training": {"steps": 4},
    "batch": {"micro_batch_size": 26, "global_batch_size": 52},
}


@pytest.mark.slow
def test_the_mixture_of_every_objective_is_one_that_trains(settings):
    file = Path(settings["run"]["directory"]).parent / "mixture.yaml"
    file.write_text(yaml.safe_dump(merge(settings, MIXTURE)))
    done = pretrain("--config", str(file), "--dry-run", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_every_objective_has_the_losses_of_the_cpu(visible_gpus, monkeypatch, settings):
    found = {
        precision: losses_of(settings, precision, MIXTURE, {"training": {"precision": precision}})
        for precision in ("fp32", "bf16")
    }
    gpus.hide_again(monkeypatch)
    on_cpu = losses_of(settings, "cpu", MIXTURE)
    assert on_cpu.keys() == {1, 2, 3, 4}
    for precision, on_gpu in found.items():
        assert on_gpu.keys() == on_cpu.keys()
        for step, values in on_cpu.items():
            expected = {name: value for name, value in values.items() if name != "grad_norm"}
            losses = {name: value for name, value in on_gpu[step].items() if name != "grad_norm"}
            tolerance = 1e-4 if precision == "fp32" else 0.03
            assert losses == pytest.approx(expected, rel=tolerance), (precision, step)


DETERMINISTIC = {
    "model": {"hidden_size": 128, "embedding_dropout": 0.1, "attention_dropout": 0.1, "output_dropout": 0.1},
    "training": {"deterministic": True, "precision": "bf16"},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "optional", [{}, {"position_encoding": "rotary", "norm": "rmsnorm"}], ids=["classic", "modern"]
)
def test_blocks_as_graphs_train_as_blocks_without(visible_gpus, settings, optional):
    """Losses of six steps, of which the later replay graphs."""
    plain = {"model": {"hidden_size": 256, **optional}, "training": {"precision": "bf16"}}
    without = losses_of(settings, "without", plain)
    found = losses_of(settings, "graphs", plain, {"training": {"cuda_graphs": True}})
    assert without.keys() == found.keys() == set(range(1, 7))
    for step, expected in without.items():
        assert found[step] == pytest.approx(expected, rel=0.01), step


def assert_resume_is_exact(settings):
    whole = losses_of(settings, "whole", DETERMINISTIC)
    resumed = losses_of(settings, "resumed", DETERMINISTIC, starts=("training.stop_after_step=3", ""))
    assert whole.keys() == set(range(1, 7))
    assert resumed == whole


@pytest.mark.gpu
def test_a_deterministic_run_resumes_bit_for_bit(visible_gpus, settings):
    assert_resume_is_exact(settings)


@pytest.mark.slow
def test_the_check_of_resume_works(settings):
    assert_resume_is_exact(settings)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("apex") is None, reason="NVIDIA apex is not installed")
def test_apex_trains_as_torch(visible_gpus, settings):
    plain = {"optimizer": {"eps": 1e-3}}
    mixture = merge(MIXTURE, plain)  # some heads have no rows in some batches
    apex = {"optimizer": {"kernel": "apex"}, "training": {"layernorm": "apex"}}
    ours, theirs = losses_of(settings, "torch", mixture), losses_of(settings, "apex", mixture, apex)
    assert ours.keys() == theirs.keys() and len(ours) == 4
    for step, expected in ours.items():
        assert theirs[step] == pytest.approx(expected, rel=1e-4), step
