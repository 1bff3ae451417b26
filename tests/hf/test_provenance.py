"""The card of an export tells where its weights come from, for each way of making a run."""

from __future__ import annotations

import json
import shutil

import torch
from support.hf.published_files import write_directory

from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build, merge
from megatron_lite.checkpoint.manifest import checkpoint_name, write_manifest
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.transformer.flops import parameter_shapes

TREE = {"training": {"steps": 6, "precision": "fp32"}, "data": {"sequence_length": 60}}
HEAD = {
    "model": {"task_head": {"type": "classes", "classes": 2}},
    "task": {
        "name": "votes", "kind": "classification", "reader": "jsonl", "labels": ["no", "yes"], "sequence_length": 24,
    },
}  # fmt: skip


def trained(run, of, changes):
    """A run that was trained for a step, with the configuration of another run and these changes."""
    config = build(Config, merge(load_yaml(of / "config.yaml"), changes))
    written, path = run / "written", run / "checkpoints" / checkpoint_name(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(config.model)
    write_training_checkpoint(written, Weights(shapes, lambda name: torch.ones(shapes[name])), config)
    written.rename(path)
    manifest = json.loads((path / "manifest.json").read_text())
    state = manifest["state"] | {"step": 1, "consumed_samples": 16}
    write_manifest(path, manifest | {"step": 1, "state": state})
    return run


def from_run(run):
    return {"checkpoint": {"initialize_from": str(run)}}


def test_each_way_of_making_a_run(tmp_path):
    write_directory("bert", tmp_path / "bert")
    first = tmp_path / "imported"
    import_directory(tmp_path / "bert", first, TREE | {"objectives": {"masked_lm": 1}}, verify=False)
    (first / "source.json").write_text(json.dumps({"repository": "org/bert", "commit": "c0ffee"}))
    scratch = trained(tmp_path / "scratch", first, {})
    further = trained(shutil.copytree(first, tmp_path / "further"), first, {})
    branch = trained(tmp_path / "branch", first, from_run(further))
    tuned = trained(tmp_path / "tuned", first, merge(HEAD, from_run(first)))
    twice = trained(tmp_path / "twice", first, merge(HEAD, from_run(branch)))
    own = trained(tmp_path / "own", first, merge(HEAD, from_run(scratch)))
    lora = trained(tmp_path / "lora", first, merge({"model": {"lora": {"rank": 2}}}, from_run(scratch)))
    lost = trained(tmp_path / "lost", first, from_run(tmp_path / "moved/checkpoints/step_00000001"))
    imported = "Its weights were imported from `org/bert` (commit c0ffee), and"
    task = "the task `votes` (classification, labels no, yes)"
    expected = {
        first: f"{imported} were not trained further.",
        scratch: "It was trained from initial weights, on masked_lm.",
        further: f"{imported} trained further on masked_lm.",
        branch: f"{imported} trained further on masked_lm, then on masked_lm.",
        tuned: f"{imported} trained further on {task}.",
        twice: f"{imported} trained further on masked_lm, then on masked_lm, then on {task}.",
        own: f"It was trained from initial weights, on masked_lm, then on {task}.",
        lora: "trained from initial weights, on masked_lm, then on masked_lm (updates of LoRA alone).",
        lost: "trained from the weights of a run that is no longer there (`moved`), on masked_lm.",
    }
    titles = set()
    for run, sentence in expected.items():
        export_run(run, tmp_path / "out" / run.name, ExportOptions(verify=False))
        card = (tmp_path / "out" / run.name / "README.md").read_text()
        assert sentence in card
        is_tuned = run in (tuned, twice, own)
        assert ("and of the imported weights" in card) == (imported in sentence)
        assert ("| task | the task `votes`" in card) == ("samples of 24 tokens" in card) == is_tuned
        assert ("| objectives | masked_lm" in card) == ("samples of 60 tokens" in card) == (not is_tuned)
        assert str(tmp_path) not in card
        titles |= {card.partition("\n# ")[2].partition("\n")[0]} if run in (scratch, lora) else set()
    assert len(titles) == 1  # merged updates are no parameters
