"""Blank infilling on GLM-4: what no class of transformers trains, but can compute with a mask and positions given."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data.blank_infilling import MIXED, SPECIAL, objective
from support.data.recipes import collate, windows
from support.hf.published import random_model, write_random

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC, PADDING_DOC, POSITION_IDS, TOKENS
from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.published.source import is_published, open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.write_config import former_fields, hf_config
from megatron_lite.transformer.attention_backends.layout import may_see
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

SIZE = 3000


@pytest.mark.parametrize("case", ["glm4", "glm4_0414, odd"])
@torch.no_grad()
def test_blank_infilling_is_the_class_with_positions_that_continue_from_the_mask(case, tmp_path):
    theirs = random_model(case, vocab_size=SIZE)
    theirs.save_pretrained(tmp_path)
    source = open_published(tmp_path)
    weights = to_ours(source.theirs, source.mappings)
    model = Transformer(build(ModelConfig, source.settings))
    for name, parameter in model.named_parameters():
        read = weights.read(name)
        parameter.zero_()
        parameter[: len(read)] = read
    rows = collate(objective(64, **MIXED), windows(4, 64, seed=0))
    rows[:, TOKENS] %= SIZE
    batch = Batch(rows)
    assert SPECIAL.sop % SIZE in rows[:, TOKENS] and rows[:, BLOCK_POSITION_IDS].max() > 3
    inputs = MicroBatch.from_batch(batch, torch.device("cpu"), model.config, kernel="dense")
    ours = model.logits(model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)).view(
        *rows[:, 0].shape, -1
    )
    columns = batch.layout.in_batch_order()
    mask = torch.from_numpy(may_see(columns[..., None], columns[..., None, :]))
    real = torch.from_numpy(rows[:, DOC] != PADDING_DOC)
    mask |= ~real[..., None] & torch.eye(rows.shape[2], dtype=torch.bool)
    positions = (rows[:, POSITION_IDS] + rows[:, BLOCK_POSITION_IDS]).astype(np.int64)
    expected = theirs(
        input_ids=torch.from_numpy(rows[:, TOKENS].astype(np.int64)),
        attention_mask=mask[:, None],
        position_ids=torch.from_numpy(positions),
    )["logits"]
    assert (ours - expected)[real].abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5, **more}}


def without_head(directory):
    state = load_file(directory / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm4")
    write_random("glm4", path)
    return path


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: edit(d, **rope("linear", factor=2.0)), ("rope_parameters.rope_type is 'linear'", "only 'default'")),
        (lambda d: edit(d, rope_scaling={"rope_type": "yarn", "factor": 2.0}, **rope("yarn", factor=2.0)), ("'yarn'",)),
        (lambda d: edit(d, hidden_act="tanh"), ("hidden_act is 'tanh'", "one of gelu")),
        (lambda d: edit(d, architectures=["GlmForTokenClassification"]), ("'GlmForToken", "only GlmForCausalLM")),
        (lambda d: edit(d, attention_bias=False), ("also has model.layers.0-2.self_attn.k_proj.bias",)),
        (lambda d: edit(d, num_key_value_heads=4), ("k_proj.weight (3)", "shape [32, 48], but the model needs [64,")),
        (lambda d: edit(d, num_key_value_heads=3), ("num_key_value_heads (3) must divide",)),
        (lambda d: edit(d, **rope("default", partial_rotary_factor=0.2)), ("rotary_share (0.2)", "an even number")),
        (lambda d: edit(d, tie_word_embeddings=True), ("lm_head.weight differs", "tied")),
        (without_head, ("lacks lm_head.weight",)),
        (lambda d: edit(d, model_type="glm4"), ("'GlmForCausalLM'", "only Glm4ForCausalLM")),
        (lambda d: edit(d, model_type="glm4", architectures=["Glm4ForCausalLM"]),
         ("lacks model.layers.0-2.post_mlp_layernorm.weight",)),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_is_refused_in_one_line(written, tmp_path, change, parts):
    shutil.copytree(written, tmp_path / "glm4")
    change(tmp_path / "glm4")
    with pytest.raises(CheckpointError) as error:
        open_published(tmp_path / "glm4")
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


def test_fields_of_older_files_are_read(written, tmp_path):
    shutil.copytree(written, tmp_path / "glm4")
    described = json.loads((written / "config.json").read_text())
    del described["rope_parameters"]
    (tmp_path / "glm4/config.json").write_text(
        json.dumps(described | {"rope_theta": 5e6, "partial_rotary_factor": 0.5})
    )
    settings = open_published(tmp_path / "glm4").settings
    assert settings["rotary_base"] == 5e6 and settings["rotary_share"] == 0.5
    again = hf_config(build(ModelConfig, settings), described)
    assert again.rope_parameters["rope_theta"] == 5e6


def test_a_released_glm_of_the_same_type_is_told_by_its_tensors(written, tmp_path):
    assert is_published(written)
    shutil.copytree(written, tmp_path / "glm")
    state = load_file(written / "model.safetensors")
    first = {"transformer.position_embeddings.weight": state["model.norm.weight"]}
    save_file(first, tmp_path / "glm/model.safetensors", {"format": "pt"})
    assert not is_published(tmp_path / "glm")


def test_options_of_no_class_are_refused(written):
    config = build(ModelConfig, {**open_published(written).settings, "sandwich_norm": True})
    with pytest.raises(
        CheckpointError, match=r"model\.sandwich_norm is True, which GlmForCausalLM does not have"
    ):
        hf_config(config, {})


def test_the_layer_for_further_tokens_is_left_out_of_import_and_export(tmp_path):
    """Published files of GLM-4.5-Air have it as layer 46, after the last one; the class ignores it."""
    write_random("glm4_moe", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.46.eh_proj.weight"] = torch.zeros(48, 96)
    state["model.layers.46.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 48)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, num_nextn_predict_layers=1)
    source = open_published(tmp_path)
    assert {shown for _, shown in source.ignored.values()} == {"model.layers.46.*"}
    described = json.loads((tmp_path / "config.json").read_text())
    model = build(ModelConfig, source.settings)
    written = {**hf_config(model, described).to_dict(), **former_fields(model)}
    assert written["num_nextn_predict_layers"] == 0 and written["n_routed_experts"] == 8
    state["model.layers.47.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"also has model\.layers\.47\.eh_proj\.weight"):
        open_published(tmp_path)
