"""The update of one linear layer against formulas, computed and merged. Training is peft's: tests/hf/test_lora.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.distributed import run_ranks

from data_utils.common.settings import build
from megatron_lite.config.lora import LoraConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.hf.common.lora import ClassModule, merged
from megatron_lite.hf.common.weights import Weights
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels.dropout import Dropout, LayerDropout, salts, token_keys
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

TOKENS, WIDTH, SCALE, P = 40, 32, 3.0, 0.5
RANK = WIDTH + 8  # a rank may be larger than the matrix, as in peft
MODEL = {
    "num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 4, "ffn_size": WIDTH, "vocab_size": 128,
    "max_position": 64, "lora": {"rank": RANK, "alpha": SCALE * RANK, "dropout": P},
}  # fmt: skip


def layer_of(path, parallel=None, **changes):
    model = Transformer(build(ModelConfig, MODEL | changes, "model."), parallel=parallel)
    initialize_parameters(model.named_parameters(), model.config, 5, model.parallel)
    return model.layers[0].get_submodule(path)


def drawn(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 1.0


@pytest.mark.parametrize("path", ["attention.query_key_value", "mlp.dense_4h_to_h"])
def test_dropout_is_of_the_input_of_the_update_alone(path):
    layer, x = layer_of(path), drawn(TOKENS, WIDTH)
    keys = torch.from_numpy(token_keys(1, np.arange(1), TOKENS).reshape(-1))
    dropout = LayerDropout(Dropout(keys, torch.from_numpy(salts(1)), 0), 0)
    with torch.no_grad():
        whole = x @ layer.weight.T
        torch.testing.assert_close(layer(x, lora_dropout=dropout), whole)  # B is zero
        layer.lora["whole"].a.copy_(torch.eye(RANK, WIDTH))
        layer.lora["whole"].b[:WIDTH].copy_(torch.eye(WIDTH, RANK))
        kept = (layer(x, lora_dropout=dropout) - whole)[:, :WIDTH] / x / SCALE
    expected = torch.where(kept > 0.5 / (1 - P), 1 / (1 - P), 0.0)
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-4)
    assert abs(float((expected > 0).double().mean()) - (1 - P)) < 0.1


@pytest.mark.parametrize(("name", "first", "last"), [("query", 0, 32), ("key", 32, 48), ("value", 48, 64)])
def test_an_update_of_a_part_is_of_its_rows_alone(name, first, last):
    layer = layer_of("attention.query_key_value", system="llama", num_key_value_heads=2)
    x = drawn(TOKENS, WIDTH)
    with torch.no_grad():
        layer.lora[name].b.fill_(1.0)
        added = layer(x) - x @ layer.weight.T
        expected = torch.zeros_like(added)
        expected[:, first:last] = (x @ layer.lora[name].a.T).sum(1, keepdim=True) * SCALE
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)


def gradient_of_a(context, b, x, grad):
    layer = layer_of("mlp.dense_h_to_4h", TensorParallel(context.tp))
    of_rank = slice(
        context.tp.rank * WIDTH // context.tp.size, (context.tp.rank + 1) * WIDTH // context.tp.size
    )
    layer.lora["whole"].b.data.copy_(b[of_rank])
    (layer(x) * grad[:, of_rank]).sum().backward()
    return layer.lora["whole"].a.grad


def test_every_rank_has_the_whole_gradient_of_a_replicated_factor():
    b, x, grad = drawn(WIDTH, RANK, seed=2), drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH, seed=3)
    expected = SCALE * (grad @ b).T @ x
    for found in run_ranks(gradient_of_a, 2, b, x, grad, parallel=ParallelConfig(tensor_parallel_size=2)):
        torch.testing.assert_close(found, expected)


def test_a_merged_weight_is_the_sum():
    tensors = {"theirs.weight": drawn(6, 4), "ours.a": drawn(2, 4, seed=2), "ours.b": drawn(6, 2, seed=3)}
    base, updates = (
        Weights({name: tuple(tensors[name].shape) for name in names}, tensors.__getitem__)
        for names in (["theirs.weight"], ["ours.a", "ours.b"])
    )
    settings = LoraConfig(rank=2, alpha=6.0)
    modules = {"theirs": ClassModule("ours", build(ModelConfig, MODEL, "model."))}
    found = merged(base, updates, modules, settings).read("theirs.weight")
    torch.testing.assert_close(found, tensors["theirs.weight"] + 3.0 * tensors["ours.b"] @ tensors["ours.a"])
