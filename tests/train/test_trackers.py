"""Trackers hold the numbers of metrics.jsonl, of one run over all its starts; a failing one costs no training."""

import importlib.util
import json
import math
import os
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pydantic
import pytest
import yaml
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit
from support.waiting import HANG_SECONDS

from data_utils.common.settings import build
from megatron_lite.config.tree import Config
from megatron_lite.telemetry.records import read_metrics
from megatron_lite.telemetry.trackers import Background, TrackerError, make_trackers, require_trackers
from megatron_lite.telemetry.writer import Metrics


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Nothing of this machine's accounts; no request leaves it."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # a server needs more packages than the tests should
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # its service and its thread: later tests fork


def configured(corpus, directory, **trackers):
    return build(Config, {**small_run(corpus, directory), "trackers": trackers})


def both(directory):
    return {"wandb": {"project": "p", "mode": "offline"}, "mlflow": {"uri": str(directory / "mlruns")}}


def expected(run):
    """{(KIND/NAME, step): number} of metrics.jsonl."""
    return {
        (f"{record['kind']}/{name}", record["step"]): value
        for record in read_metrics(run)
        for name, value in record.items()
        if isinstance(value, (int, float)) and name not in ("step", "time")
    }


def in_wandb(run):
    """What the files of W&B hold, and the ids of their runs."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found, ids = {}, []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ids += [record.run.run_id] if record.HasField("run") else []
            row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found |= {(key, row["step"]): value for key, value in row.items() if "/" in key}
    return found, ids


def in_mlflow(run):
    """What MLflow's store holds, and the state of its runs."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=str(run / "mlruns"))
    (experiment,) = [e for e in client.search_experiments() if e.name == "megatron-lite-glm"]
    runs = client.search_runs([experiment.experiment_id])
    found = {
        (name, point.step): point.value
        for each in runs
        for name in each.data.metrics
        for point in client.get_metric_history(each.info.run_id, name)
    }
    return found, runs


def test_they_hold_what_metrics_jsonl_holds_and_a_resumed_run_is_the_same_run(corpus, tmp_path):
    run = tmp_path / "run"
    tree = {**small_run(corpus, run), "trackers": both(run)}
    tree["training"] |= {"eval_interval": 2, "gradient_norm_interval": 3, "stop_after_step": 3}
    run_ranks(fit, 1, tree)
    assert [each.info.status for each in in_mlflow(run)[1]] == ["KILLED"]
    tree["training"]["stop_after_step"] = None
    run_ranks(fit, 1, tree)
    records = expected(run)
    assert len(records) > 100 and {kind.partition("/")[0] for kind, _ in records} == {
        "start", "train", "validation", "checkpoint", "gradient_norms",
    }  # fmt: skip
    sent, ids = in_wandb(run)
    assert sent == records and len(ids) == 2 and len(set(ids)) == 1
    sent, runs = in_mlflow(run)
    assert sent == {(name.replace("loss/", "loss."), step): value for (name, step), value in records.items()}
    assert [each.info.status for each in runs] == ["FINISHED"] and runs[0].info.run_name == "run"
    assert runs[0].data.params["optimizer.lr"] == "0.003"


