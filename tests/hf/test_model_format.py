"""A model that brings its own spec is exported, imported and fetched without an edit in megatron_lite/hf."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support.hf.hf_runs import tree, write_run
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build
from data_utils.objectives.causal import CausalConfig
from megatron_lite.checkpoint.resolve_path import PathType, path_type
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.hub_files import wanted
from megatron_lite.hf.common.model_format import HuggingFaceFormat, Imported
from megatron_lite.hf.common.weights import from_state_dict
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.transformer.build import ModelSpec


class TwoFiles(HuggingFaceFormat):
    """A format whose directory is a file with the step."""

    unverifiable = "nothing computes it"

    def is_format_of(self, directory):
        return (directory / "strange.json").exists()

    def write(self, directory, run, weights, dtype, max_shard_bytes):
        state = {name: weights.read(name) for name in weights.shapes}
        torch.save({"state": state, "config": run.checkpoint.state["config"]}, directory / "strange.pt")
        (directory / "strange.json").write_text(json.dumps({"step": run.checkpoint.step, "dtype": dtype}))

    def read(self, source, directory, tree, *, verify):
        held = torch.load(source / "strange.pt")
        return Imported(build(Config, held["config"]), from_state_dict(held["state"], source), None)


@pytest.fixture
def causal_has_a_model(monkeypatch):
    """The objective `causal` trains a model with that format."""
    spec = type("Spec", (ModelSpec,), {"huggingface": "strange_format"})()
    monkeypatch.setitem(sys.modules, "strange_spec", SimpleNamespace(MODEL_SPEC=spec))
    monkeypatch.setitem(sys.modules, "strange_format", SimpleNamespace(HUGGINGFACE_FORMAT=TwoFiles()))
    monkeypatch.setattr(CausalConfig, "model_module", "strange_spec")
    monkeypatch.setattr(CausalConfig, "model_files", ("strange.json", "inner/"))


@pytest.fixture
def causal_run(vocabulary, tmp_path):
    write_run(tmp_path / "run", {**tree(vocabulary), "objectives": {"causal": 1}})
    return tmp_path / "run"


def test_its_format_exports_and_imports(causal_has_a_model, causal_run, tmp_path):
    assert export_run(causal_run, tmp_path / "export", ExportOptions(dtype="bf16", verify=False)) is None
    assert json.loads((tmp_path / "export/strange.json").read_text()) == {"step": 0, "dtype": "bf16"}
    assert not json.loads((tmp_path / "export/proof.json").read_text())["proven"]
    assert path_type(tmp_path / "export") is PathType.EXPORT
    import_directory(tmp_path / "export", tmp_path / "again", {}, verify=False)
    before, after = (load_weights(find_manifest(tmp_path / "again")), load_weights(find_manifest(causal_run)))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_what_its_format_lacks_is_refused(causal_has_a_model, causal_run, tmp_path):
    with pytest.raises(CheckpointError, match="has the model of causal, which the released layout"):
        export_run(causal_run, tmp_path / "export", ExportOptions(layout="released", verify=False))
    with pytest.raises(CheckpointError, match="nothing computes it; add --no-verify"):
        export_run(causal_run, tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/strange.json").write_text("{}")
    with pytest.raises(CheckpointError, match="nothing computes it; add --no-verify"):
        import_directory(tmp_path / "source", tmp_path / "again", {})


def test_its_files_are_fetched(causal_has_a_model):
    names = {"strange.json", "inner/config.json", "inner/model.safetensors"}
    assert {*wanted([*names, "other/config.json"], json.loads)} == names
