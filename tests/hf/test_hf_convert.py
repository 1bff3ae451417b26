"""Conversion both ways: layouts, bit-equal round trips, released and model-parallel layouts, bad input."""

import argparse
import json
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.checkpoints import layout, placed
from support.distributed import run_ranks
from support.hf_runs import make_config, make_model, tree, without_padding, write_run, write_vocabulary
from support.project import ROOT
from support.training import fit

from data_utils.base.errors import CheckpointError, ConfigError, DataError, UserError
from data_utils.base.settings import merge, parse_override
from megatron_lite.checkpoint.manifest import list_checkpoints, read_checkpoint, write_manifest
from megatron_lite.checkpoint.read import load_checkpoint, load_weights, newest_valid
from megatron_lite.checkpoint.state import TrainerState
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.tree import ParallelConfig
from megatron_lite.generate.open_run import load_run
from megatron_lite.hf import proof, released
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory, import_megatron
from megatron_lite.hf.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.weights import PADDING_ROWS, WORDS, open_directory
from megatron_lite.train.plain import make_engine

# Processes and layout of the run that saved the checkpoint: all with TP x PP up to 4, a few of them always.
LAYOUTS = [
    (1, layout()),
    (4, layout(tp=2, pp=2)),
    (2, layout(pp=2)),
    (4, layout(tp=4, sp=True)),
    (4, layout(tp=2, zero=3)),
]
MORE_LAYOUTS = [
    *((2, layout(zero=zero)) for zero in (1, 2, 3)),
    *((2 * tp, layout(tp=tp, zero=zero)) for tp in (2, 4) for zero in (1, 2, 3)),
    (4, layout(pp=4)),
    (8, layout(tp=2, pp=2)),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def run(vocabulary, tmp_path_factory):
    """A run directory."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, tree(vocabulary))
    return directory


@pytest.fixture(scope="module")
def exports(run, tmp_path_factory):
    """The run in both layouts."""
    root = tmp_path_factory.mktemp("exports")
    for name in ("huggingface", "released"):
        export_run(run, root / name, ExportOptions(layout=name))
    return root


def weights_of(run_directory):
    (path,) = list_checkpoints(run_directory / "checkpoints")
    return load_weights(read_checkpoint(path))


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


# Export


def save_layout(context, settings, directory):
    config = make_config(settings)
    engine = make_engine(config, context, num_losses=3)
    whole = without_padding(make_model(config))
    for fragment, run, positions in placed(engine):
        part = fragment.tensors["weight"][run.start - fragment.start : run.stop - fragment.start]
        part.data.copy_(whole[fragment.name].flatten()[positions])
    engine.publish_weights()
    state = TrainerState.beginning(settings).to_json()
    save_checkpoint(Path(directory) / "checkpoints", 5, engine, state, context)


def settings_of(vocabulary, parallel):
    model = {"num_layers": 4} if parallel["pipeline_parallel_size"] == 4 else {}
    return merge(tree(vocabulary, **model), {"parallel": parallel, "batch": {"micro_batch_size": 1}})


@pytest.mark.parametrize(
    "ranks, parallel", [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_LAYOUTS)]
)
def test_every_layout_exports_its_model(vocabulary, tmp_path, ranks, parallel):
    settings = settings_of(vocabulary, parallel)
    run_ranks(save_layout, ranks, settings, tmp_path / "run", parallel=ParallelConfig(**parallel))
    found = export_run(tmp_path / "run", tmp_path / "export", ExportOptions(max_shard_bytes=30_000))
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0 and found.rows == 3 * 64
    exported = open_directory(tmp_path / "export")
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 3
    for name, weight in without_padding(make_model(make_config(settings))).items():
        assert torch.equal(exported.read(f"glm.{name}"), weight)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_the_rounded_model(run, tmp_path, dtype):
    found = export_run(run, tmp_path / "export", ExportOptions(dtype=dtype))
    assert found.largest_difference <= 1e-5
    stored = load_file(tmp_path / "export/model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {
        {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    }


@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_gelu_is_part_of_the_model(vocabulary, tmp_path, gelu):
    write_run(tmp_path / "run", tree(vocabulary, gelu=gelu))
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["gelu"] == gelu
    (tmp_path / "export/config.json").write_text(
        json.dumps({**config, "gelu": "erf" if gelu == "tanh" else "tanh"})
    )
    batch = proof.proof_batch(make_config(tree(vocabulary)).model)
    swapped = proof.exported_logits(tmp_path / "export", batch)
    model = load_run(tmp_path / "run").model
    assert (swapped - proof.training_logits(model, batch)).abs().max() > 1e-4  # the setting is not idle


def test_the_card_says_what_was_trained(run, vocabulary, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    saved = copy / "checkpoints/step_00000000"
    content = json.loads((saved / "manifest.json").read_text())
    content["state"]["data"] = [{"documents": 3, "tokens": 99, "sha256": "abc", "weight": 1.0}]
    content["state"]["restarts"] = 4
    write_manifest(saved, content)
    records = [("train", 0, 9.0), ("validation", 0, 2.5), ("validation", 10, 1.5)]
    lines = [json.dumps({"kind": kind, "step": step, "loss": loss}) for kind, step, loss in records]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "validation", "st')
    export_run(copy, tmp_path / "export", ExportOptions(verify=False))
    card = (tmp_path / "export/README.md").read_text()
    fingerprint = json.loads((tmp_path / "export/training.json").read_text())["tokenizer"]["fingerprint"]
    for part in ("| restarts | 4 |", "| 3 | 99 | 1.0 | `abc` |", "| loss | 2.5000 |", "| 7 |", fingerprint):
        assert part in card
    everything = "".join(
        p.read_text() for p in (tmp_path / "export").iterdir() if p.suffix in (".json", ".md")
    )
    assert (
        str(vocabulary.parent) not in everything and str(tmp_path) not in everything
    )  # no paths of this machine


# Round trips


def test_there_and_back_is_bit_equal(run, exports, tmp_path):
    found = import_directory(exports / "huggingface", tmp_path / "back", {})
    assert found.largest_difference <= 1e-5
    assert_same_weights(weights_of(tmp_path / "back"), weights_of(run))
    # The tokenizer comes along, with the fingerprint of the corpora, and the run can be opened.
    before, after = load_run(run), load_run(tmp_path / "back")
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.config.model == before.config.model
    written = yaml.safe_load((tmp_path / "back/config.yaml").read_text())
    assert written["run"]["directory"] == str(tmp_path / "back")
    assert written["training"]["steps"] == 6


def load_and_check(context, settings, directory):
    config = make_config(settings)
    engine = make_engine(config, context, num_losses=3)
    found = newest_valid(Path(directory) / "checkpoints", context)
    load_checkpoint(found, engine, context)
    whole = load_weights(found)
    for fragment, run, positions in placed(engine):
        expected = whole[fragment.name].flatten()[positions]
        for kind, values in fragment.tensors.items():
            part = values[run.start - fragment.start : run.stop - fragment.start]
            assert torch.equal(part, expected if kind == "weight" else torch.zeros_like(part))


@pytest.mark.parametrize("ranks, parallel", LAYOUTS[:2])
def test_an_import_continues_in_any_layout(run, vocabulary, exports, tmp_path, ranks, parallel):
    import_directory(exports / "huggingface", tmp_path / "back", {}, verify=False)
    assert_same_weights(weights_of(tmp_path / "back"), weights_of(run))
    settings = settings_of(vocabulary, parallel)
    run_ranks(load_and_check, ranks, settings, tmp_path / "back", parallel=ParallelConfig(**parallel))


def test_training_goes_on_from_an_import(settings, tmp_path):
    """The trainer resumes at step 0 with the imported weights; a tiny learning rate leaves them there."""
    write_run(tmp_path / "first", settings)
    export_run(tmp_path / "first", tmp_path / "export", ExportOptions(verify=False))
    change = {"training": {"stop_after_step": 1}, "optimizer": {"lr": 1e-12}, "run": {"directory": "ignored"}}
    settings = merge(settings, change)
    import_directory(tmp_path / "export", tmp_path / "back", settings, verify=False)
    settings = merge(settings, {"run": {"directory": str(tmp_path / "back")}})
    imported = weights_of(tmp_path / "back")
    for name, weight in run_ranks(fit, 2, settings)[0].items():
        torch.testing.assert_close(weight[: len(imported[name])], imported[name], rtol=0, atol=1e-10)
    saved = list_checkpoints(tmp_path / "back/checkpoints")
    assert [path.name for path in saved] == ["step_00000000", "step_00000001"]


def expected_released_names(layers):
    """GLM's published names and shapes for hidden size 32, 65 positions and 128 rows."""
    table = {
        "word_embeddings.weight": [128, 32],
        "transformer.position_embeddings.weight": [65, 32],
        "transformer.block_position_embeddings.weight": [65, 32],
        "transformer.final_layernorm.weight": [32],
        "transformer.final_layernorm.bias": [32],
    }
    inner = {
        "input_layernorm": [32],
        "attention.query_key_value": [96, 32],
        "attention.dense": [32, 32],
        "post_attention_layernorm": [32],
        "mlp.dense_h_to_4h": [128, 32],
        "mlp.dense_4h_to_h": [32, 128],
    }
    for layer in range(layers):
        for name, shape in inner.items():
            table[f"transformer.layers.{layer}.{name}.weight"] = shape
            table[f"transformer.layers.{layer}.{name}.bias"] = shape[:1]
    return table


@pytest.fixture
def released_directory(exports, tmp_path):
    return shutil.copytree(exports / "released", tmp_path / "released")


def repack(directory, change, as_pickle=False):
    """Rewrite the weights of a directory as `change` of its tensors, perhaps in torch's format."""
    tensors = change(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").unlink()
    if as_pickle:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")


PADDED = "word_embeddings.weight"
FORMS = {
    "safetensors": {},
    "wrapped": {"change": lambda t: {f"glm.{name}": x for name, x in t.items()}},
    "pickle": {"as_pickle": True},
    "padding rows in use": {
        "change": lambda t: {**t, PADDED: torch.cat([t[PADDED][:72], torch.ones(56, 32)])}
    },
    "pickle in half precision": {"change": lambda t: {n: x.half() for n, x in t.items()}, "as_pickle": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_released_layout_there_and_back(vocabulary, released_directory, tmp_path, form):
    """Every name of the released layout, read and written again bit for bit, rows that pad the vocabulary too."""
    original = load_file(released_directory / "model.safetensors")
    assert {name: list(x.shape) for name, x in original.items()} == expected_released_names(2)
    options = {"change": lambda t: t, **FORMS[form]}
    repack(released_directory, **options)
    found = import_directory(released_directory, tmp_path / "run", tree(vocabulary))
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0
    dtype = "fp16" if "half" in form else "fp32"
    export_run(tmp_path / "run", tmp_path / "again", ExportOptions(layout="released", dtype=dtype))
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == original.keys()
    for name, tensor in options["change"](original).items():
        name = name.removeprefix("glm.")
        assert torch.equal(again[name], tensor.to(again[name].dtype)), name


@pytest.mark.parametrize("rows", [72, 80, 256])
def test_the_number_of_padding_rows_survives(vocabulary, released_directory, tmp_path, rows):
    """Released models pad to other multiples than ours, or not at all: the way back has as many rows, and the same."""
    words = torch.randn(rows, 32)
    repack(released_directory, lambda t: {**t, PADDED: words})
    import_directory(released_directory, tmp_path / "run", tree(vocabulary))
    export_run(tmp_path / "run", tmp_path / "again", ExportOptions(layout="released"))
    again = load_file(tmp_path / "again/model.safetensors")[PADDED]
    assert torch.equal(again, words)


def test_padding_rows_of_another_model_are_refused(vocabulary, released_directory, tmp_path):
    repack(released_directory, lambda t: {**t, PADDED: torch.randn(80, 32)})
    import_directory(released_directory, tmp_path / "run", tree(vocabulary))
    save_file({PADDED: torch.zeros(8, 16)}, tmp_path / "run" / PADDING_ROWS)
    with pytest.raises(CheckpointError, match=r"padding_rows.*32 columns.*remove it"):
        export_run(tmp_path / "run", tmp_path / "again", ExportOptions(layout="released"))
    assert not (tmp_path / "again").exists()


def test_gelu_of_a_released_model_is_the_users_choice(vocabulary, released_directory, tmp_path):
    """Trained with tanh, published with erf: the default is tanh, and model.gelu changes it."""
    settings = tree(vocabulary)
    import_directory(released_directory, tmp_path / "tanh", settings)
    import_directory(released_directory, tmp_path / "erf", merge(settings, {"model": {"gelu": "erf"}}))
    assert [load_run(tmp_path / gelu).config.model.gelu for gelu in ("tanh", "erf")] == ["tanh", "erf"]


# Model-parallel shards


def split_as_the_reference(name, tensor, size):
    """The slices of one tensor, one per model-parallel rank, written out independently of the importer."""
    h = tensor.shape[0] // 3
    if "query_key_value" in name:
        q, k, v = tensor[:h], tensor[h : 2 * h], tensor[2 * h :]
        n = h // size
        return [torch.cat([part[r * n : (r + 1) * n] for part in (q, k, v)]) for r in range(size)]
    if name.endswith(("attention.dense.weight", "4h_to_h.weight")):
        return [x.clone() for x in tensor.split(tensor.shape[1] // size, dim=1)]
    if "dense_h_to_4h" in name or name == "word_embeddings.weight":
        return [x.clone() for x in tensor.split(tensor.shape[0] // size)]
    return [tensor] * size


def write_model_parallel(source, directory, size, change=lambda shards: None):
    shards = [{} for _ in range(size)]
    for name, tensor in load_file(source / "model.safetensors").items():
        for shard, piece in zip(shards, split_as_the_reference(name, tensor, size), strict=True):
            shard[f"module.{name}"] = piece
    change(shards)
    directory.mkdir()
    for rank, shard in enumerate(shards):
        state = {"module": shard, "mp_world_size": size, "args": argparse.Namespace(lr=0.1)}
        state["np_rng_state"] = np.random.RandomState(0).get_state()
        torch.save(state, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory


def as_written_with_numpy_1(path):
    """The same file, with the name that NumPy 1 had for its constructor of arrays."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert any(b"numpy._core.multiarray" in content for content in contents.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_model_parallel_shards_are_merged(run, vocabulary, exports, tmp_path, size):
    source = write_model_parallel(exports / "released", tmp_path / "shards", size)
    as_written_with_numpy_1(source / "mp_rank_00_model_states.pt")
    found = import_megatron(source, tmp_path / "run", tree(vocabulary))
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0
    assert_same_weights(weights_of(tmp_path / "run"), weights_of(run))


def test_the_proof_of_shards_notices_a_wrong_merge(vocabulary, exports, tmp_path, monkeypatch):
    """Q|K|V cut in contiguous thirds of the whole, the classical mistake of converters."""
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    monkeypatch.setitem(released._SPLITS, "attention.query_key_value.weight", (0, 1))
    with pytest.raises(CheckpointError, match="does not compute what its source computes"):
        import_megatron(source, tmp_path / "run", tree(vocabulary))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards"]


def test_a_shared_gmask_gets_its_own_row(vocabulary, exports, tmp_path):
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    import_megatron(source, tmp_path / "run", tree(vocabulary), copy_eop_to_gmask=True)
    words = weights_of(tmp_path / "run")[WORDS]
    special = load_run(tmp_path / "run").tokenizer.special
    assert torch.equal(words[special.gmask], words[special.eop])


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
    elif name == "hostile pickle":
        weights.unlink()
        torch.save({"word_embeddings.weight": Hostile(directory / "owned")}, directory / "pytorch_model.bin")
    elif name == "truncated pickle":
        repack(directory, lambda t: t, as_pickle=True)
        file = directory / "pytorch_model.bin"
        file.write_bytes(file.read_bytes()[:5000])
    elif name in ("missing shard", "index outside", "tensor not in shard"):
        place = {"missing shard": "model-00002.safetensors", "index outside": "../model.safetensors"}
        table = {key: "model.safetensors" for key in tensors}
        table |= {attention: place.get(name, "model.safetensors")}
        table |= {"transformer.more": "model.safetensors"} if name == "tensor not in shard" else {}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


BAD = {
    "truncated": "model.safetensors: .*damaged",
    "not weights": "model.safetensors: .*damaged",
    "no weights": "neither model.safetensors nor pytorch_model.bin",
    "no config": "config.json: No such file",
    "config cut": "config.json is not valid JSON",
    "missing key": "lacks layers.1.attention.dense.weight",
    "unknown key": "also has layers.1.attention.rotary",
    "wrong shape": r"attention.dense.weight has shape \[32, 31\], but the model needs \[32, 32\]",
    "few rows": "60 rows of word embeddings, but the tokenizer has 72",
    "integers": "attention.dense.weight' is not a floating-point tensor",
    "nan": "does not compute what its source computes",
    "hostile pickle": r"more than plain data \(\S+\) and was not opened; save its tensors alone.*safetensors\.$",
    "truncated pickle": r"pytorch_model.bin is damaged; fetch it again\.$",
    "missing shard": "model-00002.safetensors: .*missing or damaged",
    "index outside": "a shard must lie beside its index",
    "tensor not in shard": "lacks the tensor transformer.more",
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
        import_megatron(source, tmp_path / "run", tree(vocabulary))
    assert [p.name for p in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize(
    "missing, message", [(0, "lacks mp_rank_00"), (1, "is one of 2 shards, but 1 are there")]
)
def test_a_missing_shard_is_named(vocabulary, exports, tmp_path, missing, message):
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    (source / f"mp_rank_{missing:02d}_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=message):
        import_megatron(source, tmp_path / "run", tree(vocabulary))


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
        ConfigError, match=r"the tables of .*saved end at 64; add data.sequence_length=64"
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


# Command line


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, arguments)])
    return runpy.run_path(str(ROOT / "scripts/convert_checkpoint.py"))["main"]()


def test_the_commands_print_their_proof(run, vocabulary, exports, tmp_path, monkeypatch, capsys):
    command(
        monkeypatch,
        "export",
        "--checkpoint",
        run,
        "--output",
        tmp_path / "export",
        "--max-shard-size",
        "30KB",
    )
    assert "proof: largest logit difference" in capsys.readouterr().out
    command(
        monkeypatch,
        "import",
        "--input",
        tmp_path / "export",
        "--output",
        tmp_path / "run",
        "training.steps=9",
    )
    assert "argmax agreement 100.00%" in capsys.readouterr().out
    assert load_run(tmp_path / "run").config.training.steps == 9
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree(vocabulary)))
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    arguments = ("--input", source, "--output", tmp_path / "run2", "--config", config, "--no-verify")
    command(monkeypatch, "import-megatron", *arguments)
    assert "not verified" in capsys.readouterr().out
    with pytest.raises(UserError, match="--max-shard-size is 'lots'"):
        command(
            monkeypatch, "export", "--checkpoint", run, "--output", tmp_path / "x", "--max-shard-size", "lots"
        )


def test_a_mistake_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    absent = str(tmp_path / "absent")
    arguments = ["export", "--checkpoint", absent, "--output", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts/convert_checkpoint.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "absent does not exist" in printed.err and not list(tmp_path.iterdir())


def test_a_model_with_other_heads_is_not_exported(vocabulary, tmp_path):
    settings = merge(tree(vocabulary), {"model": {"segments": 2}})
    write_run(tmp_path / "run", settings)
    with pytest.raises(
        CheckpointError, match=r"heads, embeddings or shared layers.*only models of GLM's own"
    ):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


# Memory

MEASURE = """
import resource, sys
from pathlib import Path
import torch
sys.path[:0] = [{root!r}, {tests!r}]
from support.hf_runs import tree, make_config
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.importing import write_training_checkpoint
from megatron_lite.hf.weights import Weights
from megatron_lite.model.glm import parameter_shapes

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def convert(name, **model):
    config = make_config(tree(Path({vocabulary!r}), **model))
    shapes = parameter_shapes(config.model)
    run = directory / name / "checkpoints" / "step_00000000"
    write_training_checkpoint(run, Weights(shapes, lambda n: torch.full(shapes[n], 0.5)), config)
    options = ExportOptions(max_shard_bytes={shard}, verify=False)
    export_run(directory / name, directory / (name + "_export"), options)
    import_directory(directory / (name + "_export"), directory / (name + "_back"), {{}}, verify=False)
    return sum(torch.Size(shape).numel() * 4 for shape in shapes.values())

directory = Path({directory!r})
convert("small")
footprint = peak()
total = convert("large", num_layers=6, hidden_size=512)
print(total, peak() - footprint)
"""


def test_memory_stays_below_one_and_a_half_shards(vocabulary, tmp_path):
    """Export and import of a model three times the bound, beyond what a tiny model needs."""
    shard = 16_000_000
    places = {"root": str(ROOT), "tests": str(ROOT / "tests"), "vocabulary": str(vocabulary)}
    code = MEASURE.format(**places, directory=str(tmp_path), shard=shard)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    total, used = map(int, result.stdout.split())
    assert total > 3 * 1.5 * shard
    assert used <= 1.5 * shard
