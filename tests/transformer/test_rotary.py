"""Rotary positions and shared keys against their definitions, and the options that came with them."""

import dataclasses
import math

import pytest
import torch
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, ID_FIELDS
from megatron_lite.config.model import BLOCK_POSITIONS, ModelConfig
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.flops import parameter_count, step_flops
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels.fused import activated
from megatron_lite.transformer.micro_batch import ID_FIELDS, MicroBatch
from megatron_lite.transformer.rope import Rotary, prepare_qkv
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=100, max_position=64, positions="rotary",
    rotary_share=0.5, rotary_base=100.0, embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.0,
)  # fmt: skip


def ids(positions, block_positions):
    fields = torch.zeros(len(ID_FIELDS), len(positions), dtype=torch.int32)
    fields[0], fields[1] = torch.tensor(positions), torch.tensor(block_positions)
    return fields


def test_pairs_of_features_are_turned_by_their_angle():
    rotary = Rotary.of(CONFIG, ids([0, 3, 5], [0, 0, 2]))
    heads = torch.randn(3, 2, 8, dtype=torch.float64).float()
    turned = rotary.rotate(heads)
    assert torch.equal(turned[..., 4:], heads[..., 4:]) and torch.equal(turned[0], heads[0])
    for token, position in enumerate((0, 3, 7)):
        for pair in range(2):
            angle = position * 100.0 ** (-2 * pair / 4)
            number = torch.view_as_complex(heads[token, :, 2 * pair : 2 * pair + 2].contiguous())
            expected = number * complex(math.cos(angle), math.sin(angle))
            found = torch.view_as_complex(turned[token, :, 2 * pair : 2 * pair + 2].contiguous())
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_only_the_first_heads_are_turned_and_gradients_are_turned_back(dtype):
    """Beside pairs written out as (a cos - b sin, b cos + a sin)."""
    rotary = Rotary.of(CONFIG, ids([0, 3, 5, 9], [0, 0, 2, 1]))
    heads, grad = (torch.randn(4, 3, 8, dtype=dtype) for _ in range(2))

    def expected(x: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        wide = torch.promote_types(dtype, torch.float32)
        a, b = x[:, :2, 0:4:2].to(wide), x[:, :2, 1:4:2].to(wide)
        out[:, :2, 0:4:2] = (a * rotary.cos - b * sine).to(dtype)
        out[:, :2, 1:4:2] = (b * rotary.cos + a * sine).to(dtype)
        return out

    # A view of a wider tensor, as queries and keys are of a fused projection.
    wider = torch.cat([heads, heads], dim=1)[:, :3].requires_grad_()
    found = rotary.rotate(wider, 2)
    (found_grad,) = torch.autograd.grad(found, wider, grad)
    torch.testing.assert_close(found.detach(), expected(heads, rotary.sin))
    torch.testing.assert_close(found_grad, expected(grad, -rotary.sin))


def test_scores_depend_on_distances_only():
    heads = torch.randn(6, 1, 8)
    scores = []
    for first in (0, 40):
        x = Rotary.of(CONFIG, ids(range(first, first + 6), [0] * 6)).rotate(heads)[:, 0]
        scores.append(x @ x.T)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


def test_positions_of_part_b_continue_from_the_mask():
    """The same angle for position 4 and place 3 in the span as for position 7 of the text."""
    in_text, in_span = (Rotary.of(CONFIG, x) for x in (ids([5, 6, 7], [0, 0, 0]), ids([4, 4, 4], [1, 2, 3])))
    assert torch.equal(in_text.cos, in_span.cos) and torch.equal(in_text.sin, in_span.sin)


def test_halves_are_turned_by_one_position_each():
    """Both halves as a model whose heads are a half as wide turns all of its features."""
    config = dataclasses.replace(CONFIG, block_positions="halves", rotary_share=1.0)
    narrow = dataclasses.replace(config, block_positions="added", head_dim=4)
    heads = torch.randn(3, 4, 8)
    text, span = [7, 7, 9], [0, 3, 2]
    both = [
        Rotary.of(narrow, ids(places, [0] * 3)).rotate(half)
        for places, half in zip((text, span), heads.split(4, -1), strict=True)
    ]
    torch.testing.assert_close(
        Rotary.of(config, ids(text, span)).rotate(heads), torch.cat(both, dim=-1), rtol=0, atol=0
    )


def test_beside_a_table_the_position_in_the_text_alone_turns():
    config = dataclasses.replace(CONFIG, block_positions="table")
    found, expected = (Rotary.of(config, ids([4, 4, 6], blocks)) for blocks in ([0, 1, 5], [0, 0, 0]))
    assert torch.equal(found.cos, expected.cos) and torch.equal(found.sin, expected.sin)


@pytest.mark.parametrize("block_positions", BLOCK_POSITIONS)
def test_the_model_tells_places_in_a_span(block_positions):
    """But for the ablation `none`, which reads none of them."""
    config = dataclasses.replace(CONFIG, block_positions=block_positions)
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), dataclasses.replace(config, init_std=0.5), 1)
    tables = [name for name, _ in model.named_parameters() if "position" in name]
    assert tables == ["embedding.block_position_embeddings.weight"] * (block_positions == "table")
    assert parameter_count(config) == parameter_count(CONFIG) + 65 * 32 * len(tables)
    assert step_flops(config, 10, 2, 30) == step_flops(CONFIG, 10, 2, 30)
    inputs = MicroBatch.from_batch(Batch(prefix_batch(0)), CPU, CONFIG, kernel="dense")
    outs = [model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)]
    places = inputs.ids[ID_FIELDS.index(BLOCK_POSITION_IDS)]
    assert places.max() > 2
    places.clamp_(max=1)
    outs.append(model.hidden_states(inputs.tokens, inputs.ids, inputs.plan))
    assert ((outs[0] - outs[1]).abs().max() > 1e-3) == (block_positions != "none")


