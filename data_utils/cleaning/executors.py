"""How the tasks of a stage are run: in processes of this machine, as jobs of SLURM, or by Ray.

datatrove's executors run a task, mark what is complete and skip it later. SLURM's and Ray's are its own. In its local
one a method is replaced: its pool waits without end for a worker that the kernel has killed, and the process that
manages the pool outlives a killed command.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.utils.logging import logger
from datatrove.utils.stats import PipelineStats

import data_utils
from data_utils.cleaning.stages import CleaningStage, WorkFolders
from data_utils.common.errors import ConfigError, DataError, UserError
from data_utils.common.files import disk_errors
from data_utils.common.processes import begin_worker, submit
from data_utils.common.progress import progress_bar
from data_utils.common.setting_files import one_line

EXECUTORS = ("local", "slurm", "ray")
_TIME = re.compile(r"\d+|(\d+-)?\d{1,2}(:\d{2}){1,2}|\d+-\d{1,2}")
_PARTITION = re.compile(r"[\w.-]+(,[\w.-]+)*")
_PATH_OF_JOBS = re.compile(r"[\w./+@%=:,~-]+")
_AGAIN = "Finished tasks are kept: repeat the same command to continue."


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The options that change where and how fast a run is done, and nothing in its output.

    Raises: ConfigError with all mistakes.
    """

    executor: str = "local"
    workers: int = 1  # tasks at the same time
    partition: str | None = None  # the rest: of SLURM; cpus and gigabytes of Ray too
    time: str | None = None  # of a task; minutes, or [days-]hours:minutes[:seconds]
    cpus_per_task: int | None = None
    gigabytes_per_cpu: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.executor not in EXECUTORS:
            problems.append(f"--executor is {self.executor!r}; it must be one of {', '.join(EXECUTORS)}")
        of_ray = ("cpus_per_task", "gigabytes_per_cpu")
        reads = {"slurm": ("partition", "time", *of_ray), "ray": of_ray}
        for name in reads["slurm"]:
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and name not in reads.get(self.executor, ()):
                problems.append(
                    f"{option} is given, but the executor {self.executor} does not read it; remove it"
                )
            elif isinstance(value, int) and value < 1:
                problems.append(f"{option} is {value}; it must be 1 or more")
        if self.executor == "ray" and importlib.util.find_spec("ray") is None:
            problems.append(
                "--executor ray needs the package ray, which is not installed; run pip install ray"
            )
        if self.workers < 1:
            problems.append(f"--workers is {self.workers}; it must be 1 or more")
        if self.executor == "slurm":
            for name, pattern, example in (
                ("partition", _PARTITION, "cpu"),
                ("time", _TIME, "90 (minutes) or 10:00:00"),
            ):
                value = getattr(self, name)
                if value is None:
                    problems.append(f"--executor slurm needs --{name}, such as {example}")
                elif not pattern.fullmatch(value):
                    problems.append(f"--{name} is {value!r}; write it as {example}")
        if problems:
            raise ConfigError(f"{'. '.join(problems)}.")


class WithoutSecrets(PipelineExecutor):
    """An executor that writes nothing of inputs into its files: URLs may hold signatures, headers the hub's token."""

    def save_executor_as_json(self, indent: int = 4) -> None:
        """Nothing: datatrove would write each attribute of each step, and nobody reads it."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        logger.configure(patcher=_plain_traceback)
        return super()._run_for_rank(rank, local_rank, node_rank)


def _plain_traceback(record: dict[str, Any]) -> None:
    """Give a record of the log Python's own traceback: loguru's has the values of all variables in its lines."""
    if (error := record["exception"]) is not None:
        record["exception"] = None
        lines = traceback.format_exception(error.type, error.value, error.traceback)
        record["message"] += "\n" + "".join(lines)


class LocalTasks(WithoutSecrets, LocalPipelineExecutor):
    """datatrove's executor with another pool of processes."""

    def run(self) -> None:
        """Run the tasks that are not complete. Raises: what a task raised; BrokenProcessPool if one was killed."""
        global _executor
        ranks = self.get_incomplete_ranks()
        _executor = self  # the workers are forks, so nothing is pickled
        stage = Path(self.logging_dir.path).name
        done = self.tasks - len(ranks)
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(min(self.workers, len(ranks)), context, begin_worker)
        with progress_bar(total=self.tasks, initial=done, unit="task", desc=stage) as bar:
            try:
                for future in as_completed(submit(pool, _run_task, ranks)):
                    future.result()
                    bar.update()
            except BaseException:
                for worker in list((pool._processes or {}).values()):
                    worker.terminate()  # a task may take hours, and its work is discarded
                raise
            finally:
                pool.shutdown(cancel_futures=True)


_executor: LocalTasks  # of the stage that runs


def _run_task(rank: int) -> None:
    # A copy: the steps of a pipeline sum up datatrove's statistics over all tasks that they run. datatrove logs to a
    # file and to stderr, on which its traceback would come before our one line.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            copy.deepcopy(_executor)._run_for_rank(rank)
        finally:
            logger.remove()


class RayTasks(WithoutSecrets, RayPipelineExecutor):
    """datatrove's executor."""


class SlurmTasks(WithoutSecrets, SlurmPipelineExecutor):
    """datatrove's executor without the job that sums up its statistics: the report has its own counts."""

    def launch_merge_stats(self) -> None:
        pass


