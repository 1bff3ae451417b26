"""Records with the names of an earlier version open; a file or command line that has them is told the present ones."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import yaml
from support.configs import TINY

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.settings import build, merge, to_tree
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.task_head import TaskHeadConfig
from megatron_lite.config.tree import Config, load_config
from megatron_lite.finetune.setup import load_tree
from megatron_lite.hf.common.recipe import read_recipe

HEAD = {
    "type": "classes", "classes": 3, "heads": [], "pooler": True, "pooler_kind": "gelu", "mix": True, "pool": "token",
    "dropout": 0.2,
}  # fmt: skip


def former(model):
    """A section with the head's options beside the model's, as they were recorded."""
    options = {f"task_{name}": value for name, value in model["task_head"].items() if name != "type"}
    return {**model, **options, "task_head": model["task_head"]["type"]}


@pytest.fixture
def recorded():
    """The configuration of a run, and the record of it in former names."""
    task = {"name": "own", "kind": "classification", "reader": "jsonl", "labels": ["a", "b", "c"]}
    config = build(Config, merge(TINY, {"model": {"task_head": HEAD}, "task": task}))
    tree = to_tree(config)
    return config, {**tree, "model": former(tree["model"])}


def test_a_checkpoint_opens_under_the_present_names(recorded, tmp_path):
    assert HEAD.keys() == {field.name for field in fields(TaskHeadConfig)}
    config, record = recorded
    state = TrainerState.at_step_0(record).to_json()
    assert build(Config, TrainerState.from_json(state, tmp_path).config) == config


def test_an_export_opens_under_the_present_names(recorded, tmp_path):
    _, record = recorded
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    dropped = {"task_heads", "task_rows"}  # text and rows are no part of an export
    head = {name: value for name, value in record["model"].items() if name.startswith("task_")}
    described = {"model": sizes | {name: head[name] for name in head.keys() - dropped}}
    text = json.dumps(
        {"format": "megatron-lite-export", "config": described, "tokenizer": {"kind": "hf_json"}}
    )
    (tmp_path / "training.json").write_text(text)
    found = read_recipe(tmp_path).config["model"]["task_head"]
    assert {**HEAD, **found} == HEAD and found.keys() == HEAD.keys() - {"heads"}


def test_a_setting_of_tasks_that_is_gone_is_left_out_where_it_says_nothing(recorded, tmp_path):
    config, record = recorded
    several = build(Config, merge(record | {"model": to_tree(config)["model"]}, {"tasks": [record["task"]]}))
    record = to_tree(several)
    for task in (record["task"], *record["tasks"]):
        task["bidirectional"] = True
    assert (
        build(Config, TrainerState.from_json(TrainerState.at_step_0(record).to_json(), tmp_path).config)
        == several
    )
    record["tasks"][0]["bidirectional"] = False
    with pytest.raises(CheckpointError, match=r"task.bidirectional to False.*harness.py --left-to-right"):
        TrainerState.from_json(TrainerState.at_step_0(record).to_json(), tmp_path)


def test_a_file_with_a_former_name_is_told_the_present_one(recorded, tmp_path):
    (tmp_path / "base.yaml").write_text(
        yaml.safe_dump({**TINY, "model": {**TINY["model"], "task_dropout": 0.0}})
    )
    with pytest.raises(
        ConfigError, match=r"base.yaml:\d+: unknown setting model.task_dropout; it is now model.task_"
    ):
        load_config([tmp_path / "base.yaml"])
    with pytest.raises(
        ConfigError, match=r"unknown setting model.task_head; it is now model.task_head.type\."
    ) as error:
        load_tree([], None, ["model.task_head=tags", "model.task_mix=true"], to_tree(recorded[0]))
    assert "model.task_mix; it is now model.task_head.mix." in str(error.value)
