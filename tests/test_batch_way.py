"""The table of docs/architecture.md names every file that a batch passes from its read to its loss."""

import json
import os
import re
import subprocess
import sys

import yaml
from support.project import ROOT, small_run

from data_utils.base.settings import merge

MOST_FILES = 17


def test_a_batch_passes_the_files_of_the_table(corpus, tmp_path):
    """One training process in which every call of a step is recorded, compiled functions run as Python."""
    short = {"training": {"steps": 2}, "schedule": {"warmup_steps": 1}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merge(small_run(corpus, tmp_path / "run"), short)))
    done = subprocess.run(
        [sys.executable, "tests/support/trace_batch.py", str(tmp_path / "files.json"), "--config", str(config)],
        cwd=ROOT, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    traced = json.loads((tmp_path / "files.json").read_text())

    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## One batch from disk to loss") : page.index("## Rooms")]
    table = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", section, re.M)
    beside = re.findall(r"`([\w/]+\.py)`", section[section.index("without the batch:") :].split("\n\n")[0])
    assert (set(traced) - {*table, *beside}, {*table, *beside} - set(traced)) == (set(), set())
    assert len(table + beside) == len({*table, *beside})
    assert len(table) <= MOST_FILES
