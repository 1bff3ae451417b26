"""A mixture of experts is the layer of the classes of transformers; its router's losses are those of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.training.parity_cases import samples_of
from transformers import Glm4MoeConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from data_utils.common.batch_fields import DOC, PADDING_DOC
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSSES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.experts import Experts
from megatron_lite.transformer.flops import parameter_count, step_flops
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.routed_tokens import RoutedTokens
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

WIDTHS = {"hidden_size": 16, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn": "gated", "activation": "silu",
    "biases": "none", "max_position": 80, "vocab_size": 500, "attention_dropout": 0.0, "output_dropout": 0.0,
    "embedding_dropout": 0.0, "experts": {"count": 8, "per_token": 3, "width": 12},
}  # fmt: skip
GLM = {**WIDTHS, "n_routed_experts": 8, "routed_scaling_factor": 2.5}
OF_GLM = {"shared": 1, "factor": 2.5, "biased": True}
CLASSES = {
    "GLM-4.5": (Glm4MoeMoE, Glm4MoeConfig(**GLM), OF_GLM),
    "GLM-4.5, groups": (
        Glm4MoeMoE,
        Glm4MoeConfig(**GLM, n_group=4, topk_group=2, n_shared_experts=2),
        {**OF_GLM, "groups": 4, "kept_groups": 2, "shared": 2},
    ),
    "Qwen3-MoE": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**WIDTHS, num_experts=8, norm_topk_prob=True),
        {"scores": "softmax"},
    ),
    "OLMoE": (
        OlmoeSparseMoeBlock,
        OlmoeConfig(hidden_size=16, intermediate_size=12, num_experts=8, num_experts_per_tok=3),
        {"scores": "softmax", "normalized": False},
    ),
}


def model_with(**experts):
    return merge(MODEL, {"experts": experts})


def theirs_as_ours(theirs):
    """The tensors of a class, or their gradients, under our names."""
    found = {"router.weight": theirs["gate.weight"]}
    if "gate.e_score_correction_bias" in theirs:
        found["router.bias"] = theirs["gate.e_score_correction_bias"]
    for expert, (first, second) in enumerate(
        zip(theirs["experts.gate_up_proj"], theirs["experts.down_proj"], strict=True)
    ):
        found[f"experts.{expert}.dense_h_to_4h.weight"] = first
        found[f"experts.{expert}.dense_4h_to_h.weight"] = second
    if "shared_experts.up_proj.weight" in theirs:
        both = [theirs[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up")]
        found["shared.dense_h_to_4h.weight"] = torch.cat(both)
        found["shared.dense_4h_to_h.weight"] = theirs["shared_experts.down_proj.weight"]
    return found


@pytest.mark.parametrize("case", CLASSES)
def test_outputs_and_gradients_are_those_of_the_class(case):
    cls, config, experts = CLASSES[case]
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    theirs = cls(config)
    for tensor in theirs.state_dict().values():
        torch.nn.init.normal_(tensor, std=0.3)
    ours = Experts(build(ModelConfig, model_with(**experts)), TensorParallel())
    assert not ours.load_state_dict(theirs_as_ours(theirs.state_dict()), strict=True).missing_keys
    # Tokens enough that all experts have some, and one token alone, with which most have none.
    for tokens in (60, 1):
        theirs.zero_grad()
        ours.zero_grad()
        x = torch.randn(tokens, 16)
        given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected_y = ours(given, ForwardContext((tokens,), None, None, None), 1), theirs(expected[None])[0]
        torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-6)
        direction = torch.randn_like(y)
        (y * direction).sum().backward()
        (expected_y * direction).sum().backward()
        torch.testing.assert_close(given.grad, expected.grad, rtol=1e-5, atol=1e-5)
        gradients = theirs_as_ours(
            {name: p.grad for name, p in theirs.named_parameters()}
            | dict.fromkeys(("gate.e_score_correction_bias",) if "router.bias" in ours.state_dict() else ())
        )
        for name, parameter in ours.named_parameters():
            if name == "router.bias":
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)


def plain_losses(x, router, sequences, settings):
    """The router's losses of each sequence by a loop over its tokens: their means, and the tokens of each expert."""
    counts = torch.zeros(settings.count, dtype=torch.float64)
    balance = z = entropy = 0.0
    for sequence in sequences:
        of_experts, mean = torch.zeros(settings.count), torch.zeros(settings.count)
        for token in sequence:
            logits = x[token] @ router.weight.T
            z = z + torch.logsumexp(logits, 0) ** 2 / len(sequence) / len(sequences)
            scores = logits.sigmoid()
            chosen = (scores + router.bias).topk(settings.per_token).indices
            of_experts[chosen] += 1
            p = scores / scores.sum()
            mean = mean + p / len(sequence)
            entropy = entropy - (p * p.log()).sum() / len(sequence) / len(sequences)
        counts += of_experts.double()
        share = of_experts / (settings.per_token * len(sequence))
        balance = balance + settings.count * (share * mean).sum() / len(sequences)
    return balance, z, entropy, counts


