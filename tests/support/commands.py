"""The entry points as a user starts them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from support.project import ROOT

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


def pretrain(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("pretrain_glm.py", *arguments, **variables)


def assert_refused(result: subprocess.CompletedProcess[str], message: str) -> None:
    said = [line for line in result.stdout.splitlines() if not line.endswith("; loading libraries")]
    assert result.returncode == 2 and said == []
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
