"""Both streams against a reference of dense matrices, written from the specification: losses, scores, gradients."""

import math

import numpy as np
import pytest
import torch
from support.hf.own_models import NO_DROPOUT
from support.project import ROOT
from support.systems.entity_models import RandomVectors, batch_of, entity_config
from support.systems.entity_reference import Reference, reference_losses

from data_utils.common.losses import ENTITIES, NEXT_SENTENCE_LOSS
from data_utils.objectives import LOSSES
from megatron_lite.config.tree import Config, load_config
from megatron_lite.train.loss_normalizer import mean_scales
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.flops import parameter_count
from megatron_lite.transformer.micro_batch import prepare

CPU = torch.device("cpu")
CASES = {
    "as published": {},
    "odd": {
        "model": {"hidden_size": 36, "num_attention_heads": 3, "num_layers": 3, "ffn_size": 50},
        "entities": {"size": 15, "heads": 3, "layer_types": ["norm", "sim", "mix"]},
    },
    "one text": {"model": {"sentence_classes": 0}, "entities": {"next_sentence": False, "layer_types": ["norm"] * 4}},
}  # fmt: skip


def case_config(name: str, **changes) -> Config:
    case = CASES[name]
    return entity_config(**{**case, "model": {**NO_DROPOUT, **case.get("model", {})}, **changes})


def made(config, batch, **options):
    inputs = prepare(batch, CPU, config.model, **options)
    factors = np.ones(len(LOSSES))
    inputs.scale_weights(mean_scales(factors, batch.loss_divisors(len(LOSSES))))
    return inputs.to(CPU)


def spread(model):
    """Larger weights than the initial ones, and biases and norms that are not 0 and 1, so that all matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter) * (0.3 if "layernorm" in name or "bias" in name else 0.15)
            )
    return model


@pytest.mark.parametrize("few_counts", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_the_reference(name, few_counts):
    config = case_config(name)
    section = config.objective_choices[0].section
    vectors = RandomVectors(section.size)
    batch = batch_of(5, share=0.3, next_sentence=section.next_sentence, vectors=vectors)
    model = spread(build_model(config, len(LOSSES)))
    loss, sums = model(made(config, batch, few_counts=few_counts))
    loss.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    whole = {n: w[: model_spec(config).shapes(config)[n][0]] for n, w in weights.items()}
    found, _ = reference_losses(Reference(config, whole), batch, vectors)
    assert len(found[ENTITIES]) > 20 and bool(found[NEXT_SENTENCE_LOSS]) == section.next_sentence
    means = {loss: torch.stack(losses).mean() for loss, losses in found.items() if losses}
    for its, mean in means.items():
        assert sums[its.number, 0].item() == pytest.approx(mean.item(), rel=1e-5)
        assert sums[its.number, 1].item() == pytest.approx(1.0, rel=1e-5)
    expected = sum(means.values())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for n, parameter in model.named_parameters():
        other = weights[n].grad if weights[n].grad is not None else torch.zeros_like(parameter)
        assert parameter.grad is not None, n
        scale = max(other.abs().max().item(), 1e-3)
        assert (parameter.grad - other).abs().max().item() <= 1e-5 * scale + 1e-7, n
        if model_spec(config).is_unused(n, config):
            assert not parameter.grad.any() and not other.any(), n


def test_scores_of_candidates_match_the_reference():
    config = case_config("as published")
    vectors = RandomVectors()
    batch = batch_of(3, share=0.3)
    model = spread(build_model(config, len(LOSSES)))
    inputs = made(config, batch)
    hidden = model.run(inputs.tokens, inputs.ids, inputs.plan, None, condition=inputs.extra_inputs)
    logits = model.entity_logits(hidden, inputs.extra_inputs)
    ours = logits[(inputs.extra_inputs.predicted >= 0).flatten()]
    _, expected = reference_losses(Reference(config, dict(model.named_parameters())), batch, vectors)
    assert len(ours) == len(expected)
    for own, other in zip(ours, expected, strict=True):
        assert own[: len(other)].tolist() == pytest.approx(other.tolist(), abs=1e-4)
        assert own[0] == 0 and torch.isinf(own[len(other) :]).all()


def test_shapes_and_counts():
    config = case_config("odd")
    model = build_model(config, len(LOSSES))
    assert {n for n, _ in model.named_parameters()} == set(model_spec(config).shapes(config))
    assert model_spec(config).count(config) == sum(p.numel() for p in model.parameters())


def test_the_published_base_has_its_parameters():
    path = ROOT / "configs/ernie-thu-base.yaml"
    config = load_config([path])
    section = config.objective_choices[0].section
    assert section.layer_types_for(12) == ("sim",) * 5 + ("mix",) + ("norm",) * 6 and (
        section.size,
        section.heads,
    ) == (100, 4)
    sizes = {name: math.prod(shape) for name, shape in model_spec(config).shapes(config).items()}
    head = sum(size for name, size in sizes.items() if name.startswith("entity_head."))
    assert sum(sizes.values()) == 114_751_532 and "114.8 M" in path.read_text()
    assert sum(sizes.values()) - head - parameter_count(config.model, padded=False) == 4_568_004
    assert (
        model_spec(config).count(config) == 114_751_532 + (30592 - 30522) * 769
    )  # with rows that pad the vocabulary