def test_losses_are_means_of_sequences_without_padding():
    """Their gradient too. They are counted once, though the forward pass is evaluated and computed again."""
    torch.manual_seed(2)
    config = build(ModelConfig, model_with(biased=True, balance_loss=0.3, z_loss=0.2))
    layer = Experts(config, TensorParallel())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sequences = [list(range(0, 9)), list(range(9, 14)), list(range(14, 30))]
    numbers = torch.full((34,), -1)  # the last four are padding
    for number, tokens in enumerate(sequences):
        numbers[tokens] = number
    x = torch.randn(34, 16)
    routed = RoutedTokens.of(numbers, len(sequences), 1 / 3, 1.0)
    context = ForwardContext((34,), None, None, None, routed=routed)
    with torch.no_grad():
        layer(x, context, 0)
    assert layer.router.step_sums is None

    def gradients(context, loss):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        y = torch.utils.checkpoint.checkpoint(lambda t: layer(t, context, 0), given, use_reentrant=False)
        (y.square().sum() + loss(given)).backward()
        return given.grad, layer.router.weight.grad

    balance, z, entropy, counts = plain_losses(x, layer.router, sequences, config.experts)

    def expected(given):
        of_balance, of_z, *_ = plain_losses(given, layer.router, sequences, config.experts)
        return 0.3 * of_balance + 0.2 * of_z

    got = gradients(context, lambda given: 0.0)
    for one, other in zip(got, gradients(ForwardContext((34,), None, None, None), expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    sums = layer.router.step_sums
    assert torch.equal(sums[:8], counts) and counts.sum() == 30 * 3
    torch.testing.assert_close(sums[8:], torch.stack([balance, z, entropy]).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("decoder_layers", [0, 1])
def test_a_model_counts_the_tokens_of_its_batch(decoder_layers):
    """In every block with experts; padding, of which the batch has much, is in no count."""
    config = build(ModelConfig, {**model_with(dense_layers=1), "decoder_layers": decoder_layers})
    model = Transformer(config, num_losses=len(LOSSES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rows = samples_of(0)
    padding = np.count_nonzero(rows[:, DOC] == PADDING_DOC)
    batch = Batch(rows)
    data = MicroBatch.from_batch(batch, torch.device("cpu"), config, has_one_length=True)
    assert padding > 50
    model(data)[0].backward()
    blocks = [block.mlp for block in model.layers if isinstance(block.mlp, Experts)]
    assert len(blocks) == 1 + decoder_layers and not isinstance(model.layers[0].mlp, Experts)
    counted = [block.router.step_sums[:8].sum().item() / 3 for block in blocks]
    if decoder_layers:
        assert counted == [batch.tokens - batch.decoder_tokens, batch.decoder_tokens]
    else:
        assert counted == [batch.tokens]


def test_flops_are_those_of_the_experts_that_compute():
    sizes = [(8, 3), (16, 3), (16, 6)]
    few, many, twice = (
        build(ModelConfig, model_with(count=count, per_token=chosen)) for count, chosen in sizes
    )
    per_expert, router = 3 * 16 * 12, 16  # of a token: gate, up and down; one score
    for other, added in ((many, 8 * router), (twice, 8 * router + 3 * per_expert)):
        assert step_flops(other, 10, 0, 0) - step_flops(few, 10, 0, 0) == 6 * 2 * 10 * added
    assert parameter_count(many) - parameter_count(few) == 2 * 8 * (per_expert + router)
