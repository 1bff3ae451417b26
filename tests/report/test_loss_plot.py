"""The loss plot: a readable PNG, with the lines that the records hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import pyplot

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from megatron_lite.report.loss_plot import draw_objectives, draw_total
from scripts.report import main

TRAIN = [{"kind": "train", "step": step, "loss": 8.0 - step / 10} for step in range(1, 30)]
VALIDATION = [
    {"kind": "validation", "step": step, "loss": 7.0 - step / 20, "loss/token": 5.0, "loss/document": 7.5}
    for step in (10, 20)
]
UNIGRAM = {"loss": 6.5, "loss/token": 6.0, "loss/document": 6.7}


def write_run(run: Path, records: list[dict]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_writes_a_png(tmp_path: Path) -> None:
    write_run(tmp_path, TRAIN + VALIDATION)
    main(["--plot", str(tmp_path)])
    image = pyplot.imread(tmp_path / "loss.png")
    assert image.shape[0] > 400 and image.shape[1] > 1000
    assert image.std() > 0.05  # not blank
    (tmp_path / "unigram.json").write_text(json.dumps(UNIGRAM))
    main(["--plot", str(tmp_path), "--output", str(tmp_path / "with_unigram.png")])
    assert (pyplot.imread(tmp_path / "with_unigram.png") != image).any()


def test_without_validation(tmp_path: Path) -> None:
    write_run(tmp_path, TRAIN)
    main(["--plot", str(tmp_path)])
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_lines_of_the_axes() -> None:
    figure, (total_axes, objective_axes) = pyplot.subplots(1, 2)
    draw_total(total_axes, TRAIN, VALIDATION, UNIGRAM)
    draw_objectives(objective_axes, VALIDATION, UNIGRAM)
    assert [line.get_label() for line in total_axes.get_lines()] == ["training", "validation", "unigram"]
    assert list(total_axes.get_lines()[1].get_ydata()) == [6.5, 6.0]
    assert total_axes.get_lines()[2].get_ydata()[0] == 6.5
    labels = [line.get_label() for line in objective_axes.get_lines() if not line.get_label().startswith("_")]
    assert labels == ["token", "document", "unigram"]
    pyplot.close(figure)


def test_errors(tmp_path: Path) -> None:
    write_run(tmp_path, VALIDATION)
    with pytest.raises(DataError, match="no training step yet"):
        main(["--plot", str(tmp_path)])
    write_run(tmp_path, TRAIN)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"--output \S*x\.png: .*choose another --output"):
        main(["--plot", str(tmp_path), "--output", str(tmp_path / "file" / "x.png")])
    (tmp_path / "unigram.json").write_text("{")
    with pytest.raises(DataError, match=r"unigram\.json cannot be read"):
        main(["--plot", str(tmp_path)])


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(
        CheckpointError, match=r"metrics\.jsonl is not a directory; give the directory of a run"
    ):
        main([str(tmp_path / "metrics.jsonl")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other", "--plot"], "--plot takes one run"),
        (["other", "--heartbeats"], "--heartbeats takes one run"),
        (["--heartbeats", "--output", "x.txt"], "leave --output out"),
        (["--plot", "--output", "x.html"], "must be one of .png, .svg, .pdf"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, arguments: list[str], message: str) -> None:
    write_run(tmp_path, TRAIN)
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path), *arguments])
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]
