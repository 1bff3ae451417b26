"""The benchmark of widths and rates: it finds each width's best rate, goes on where it was, and trains."""

from __future__ import annotations

import json
import math
import subprocess
from types import SimpleNamespace

import pytest
from support.commands import forked

from benchmarks import scaling_ladder
from benchmarks.scaling_ladder import descend, exponent, lowest
from data_utils.common.settings import parse_override
from megatron_lite.config.tree import load_config


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_the_best_rate_has_a_worse_one_on_both_sides(best):
    asked = []

    def loss(rate):
        asked.append(rate)
        return abs(math.log2(rate / best))

    rates = descend(1.0, loss)
    assert rates == sorted(set(asked)) == [rates[0] * 2**n for n in range(len(rates))]
    assert rates[0] < best < rates[-1] and 1.0 in rates
    assert len(rates) == 3 + abs(round(math.log2(best))) - (best < 1)


def test_between_the_rates_a_parabola_is_exact():
    rates = [1.0, 2.0, 4.0, 8.0]
    assert lowest(rates, lambda rate: (math.log2(rate) - 1.7) ** 2 + 3) == pytest.approx(2**1.7)
    assert exponent([128, 256, 512], [4.0, 2.0, 1.0]) == pytest.approx(-1)


WIDTHS, SEEDS = (64, 128), (1, 2)
OPTIONS = ["--steps", "40", "--samples", "4", "--seeds", *map(str, SEEDS), "--rate", "0.004"]


@pytest.fixture
def quickstart(tmp_path):
    (tmp_path / "data").mkdir()
    manifest = {"checksum": "0123456789abcdef", "vocab_size": 2048}
    (tmp_path / "data/corpus_train.json").write_text(json.dumps(manifest))
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """The (width, rate, seed) of each run, whose losses follow a rule instead of training; best is 0.256 / width."""
    runs = []

    def train(run, settings, threads):
        config = load_config([scaling_ladder.ROOT / "configs/tiny.yaml"], settings)
        width, rate, seed = config.model.hidden_size, config.optimizer.lr, config.training.seed
        assert config.model.num_attention_heads * 64 == width
        assert (config.training.eval_interval, config.schedule.warmup_steps) == (10, 4)
        mup = config.model.mup
        runs.append((width, rate, seed) if mup is None else (mup.base_hidden_size, mup.base_head_size, width))
        last = 3 + 0.1 * math.log2(rate * width / 0.256) ** 2 + 0.01 * seed
        losses = {"loss": last, "loss/token": last - 1, "loss/document": last + 1}
        return [
            {"step": step, **{name: loss + 4 - step / 10 for name, loss in losses.items()}}
            for step in (10, 20, 30, 40)
        ]

    monkeypatch.setattr(scaling_ladder, "train", train)
    return runs


def test_rates_and_losses_by_width(quickstart, trained, tmp_path, capsys):
    arguments = ["--quickstart", str(quickstart), "--widths", *map(str, WIDTHS), *OPTIONS]
    assert scaling_ladder.main([*arguments, "--plot", str(tmp_path / "plot.png")]) == 0
    rates = {64: (0.002, 0.004, 0.008), 128: (0.001, 0.002, 0.004)}
    assert sorted(trained) == [(w, r, seed) for w in WIDTHS for r in rates[w] for seed in SEEDS]
    out = capsys.readouterr().out
    # The mean of two seeds, 0.015; 81,920 tokens of text are 40 steps of 32 samples of 64.
    assert "| 20,480 tokens | 40,960 tokens | 61,440 tokens | 81,920 tokens | short spans, end |" in out
    assert "| 64 | 0.23 M | 0.004, best, for all | 6.015 | 5.015 | 4.015 | 3.015 | 2.015 | 4.015 |" in out
    assert "| 128 | 0.66 M | 0.002, best | 6.015 | 5.015 | 4.015 | 3.015 | 2.015 | 4.015 |" in out
    assert "| 128 | 0.66 M | 0.004, for all | 6.115 | 5.115 | 4.115 | 3.115 | 2.115 | 4.115 |" in out
    assert "| 128 | 0.001: 3.115, 0.002: 3.015, 0.004: 3.115 | 2.0e-03 |" in out
    assert out.endswith("\nrate ~ width^-1.00\n")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_an_interrupted_ladder_goes_on(quickstart, trained, capsys):
    arguments = ["--quickstart", str(quickstart), "--widths", *map(str, WIDTHS), *OPTIONS]
    scaling_ladder.main(arguments)
    (lost,) = (quickstart / "scaling_ladder").glob("128_0.002_2_*.json")
    lost.unlink()
    trained.clear()
    before = capsys.readouterr().out
    scaling_ladder.main(arguments)
    assert trained == [(128, 0.002, 2)]
    again = capsys.readouterr().out
    assert again.count("CPU seconds") == 1
    assert again[again.index("| width") :] == before[before.index("| width") :]


