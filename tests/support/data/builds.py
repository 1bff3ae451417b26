"""Builds of a corpus in this process, and in new processes that a test can find and kill."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.data.byte_tokenizer import ByteTokenizer
from support.project import ROOT
from support.waiting import HANG_SECONDS

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus

DRIVER = ROOT / "tests/support/build_driver.py"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
SPLIT = "a=0.5,b=0.5"
MARK = "BUILD_OF_TEST"  # an environment variable by which children of children are found
TIMEOUT = HANG_SECONDS


def build(path, output, tokenizer=ByteTokenizer, **options):
    """Build in this process. Args: options: of BuildConfig."""
    options = {"shard_bytes": 400, "split": SPLIT, **options}
    return build_corpus(BuildConfig(inputs=[str(path)], output=str(output), **options), tokenizer)


def outputs(directory):
    """The finished files, without the working directory and partial files."""
    return {name: data for name, data in files_only(directory).items() if not name.endswith(".partial")}


def files_only(directory):
    """Name -> content."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def start(path, output, tokenizer="SlowTokenizer", workers=2, ranks=0, **options):
    """A new process that builds. Args: tokenizer: a class of byte_tokenizer.py; ranks: of MPI, 0: without it."""
    config = {
        "inputs": [str(path)],
        "output": str(output),
        "workers": workers,
        "shard_bytes": 2000,
        **options,
    }
    command = [sys.executable, str(DRIVER), json.dumps(config), tokenizer]
    if ranks:
        command = [MPIRUN, "-n", str(ranks), *command, "mpi"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: str(output)},
    )


def members(output):
    """The processes that `start` started for an output, and their children, as far as they still run."""
    mark = f"{MARK}={output}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0") and "Z" not in state_of_process(path):
                found.append(int(path.name))
        except OSError:  # gone in between, or of another user
            continue
    return sorted(found)


def state_of_process(path):
    """The letter of /proc/PID/stat, such as Z for a zombie."""
    return (path / "stat").read_text().rpartition(")")[2].split()[0]


def finished_shards(output):
    return len(list(Path(f"{output}.build").glob("shard-??????")))
