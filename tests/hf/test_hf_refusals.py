"""Bad input of an import or export is one message, and leaves nothing behind."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.hf_directories import repack, write_model_parallel
from support.hf.hf_runs import tree

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import build, merge, parse_override
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.hf.export import ExportOptions, export_run, require_plain_logits
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.write_config import hf_config


@pytest.mark.parametrize("option", [{"logit_soft_cap": 30.0}, {"mup": {"base_hidden_size": 8}}])
def test_what_no_class_computes_is_not_exported(option):
    config = build(Config, tree(Path("vocab.txt"), **option))
    with pytest.raises(
        CheckpointError, match=rf"step_1 has model.{next(iter(option))}, .*; use the run itself"
    ):
        require_plain_logits(config, Path("step_1"))


@pytest.mark.parametrize("choice", ["attention", "ffn", "none"])
def test_the_class_of_shared_layers_holds_all_shared_alone(choice):
    settings = {
        "system": "albert",
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 60,
    }
    assert hf_config(build(ModelConfig, settings), {}).num_hidden_groups == 1
    with pytest.raises(
        CheckpointError, match=f"model.share_layers is '{choice}', which AlbertForPreTraining does not have"
    ):
        hf_config(build(ModelConfig, {**settings, "share_layers": choice}), {})


# Bad input: one message, nothing written


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def damage(name, directory):
    """Make one mistake in a released directory."""
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    attention = "transformer.layers.1.attention.dense.weight"
    if name == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "not weights":
        weights.write_bytes(b"PK not weights")
    elif name == "no weights":
        weights.unlink()
    elif name == "no config":
        (directory / "config.json").unlink()
    elif name == "config cut":
        (directory / "config.json").write_text('{"num_layers": ')
    elif name == "missing key":
        repack(directory, lambda t: {k: v for k, v in t.items() if k != attention})
    elif name == "unknown key":
        repack(directory, lambda t: {**t, "transformer.layers.1.attention.rotary": torch.ones(3)})
    elif name == "wrong shape":
        repack(directory, lambda t: {**t, attention: torch.ones(32, 31)})
    elif name == "few rows":
        repack(directory, lambda t: {**t, "word_embeddings.weight": torch.ones(60, 32)})
    elif name == "integers":
        repack(directory, lambda t: {**t, attention: torch.ones(32, 32, dtype=torch.long)}, as_pickle=True)
    elif name == "nan":
        repack(directory, lambda t: {**t, attention: torch.full((32, 32), float("nan"))})
    elif name in ("wrapped", "compiled"):
        prefix = "module." if name == "wrapped" else "_orig_mod."
        repack(directory, lambda t: {prefix + key: tensor for key, tensor in t.items()})
    elif name == "trainer's checkpoint":
        repack(directory, lambda t: {"state_dict": t, "epoch": 3}, as_pickle=True)
    elif name == "other name":
        weights.rename(directory / "glm-large.safetensors")
        (directory / "training_args.bin").write_bytes(b"of the Trainer")
    elif name == "no index":
        for number in (1, 2):
            save_file(tensors, directory / f"model-0000{number}-of-00002.safetensors")
        weights.unlink()
    elif name == "other program":
        weights.rename(directory / "tf_model.h5")
    elif name in ("pointer", "pointer of a pickle"):
        weights.unlink()
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 440473133\n"
        (directory / ("model.safetensors" if name == "pointer" else "pytorch_model.bin")).write_text(pointer)
    elif name == "hostile pickle":
        weights.unlink()
        torch.save({"word_embeddings.weight": Hostile(directory / "owned")}, directory / "pytorch_model.bin")
    elif name == "truncated pickle":
        repack(directory, lambda t: t, as_pickle=True)
        file = directory / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:5000])
    elif name in ("missing shard", "index outside"):
        place = {"missing shard": "model-00002.safetensors", "index outside": "../model.safetensors"}
        table = {key: "model.safetensors" for key in tensors}
        table |= {attention: place[name]}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


BAD = {
    "truncated": "model.safetensors: .*damaged",
    "not weights": "model.safetensors: .*damaged",
    "no weights": "neither model.safetensors nor pytorch_model.bin",
    "other name": "rename glm-large.safetensors to model.safetensors",
    "no index": "fetch model.safetensors.index.json",
    "other program": r"tf_model.h5 cannot be read",
    "pointer": "model.safetensors is a pointer of Git LFS.*git lfs pull",
    "pointer of a pickle": "pytorch_model.bin is a pointer of Git LFS.*git lfs pull",
    "no config": "config.json: No such file",
    "config cut": "config.json is not valid JSON",
    "missing key": "lacks layers.1.attention.dense.weight",
    "unknown key": "also has layers.1.attention.rotary",
    "wrong shape": r"attention.dense.weight has shape \[32, 31\], but the model needs \[32, 32\]",
    "few rows": "60 rows of word embeddings, but the tokenizer has 72",
    "integers": "attention.dense.weight' is not a floating-point tensor",
    "nan": "layers.1.attention.dense.weight of the weights to import has values that are not finite",
    "wrapped": "all names of tensors begin with module., as DistributedDataParallel .* save the model inside",
    "compiled": "all names of tensors begin with _orig_mod., as torch.compile",
    "trainer's checkpoint": "no tensors at its top level.* save the mapping state_dict alone",
    "hostile pickle": r"more than plain data \(\S+\) and was not opened; .*save its tensors alone.*safetensors\.$",
    "truncated pickle": r"pytorch_model.bin is damaged; fetch it again\.$",
    "missing shard": "model-00002.safetensors: .*missing or damaged",
    "index outside": "a shard must be in the directory of its index",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_leaves_nothing(vocabulary, released_directory, tmp_path, name):
    damage(name, released_directory)
    with pytest.raises(CheckpointError, match=BAD[name]) as raised:
        import_directory(released_directory, tmp_path / "run", tree(vocabulary))
    assert "\n" not in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["released"]
    assert not (released_directory / "owned").exists()


def first_key(shards, text):
    return next(key for key in shards[0] if text in key)


BAD_SHARDS = {
    "a bias that differs": (
        lambda s: s[1].update({first_key(s, "1.attention.dense.bias"): torch.ones(32)}),
        "1.attention.dense.bias differs between shards 0 and 1",
    ),
    "another model": (
        lambda s: s[1].update({first_key(s, "0.mlp.dense_h_to_4h.bias"): torch.ones(5)}),
        "shard 1 does not fit shard 0 at transformer.layers.0.mlp.dense_h_to_4h.bias",
    ),
    "a tensor only in one": (lambda s: s[0].update({"module.more": torch.ones(1)}), "shard 1 does not fit"),
    "no embedding": (lambda s: s[0].pop(first_key(s, "word_emb")), "0 tensors named word_embeddings.weight"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_shards_that_do_not_fit_are_refused(vocabulary, exports, tmp_path, name):
    change, message = BAD_SHARDS[name]
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2, change)
    with pytest.raises(CheckpointError, match=message):
        import_directory(source, tmp_path / "run", tree(vocabulary), is_megatron=True)
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize(
    "missing, message", [(0, "lacks mp_rank_00"), (1, "is one of 2 shards, but 1 are there")]
)
def test_a_missing_shard_is_named(vocabulary, exports, tmp_path, missing, message):
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    (source / f"mp_rank_{missing:02d}_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=message):
        import_directory(source, tmp_path / "run", tree(vocabulary), is_megatron=True)


MISTAKES = {
    "heads": ({"model": {"num_attention_heads": 8}}, "num_attention_heads is 8, but .* has 4"),
    "tokenizer": ({"tokenizer": None}, "does not say which tokenizer it needs"),
    "typo": ({"model": {"gelo": "erf"}}, "unknown setting model.gelo"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_configuration_that_does_not_fit_is_refused(vocabulary, released_directory, tmp_path, name):
    change, message = MISTAKES[name]
    settings = {**tree(vocabulary), **change} if name == "tokenizer" else merge(tree(vocabulary), change)
    with pytest.raises(ConfigError, match=message):
        import_directory(released_directory, tmp_path / "run", settings)
    assert [p.name for p in tmp_path.iterdir()] == ["released"]


def test_the_advice_for_a_directory_that_transformers_saved_can_be_followed(vocabulary, exports, tmp_path):
    """It holds no training.json, so the length of samples is the default, beyond its position tables."""
    saved = tmp_path / "saved"
    GLMForBlankInfilling.from_pretrained(exports / "huggingface").save_pretrained(saved)
    settings = merge(tree(vocabulary), {"data": {"sequence_length": 512}})
    with pytest.raises(
        ConfigError, match=r"the tables of .*saved end at 64; set data.sequence_length=64"
    ) as raised:
        import_directory(saved, tmp_path / "run", settings)
    assert "max_position" not in str(raised.value)
    advice = parse_override(re.findall(r"data\.\S+=\d+", str(raised.value))[0])
    import_directory(saved, tmp_path / "run", merge(settings, advice))


def test_nothing_is_overwritten_and_damage_is_found_before_export(run, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export/mine").write_text("x")
    with pytest.raises(DataError, match="exists; choose a new directory"):
        export_run(run, tmp_path / "export", ExportOptions())
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "checkpoints/step_00000000/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is valid|checksum"):
        export_run(copy, tmp_path / "new", ExportOptions())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "run"]
