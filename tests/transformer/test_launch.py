"""Our launches of compiled kernels against Triton's own: the function in C gets the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.project import ROOT

RESULTS = {"norm": (6, 7, 8)}  # places of tensors that a launch makes; of gelu the fourth


def test_later_launches_pass_what_the_first_one_passed():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/support/launch_kernels.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    observed = launches.pop()
    functions = {}
    for (kind, asked, start, arguments), (again, asked_again, *others) in zip(
        launches[::2], launches[1::2], strict=True
    ):
        assert kind == again and asked == asked_again, "Triton is not asked twice"
        results = RESULTS.get(kind, (3,))
        if kind == "gelu in fp32":
            results = 0, 1, 3  # a copy each
        others[1] = [arguments[i] if i in results else other for i, other in enumerate(others[1])]
        assert [start, arguments] == others
        functions[kind] = start[4]
    assert functions["gelu"] == functions["gelu of fewer rows"], "rows are no constant"
    assert len(set(functions.values())) == len(functions) - 1, (
        "a kernel for each other type, constant or alignment"
    )
    assert observed[1] == launches[-1][1] + 1, "a profiler is told by Triton"
    assert observed[2] == launches[-1][2]
