"""Directories of weights as other programs write them: released layouts, changed files, model-parallel shards."""

import argparse

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.training.whole_weights import load_weights

from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint


def weights_of(run_directory):
    (path,) = list_checkpoints(run_directory / "checkpoints")
    return load_weights(read_checkpoint(path))


def assert_same_weights(actual, expected):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


def repack(directory, change, as_pickle=False):
    """Rewrite the weights of a directory as `change` of its tensors, perhaps in torch's format."""
    tensors = change(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").unlink()
    if as_pickle:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")


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
