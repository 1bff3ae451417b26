"""The way of a batch, traced: docs/architecture.md names every file that holds it, and its figures only fall."""

import json
import re

from support import figures
from support.project import ROOT

CEILINGS = {
    "files that hold the batch or its activations": 26,
    "types that carry it": 10,
    "changes of file from step to loss": 438,
    "returns to a file that was left": 413,
    "lines loaded by a run": 18307,
}


def test_a_batch_passes_the_files_of_the_table(corpus, tmp_path):
    """One training process in which every call of a step is recorded, compiled functions run as Python."""
    traced = figures.traced_step(corpus, tmp_path)

    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## One batch from disk to loss") : page.index("## Rooms")]
    table = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", section, re.M)
    assert len(table) == len(set(table))
    assert (set(traced["files"]) - set(table), set(table) - set(traced["files"])) == (set(), set())
    drawn = json.loads((ROOT / "docs/pictures/way.json").read_text(encoding="utf-8"))
    assert set(drawn) == set(traced["files"]), "run: python docs/pictures/draw.py --trace FILE way.png"
    found = figures.of_a_step(traced)
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}
