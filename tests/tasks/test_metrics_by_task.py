import pytest

from data_utils.common.errors import ConfigError
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.metrics import require_metrics
from data_utils.tasks.metrics.metrics_by_task import (
    METRICS_BY_KIND,
    METRICS_BY_TASK,
    Metrics,
    plain_name,
    task_metrics,
)


def task(name="mine", kind="cloze", **more):
    return TaskConfig(name=name, kind=kind, reader="jsonl", **more)


def test_tables_hold_known_names_only():
    assert all(plain_name(name) == name for name in METRICS_BY_TASK)
    for metrics in [*METRICS_BY_TASK.values(), *METRICS_BY_KIND.values()]:
        require_metrics(metrics.names)
        assert set(metrics.compared) <= set(metrics.names)


def test_a_task_has_what_is_said_then_its_own_then_its_kinds():
    assert task_metrics(task("AX-b")).names == task_metrics(task("ax_b")).names == ("matthews",)
    assert task_metrics(task("SST-2", "classification")).names == ("accuracy",)
    assert task_metrics(task("mine", "tagging")).names == ("entity_f1",)
    assert task_metrics(task("CoLA", metrics=("accuracy", "f1"))).names == ("accuracy", "f1")
    with pytest.raises(ConfigError, match="unknown metric 'matthew'; the nearest is matthews"):
        task_metrics(task(metrics=("matthew",)))


def test_the_higher_score_is_the_better_one():
    squad = task_metrics(task("SQuAD", "spans"))
    assert squad.score({"answer_em": 0.1, "answer_f1": 0.7}) == 0.7
    assert task_metrics(task("cb")).score({"accuracy": 0.8, "macro_f1": 0.6}) == pytest.approx(0.7)
    assert Metrics(("loss",)).score({"loss": 30.0}) == -30.0
