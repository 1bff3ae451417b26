"""Whether traced numbers are the true ones: against each other, and against what is known."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.commands import assert_refused, forked
from support.project import ROOT

from benchmarks.step_trace import guards
from benchmarks.step_trace.counts import Counts, difference, extended
from benchmarks.step_trace.request import Expected, run_module
from data_utils.common.errors import ConfigError
from megatron_lite.config.tree import load_config
from megatron_lite.estimate.batches import random_batches
from megatron_lite.estimate.gpus import GPUS
from megatron_lite.telemetry.peak_flops import GPU_PEAK_TFLOPS
from scripts import profile_step


@pytest.mark.slow
def test_extended_layers_match_a_whole_trace(profile_of):
    """Two and three layers, extended to five, against five."""
    some, every = (profile_of(f"bert of 5 layers, {kind}") for kind in ("extended", "all traced"))
    for field in dataclasses.fields(Expected):
        found, true = getattr(some.expected, field.name), getattr(every.expected, field.name)
        # Buckets of gradients fill up in steps, not layer by layer; in five layers one bucket is 3 % of the launches.
        in_buckets = field.name in ("peak_gib", "collective_mb")
        assert found == pytest.approx(true, rel=0.05 if in_buckets else 1e-6), field.name
    assert some.details.places == every.details.places
    assert some.details.rank_parameters == every.details.rank_parameters


def test_gradients_travel_once_in_fp32_and_weights_once_in_bf16(profiles):
    """Of pure data parallelism at ZeRO 1: 4 bytes of each gradient, 2 of each weight; else only norms."""
    found = profiles["data parallel"]
    assert found.expected.collective_mb["dp"] == pytest.approx(
        6 * found.details.rank_parameters / 1e6, rel=0.001
    )
    assert set(found.expected.collective_mb) == {"dp"}


def test_tensor_parallel_ranks_sum_two_activations_of_a_layer_in_each_direction(profiles):
    config = load_config([ROOT / "configs/glm-large.yaml", ROOT / "configs/objectives/paper.yaml"])
    tokens = random_batches(config, 1)[0].tokens
    layers, activation = config.model.num_layers, tokens * config.model.hidden_size * 2 / 1e6
    # And the look-ups of the embedding, and the gradient of the hidden states of the rows with loss.
    least = (4 * layers + 1) * activation
    assert least < profiles["tensor parallel"].expected.collective_mb["tp"] < least + 2 * activation


def test_memory_holds_weights_gradients_and_moments(profiles):
    """One rank of 64: 2 bytes a weight, 4 a summed gradient, and a 64th of 12; the rest is activations."""
    found = profiles["data parallel"]
    static = found.details.rank_parameters * (2 + 4 + 12 / 64)
    assert static < found.expected.peak_gib * 2**30 < static + 9e9


def test_trees_extend_linearly():
    first = {"a": 1, "places": {"x": 2}}
    second = {"a": 3, "places": {"x": 2, "y": 1}}
    assert extended(first, second, 10) == {"a": 21, "places": {"x": 2, "y": 10}}
    assert difference(second, first) == {"a": 2, "places": {"x": 0, "y": 1}}
    assert json.loads(json.dumps(Counts().tree()))["launches"] == 0


def test_batches_match_the_configuration():
    config = load_config([ROOT / "configs/glm-large.yaml", ROOT / "configs/objectives/paper.yaml"])
    first, second = random_batches(config, 2)
    assert first.fields.shape == (16, 10, 568) and (first.fields != second.fields).any()
    assert first.tokens > 0.9 * 16 * 512 and 0.3 < first.loss_tokens / first.tokens < 0.6
    assert (random_batches(config, 1)[0].fields == first.fields).all()


def test_peaks_match_reports():
    for name, gpu in GPUS.items():
        for part, peak in GPU_PEAK_TFLOPS.items():
            if part == name.split("-")[0].upper():
                assert gpu.peak_tflops == peak, name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("torch.__version__", "9.1.0", "fake devices do not know torch 9.1.0"),
        ("platform.machine", lambda: "riscv64", "need Linux on x86_64, and this is linux on riscv64"),
    ],
)
def test_the_unknown_is_refused_in_one_line(monkeypatch, name, value, message):
    monkeypatch.setattr(f"benchmarks.step_trace.guards.{name}", value)
    with pytest.raises(ConfigError, match=message) as refused:
        guards.install()
    assert "\n" not in str(refused.value)


def test_another_build_of_torch_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(guards, "_REGISTRY", "absent")
    with pytest.raises(ConfigError, match="do not know this build of torch"):
        guards._tables()


def test_a_process_that_fails_is_reported_in_one_line():
    with pytest.raises(
        ConfigError, match=r"json\.tool ended with status 1: Expecting value.*requirements\.txt"
    ) as failed:
        run_module("json.tool", "nonsense")
    assert "\n" not in str(failed.value)
    with pytest.raises(ConfigError, match=r"^no configuration given"):
        run_module("pretrain_glm", "")


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "profile.json"
    options = ["--config", "configs/tiny.yaml", "--processes", "2", "--gpu", "a100", "--json", str(out)]
    settings = ["model.vocab_size=300", "tokenizer=null"]
    done = forked("scripts/profile_step.py", *options, *settings)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert list(found) == [field.name for field in dataclasses.fields(Expected)]
    assert "device    a100" in done.stdout and all(name in done.stdout for name in found)


def test_an_installed_package_says_where_the_trace_is(monkeypatch):
    monkeypatch.setattr(profile_step.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="is not installed; run scripts") as refused:
        profile_step.require_checkout()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes is 0"),
        (["--processes", "3"], "3 processes"),
        (["--processes", "2", "--gpu", "z80"], "--gpu is 'z80'; it must be one of h100"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, message):
    options = ["--config", "configs/glm-large.yaml", *arguments, "parallel.pipeline_parallel_size=2"]
    assert_refused(forked("scripts/profile_step.py", *options), message)
