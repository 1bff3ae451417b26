"""Weights & Biases and MLflow: they get the numbers of metrics.jsonl, where a configuration names them.

A service may take minutes to answer, or fail. So each has a thread, and training waits for it at its end only, for a
limited time. While a service fails, its records are kept; a warning names it, and training continues.

Only what a configuration names is sent: the settings of the run and its numbers. What the packages would send by
themselves (the code's version, the machine, the console, reports of their own use and errors) is switched off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_utils.common.errors import ConfigError
from data_utils.common.files import write_atomically
from data_utils.common.setting_files import one_line, shorten
from data_utils.common.settings import to_tree
from megatron_lite.config.sections import MlflowConfig, TrackersConfig, WandbConfig
from megatron_lite.config.tree import Config

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # longest wait for a service at the end of a run
MAX_KEPT = 100_000  # records kept for a service that fails; beyond that the oldest are lost
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # section -> what pip installs
# Turns off telemetry of the packages to their makers, unless the user has set these variables.
SILENCED = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


class TrackerError(ConfigError):
    """A tracker that cannot be used as configured."""

    only_here = True  # only the rank that reports to it finds it


@dataclass(frozen=True, slots=True)
class Record:
    step: int
    seconds: float  # since 1970
    numbers: dict[str, float]  # KIND/NAME -> finite number, as in TensorBoard; NAME may be loss/token


class Tracker(Protocol):
    """One service. Any method may raise anything, and is called again with the same record then."""

    name: str

    def send(self, record: Record) -> None: ...

    def finish(self, outcome: str) -> None:
        """Args: outcome: FINISHED, KILLED (stopped, to be continued) or FAILED."""


def require_trackers(trackers: TrackersConfig) -> None:
    """Raise TrackerError if a configured service cannot work here. Called before torch is imported."""
    for section, package in PACKAGES.items():
        if getattr(trackers, section) is not None and importlib.util.find_spec(section) is None:
            raise TrackerError(
                f"trackers.{section} is set, but the package {section} is not installed; pip install {package}, or set "
                f"trackers.{section}=null."
            )
    if trackers.wandb is None:
        return
    _silence()
    import wandb

    try:
        _wandb_settings(trackers.wandb)
    except ValueError as error:  # its records would all fail, after hours
        raise TrackerError(
            f"trackers.wandb is set, but wandb {wandb.__version__} lacks a setting that this program needs "
            f"({one_line(error)}); pip install 'wandb>=0.27', or set trackers.wandb=null."
        ) from None
    if trackers.wandb.mode == "online" and not wandb.api.api_key:
        # It would ask on a terminal, in the middle of the start.
        raise TrackerError(
            "trackers.wandb.mode is online, but there is no key of Weights & Biases; run `wandb login` once, set "
            "WANDB_API_KEY, or set trackers.wandb.mode=offline."
        )


def make_trackers(config: Config, continues: bool) -> list[Background]:
    """The configured services, of the main rank.

    Args: continues: the run continues from its own checkpoint, so its records belong to the run that each service has.
    """
    places: list[tuple[type[Wandb] | type[Mlflow], Any]] = [
        (Wandb, config.trackers.wandb),
        (Mlflow, config.trackers.mlflow),
    ]
    return [
        Background(cls(section, Path(config.run.directory), to_tree(config), continues))
        for cls, section in places
        if section is not None
    ]


class Background:
    """A tracker in a thread of its own, which begins with the first record."""

    def __init__(self, tracker: Tracker):
        self._tracker = tracker
        self._queue: queue.SimpleQueue[Record | str] = queue.SimpleQueue()
        # Records of a service that fails wait here, and are sent in order once it works again.
        self._kept: deque[Record] = deque(maxlen=MAX_KEPT)
        self._failing = False
        self._thread: threading.Thread | None = None

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Queue the numbers of a record."""
        numbers = numbers_of(kind, values)
        if not numbers:
            return
        if self._thread is None:
            # A thread, although W&B has a process of its own: MLflow's client retries for minutes within the
            # call. It is a daemon, so that a service that hangs cannot keep the run from ending.
            self._thread = threading.Thread(target=self._work, name=self._tracker.name, daemon=True)
            self._thread.start()
        self._queue.put(Record(step, time.time(), numbers))

    def close(self, outcome: str, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left and end the service's run, for at most `seconds`. A second call does nothing."""
        if self._thread is None:
            return
        self._queue.put(outcome)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("%s did not answer within %.0f seconds; what it lacks is in metrics.jsonl.",
                        self._tracker.name, seconds)  # fmt: skip
        self._thread = None

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, Record):
                self._kept.append(item)
            self._try(self._send_kept)
            if not isinstance(item, Record):
                break
        if self._kept:
            log.warning("%s lacks %d records of this run; metrics.jsonl has them.",
                        self._tracker.name, len(self._kept))  # fmt: skip
            with contextlib.suppress(Exception):  # it fails, as was said
                self._tracker.finish(item)
        else:
            self._try(lambda: self._tracker.finish(item))

    def _send_kept(self) -> None:
        while self._kept:
            self._tracker.send(self._kept[0])
            # After the call, so that a record that fails is sent again.
            self._kept.popleft()

    def _try(self, call: Any) -> None:
        """Call, and report the first failure and the end of failing."""
        try:
            call()
        except Exception as error:  # of a package or its network: of any type
            if not self._failing:
                reason = one_line(error)
                log.warning("%s failed: %s; training continues, and the records are kept for it.",
                            self._tracker.name, reason)  # fmt: skip
            self._failing = True
            return
        if self._failing:
            log.warning("%s works again.", self._tracker.name)
        self._failing = False


