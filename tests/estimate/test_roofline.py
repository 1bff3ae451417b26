"""The roofline against counts by hand (docs/records/roofline.md), and its table of constants."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.project import ROOT

from benchmarks.step_trace import without_gpu
from megatron_lite.estimate import gpus
from megatron_lite.estimate.gpus import GPUS
from megatron_lite.estimate.roofline import (
    ISSUE,
    Work,
    attention_micros,
    kernel_micros,
    product_micros,
    tile_pairs,
)

H100 = GPUS["h100"]
T, WIDTH, INNER = 8640, 1024, 4096  # of 335M, 16 rows


def by_hand():
    """Kernel -> microseconds, of the table that was counted by hand."""
    page = (ROOT / "docs/records/roofline.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.+?) \|.*\| ([\d.]+) \|$",
        page.partition("## Six kernels by hand")[2].partition("\n## ")[0],
        re.M,
    )
    return {name: float(micros) for name, micros in rows}


def product(rows, inner, columns, result=2):
    size = 2 * (rows * inner + inner * columns) + result * rows * columns
    return product_micros(rows, inner, columns, size, H100)


def attention():
    documents = np.full(16, 512.0)
    work = Work.flash(documents, documents, False, 64, 0.1, False)
    return attention_micros(work, 16, 64, 0.1, False, H100, 8192)


# TFLOP/s of FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) on documents of 512 to 16,384 tokens, width 2048; how
# far the formula may be from them.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PUBLISHED = {
    (64, False): ((333, 392, 460, 476, 496, 497), 0.08),
    (64, True): ((272, 363, 422, 453, 472, 474), 0.07),
    (128, False): ((467, 565, 625, 638, 646, 648), 0.16),
    (128, True): ((316, 424, 501, 542, 559, 561), 0.07),
}


@pytest.mark.parametrize(("head_size", "backward"), PUBLISHED)
def test_fa3_reaches_its_published_rates(head_size, backward):
    rates, tolerance = PUBLISHED[head_size, backward]
    heads = 2048 // head_size
    for length, rate in zip(LENGTHS, rates, strict=True):
        documents = np.full(16384 // length, float(length))
        work = Work.flash(documents, documents, False, head_size, 0.0, backward, 0, "fa3")
        micros = attention_micros(work, heads, head_size, 0.0, backward, H100, 16384.0)
        flops = (10 if backward else 4) * heads * head_size * 16384 * length
        assert flops / micros / 1e6 == pytest.approx(rate, rel=tolerance), length


def test_an_implementation_has_its_own_rates_and_no_other_is_changed():
    found = {
        name: attention_micros(
            Work.flash(LONG, LONG, False, 64, 0.0, False, 0, name), 16, 64, 0.0, False, H100, 1.0
        )
        for name in ("fa2", "fa3", "torch")
    }
    assert found["fa3"] < found["fa2"] == pytest.approx(found["torch"] * H100.dense_share)
    assert H100.attention_tflops("fa2", 64) == H100.attention_tflops("auto", 64) == H100.flash_64


LONG = np.full(4, 4096.0)


def norm_backward():
    size = 5 * 2 * T * WIDTH + 528 * 3 * WIDTH * 4 + 8 * T
    return kernel_micros(size, H100, ISSUE["add_norm_backward"] * T * WIDTH, T / 528)


def test_six_kernels_cost_what_was_counted_by_hand():
    found = {
        "queries, keys and values": product(T, WIDTH, 3 * WIDTH),
        "second product of the FFN": product(T, INNER, WIDTH),
        "weight gradient of attention's output": product(WIDTH, T, WIDTH, 8),
        "GELU": kernel_micros(4 * T * INNER, H100, ISSUE["activate_gelu_tanh"] * T * INNER),
        "attention, forward": attention(),
        "norm, backward": norm_backward(),
    }
    assert found == pytest.approx(by_hand(), rel=0.005)


def test_tiles_hold_the_pairs_that_see_each_other():
    """Causal tiles, counted pair by pair."""
    random = np.random.default_rng(3)
    for _ in range(30):
        queries = random.integers(1, 400, 3).astype(float)
        keys = queries + random.integers(0, 300, 3)
        high, wide = (int(random.choice([32, 64, 128])) for _ in range(2))
        tiles = sum(
            any(row + k - q >= first for row in range(top, min(top + high, int(q))))
            for q, k in zip(queries, keys, strict=True)
            for top in range(0, int(q), high)
            for first in range(0, int(k), wide)
        )
        assert tile_pairs(queries, keys, True, (high, wide)) == tiles * high * wide


def test_a_wave_that_is_just_begun_costs_a_whole_one():
    full, begun = product(8448, WIDTH, WIDTH), product(8449, WIDTH, WIDTH)
    assert full == pytest.approx(2 * 8448 * WIDTH * WIDTH / 650e6) and begun == pytest.approx(1.25 * full)
    small = replace(H100, processors=66)
    assert product_micros(8448, WIDTH, WIDTH, 0, small) == pytest.approx(full)


def test_every_constant_has_its_source():
    table = yaml.safe_load(gpus.CONSTANTS.read_text(encoding="utf-8"))
    for constants in table.values():
        for name, each in constants.items():
            assert name == "like" or (set(each) == {"value", "source"} and each["source"])
    assert not any("measured" in str(each) for each in table["h100"].values())


COUNT = Path(__file__).parents[1] / "support/instructions.py"
# An activation takes a second of the compiler: by default the usual ones are counted.
USUAL = [
    name for name in ISSUE
    if not name.startswith("activate") or name.endswith(("_relu", "_relu_dropped", "_gelu_tanh", "_silu_gated"))
]  # fmt: skip


@pytest.mark.skipif(not without_gpu.is_available(), reason="no Triton to compile with")
@pytest.mark.slow
@pytest.mark.parametrize("names", [USUAL, [*ISSUE]], ids=["usual", "all"])
def test_instructions_match_compiled_kernels(names):
    compiled = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(COUNT), *names], capture_output=True, text=True, env=compiled)
    assert done.returncode == 0, done.stderr
    found = {name: float(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert found == pytest.approx({name: ISSUE[name] for name in names}, rel=0.08)
