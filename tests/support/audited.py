"""Prints as JSON which differences benchmarks/step_trace/audit.py finds in a layer of the 335M model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main():
    from benchmarks.step_trace.audit import differences
    from benchmarks.step_trace.trace import Case
    from benchmarks.step_trace.worker import forked, load_libraries
    from support.step_profiles import PAPER, request_of

    load_libraries()
    tree = request_of(PAPER, 64, 1, sys.argv[1:], 1).tree
    answer = forked(lambda: {"lines": differences(Case(tree, 64, 0, 1, 1, "h100"))})
    assert "lines" in answer, answer
    print(json.dumps(answer["lines"]))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main()