def numbers_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record under their names in a service; metrics.jsonl has null for the others."""
    numbers = {name: value for name, value in values.items()
               if isinstance(value, (int, float)) and not isinstance(value, bool)}  # fmt: skip
    return {f"{kind}/{name}": float(value) for name, value in numbers.items() if math.isfinite(value)}


def _silence() -> None:
    """Before a package is imported: keep it from reporting to its maker."""
    for name, value in SILENCED.items():
        os.environ.setdefault(name, value)


class RunId:
    """The id of the run in a service, in RUN/trackers/SERVICE.json."""

    def __init__(self, directory: Path, service: str, place: Sequence[str | None], continues: bool):
        """Args: place: where in the service; the id holds nowhere else."""
        self._path = directory / "trackers" / f"{service}.json"
        self._place = list(place)
        self.value: str | None = None
        if continues:
            # Absent or damaged: a new run.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stored = json.loads(self._path.read_text(encoding="utf-8"))
                self.value = str(stored["id"]) if stored["place"] == self._place else None

    def store(self, value: str) -> None:
        self.value = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps({"id": value, "place": self._place}).encode())


def _wandb_settings(config: WandbConfig) -> Any:
    """Raises ValueError where the installed release lacks one."""
    import wandb

    return wandb.Settings(
        mode="online" if config.mode == "online" else "offline", console="off", silent=True,
        save_code=False, disable_code=True, disable_git=True, x_disable_machine_info=True,
        x_disable_meta=True, x_disable_stats=True, x_save_requirements=False, finish_timeout=CLOSE_SECONDS / 2,
    )  # fmt: skip


class Wandb:
    name = "Weights & Biases"

    def __init__(self, config: WandbConfig, directory: Path, settings: Mapping[str, Any], continues: bool):
        """Args: settings: of the run, as a tree."""
        self._config, self._directory, self._settings = config, directory, settings
        self._id = RunId(directory, "wandb", [config.entity, config.project], continues)
        self._run: Any = None

    def send(self, record: Record) -> None:
        if self._run is None:
            self._run = self._open()
        # `step` is a value, not W&B's own step, which may not decrease: steps are repeated after a restart.
        self._run.log({**record.numbers, "step": record.step})

    def _open(self) -> Any:
        _silence()
        import wandb

        if self._id.value is None:
            # Before the service hears of the run: a start that dies in between continues the same one.
            self._id.store(secrets.token_hex(4))
        config = self._config
        run = wandb.init(
            project=config.project, entity=config.entity, name=config.name or self._directory.resolve().name,
            id=self._id.value,
            resume="allow"
            if config.mode == "online"
            else None,  # offline `wandb sync` joins the parts by their id
            dir=str(self._directory),
            config=dict(self._settings),
            allow_val_change=True,
            settings=_wandb_settings(config),
        )  # fmt: skip
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def finish(self, outcome: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(outcome == "FAILED"))


class Mlflow:
    name = "MLflow"

    def __init__(self, config: MlflowConfig, directory: Path, settings: Mapping[str, Any], continues: bool):
        """Args: settings: of the run, as a tree."""
        self._config, self._settings = config, settings
        self._title = config.name or directory.resolve().name
        self._id = RunId(directory, "mlflow", [config.uri, config.experiment], continues)
        self._client: Any = None

    def send(self, record: Record) -> None:
        if self._client is None:
            self._client = self._open()
        from mlflow.entities import Metric

        when = round(1000 * record.seconds)
        metrics = [
            Metric(_file_name(name), value, when, record.step) for name, value in record.numbers.items()
        ]
        for start in range(0, len(metrics), 1000):  # MLflow takes no more at once
            self._client.log_batch(self._id.value, metrics=metrics[start : start + 1000])

    def _open(self) -> Any:
        _silence()
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would report each of the client's retries
        client = MlflowClient(tracking_uri=self._config.uri)
        if self._id.value is not None:
            client.update_run(self._id.value, status="RUNNING")
            return client
        experiment = client.get_experiment_by_name(self._config.experiment)
        number = (
            client.create_experiment(self._config.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        created = client.create_run(number, run_name=self._title).info.run_id
        params = [Param(name, shorten(str(value), 500)) for name, value in _leaves(self._settings)]
        for start in range(0, len(params), 100):  # MLflow takes no more at once
            client.log_batch(created, params=params[start : start + 100])
        self._id.store(created)
        return client

    def finish(self, outcome: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id.value, outcome)


def _file_name(name: str) -> str:
    """train/loss.token for train/loss/token: MLflow's stores make files of names, and train/loss is one already."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.replace('/', '.')}"


def _leaves(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every setting."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        found += _leaves(value, f"{path}{key}.") if nested else [(f"{path}{key}", value)]
    return found
