"""Shell scripts parse and refuse bad arguments; configs/tiny.yaml is valid. .ci/run runs the quickstart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.project import ROOT

from data_utils.common.batch_fields import FIELDS, OBJECTIVE, ORD, POSITION_IDS, TARGETS, TOKENS, Example
from data_utils.loader import blanks
from data_utils.loader.blanks import Prompt, blank_tokens, cut
from data_utils.tokenizers.special_tokens import SpecialTokens
from megatron_lite.config.tree import load_config
from megatron_lite.transformer.flops import parameter_count
from scripts.quickstart.fill_examples import render
from scripts.quickstart.words import WordBlank

SHELL = [
    "scripts/quickstart.sh",
    "scripts/laptop.sh",
    "scripts/stages.sh",
    "scripts/test.sh",
    "scripts/setup_environment.sh",
    ".ci/run",
]


def bash(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("script", SHELL)
def test_shell_syntax(script: str) -> None:
    result = bash("-n", script)
    assert result.returncode == 0, result.stderr


def test_quickstart_help() -> None:
    result = bash("scripts/quickstart.sh", "--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: scripts/quickstart.sh")


@pytest.mark.parametrize("arguments", [["--unknown"], ["one", "two"]])
def test_quickstart_refuses_bad_arguments(arguments: list[str], tmp_path: Path) -> None:
    result = bash(ROOT / "scripts/quickstart.sh", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_quickstart_refuses_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = bash(ROOT / "scripts/quickstart.sh", ".", cwd=tmp_path)
    assert result.returncode == 2
    assert "choose another directory" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_environment_refuses_what_is_not_python() -> None:
    script = "source scripts/setup_environment.sh; PYTHON=/bin/false ensure_environment requirements.txt"
    result = bash("-c", script)
    assert result.returncode == 2
    assert "not Python 3.11 to 3.13" in result.stderr


@pytest.mark.slow
def test_environment_is_made_once_per_requirements(tmp_path: Path) -> None:
    """With requirements that ask for nothing, so that pip needs no network."""
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("# nothing\n")
    script = f"source {ROOT}/scripts/setup_environment.sh; ensure_environment $1; $python -c 'print(1)'"

    def ensure(file: str) -> str:
        result = subprocess.run(
            ["bash", "-euc", script, "-", file],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHON": sys.executable},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "installing requirements-dev.txt" in ensure("requirements-dev.txt")
    assert ensure("requirements-dev.txt") == "1\n"
    assert ensure("requirements.txt") == "1\n"  # contained in the other
    (tmp_path / "requirements.txt").write_text("# nothing else\n")
    assert "installing requirements.txt" in ensure("requirements.txt")
    assert "installing requirements-dev.txt" in ensure("requirements-dev.txt")


@pytest.mark.slow
def test_a_failure_of_pip_is_shown_with_where_the_rest_is(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("./absent\n")
    script = f"source {ROOT}/scripts/setup_environment.sh; ensure_environment requirements.txt; echo on"
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert result.returncode == 1 and "on" not in result.stdout.split()
    assert result.stderr.splitlines()[-1] == (
        "error: pip could not install requirements.txt (status 1); .venv/pip.log has all of its lines."
    )
    assert "absent" in result.stderr and "absent" in (tmp_path / ".venv/pip.log").read_text()
    assert not list((tmp_path / ".venv").glob("*.stamp"))


def test_tiny_configuration() -> None:
    config = load_config([ROOT / "configs/tiny.yaml"]).with_vocab_size(4096)
    assert parameter_count(config.model) < 4e6
    assert config.batch.accumulation_steps(1) and config.batch.accumulation_steps(2)


SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=4, gmask=5, sop=6, eop=7, eos=8, pad=9, unk=10, dblock=11)


class Letters:
    """A tokenizer whose token 20 is "a", 21 "b", ..."""

    special = SPECIAL

    def decode(self, tokens: list[int], skip_special: bool = False) -> str:
        return "".join(chr(ord("a") + token - 20) for token in tokens if token >= 20 or not skip_special)


def test_answers_stand_beside_the_word() -> None:
    answers = [(0.5, [30]), (0.25, [21, 22])]
    first, second = render(Letters(), WordBlank([1, 20, 21], [21, 22], [23, 8]), answers).splitlines()
    assert first.split() == ["ab", "____", "d"]
    assert second.split() == ["'bc'", "50%", "'k'", "=", "25%", "'bc'"]


def test_original_spans_in_text_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = np.zeros((len(FIELDS), 10), np.int32)
    fields[TOKENS] = [1, 20, 3, 21, 3, 6, 30, 31, 6, 40]  # the second blank comes first in part B
    fields[TARGETS, 5:] = [30, 31, 7, 40, 7]
    fields[POSITION_IDS] = [0, 1, 2, 3, 4, 4, 4, 4, 2, 2]
    fields[ORD, 5:] = [1, 2, 3, 4, 5]
    fields[OBJECTIVE] = 0
    example = Example.from_fields(fields)
    assert blank_tokens(example, SPECIAL) == [[40], [30, 31]]
    assert cut(example, SPECIAL) == Prompt([1, 20, 3, 21, 3], [[40], [30, 31]])
    monkeypatch.setattr(blanks, "MOST_BLANKS", 1)
    assert cut(example, SPECIAL) == Prompt([1, 20, 3, 21], [[40]])
    monkeypatch.setattr(blanks, "MOST_TOKENS", 2)
    assert cut(example, SPECIAL) == Prompt([1, 20], [])
