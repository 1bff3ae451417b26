"""The benchmarks that draw curves of small models: their settings are accepted, their tables are those of the runs."""

from __future__ import annotations

import json

import pytest
from support.project import ROOT

from benchmarks import recall, second_positions
from data_utils.tasks.readers.synthetic import synthetic_vocabulary
from megatron_lite.config.model import BLOCK_POSITIONS
from megatron_lite.config.tree import load_config
from megatron_lite.finetune.setup import load_tree, prepare


def test_kinds_of_positions_are_compared_from_finished_runs(tmp_path, capsys):
    """Their settings are accepted, the table has mean and deviation of the seeds."""
    (tmp_path / "data").mkdir()
    work, result = tmp_path / "work", tmp_path / "curves.json"
    for number, kind in enumerate(second_positions.KINDS):
        overrides = [*second_positions.KINDS[kind], "tokenizer.path=x", "data.train=[{prefix: x}]"]
        positions = load_config([ROOT / "configs/tiny.yaml"], overrides).model
        assert (positions.positions, positions.block_positions) in {
            ("learned_blocks", "added"), *(("rotary", each) for each in BLOCK_POSITIONS)
        }  # fmt: skip
        for seed in (1, 2):
            run = work / f"{kind.replace(', ', '_').replace(' ', '_')}_{seed}_10"
            run.mkdir(parents=True)
            losses = {"loss": number + seed, "loss/token": 1.0, "loss/document": 2.0}
            lines = [{"kind": "train", "step": 10}, {"kind": "validation", "step": 10, **losses}]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--quickstart", tmp_path, "--steps", 10, "--seeds", 1, 2, "--work", work, "--json", result]
    second_positions.main([*map(str, arguments), "--plot", str(tmp_path / "plot.png")])
    assert "| rotary, table | 2 | 3.500 ± 0.707 | 1.000 ± 0.000 | 2.000 ± 0.000 |" in capsys.readouterr().out
    assert json.loads(result.read_text())["learned tables"][1][0]["loss"] == 2
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_ways_to_begin_are_compared_from_finished_runs(tmp_path, capsys):
    """Each way to begin has its share of right words over the steps; their settings are accepted."""
    (tmp_path / "vocab.txt").write_text("\n".join([*recall.SPECIAL, *synthetic_vocabulary()]))
    own = [f"tokenizer.path={tmp_path / 'vocab.txt'}", "task.train=recall:pairs=2,samples=64,seed=1"]
    file = str(ROOT / recall.TASK)
    for number, way in enumerate(recall.WAYS):
        task = prepare(load_tree([file], file, [*own, *recall.WAYS[way]]))
        assert task.config.training.steps == 2 and task.config.model.num_layers == 2
        for seed in (1, 2):
            run = tmp_path / f"{number}_{seed}_8" / f"seed_{seed}"
            run.mkdir(parents=True)
            (run.parent / "results.json").touch()
            lines = [{"kind": "scores", "step": step, "accuracy": number / 10 + seed / 10} for step in (4, 8)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--steps", "8", "--seeds", "1", "2", "--work", str(tmp_path)]
    recall.main([*arguments, "--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "plot.png")])
    out = capsys.readouterr().out
    assert "| begins with | 4 | 8 | deviation |" in out and "| words at 0.8 | 0.35 | 0.35 | 0.071 |" in out
    assert json.loads((tmp_path / "c.json").read_text())["words at 0.8"][1][1]["accuracy"] == pytest.approx(
        0.4
    )
    assert (tmp_path / "plot.png").stat().st_size > 1000
