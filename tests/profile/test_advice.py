"""The dry run: which layouts are possible, which are worth a trace, and what the command says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.commands import assert_refused, pretrain
from support.project import ROOT

from megatron_lite.config.tree import load_config
from megatron_lite.model.trunk.counts import parameter_count
from megatron_lite.profile import advice
from megatron_lite.profile.advice import (
    RESERVED_GIB,
    Layout,
    advise,
    fits,
    guess,
    possible_layouts,
    step_ms,
)
from megatron_lite.profile.gpus import GPUS
from megatron_lite.profile.request import Request, profile

TEN_B = ROOT / "configs/glm-10b.yaml"


def test_possible_layouts_divide_processes_heads_and_batch():
    config = load_config([TEN_B])
    found = list(possible_layouts(config, 64))
    assert len(found) == len(set(found)) > 50
    for layout in found:
        dp = 64 // (layout.tensor * layout.pipeline)
        assert layout.tensor * layout.pipeline * dp == 64 and 5376 % (dp * layout.micro_batch) == 0
        assert layout.zero == 1 or layout.pipeline == 1
    applied = Layout(4, 2, 1, "none", 8).applied(config)
    assert applied.parallel.data_parallel_size(64) == 8 and applied.parallel.sequence_parallel
    assert advice.Layout(4, 2, 1, "none", 8).settings() == (
        "parallel.tensor_parallel_size=4 parallel.pipeline_parallel_size=2 parallel.sequence_parallel=true "
        "parallel.zero_stage=1 training.recompute=none batch.micro_batch_size=8"
    )


def test_what_saves_memory_is_guessed_to_save_it():
    config, gpu = load_config([TEN_B]), GPUS["h100"]
    plain = Layout(1, 1, 1, "none", 8)
    (ms, gib), others = guess(config, plain, 64, gpu), {}
    for change in ({"tensor": 4}, {"pipeline": 4}, {"zero": 2}, {"recompute": "full"}, {"micro_batch": 4}):
        others |= {str(change): guess(config, replace(plain, **change), 64, gpu)}
    assert all(found[1] < gib for found in others.values()), others
    assert guess(config, replace(plain, recompute="full"), 64, gpu)[0] > ms


def test_guessed_memory_is_near_the_traced(profiles):
    """Near enough to choose what is traced."""
    config = load_config([ROOT / "configs/glm-large.yaml", ROOT / "configs/objectives/paper.yaml"])
    _, gib = guess(config, Layout(1, 1, 1, "none", 16), 64, GPUS["h100"])
    assert 0.5 < gib / profiles["data parallel"].expected.peak_gib < 2


def test_communication_is_added_where_nothing_overlaps(profiles):
    found = profiles["tensor parallel"]
    assert step_ms(found) > max(found.expected.host_ms, found.expected.roofline_ms)
    assert fits(found, GPUS["h100"])
    full = replace(found, expected=replace(found.expected, peak_gib=GPUS["h100"].memory_gib - 1))
    assert not fits(full, GPUS["h100"])


def test_advice_is_never_slower_than_the_given_layout(profiles, monkeypatch):
    """The given layout competes; it wins where what was traced is slower or does not fit."""
    config, gpu = load_config([ROOT / "configs/glm-large.yaml"]), GPUS["h100"]
    given = profiles["data parallel"]
    slower = replace(given, expected=replace(given.expected, roofline_ms=1e6))
    large = replace(given, expected=replace(given.expected, peak_gib=1e3))
    traced, said = [], []

    def found(config, layouts, processes, gpu):
        return list(zip(layouts, traced, strict=False))

    monkeypatch.setattr(advice, "_traced", found)
    traced[:] = slower, slower
    assert advise(config, 64, gpu, given, said.append) == (None, given)
    assert advise(config, 64, gpu, slower)[1] is slower
    assert len(said) == 1 and re.fullmatch(r"tracing 2 of \d+ possible layouts", said[0])
    traced[:] = large, given
    layout, best = advise(config, 64, gpu, slower)
    assert layout is not None and best is given
    traced[:] = large, large
    assert advise(config, 64, gpu, given) == (None, given)
    assert advise(config, 64, gpu, large) is None


def test_the_dry_run_shows_a_layout_and_advises_one():
    settings = ["model.vocab_size=300", "tokenizer=null"]
    done = pretrain("--config", "configs/tiny.yaml", "--dry-run", "1", "--gpu", "a100", *settings)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("parameters ") and "1 processes: pipeline 1 x data 1 x tensor 1" in done.stdout
    )
    assert "it fits 79 GiB" in done.stdout and "tokens/s, MFU" in done.stdout
    assert re.search(r"\nadvice            (parallel\.tensor_parallel_size=|keep this layout)", done.stdout)
    assert done.stderr.startswith("tracing a step of the given layout")


def said_of_small():
    """GiB at the peak, GiB of a GPU, minutes and FLOPs in the comment of configs/small.yaml; its configuration."""
    path = ROOT / "configs/small.yaml"
    text = " ".join(path.read_text(encoding="utf-8").replace("# ", "").split())
    found = re.search(r"([\d.]+) GiB at the peak, of (\d+) .*; (\d+) minutes .* is ([\d.e]+) FLOPs", text)
    return *map(float, found.groups()), load_config([path], ["model.vocab_size=32000"])


def test_the_small_configuration_fits_where_it_says():
    """By the formulas that choose what is traced: within a factor of 2."""
    gib, room, minutes, flops, config = said_of_small()
    ms, guessed = guess(config, Layout(1, 1, 1, "none", 16), 1, GPUS["h100"])
    assert 0.5 < guessed / gib < 2 and gib + RESERVED_GIB < room
    assert 0.5 < config.training.steps * ms / 60e3 / minutes < 2
    tokens = config.training.steps * config.batch.global_batch_size * config.row_length
    assert 0.5 < flops / (6 * parameter_count(config.model) * tokens) < 2


@pytest.mark.slow
def test_the_small_configuration_needs_what_it_says():
    """By a trace, of the time of the GPU alone: this machine's load is no part of it."""
    gib, _, minutes, flops, config = said_of_small()
    found = profile(Request.of(config, 1, GPUS["h100"])).expected
    assert found.peak_gib == pytest.approx(gib, rel=0.1)
    assert config.training.steps * found.roofline_ms / 60e3 == pytest.approx(minutes, rel=0.15)
    seconds = config.training.steps * max(found.host_ms, found.roofline_ms) / 1000
    assert seconds * found.expected_mfu * GPUS["h100"].peak_tflops * 1e12 == pytest.approx(flops, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "0"], "--dry-run is 0; it must be a number of processes"),
        (["--dry-run", "5"], "start a number of processes that divides"),
        (["--dry-run", "8", "--gpu", "z80"], "--gpu is 'z80'; it must be one of"),
        (
            ["--dry-run", "8", "model.vocab_size=null", "tokenizer.path=absent"],
            "tokenizer absent does not exist",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments, message):
    assert_refused(pretrain("--config", str(TEN_B), *arguments), message)
