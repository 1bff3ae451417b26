"""`python pretrain_glm.py` as a user meets it: help, printed configuration, and mistakes in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import reduce

import pytest
import yaml
from support.commands import assert_refused, forked, python
from support.distributed import run_ranks
from support.project import ROOT
from support.training.training import fit

from data_utils.common.settings import build, merge, parse_override, setting_names, to_tree
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.tree import Config, load_config
from megatron_lite.runtime.finished_runs import nothing_to_do
from megatron_lite.runtime.run_state import Condition, RunState

BASE = str(ROOT / "configs" / "glm-base.yaml")
ENTRY = "pretrain_glm.py"


def test_help_lists_every_setting():
    result = forked(ENTRY, "--help", "all")
    assert result.returncode == 0 and result.stderr == ""
    alike = (
        "decoder.",
        "decoder_tokenizer.",
    )  # their sections are like `model` and `tokenizer`, and one line each
    for name in setting_names(Config):
        assert name.startswith(alike) or f"  {name} (" in result.stdout
    assert "  decoder (section like model" in result.stdout


def test_help_fits_a_screen_and_explains_a_section():
    """More than 600 lines of settings would hide the options."""
    short = forked(ENTRY, "--help").stdout
    assert "--dry-run PROCESSES" in short and short.count("\n") < 50
    for name in {name.partition(".")[0] for name in setting_names(Config)}:
        assert re.search(rf"\b{name}\b", short), name
    found = forked(ENTRY, "--help", "batch").stdout
    assert "  batch.micro_batch_size (int" in found and "optimizer." not in found
    assert_refused(forked(ENTRY, "--help", "optimiser"), "the nearest is optimizer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--print-config", "--dry-run", "8"], "--print-config and --dry-run exclude each other"),
        (
            ["masked_lm.masked_ratio=0.2", "--print-config"],
            "masked_lm is set, but the run trains blank_infilling",
        ),
        (["training.eval_interval=5"], "training.eval_interval is set, but data.validation is not"),
        (["training.eval_fillings=1"], "training.eval_fillings is set, but data.validation is not"),
    ],
)
def test_what_nothing_would_read_is_refused(arguments, message):
    assert_refused(forked(ENTRY, "--config", BASE, "data.train=[{prefix: a}]", *arguments), message)


def test_the_printed_configuration_is_the_resolved_one(tmp_path):
    overrides = [
        "batch.micro_batch_size=4",
        "data.train=[{prefix: a}, {prefix: b, weight: 2}]",
        "optimizer.lr=1e-5",
    ]
    printed = forked(ENTRY, "--config", BASE, overrides[0], "--print-config", *overrides[1:])
    assert printed.returncode == 0 and printed.stderr == ""
    copy = tmp_path / "copy.yaml"
    copy.write_text(printed.stdout)
    assert load_config([copy]) == load_config([BASE], overrides)
    assert set(yaml.safe_load(printed.stdout)) == set(to_tree(load_config([BASE])))


def test_a_deepspeed_file_configures_a_run(tmp_path):
    """The file of GLM's own scripts for its large model, and an override: two processes, one pass."""
    given = {
        "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1, "steps_per_print": 100,
        "gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-6}},
        "activation_checkpointing": {"partition_activations": False}, "wall_clock_breakdown": False,
    }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    arguments = ["--config", BASE, "--deepspeed_config", str(path), "--print-config"]
    printed = forked(ENTRY, *arguments, "optimizer.beta1=0.9", WORLD_SIZE="2", RANK="0")
    assert printed.returncode == 0, printed.stderr
    first, second, *_ = printed.stdout.splitlines()
    assert first.startswith("# ") and "training.precision='fp16'" in first and "steps_per_print" in second
    made = yaml.safe_load(printed.stdout)
    assert made["batch"]["global_batch_size"] == 32 and made["batch"]["micro_batch_size"] == 16
    assert made["training"]["precision"] == "fp16" and made["optimizer"]["lr"] == 2e-4
    assert_refused(
        forked(ENTRY, *arguments, "optimizer.lr=1"), "optimizer.lr=1 contradicts deepspeed.optimizer"
    )


def test_printing_and_refusing_do_not_load_torch():
    code = (
        "import sys, pretrain_glm; sys.argv = ['pretrain_glm.py', '--config', {!r}, '--print-config']\n"
        "pretrain_glm.main(); sys.exit(3 * ('torch' in sys.modules or 'deepspeed' in sys.modules))"
    )
    result = python("-c", code.format(BASE))
    assert result.returncode == 0, result.stderr


