"""Traces of chosen steps and ranks, and what is refused."""

import gzip
import json
from contextlib import nullcontext

import pytest
import torch
from support.commands import assert_refused, pretrain
from support.distributed import run_ranks
from support.training.training import fit, records

from data_utils.common.errors import ConfigError
from megatron_lite.config.sections import ProfilerConfig
from megatron_lite.runtime.control import Requests
from megatron_lite.train.callbacks import profiler as profiler_file
from megatron_lite.train.callbacks.profiler import StepProfiler


def make_profiler(config, directory, device="cpu"):
    return StepProfiler(config, directory, 0, torch.device(device), lambda section, place: nullcontext())


def events_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_chosen_steps_of_a_chosen_rank_are_traced(settings, tmp_path):
    settings["profiler"] = {"first_step": 2, "last_step": 3, "ranks": [1]}
    run_ranks(fit, 2, settings)
    (path,) = (tmp_path / "run/profile").iterdir()
    assert path.name == "steps_2_to_3_rank_1.trace.json.gz"
    events = events_of(path)
    names = [event["name"] for event in events]
    first, second = (
        event for event in events if event["name"] in ("step 2", "step 3") and event["ph"] == "X"
    )
    assert first["name"] == "step 2" and first["ts"] + first["dur"] <= second["ts"]
    inside = [
        e
        for e in events
        if e["name"] == "aten::embedding" and first["ts"] <= e["ts"] <= first["ts"] + first["dur"]
    ]
    assert len(inside) == names.count("aten::embedding") / 2 > 0
    # 8 samples a step are 2 micro-batches a rank; an embedding is read once in each.
    assert names.count("aten::embedding") >= 4 and names.count("aten::embedding") % 4 == 0
    traced = records(tmp_path / "run")
    settings["profiler"], settings["run"]["directory"] = {}, str(tmp_path / "other")
    run_ranks(fit, 2, settings)
    assert records(tmp_path / "other") == traced and not (tmp_path / "other/profile").exists()


def test_a_run_that_ends_earlier_writes_what_it_has(settings, tmp_path):
    settings["training"]["stop_after_step"] = 2
    settings["profiler"] = {"first_step": 2, "last_step": 5}
    run_ranks(fit, 1, settings)
    (path,) = (tmp_path / "run/profile").iterdir()
    assert path.name == "steps_2_to_2_rank_0.trace.json.gz" and events_of(path)


def test_nothing_is_recorded_without_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", None)  # a call would fail
    profiler = make_profiler(ProfilerConfig(), tmp_path)
    for step in (1, 2):
        profiler.on_step_begin(step)
        profiler.on_step_end(step, None, Requests())
    profiler.on_train_end(2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_costs_the_trace_only(tmp_path, caplog):
    (tmp_path / "profile").write_text("")
    profiler = make_profiler(ProfilerConfig(first_step=1), tmp_path)
    profiler.on_step_begin(1)
    profiler.on_train_end(1)
    assert "rank_0.trace.json.gz cannot be written" in caplog.text


def test_a_memory_snapshot_is_written_on_gpus(tmp_path, monkeypatch):
    """With stand-ins for the two functions of torch, which need a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: calls.append(name))
    config = ProfilerConfig(first_step=4, memory=True)
    profiler = make_profiler(config, tmp_path, "cuda")
    profiler.on_step_begin(3)
    assert calls == []
    profiler.on_step_begin(4)
    profiler.on_train_end(4)
    snapshot = str(tmp_path / "profile/steps_4_to_4_rank_0.memory.pickle")
    assert calls == [{"max_entries": profiler_file.MAX_MEMORY_EVENTS}, snapshot, {"enabled": None}]


def test_a_memory_snapshot_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"profiler\.memory is true, but the run is on the cpu"):
        make_profiler(ProfilerConfig(first_step=1, memory=True), tmp_path)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"last_step": 3}, "profiler.first_step is null"),
        ({"memory": True}, "profiler.first_step is null"),
        ({"first_step": 3, "last_step": 2}, "profiler.first_step is 3"),
        ({"first_step": 3, "ranks": ()}, r"profiler.ranks is \[\]"),
        ({"first_step": 3, "ranks": (-1,)}, r"profiler.ranks is \[-1\]"),
    ],
)
def test_settings_that_make_no_trace_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ProfilerConfig(**values)


@pytest.mark.parametrize(
    "override, message",
    [
        ("profiler.first_step=100000000", "profiler.first_step is 100000000, but training.steps is"),
        ("profiler={first_step: 1, ranks: [2]}", "profiler.ranks is [2], but the run has 1 processes"),
    ],
)
def test_traces_of_no_step_or_rank_are_refused_before_torch_is_loaded(override, message):
    assert_refused(pretrain("--config", "configs/tiny.yaml", override), message)
