"""The way of a batch, traced: docs/architecture.md names every file that holds it, and its figures only fall."""

import json
import os
import re
import subprocess
import sys

import yaml
from support import figures
from support.project import ROOT, small_run

from data_utils.base.settings import merge

CEILINGS = {
    "files that hold the batch or its activations": 28,
    "types that carry it": 11,
    "changes of file from step to loss": 444,
    "returns to a file that was left": 417,
    # New abilities that every run's plan and head hold: phases in samples and rates 169, z-loss and soft cap 68.
    "lines loaded by a run": 18628 + 237,
}


def test_a_batch_passes_the_files_of_the_table(corpus, tmp_path):
    """One training process in which every call of a step is recorded, compiled functions run as Python."""
    short = {"training": {"steps": 2}, "schedule": {"warmup_steps": 1}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merge(small_run(corpus, tmp_path / "run"), short)))
    done = subprocess.run(
        [sys.executable, "tests/support/trace_batch.py", str(tmp_path / "trace.json"), "--config", str(config)],
        cwd=ROOT, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    traced = json.loads((tmp_path / "trace.json").read_text())

    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## One batch from disk to loss") : page.index("## Rooms")]
    table = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", section, re.M)
    assert len(table) == len(set(table))
    assert (set(traced["files"]) - set(table), set(table) - set(traced["files"])) == (set(), set())
    drawn = json.loads((ROOT / "docs/pictures/way.json").read_text(encoding="utf-8"))
    assert set(drawn) == set(traced["files"]), "run: python docs/pictures/draw.py --trace FILE way.png"
    found = figures.of_a_step(traced)
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}