@pytest.mark.parametrize(
    "options",
    [
        {"relative": "xlnet"},
        {"norm": "post"},
        {"sandwich_norm": True},
        {"adapter_size": 4},
        {"activation_dropout": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_function_of_a_whole_block_leaves_something_out(options):
    """Blocks with rotary positions may be one function of autograd, those with what it does not compute may not."""
    fusible = [
        Block(config, TensorParallel(), "none", 0).may_fuse
        for config in (CONFIG, dataclasses.replace(CONFIG, **options))
    ]
    assert fusible == [True, False]


def test_shared_keys_match_a_model_that_repeats_their_weights():
    grouped = Transformer(dataclasses.replace(CONFIG, num_key_value_heads=2, init_std=0.3))
    initialize_parameters(grouped.named_parameters(), grouped.config, 1)
    whole = Transformer(CONFIG)
    state = {}
    for name, parameter in grouped.state_dict().items():
        if "query_key_value" in name:
            q, *shared = parameter.unflatten(0, (-1, 8)).split([4, 2, 2])
            parameter = torch.cat([q, *(x.repeat_interleave(2, dim=0) for x in shared)]).flatten(0, 1)
        state[name] = parameter
    whole.load_state_dict(state)
    inputs = MicroBatch.from_batch(Batch(prefix_batch(0)), CPU, CONFIG, kernel="dense")
    one, other = (model.hidden_states(inputs.tokens, inputs.ids, inputs.plan) for model in (grouped, whole))
    torch.testing.assert_close(one, other)


def test_without_the_options_nothing_is_copied():
    heads = torch.randn(5, 12, 8)
    assert prepare_qkv(heads, 4, None) is heads


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "relu", "silu"])
def test_a_gate_multiplies_the_other_half(activation):
    x, bias = torch.randn(3, 10), torch.randn(10)
    functions = {
        "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu, "relu": torch.relu, "silu": lambda y: y * torch.sigmoid(y),
    }  # fmt: skip
    y = x + bias
    torch.testing.assert_close(
        activated(x, activation, bias=bias, gated=True), functions[activation](y[:, :5]) * y[:, 5:]
    )


def test_deepnorm_scales_the_residual_and_the_initial_values():
    config = dataclasses.replace(CONFIG, hidden_size=256, num_layers=8, norm="deepnorm", init="deepnorm")
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), config, 1)
    named = dict(model.named_parameters())
    q, k, v = named["layers.3.attention.query_key_value.weight"].chunk(3)
    xavier = math.sqrt(2 / 512)
    for weight, std in (
        (q, xavier),
        (k, xavier),
        (v, xavier / 4),
        (named["layers.3.attention.dense.weight"], xavier / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.02)  # 65,536 draws: 4 sigma are 1 %
    inner = named["layers.3.mlp.dense_h_to_4h.weight"]
    assert inner.std().item() == pytest.approx(math.sqrt(2 / (256 + 1024)) / 4, rel=0.02)
    inputs = MicroBatch.from_batch(Batch(prefix_batch(0)), CPU, config)
    context = ForwardContext.of(
        inputs.tokens.shape, inputs.plan, None, TensorParallel(), (Rotary.of(config, inputs.ids),) * 2
    )
    block, hidden = model.layers[0], torch.randn(len(inputs.tokens), 256)
    attended, expanded = torch.randn(2, 256)
    with torch.no_grad():  # attention and MLP give their biases
        for layer, bias in ((block.attention.dense, attended), (block.mlp.dense_4h_to_h, expanded)):
            layer.weight.zero_()
            layer.bias.copy_(bias)
        out = block(hidden, context, 0)
    normed = torch.nn.functional.layer_norm(4 * hidden + attended, (256,))
    expected = torch.nn.functional.layer_norm(4 * normed + expanded, (256,))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_ranks_hold_the_keys_of_their_queries():
    config = dataclasses.replace(CONFIG, num_key_value_heads=2, ffn="gated", ffn_size=20)
    shapes = [
        {
            name: tuple(p.shape)
            for name, p in Block(config, TensorParallel(group), "none", 0).named_parameters()
        }
        for group in (Group(None, 0, 1, (0,)), Group(None, 1, 2, (0, 1)))
    ]
    whole, half = (
        [x[f"{name}.weight"] for name in ("attention.query_key_value", "mlp.dense_h_to_4h")] for x in shapes
    )
    assert whole == [(64, 32), (40, 32)] and half == [(32, 32), (20, 32)]
