"""Directories with one field of config.json edited: one line, or a model that is read; in no time and no memory."""

import json
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import transformers
from support.hf.edited_configs import edits
from support.hf.published import CASES, write_random

from data_utils.common.errors import CheckpointError, UserError
from megatron_lite.hf.formats import format_of_directory
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.source import is_published, open_published

SYSTEMS = (
    *("bert", "roberta", "albert", "ernie2", "gpt", "gpt2", "glm4", "glm4_0414", "xlnet", "bart", "t5"),
    *("llama, tied", "qwen3", "eurobert", "mt5"),
)
GLM = ("own layout", "released layout")
MEGABYTE = 1 << 20
TOKENIZER = "training_tokenizer"


@pytest.fixture
def directory(request, exports, tmp_path):
    """A copy of a system's directory."""
    target = tmp_path / "directory"
    if request.param in GLM:
        layout = "huggingface" if request.param == "own layout" else "released"
        shutil.copytree(exports / layout, target)
        shutil.copytree(exports / "huggingface/training_tokenizer", target / TOKENIZER, dirs_exist_ok=True)
        return target
    write_random(request.param, target)
    return target


def read(directory):
    """What an import does before it writes weights."""
    if is_published(directory):
        open_published(directory)
        return
    tokenizer = {"kind": "bert_wordpiece", "path": str(directory / TOKENIZER / "vocab.txt")}
    with tempfile.TemporaryDirectory() as run:
        model_format = format_of_directory(directory)
        model_format.read(directory, Path(run), {"tokenizer": tokenizer}, verify=False)


def check_edits(directory, chosen):
    """Every edit of config.json ends in one line, or in a directory that is read."""
    path = directory / "config.json"
    described = json.loads(path.read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    outcomes = {"refused": 0, "read": 0}
    for number, (name, edited) in enumerate(edits(described)):
        if not chosen(number):
            continue
        path.write_text(json.dumps(edited))
        try:
            read(directory)
            outcomes["read"] += 1
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, name
            outcomes["refused"] += 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < 300 * MEGABYTE
    assert min(outcomes.values()) > 5
    path.write_text(json.dumps(described))
    read(directory)


@pytest.mark.parametrize("directory", ["bert", "glm4", "t5", "own layout"], indirect=True)
def test_edits_of_a_config_are_refused_or_read(directory):
    check_edits(directory, lambda number: number % 5 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("directory", [*SYSTEMS, *GLM], indirect=True)
def test_every_edit_of_a_config_is_refused_or_read(directory):
    check_edits(directory, lambda number: True)


def edit(directory, name="config.json", **changes):
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("directory", "changes", "message"),
    [
        ("bert", {"model_type": ["bert"]}, r"config.json says model_type \['bert'\]; it must be a valid string"),
        ("bert", {"architectures": [7]}, r"says architectures\[0\] 7; it must be a valid string"),
        ("bert", {"id2label": {"0": 1}}, r"says id2label\.0 1; it must be a valid string"),
        ("bert", {"id2label": {"first": "a"}}, r"says id2label\.first"),
        ("bert", {"num_labels": 10**9}, r"says num_labels 1000000000; it must be less than or equal to 65536"),
        ("bert", {"num_hidden_layers": 10**7}, r"says num_hidden_layers 10000000; it must be less than"),
        ("bert", {"hidden_size": 10**9}, r"sets model.hidden_size to 1000000000, but these weights"),
        ("bert", {"num_attention_heads": 10**9}, r"sets model.num_attention_heads to 1000000000, but these weights"),
        ("albert", {"num_hidden_layers": 10**4}, r"sets model.num_layers to 10000, but these weights"),
        ("gpt2", {"quantization_config": {"load_in_4bit": True}}, r"has quantization_config; quantized weights"),
        ("gpt2", {"transformers_weights": "../x.safetensors"}, r"has transformers_weights; weights under another"),
        ("glm4", {"rope_parameters": "none"}, r"says rope_parameters 'none'"),
        ("own layout", {"vocab_size": 70}, r"vocab_size is 70, but the tensors have \d+;"),
        ("own layout", {"num_attention_heads": 2}, r"is 2 in config.json and 4 in training.json; fetch both again"),
        ("released layout", {"num_attention_heads": "4"}, r"says num_attention_heads '4'; it must be"),
    ],
    indirect=["directory"],
)  # fmt: skip
def test_a_refusal_names_the_field_the_value_and_the_rule(directory, changes, message):
    edit(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        read(directory)


@pytest.mark.parametrize(
    ("directory", "sizes"),
    [
        ("bert", {"hidden_size": 96, "intermediate_size": 128}),
        ("gpt2", {"n_embd": 96, "n_layer": 3}),
        ("t5", {"d_model": 96, "num_decoder_layers": 5}),
        ("llama, tied", {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 12}),
    ],
    indirect=["directory"],
)
def test_the_config_of_another_model_is_refused_by_the_shapes(directory, sizes):
    edit(directory, **sizes)
    with pytest.raises(
        CheckpointError,
        match=r"no model of the weights: .*(has shape .*but the model needs|lacks).*fetch config.json and the weights",
    ):
        read(directory)


@pytest.mark.parametrize(
    ("class_name", "sizes"),
    [
        ("DebertaForMaskedLM", CASES["roberta"][1]),
        ("GemmaForCausalLM", {**CASES["glm4"][1], "rope_parameters": None}),
        (
            "GPTNeoXForCausalLM",
            {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64},
        ),
    ],
)  # fmt: skip
def test_another_architecture_is_told_what_is_supported(class_name, sizes, tmp_path):
    cls = getattr(transformers, class_name)
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path)
    message = str(raised.value)
    assert f"model_type is '{cls.config_class.model_type}', which cannot be imported" in message
    assert "bert, roberta, xlm-roberta" in message and "olmoe, and GLM" in message and "\n" not in message


@pytest.mark.parametrize("directory", ["bert", "own layout"], indirect=True)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer_config.json", "training.json"]
)
def test_a_pipe_is_refused_and_not_waited_for(directory, name):
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        read(directory)


@pytest.mark.parametrize("directory", ["gpt2"], indirect=True)
def test_an_adapters_directory_is_refused(directory):
    """Transformers would load the model that adapter_config.json names in place of the directory's."""
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(
        CheckpointError, match=r"has adapter_config\.json, of an adapter on another model; import"
    ):
        read(directory)


@pytest.mark.parametrize("directory", ["bert"], indirect=True)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"[]"])
def test_a_damaged_json_file_is_one_line(directory, name, content):
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        read(directory)
    assert name in str(raised.value) and "\n" not in str(raised.value) and "fetch" in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "../../etc/passwd"}, {"pad_token_id": [1]}, {"_attn_implementation": "flash_attention_2"}],
)
@pytest.mark.parametrize("directory", ["own layout"], indirect=True)
def test_what_transformers_raises_is_one_line(directory, changes, tmp_path):
    """Fields that our model does not have are the class's own matter; a comparison asks it."""
    edit(directory, **changes)
    with pytest.raises(CheckpointError, match="transformers cannot use it") as raised:
        import_directory(directory, tmp_path / "run", {})
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()
