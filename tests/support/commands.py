"""The entry points as a user starts them, in new processes or in forks of this one."""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from support import remedies
from support.project import ROOT

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    return {**environment, **variables}


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, in the project's directory. Args: variables: of the environment."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=_environment(variables),
        capture_output=True,
        text=True,
    )
    remedies.hear(done.stdout, done.stderr)
    return done


def pretrain(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pretrain_glm.py in a new process: for tests of what is imported, and when."""
    return python("pretrain_glm.py", *arguments, **variables)


def forked(
    script: str, *arguments: Any, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """As `python`, in a fork of this process: what is imported here need not be imported again, which takes seconds.

    What is read while libraries are imported, and in which order they are, only a new process shows.
    """
    return Forked(script, *arguments, cwd=cwd, **variables).result()


class Forked:
    """As `forked`, but goes on at once, so that several ranks can run."""

    def __init__(self, script: str, *arguments: Any, cwd: Path = ROOT, **variables: str):
        self._command = [script, *arguments]
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  closed where they are read
        self.pid = os.fork()
        if self.pid == 0:
            for number, file in enumerate(self._files, start=1):
                os.dup2(file.fileno(), number)
            _run(ROOT / script, [str(argument) for argument in arguments], cwd, _environment(variables))

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        remedies.hear(*texts)
        return subprocess.CompletedProcess(self._command, status, *texts)


def _run(script: Path, arguments: list[str], cwd: Path, environment: dict[str, str]) -> NoReturn:
    """This process, a fork, is `python script arguments` from here on. Nothing of pytest prints or cleans up in it."""
    status: Any = 1
    try:
        atexit._clear()
        logging.getLogger().handlers.clear()
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.parent)]
        try:
            runpy.run_path(str(script), run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter at its end does
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(int(status))


def assert_refused(result: subprocess.CompletedProcess[str], message: str) -> None:
    """The command ended with status 2 and one line on stderr, which holds `message`."""
    said = [line for line in result.stdout.splitlines() if not line.endswith("; loading libraries")]
    assert result.returncode == 2 and said == []
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
