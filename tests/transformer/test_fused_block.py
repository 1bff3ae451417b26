"""A model whose blocks are one function of autograd each, against the same in fp64 whose parts are torch's own.

fp32 sums in another order: 1e-4 of an element, or 2e-6 of the largest one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from support.data.recipes import collate, windows
from support.data.recipes import make as make_objective
from support.transformer.kernels import interpreted_kernels

from megatron_lite.config.lora import LoraConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer import fused_block
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    accumulate_in_backward,
)
from megatron_lite.transformer.transformer import Transformer

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=3000, max_position=64,
    embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.3,
)  # fmt: skip


_MODERN = {
    "positions": "rotary", "block_positions": "halves", "rms_norm": True, "ffn": "gated", "ffn_size": 20,
    "biases": "none",
}  # fmt: skip
_LOCAL = {"attention_window": 2, "global_every": 2, "rotary_base_local": 100.0}
# name -> (options, objective, seed of dropout, blocks that are fused)
BODIES = {
    "GLM": ({}, "blank_infilling", 7, 2),
    "one call": ({}, "masked_lm", None, 2),
    "modern, two calls": (_MODERN, "blank_infilling", 7, 2),
    "modern, one call": ({**_MODERN, "block_positions": "added", "rotary_share": 0.5}, "masked_lm", 7, 2),
    "local, first without norm": (
        {**_MODERN, **_LOCAL, "block_positions": "added", "rms_norm": False, "norm_bias": False, "first_norm": False},
        "masked_lm", None, 1,
    ),
    "shared keys": ({**_MODERN, "num_key_value_heads": 2, "biases": "qkv"}, "blank_infilling", None, 2),
    "norms of heads": ({**_MODERN, "num_key_value_heads": 2, "query_key_norm": True}, "causal", 7, 2),
    "norms of heads, two calls": ({"query_key_norm": True, "biases": "qkv"}, "blank_infilling", None, 2),
    "norms of heads and all biases": ({"query_key_norm": True}, "masked_lm", None, 0),
    "updates of LoRA": ({"lora": LoraConfig(rank=3, dropout=0.2)}, "blank_infilling", 7, 0),
    "unscaled scores": ({"unscaled_scores": True, "activation": "silu"}, "blank_infilling", 7, 2),
}  # fmt: skip


def model_of(config=CONFIG, **options):
    """With weights that matter all: initial biases would be 0."""
    model = Transformer(config, num_losses=6, **options)
    initialize_parameters(model.named_parameters(), config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=generator)
    return model


def batch_of(objective, **config):
    return collate(make_objective(objective, 16, **config), windows(1, 16, seed=0))


def input_of(batch, model, dropout_seed, multiple=8):
    return MicroBatch.from_batch(
        Batch(batch),
        torch.device("cpu"),
        model.config,
        dropout_seed=dropout_seed,
        kernel="varlen",
        multiple=multiple,
    )


def accumulate_gradients(model):
    """name -> gradient, filled as an optimizer would be; the parameters of blocks that autograd knows of."""
    taken, autograds = {}, []
    names = {parameter: name for name, parameter in model.named_parameters()}

    def take(parameter, gradient):
        assert names[parameter] not in taken and gradient.shape == parameter.shape
        taken[names[parameter]] = gradient

    for layer in model.modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            product = functools.partial(lambda weight, grad, rows: take(weight, grad.T @ rows), layer.weight)
            accumulate_in_backward(layer.weight, product)
    for block in model.layers:
        block.accumulate_gradients(take)
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: autograds.append(names[p]))
    return taken, autograds


def run(model, batch, dropout_seed):
    loss, _ = model(input_of(batch, model, dropout_seed))
    loss.backward()
    return loss


@pytest.fixture
def counted(monkeypatch):
    """The fused blocks that were computed."""
    blocks = []
    fused = fused_block.FusedBlock.apply
    monkeypatch.setattr(
        fused_block.FusedBlock,
        "apply",
        lambda *arguments: blocks.append(arguments[2].block) or fused(*arguments),
    )
    return blocks


# In the interpreter a body takes seconds: those that differ from others by one option are slow.
SLOW = {"modern, one call", "norms of heads, two calls", "norms of heads and all biases", "shared keys"}
SLOW |= {"one call", "unscaled scores", "local, first without norm", "norms of heads", "updates of LoRA"}


@pytest.mark.parametrize(
    "body", [pytest.param(body, marks=[pytest.mark.slow] * (body in SLOW)) for body in BODIES]
)
def test_a_model_of_fused_blocks(emulated_kernel, counted, body):
    options, objective, dropout_seed, count = BODIES[body]
    model, batch = model_of(dataclasses.replace(CONFIG, **options)), batch_of(objective)
    wide = copy.deepcopy(model).double()
    expected = run(wide, batch, dropout_seed)
    assert not counted
    with interpreted_kernels():
        taken, autograds = accumulate_gradients(model)
        loss = run(model, batch, dropout_seed)
    fused = list(model.layers)[2 - count :]
    assert counted == [block.fused for block in fused]
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    if count == 2:
        of_blocks = {name for name, _ in model.named_parameters() if name.startswith("layers.")}
        last = {"layers.1.mlp.dense_4h_to_h.bias"} & of_blocks
        assert set(autograds) == last, "the last sum's"
        assert set(taken) == of_blocks - last
    for name, parameter in model.named_parameters():
        found, theirs = taken.get(name, parameter.grad), wide.get_parameter(name).grad
        assert found.dtype == parameter.dtype and (parameter.grad is None) == (name in taken)
        scale = theirs.abs().max().item()
        torch.testing.assert_close(found.double(), theirs, rtol=1e-4, atol=2e-6 * max(1.0, scale), msg=name)


@pytest.mark.slow
def test_padding_to_a_length_changes_nothing_of_fused_blocks(emulated_kernel, counted):
    """Loss and gradients, but for the rounding of sums over more tokens, which are zeros."""
    model, batch = model_of(dataclasses.replace(CONFIG, num_layers=1)), batch_of("blank_infilling")
    found = []
    for multiple in (1, 64):
        other = copy.deepcopy(model)
        with interpreted_kernels():
            taken, _ = accumulate_gradients(other)
            given = input_of(batch, other, 5, multiple)
            loss, _ = other(given)
            loss.backward()
        gradients = {name: taken.get(name, parameter.grad) for name, parameter in other.named_parameters()}
        found.append((len(given.tokens), loss.detach(), gradients))
    (tokens, loss, gradients), (padded, same_loss, same) = found
    assert counted and padded == 64 > tokens
    torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("why", ["not trained", "recompute", "no taker", "another norm"])
def test_blocks_that_are_not_fused(emulated_kernel, counted, why):
    model, batch = model_of(recompute="full" if why == "recompute" else "none"), batch_of("blank_infilling")
    if why == "another norm":
        for block in model.layers:
            block.input_layernorm.normalize = lambda *arguments: torch.nn.functional.layer_norm(*arguments)
    with interpreted_kernels(), torch.set_grad_enabled(why != "not trained"):
        if why != "no taker":
            accumulate_gradients(model)
        loss, _ = model(input_of(batch, model, None))
        assert np.isfinite(loss.item())
    assert not counted
