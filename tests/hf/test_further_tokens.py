"""The layer of further tokens (MTP) in directories of GLM-4.5: there and back bit-equal, without it, with another."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.further_tokens import add_further
from support.hf.published_files import OBJECTIVE, TREE, assert_same_tensors, edit, write_directory
from transformers import Glm4MoeForCausalLM

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run

SETTINGS = merge(TREE, OBJECTIVE["glm4_moe"])


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    directory = tmp_path_factory.mktemp("glm")
    add_further(write_directory("glm4_moe", directory), directory)
    return directory


def import_with(source, output, **model):
    """The run, its settings of the layer, and its parameters of it."""
    import_directory(source, output, merge(SETTINGS, {"model": model}))
    run = open_run(output)
    return run.config.model.mtp_layers, [
        name for name in run.checkpoint.shapes if name.startswith("layers.2.")
    ]


def test_it_comes_back_bit_equal_and_the_class_ignores_it(released, tmp_path):
    layers, names = import_with(released, tmp_path / "run")
    assert layers == 1 and "layers.2.projection.weight" in names
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert_same_tensors(tmp_path / "export", released)
    assert json.loads((tmp_path / "export/config.json").read_text())["num_nextn_predict_layers"] == 1
    theirs, ours = (
        Glm4MoeForCausalLM.from_pretrained(path).eval()(torch.arange(4, 20)[None]).logits
        for path in (released, tmp_path / "export")
    )
    assert torch.equal(theirs, ours)


def test_files_without_it_are_imported_without_it(released, tmp_path, caplog):
    """transformers saves no such layer, and leaves the field that counts it as it was."""
    Glm4MoeForCausalLM.from_pretrained(released).save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy2(released / name, tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert import_with(tmp_path / "saved", tmp_path / "run") == (0, [])
    line = "the layer of further tokens (MTP) is not there: no tensor begins with model.layers.2."
    assert line in caplog.text
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert json.loads((tmp_path / "export/config.json").read_text())["num_nextn_predict_layers"] == 0
    # A run may begin it anew.
    layers, names = import_with(tmp_path / "saved", tmp_path / "other", mtp_layers=1)
    assert layers == 1 and names and "layers.2.projection.weight" in caplog.text


def test_a_run_may_leave_it_out(released, tmp_path):
    assert import_with(released, tmp_path / "run", mtp_layers=0) == (0, [])


def test_a_table_of_its_own_is_refused_in_one_line(released, tmp_path):
    shutil.copytree(released, tmp_path / "glm")
    state = load_file(released / "model.safetensors")
    state["model.layers.2.embed_tokens.weight"][5] += 1
    del state["model.layers.2.shared_head.head.weight"]  # GLM-4.6 has no copies
    save_file(state, tmp_path / "glm/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        import_with(tmp_path / "glm", tmp_path / "run")
    message = str(error.value)
    assert "embed_tokens.weight differs from model.embed_tokens.weight" in message and "\n" not in message
    assert "shared_head" not in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, which the model here cannot be"),
        ({"num_nextn_predict_layers": 0}, r"also has model\.layers\.2\.|model\.layers\.2\."),
    ],
)
def test_another_number_is_refused(released, tmp_path, change, part):
    shutil.copytree(released, tmp_path / "glm")
    edit(tmp_path / "glm", **change)
    with pytest.raises(CheckpointError, match=part):
        import_with(tmp_path / "glm", tmp_path / "run")


def test_a_layer_with_a_missing_tensor_is_refused(released, tmp_path):
    shutil.copytree(released, tmp_path / "glm")
    state = load_file(released / "model.safetensors")
    del state["model.layers.2.eh_proj.weight"]
    save_file(state, tmp_path / "glm/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight"):
        import_with(tmp_path / "glm", tmp_path / "run")
