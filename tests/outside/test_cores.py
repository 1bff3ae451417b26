"""One and two cores, whatever this machine has: one function is asked, and defaults follow it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.code_structure import product_files
from support.project import ROOT

from megatron_lite.parallel.launch import Launch
from scripts import preprocess_data


def test_one_function_asks_the_system_for_cores():
    asks = re.compile(r"sched_getaffinity|cpu_count|process_cpu")
    found = [str(path.relative_to(ROOT)) for path in product_files() if asks.search(path.read_text("utf-8"))]
    assert found == ["data_utils/common/cores.py"]


def test_only_cores_that_a_process_may_use_count():
    """As `taskset`, SLURM and containers allow them."""
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from data_utils.common.cores import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("cores", [1, 2])
def test_defaults_follow_the_cores(monkeypatch, cores):
    """Workers of a build; threads of each of two ranks on a node, which need one at least."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    arguments = ["--input", "a", "--output", "b", "--tokenizer-kind", "hf_json", "--tokenizer-path", "c"]
    monkeypatch.setattr("sys.argv", ["preprocess_data.py", *arguments])
    assert preprocess_data.parse_arguments().workers == cores
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment().threads == 1
