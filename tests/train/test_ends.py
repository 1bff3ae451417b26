"""How a run ends, by the table of docs/cluster.md: exit status and lines that a user reads, in each precision."""

import os
import re
import signal

import pytest
import yaml
from support.commands import Forked, forked
from support.distributed import run_ranks
from support.project import ROOT
from support.training.training import make_trainer
from support.waiting import wait_until

from data_utils.common.errors import ExitStatus, TrainingError
from data_utils.common.settings import merge
from megatron_lite.config.sections import ParallelConfig

PRECISIONS = ("bf16", "fp16", "fp32")
ENDS = {
    "finished": (["training.steps=3"], ExitStatus.FINISHED),
    "stopped after a step": (["training.stop_after_step=2"], ExitStatus.FINISHED),
    "refused": (["training.steps=0"], ExitStatus.USER_ERROR),
    "diverged": (
        ["optimizer.lr=1e30", "optimizer.clip_grad_norm=0", "training.steps=80"],
        ExitStatus.UNSOUND,
    ),
    "not finite from the first step on": (["model.init_std=1e30", "training.steps=80"], ExitStatus.UNSOUND),
}


@pytest.fixture
def command(settings, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return ["pretrain_glm.py", "--config", tmp_path / "config.yaml"]


@pytest.mark.parametrize(
    "precision, end",
    [  # loss scaling is fp16's alone: a refusal and a planned stop are the same in each
        pytest.param(precision, end, marks=[pytest.mark.slow] * (precision != "fp16"))
        for precision in PRECISIONS
        for i, end in enumerate(ENDS)
    ],
)
def test_each_end_has_its_status_in_each_precision(command, tmp_path, end, precision):
    arguments, status = ENDS[end]
    said = tmp_path / "status"
    done = forked(*command, *arguments, f"training.precision={precision}", GLM_STATUS_FILE=str(said))
    assert done.returncode == status, done.stderr
    assert said.read_text() == f"{int(status)}\n"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == (status != 0) and "Traceback" not in done.stderr
    if status == ExitStatus.UNSOUND:
        assert "gradients were not finite in 20 consecutive steps" in errors[0]
        assert ("Set training.precision=bf16" in errors[0]) == (precision == "fp16")


@pytest.mark.parametrize(
    "precision", [pytest.param(p, marks=[pytest.mark.slow] * (p != "fp16")) for p in PRECISIONS]
)
@pytest.mark.parametrize("request_", ["signal", "STOP"])
def test_a_stopped_run_has_its_status_in_each_precision(command, tmp_path, request_, precision):
    rank = Forked(*command, "training.steps=1000000", f"training.precision={precision}")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"train"' in metrics.read_text(), what="the run trains")
    if request_ == "signal":
        os.kill(rank.pid, signal.SIGUSR1)
    else:
        (tmp_path / "run/STOP").touch()
    done = rank.result()
    assert done.returncode == (ExitStatus.STOPPED if request_ == "signal" else ExitStatus.HALTED), done.stderr
    assert "saved " in done.stdout and "Traceback" not in done.stderr


def diverge(context, tree):
    with pytest.raises(TrainingError, match="not finite in 20 consecutive steps") as caught:
        make_trainer(context, tree).fit()
    return caught.value.status


@pytest.mark.parametrize(
    "parallel",
    [
        {"zero_stage": 1},
        *(pytest.param({"zero_stage": stage}, marks=pytest.mark.slow) for stage in (2, 3)),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda parallel: " ".join(f"{key}={value}" for key, value in parallel.items()),
)
def test_every_engine_ends_a_diverged_run_in_fp16_alike(settings, parallel):
    """The loss scale reaches its minimum, where DeepSpeed's scaler raises, before the limit of skipped steps.

    Pipelines refuse fp16.
    """
    more = {
        "training": {"precision": "fp16", "steps": 80},
        "optimizer": {"lr": 1e9, "clip_grad_norm": 0.0},
        "parallel": parallel,
    }
    statuses = run_ranks(diverge, 2, merge(settings, more), parallel=ParallelConfig(**parallel))
    assert set(statuses) == {ExitStatus.UNSOUND}


def test_the_table_of_statuses_has_all_that_a_run_ends_with():
    text = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    table = text.partition("## Exit statuses\n")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)] == list(ExitStatus)
