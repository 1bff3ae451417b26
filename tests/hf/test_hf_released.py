"""Directories in the released layout, whole and in model-parallel shards."""

import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.hf_directories import assert_same_weights, repack, weights_of, write_model_parallel
from support.hf.hf_runs import tree

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.hf.common.weights import PADDING_ROWS, WORDS
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm import released
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import load_run


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
    """Trained with tanh, published with erf: the default is tanh, and model.activation changes it."""
    settings = tree(vocabulary)
    import_directory(released_directory, tmp_path / "tanh", settings)
    import_directory(
        released_directory, tmp_path / "erf", merge(settings, {"model": {"activation": "gelu_erf"}})
    )
    assert [load_run(tmp_path / gelu).config.model.activation for gelu in ("tanh", "erf")] == [
        "gelu_tanh",
        "gelu_erf",
    ]


# Model-parallel shards


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
    found = import_directory(source, tmp_path / "run", tree(vocabulary), is_megatron=True)
    assert found.largest_difference <= 1e-5 and found.agreement == 1.0
    assert_same_weights(weights_of(tmp_path / "run"), weights_of(run))


def test_the_proof_of_shards_notices_a_wrong_merge(vocabulary, exports, tmp_path, monkeypatch):
    """Q|K|V cut in contiguous thirds of the whole, the classical mistake of converters."""
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    monkeypatch.setitem(released._SPLITS, "attention.query_key_value.weight", (0, 1))
    with pytest.raises(CheckpointError, match="does not compute what its source computes"):
        import_directory(source, tmp_path / "run", tree(vocabulary), is_megatron=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shards"]


def test_a_shared_gmask_gets_its_own_row(vocabulary, exports, tmp_path):
    source = write_model_parallel(exports / "released", tmp_path / "shards", 2)
    import_directory(source, tmp_path / "run", tree(vocabulary), is_megatron=True, copy_eop_to_gmask=True)
    words = weights_of(tmp_path / "run")[WORDS]
    special = load_run(tmp_path / "run").tokenizer.special
    assert torch.equal(words[special.gmask], words[special.eop])