def run_stage(stage: CleaningStage, folders: WorkFolders, execution: Execution, job_name: str) -> None:
    """Run the tasks of a stage that are not complete.

    Raises: UserError of a task; DataError if a task failed otherwise or was killed, with the log that says why.
    """
    with _silent():
        executor = _make_executor(stage, folders, execution, job_name)
    if not executor.get_incomplete_ranks():
        return
    cause = ""
    with disk_errors(folders.root), _silent():
        try:
            executor.run()
        except (UserError, OSError):
            raise
        except BrokenProcessPool:
            raise DataError(
                f"a worker process of the stage {stage.name} was killed; if memory ran out, use fewer --workers or "
                f"more --tasks with --restart. {_AGAIN}"
            ) from None
        except subprocess.CalledProcessError as error:
            cause = f" (sbatch ended with status {error.returncode})"
        except Exception as error:
            cause = f" ({type(error).__name__}: {one_line(error)})"
    if incomplete := executor.get_incomplete_ranks():
        log = f"{folders.logs(stage.name)}/logs/task_{incomplete[0]:05d}.log"
        reason = _user_error_in(Path(log))
        if reason is not None:
            raise DataError(reason)
        where = f"the log of the first is {log}" if Path(log).exists() else "the first did not begin"
        raise DataError(
            f"the stage {stage.name} failed in {len(incomplete)} of {stage.tasks} tasks{cause}; {where}. {_AGAIN}"
        )


def _make_executor(
    stage: CleaningStage, folders: WorkFolders, execution: Execution, job_name: str
) -> PipelineExecutor:
    tasks, workers, logs = stage.tasks, min(execution.workers, stage.tasks), folders.logs(stage.name)
    Path(logs).mkdir(parents=True, exist_ok=True)
    if execution.executor == "local":
        return LocalTasks(stage.pipeline, tasks, workers, logs)
    cpus = execution.cpus_per_task or 1
    gigabytes = execution.gigabytes_per_cpu or 2
    if execution.executor == "ray":
        return RayTasks(
            stage.pipeline, tasks, workers, logging_dir=logs, cpus_per_task=cpus, mem_per_cpu_gb=gigabytes
        )
    return SlurmTasks(
        stage.pipeline,
        tasks,
        time=execution.time or "",
        partition=execution.partition or "",
        cpus_per_task=cpus,
        mem_per_cpu_gb=gigabytes,
        workers=workers,
        job_name=job_name,
        qos="",  # otherwise datatrove asks for one that a cluster may not have
        env_command=_environment_of_jobs(),
        sbatch_args={"wait": ""},  # sbatch returns when the stage is done
        logging_dir=logs,
        with_srun=False,
    )


def _environment_of_jobs() -> str:
    """Shell lines after which a job finds this Python, datatrove's program and this project."""
    programs = dict.fromkeys([os.path.dirname(sys.executable), sysconfig.get_path("scripts")])
    root = str(Path(data_utils.__file__).resolve().parents[1])
    path, python_path = shlex.quote(":".join(programs)), shlex.quote(root)
    return f"export PATH={path}:$PATH\nexport PYTHONPATH={python_path}:$PYTHONPATH"


def _user_error_in(log: Path) -> str | None:
    """The one line of a user's mistake that ended a task on another machine; None if it ended otherwise."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.findall(r"^data_utils[\w.]*\.\w+Error: (.*)$", text, re.M)
    return found[-1] if found else None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without datatrove's log on stderr; each task has its file."""
    logger.remove()
    try:
        yield
    finally:
        logger.remove()


def job_name_of(output: Path) -> str:
    """The name of a run's jobs, by which the same command finds them again."""
    return f"clean-{hashlib.sha256(str(output).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def executor_ready(execution: Execution, root: Path, job_name: str) -> Iterator[None]:
    """What an executor needs before its first stage, and after an error.

    Raises: ConfigError without SLURM's commands or a Ray cluster; DataError while jobs of an earlier command run.
    """
    if execution.executor == "ray":
        _connect_to_ray()
    if execution.executor != "slurm":
        yield
        return
    if not _PATH_OF_JOBS.fullmatch(str(root)):
        raise ConfigError(
            f"--output leads to {str(root)!r}, which stands unquoted in datatrove's job scripts; choose a path of "
            "letters, digits and . _ - /."
        )
    running = _slurm("squeue", "--noheader", "--me", f"--name={job_name}", "--format=%i").split()
    if running:
        raise DataError(
            f"jobs of an earlier command write the same output ({', '.join(running[:5])}); wait for them, or cancel "
            f"them: scancel --name={job_name}"
        )
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError):
            _slurm("scancel", "--me", f"--name={job_name}")
        raise


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(
            f"--executor slurm needs SLURM's commands, but there is no {command[0]}; run this on a login node, or "
            "choose --executor local."
        ) from None
    if done.returncode:
        raise DataError(f"{command[0]} failed: {one_line(done.stderr)}; check the cluster.")
    return done.stdout


def _connect_to_ray() -> None:
    """Raises ConfigError without a running cluster. None is started here: it would listen on the machine's address."""
    import ray

    root = str(Path(data_utils.__file__).resolve().parents[1])
    # Workers import what this process does.
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
    try:
        ray.init(
            "auto", ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )  # fmt: skip
    except ConnectionError as error:
        raise ConfigError(
            f"--executor ray needs a running Ray cluster ({one_line(error, 100)}); run ray start --head, or choose "
            "--executor local."
        ) from None