def listening():
    """The sockets of this process and its children that wait for connections."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {connection.laddr for connection in connections if connection.status == "LISTEN"}


def test_nothing_listens_on_a_network_and_the_machine_is_not_described(corpus, tmp_path):
    of_others = listening()  # an earlier test of this process may have left one open
    config = configured(corpus, tmp_path, **both(tmp_path))
    metrics = Metrics(tmp_path, True, tensorboard=False, trackers=make_trackers(config, continues=False))
    metrics.write("train", 1, {"loss": 2.0, "grad_norm": math.nan}, "line")
    written = threading.Event()
    tracker = metrics._trackers[0]._tracker
    send, tracker.send = tracker.send, lambda record: (send(record), written.set())
    metrics.write("train", 2, {"loss": 1.0}, "line")
    assert written.wait(HANG_SECONDS)
    assert any("wandb" in process.name() for process in psutil.Process().children(recursive=True))
    opened = listening() - of_others
    metrics.close("FINISHED")
    assert opened == set()
    assert in_wandb(tmp_path)[0] == in_mlflow(tmp_path)[0] == {("train/loss", 1): 2.0, ("train/loss", 2): 1.0}
    stored = {path.name for path in tmp_path.glob("wandb/offline-run-*/files/**/*") if path.is_file()}
    assert stored <= {"config.yaml", "wandb-summary.json"}  # neither the machine, nor its packages, nor code


def test_a_run_that_begins_again_is_a_new_run(corpus, tmp_path):
    config = configured(corpus, tmp_path, mlflow={"uri": str(tmp_path / "mlruns")})
    for continues in (False, True, False):
        (tracker,) = make_trackers(config, continues)
        tracker.write("train", 1, {"loss": 1.0})
        tracker.close("FAILED")
    assert [run.info.status for run in in_mlflow(tmp_path)[1]] == ["FAILED", "FAILED"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"id": "x"}'])
def test_a_damaged_id_makes_a_new_run(corpus, tmp_path, damage):
    config = configured(corpus, tmp_path, mlflow={"uri": str(tmp_path / "mlruns")})
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers/mlflow.json").write_text(damage)
    (tracker,) = make_trackers(config, continues=True)
    assert tracker._tracker._id.value is None


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_refused_by_name(corpus, tmp_path, package, monkeypatch):
    config = configured(corpus, tmp_path, **{package: both(tmp_path)[package]})
    require_trackers(config.trackers)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(TrackerError, match=f"package {package} is not installed; pip install {package}"):
        require_trackers(config.trackers)


def test_an_older_wandb_is_refused_before_the_run(corpus, tmp_path, monkeypatch):
    class Settings(pydantic.BaseModel, extra="allow"):
        @pydantic.model_validator(mode="before")
        @classmethod
        def _without_finish_timeout(cls, values):  # as before 0.27
            if "finish_timeout" in values:
                raise ValueError("finish_timeout: Extra inputs are not permitted")
            return values

    config = configured(corpus, tmp_path, wandb=both(tmp_path)["wandb"])
    monkeypatch.setattr("wandb.Settings", Settings)
    with pytest.raises(TrackerError, match=r"lacks a setting.*finish_timeout.*pip install 'wandb>=0.27'"):
        require_trackers(config.trackers)


def test_a_missing_key_of_wandb_is_refused_without_asking(settings, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    refused = forked("pretrain_glm.py", "--config", config, "trackers.wandb.project=p")
    assert_refused(refused, "run `wandb login` once, set WANDB_API_KEY, or set trackers.wandb.mode=offline.")
    assert not Path(settings["run"]["directory"]).exists()


class StandIn:
    """A service that fails for some calls."""

    name = "The service"

    def __init__(self, fails):
        self.fails, self.sent, self.ended = deque(fails), [], None
        self.called = threading.Semaphore(0)

    def send(self, record):
        fails = bool(self.fails) and self.fails.popleft()
        self.called.release()
        if fails:
            raise ConnectionError("no route\nto host")
        self.sent.append(record.step)

    def finish(self, outcome):
        self.ended = outcome


def test_records_are_kept_while_a_service_fails(caplog):
    service = StandIn([False, True, True])
    tracker = Background(service)
    for step in range(1, 4):
        tracker.write("train", step, {"loss": 1.0})
        assert service.called.acquire()
    tracker.write("event", 4, {"event": "text is no number"})
    tracker.write("train", 4, {"loss": 1.0})
    tracker.close("FINISHED")
    tracker.close("FINISHED")
    assert service.sent == [1, 2, 3, 4] and service.ended == "FINISHED"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "The service failed: no route to host; training continues, and the records are kept for it.",
        "The service works again.",
    ]


def test_a_service_that_hangs_does_not_hold_the_end(caplog):
    go_on = threading.Event()
    service = StandIn([])
    service.send = lambda record: go_on.wait(HANG_SECONDS)
    tracker = Background(service)
    tracker.write("train", 1, {"loss": 1.0})
    tracker.close("FINISHED", seconds=0.05)
    go_on.set()
    assert "The service did not answer within" in caplog.text


class MlflowServer:
    """The part of MLflow's REST interface that a run uses, on localhost."""

    def __init__(self, port=0):
        self.points = points = []
        answers = {
            "get-by-name": {"experiment": {"experiment_id": "1", "name": "megatron-lite-glm"}},
            "create": {"run": {"info": {"run_id": "r", "run_uuid": "r"}, "data": {}}},
        }

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path.endswith("log-batch"):
                    points.extend(
                        (m["key"], m["step"], m["value"]) for m in json.loads(body).get("metrics", [])
                    )
                content = json.dumps(answers.get(self.path.partition("?")[0].rpartition("/")[2], {})).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", "application/json")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


def test_a_network_that_goes_down_in_mid_run_costs_a_warning(corpus, tmp_path, monkeypatch, caplog):
    """A real client; the server goes and does not come back."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    server = MlflowServer()
    uri = f"http://127.0.0.1:{server.port}"
    trackers = make_trackers(configured(corpus, tmp_path, mlflow={"uri": uri}), continues=False)
    service = trackers[0]._tracker
    sent = threading.Semaphore(0)
    send = service.send

    def watched(record):
        try:
            send(record)
        finally:
            sent.release()

    service.send = watched
    metrics = Metrics(tmp_path, True, tensorboard=False, trackers=trackers)
    for step in range(1, 4):
        metrics.write("train", step, {"loss": 1.0 / step}, "line")
        assert sent.acquire()
        if step == 1:
            server.stop()
    metrics.close("FINISHED")
    assert server.points == [("train/loss", 1, 1.0)]
    assert [
        json.loads(line)["step"] for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]
    warnings = [r.message for r in caplog.records if r.name.endswith("trackers")]
    assert len(warnings) == 2 and warnings[0].startswith("MLflow failed: ")
    assert warnings[1] == "MLflow lacks 2 records of this run; metrics.jsonl has them."