def test_the_launchers_arguments_are_accepted():
    result = forked(ENTRY, "--local_rank=0", "--deepspeed", "--config", BASE, "--print-config")
    assert result.returncode == 0 and result.stderr == ""


# Arguments after `--config BASE`, environment, message.
MISTAKES = {
    "typo": (["optimizer.lrr=1"], {}, "setting optimizer.lrr; the nearest valid key is optimizer.lr."),
    "other section": (["training.lr=1"], {}, "setting training.lr; the nearest valid key is optimizer.lr."),
    "no value": (["optimizer.lr"], {}, "'optimizer.lr' must have the form section.key=value"),
    "wrong type": (["training.steps=many"], {}, "training.steps is 'many'; it must be a valid integer"),
    "dashes": (["--training.steps=3"], {}, "write settings as section.key=value, without dashes"),
    "rule": (["training.precision=fp8"], {}, "training.precision is 'fp8'; it must be one of"),
    "second file": (
        ["--config", "absent.yaml"],
        {},
        "absent.yaml: No such file or directory; check the path",
    ),
    "a file that comes with the project": (
        ["--config", "glm-base.yaml"],
        {},
        f"glm-base.yaml: No such file or directory; there is {ROOT}/configs/glm-base.yaml.",
    ),
    "a task's": (["--config", "boolq"], {}, f"there is {ROOT}/configs/tasks/boolq.yaml."),
    "world size": ([], {"WORLD_SIZE": "3", "RANK": "0"}, "data-parallel ranks (3) = 48"),
    "environment": ([], {"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE is 'two'"),
    "no tokenizer": (["tokenizer.path=absent"], {}, "absent does not exist; set path"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name):
    arguments, variables, message = MISTAKES[name]
    assert_refused(forked(ENTRY, "--config", BASE, *arguments, **variables), message)


def test_a_configuration_must_be_given():
    assert_refused(forked(ENTRY, "training.steps=3"), "no configuration given; pass --config FILE")


def test_only_the_first_rank_of_a_node_reports_a_mistake():
    result = forked(ENTRY, "--config", "absent.yaml", LOCAL_RANK="1")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_a_reader_that_leaves_early_is_no_error():
    with subprocess.Popen(
        [sys.executable, "pretrain_glm.py", "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


FINISHED = {
    "finished": ([], 6, 6, "training.steps is 6; raise training.steps to train on"),
    "fewer steps asked for": (["training.steps=4"], 6, 6, "is of step 6, and training.steps is 4; raise"),
    "planned stop": (["training.stop_after_step=5"], 5, None, "training.stop_after_step is 5; raise"),
    "steps are left": (["training.steps=7"], 6, 6, None),
    "the last evaluation is missing": ([], 6, 5, None),
    "no validation": (["data.validation=[]"], 6, None, "nothing to do"),
    "no checkpoint": ([], None, None, None),
    "a start that may not continue": (["checkpoint.resume=never"], 6, 6, None),
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_says_that_there_is_nothing_to_do(name, settings, tmp_path):
    overrides, saved, validated, message = FINISHED[name]
    config = build(Config, reduce(merge, map(parse_override, overrides), settings))
    newest = None
    if saved is not None:
        state = TrainerState.at_step_0(to_tree(config))
        newest = Checkpoint(tmp_path, saved, {}, (), {}, {}, state.to_json(), None)
    (tmp_path / "run").mkdir()
    if validated:
        (tmp_path / "run/metrics.jsonl").write_text(
            json.dumps({"kind": "validation", "step": validated}) + "\n"
        )
    reason = nothing_to_do(config, RunState(tmp_path / "run", Condition.SAVED, newest=newest))
    assert (reason is None) == (message is None) and (message is None or message in reason)


def test_a_finished_run_ends_in_one_line_before_libraries_are_loaded(settings, tmp_path):
    settings = merge(settings, {"training": {"steps": 1}, "schedule": {"warmup_steps": 0}})
    run_ranks(fit, 1, settings)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(settings))
    code = "import sys, pretrain_glm; status = pretrain_glm.main(); sys.exit(status or 3 * ('torch' in sys.modules))"
    result = python("-c", code, "--config", str(again))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert result.stdout.count("\n") == 1 and "nothing to do: the newest checkpoint of" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_notes_on_the_configuration_are_logged_once(settings, tmp_path):
    tree = merge(settings, {"training": {"steps": 20}, "schedule": {"warmup_steps": 8}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    result = forked("pretrain_glm.py", "--config", tmp_path / "config.yaml", "training.steps=1")
    assert result.returncode == 0, result.stderr
    assert (result.stdout + result.stderr).count("schedule.warmup_steps is scaled to 0") == 1
