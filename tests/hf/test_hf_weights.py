"""The streaming safetensors writer against the library's reader, shards, and resized tables."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.tensor_files import write_tensors
from megatron_lite.hf.common.weights import (
    DTYPES,
    METADATA,
    from_state_dict,
    open_directory,
    write_sharded,
)

shapes = st.dictionaries(
    st.text(st.sampled_from("abc._0é"), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    min_size=1,
    max_size=6,
)


def tensors_of(shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, dtype=st.sampled_from(sorted(DTYPES)))
def test_the_library_reads_what_is_written(tmp_path_factory, shapes, dtype):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    tensors = tensors_of(shapes)
    write_tensors(path, shapes, iter(tensors.values()), DTYPES[dtype], METADATA)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.to(DTYPES[dtype]))


@settings(max_examples=60, deadline=None)
@given(shapes=shapes, limit=st.integers(1, 2000))
def test_shards_hold_everything_once_within_the_limit(tmp_path_factory, shapes, limit):
    directory = tmp_path_factory.mktemp("shards")
    tensors = tensors_of(shapes)
    write_sharded(directory, from_state_dict(tensors, directory), torch.float32, limit)
    weights = open_directory(directory)
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in tensors.items())
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    assert sum(map(len, files)) == len(tensors)
    for file in files:
        filled = [tensor for tensor in file.values() if tensor.numel()]
        assert len(filled) <= 1 or sum(tensor.nbytes for tensor in filled) <= limit


def test_shards_of_pickles_are_read(tmp_path):
    parts = [{"a": torch.ones(2)}, {"b": torch.zeros(3)}]
    table = {}
    for i, part in enumerate(parts):
        torch.save(part, tmp_path / f"pytorch_model-{i}.bin")
        table |= dict.fromkeys(part, f"pytorch_model-{i}.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    weights = open_directory(tmp_path)
    assert torch.equal(weights.read("a"), torch.ones(2)) and weights.shapes["b"] == (3,)
    (tmp_path / "pytorch_model-1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-1.bin: No such file"):
        open_directory(tmp_path)
