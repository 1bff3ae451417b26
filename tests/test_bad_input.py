"""Mistakes of a user in training and generation: one clear line, status 2, no traceback, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from megatron_lite.settings import merge


def run(script, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def other_vocabulary(tmp_path, corpus):
    words = (corpus / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(words.replace("word7\n", "sword\n"))
    return {"tokenizer": {"path": str(tmp_path / "vocab.txt")}}


MISTAKES = {
    "missing dataset": (lambda t, c: {"data": {"train": [{"prefix": str(t / "absent")}]}}, "absent"),
    "no training corpus": (lambda t, c: {"data": {"train": []}}, "data.train is empty"),
    "missing tokenizer": (lambda t, c: {"tokenizer": {"path": str(t / "none.txt")}}, "none.txt"),
    "another tokenizer": (other_vocabulary, "tokenizer"),
    "another vocabulary size": (lambda t, c: {"model": {"vocab_size": 99}}, "model.vocab_size is 99"),
    "sequence too long": (lambda t, c: {"data": {"sequence_length": 100}}, "max_position"),
    "typo": (lambda t, c: {"optimizer": {"leraning_rate": 1}}, "unknown setting"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_training_is_refused_with_one_line(settings, corpus, tmp_path, kind):
    change, message = MISTAKES[kind]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merge(settings, change(tmp_path, corpus))))
    done = run("pretrain_glm.py", "--config", str(config))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert done.stdout == "" and not Path(settings["run"]["directory"]).exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint", "absent", "--text", "a [MASK]"], "absent holds no checkpoint"),
        (["--checkpoint", "absent"], "no text given"),
        (["--checkpoint", "absent", "--text", "a [MASK]", "--strategy", "best"], "must be one of greedy"),
        (["--checkpoint", "absent", "--input", "absent.txt"], "absent.txt: No such file"),
    ],
)
def test_generation_is_refused_with_one_line(arguments, message):
    done = run("scripts/generate.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