def test_runs_of_another_corpus_or_length_are_not_taken(quickstart, trained):
    arguments = ["--quickstart", str(quickstart), "--widths", "64", *OPTIONS]
    scaling_ladder.main(arguments)
    manifest = quickstart / "data/corpus_train.json"
    manifest.write_text(manifest.read_text().replace("0123", "1123"))
    trained.clear()
    scaling_ladder.main(arguments)
    assert len(trained) == 3 * len(SEEDS)
    trained.clear()
    scaling_ladder.main([*arguments, "--samples", "8"])
    assert len(trained) == 3 * len(SEEDS)


def test_mup_has_runs_of_its_own(quickstart, trained):
    arguments = ["--quickstart", str(quickstart), "--widths", "128", *OPTIONS]
    scaling_ladder.main(arguments)
    trained.clear()
    scaling_ladder.main([*arguments, "--mup", "64"])
    assert trained == [(64, 64, 128)] * 3 * len(SEEDS)


def test_a_run_is_trained_by_the_command(tmp_path, monkeypatch):
    """On a corpus of some words, tokenized as the quickstart does it."""
    text = tmp_path / "text.jsonl"
    lines = (" ".join(f"word {(n * k) % 17} of the text," for k in range(20)) for n in range(60))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = ("--kind", "byte_bpe", "--vocab-size", 300, "--output", tmp_path / "tokenizer")
    assert forked("scripts/train_tokenizer.py", "--input", text, *tokenizer).returncode == 0
    corpus = ("--output", tmp_path / "data/corpus", "--split", "train=0.8,validation=0.2")
    made = tmp_path / "tokenizer/tokenizer.json"
    kind = ("--tokenizer-kind", "hf_json", "--tokenizer-path", made)
    done = forked("scripts/preprocess_data.py", "--input", text, *corpus, *kind)
    assert done.returncode == 0, done.stderr

    def run(command, cwd, env, **others) -> subprocess.CompletedProcess[str]:
        assert (
            parse_override(command[-1]) == {"schedule": {"warmup_steps": 1}} and env["OMP_NUM_THREADS"] == "1"
        )
        return forked(*command[1:], cwd=cwd)

    monkeypatch.setattr(scaling_ladder, "subprocess", SimpleNamespace(run=run))
    arguments = ["--quickstart", str(tmp_path), "--widths", "64", "--steps", "4", "--samples", "32"]
    assert scaling_ladder.main([*arguments, "--threads", "1"]) == 0
    found = [json.loads(file.read_text()) for file in (tmp_path / "scaling_ladder").iterdir()]
    assert len(found) >= 3 and {run["tokens"] for run in found} == {4 * 32 * 64}
    assert all([point["step"] for point in run["curve"]] == [1, 2, 3, 4] for run in found)
    assert all(1 < run["curve"][-1]["loss"] < 8 for run in found)
