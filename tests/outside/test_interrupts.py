"""Ctrl-C at any moment: one line, status 130, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.project import ROOT

GENERATE = ("scripts/generate.py", "--text", "a [MASK]", "--checkpoint")
INSPECT = ("scripts/inspect_batch.py", "--objective", "t5", "--text", "some text that has a few words")
TRACE = "import time:"  # begins a line about a module that Python has imported

# A moment is the end of a module's import.
MOMENTS = [
    (INSPECT, "data_utils.common.entry"),  # the first import
    (INSPECT, "argparse"),
    (INSPECT, "numpy.linalg"),
    (INSPECT, "numba.core.types"),
    (GENERATE, "torch._utils"),
    (GENERATE, "torch.nn.functional"),
]


@pytest.mark.parametrize(
    "command, module", MOMENTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_interrupted_start_is_one_line(command, module, tmp_path):
    folder = (
        [str(tmp_path)] if command == GENERATE else []
    )  # a run without a checkpoint: refused after all imports
    (tmp_path / "checkpoints").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command, *folder],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        pipesize=4096,  # so few lines may wait here: on a busy machine it would be at its end before the signal
    )  # fmt: skip
    said, seen = [], False
    for line in process.stderr:
        if not line.startswith(TRACE):
            said.append(line)
        elif not seen and line.rpartition("|")[2].strip() == module:
            seen = True
            process.send_signal(signal.SIGINT)
    assert seen, f"{module} is not imported any more; choose another moment"
    assert (process.wait(), said, process.stdout.read()) == (130, ["interrupted\n"], "")


COMMAND = """
import data_utils.common.entry
import os, signal, sys
from data_utils.common.errors import run_command

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def main():
    {}

run_command(main)
"""

IN_A_DESTRUCTOR = """
    class Held:
        def __del__(self): interrupt()
    Held()
    print("went on")
"""
SWALLOWED = """
    try: interrupt()
    except BaseException: pass
"""
CLEANED_UP = """
    try: interrupt()
    finally: print("cleaned up")
"""
TWICE = """
    try: interrupt()
    finally: interrupt(); print("went on")
"""
AT_THE_END = """
    import atexit
    atexit.register(interrupt)
"""


@pytest.mark.parametrize(
    "main, output",
    [(IN_A_DESTRUCTOR, ""), (SWALLOWED, ""), (CLEANED_UP, "cleaned up\n"), (TWICE, ""), (AT_THE_END, "")],
    ids=["in a destructor", "swallowed by a library", "cleaned up", "twice", "at the end"],
)
def test_an_interrupted_command_is_one_line(main, output):
    code = COMMAND.format(main.strip())
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, output, "interrupted\n")


def test_a_command_in_the_background_of_a_script_ignores_ctrl_c():
    """As the shell has set it."""
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + COMMAND.format(
        "interrupt(); print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
