"""Our model computes what the class of transformers does, and its tensors come back bit-equal, for every system."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.published import CASES, write_random

from data_utils.base.settings import build
from data_utils.objectives.planes import DOC, ORD, PADDING_DOC, TOKENS
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf import conversion
from megatron_lite.hf.published_runs import in_rows, our_output, proof_batch, their_output
from megatron_lite.hf.weights import Weights
from megatron_lite.model.glm import GLM

# fp32, the same sums in another order; times the largest value beyond 1.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=list(CASES))
def both(request, tmp_path_factory):
    """Their model, its directory as we read it, and ours with its weights."""
    path = tmp_path_factory.mktemp("published")
    theirs = write_random(request.param, path)
    source = conversion.open_published(path)
    config = build(ModelConfig, {**source.settings, "attention_dropout": 0.0})
    model = GLM(config)
    weights = conversion.to_ours(source.theirs, source.parts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            read = weights.read(name)
            parameter.zero_()
            parameter[: len(read)] = read  # rows that pad the vocabulary stay 0
    return theirs, source, model


def test_logits_and_gradients_are_those_of_the_class(both):
    theirs, source, model = both
    config = model.config
    batch = proof_batch(config)
    batch[:, TOKENS] += 4 * (batch[:, TOKENS] < 4)  # their padding row has no gradient from the input side
    real = torch.from_numpy(batch[:, DOC] != PADDING_DOC)
    hidden, logits = our_output(model, batch)
    out = their_output(theirs, config, batch)
    expected = out["logits"] if "logits" in out else out["prediction_logits"]
    if config.decoder_layers:
        expected = in_rows(expected, batch)
        real &= torch.from_numpy(batch[:, ORD] > 0)
    pairs = [(logits[real], expected[real])]
    for name in ("seq_relationship_logits", "sop_logits"):
        if name in out:
            pairs.append((model.heads.sentence(model.final_layernorm(hidden[:, 0])), out[name]))
    assert len(pairs) == 1 + (config.sentence_classes > 0)
    total, expected_total = 0.0, 0.0
    for ours, expected in pairs:
        assert (ours - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max())
        weights = torch.from_numpy(np.random.default_rng(1).normal(size=tuple(ours.shape))).float()
        total = total + (ours * weights / ours.numel() ** 0.5).sum()
        expected_total = expected_total + (expected * weights / ours.numel() ** 0.5).sum()
    total.backward()
    expected_total.backward()
    of_theirs = {name: p.grad for name, p in theirs.named_parameters()}
    grads = Weights(source.theirs.shapes, of_theirs.__getitem__)
    expected_grads = conversion.to_ours(grads, source.parts)
    largest = max(grad.abs().max() for grad in of_theirs.values() if grad is not None)
    for name, parameter in model.named_parameters():
        expected = expected_grads.read(name)
        difference = (parameter.grad[: len(expected)] - expected).abs().max()
        assert difference <= TOLERANCE * largest, name


def test_their_tensors_come_back_bit_equal(both, tmp_path):
    theirs, source, model = both
    described = conversion.hf_config(model.config, {})
    assert described.architectures == [type(theirs).__name__]
    for entry in source.system.fields:
        if getattr(model.config, entry.ours) and entry.ours != "attention_dropout":  # which is off here
            before, after = (
                conversion.field_of(config, entry.theirs) for config in (theirs.config, described)
            )
            assert before == after
    named = dict(model.named_parameters())
    ours = Weights(
        {name: conversion.to_ours(source.theirs, source.parts).shapes[name] for name in named},
        lambda name: named[name].detach()[: conversion.to_ours(source.theirs, source.parts).shapes[name][0]],
    )
    kept = dict(conversion.kept_rows(source.theirs, source.parts))
    rows = Weights({name: tuple(x.shape) for name, x in kept.items()}, kept.__getitem__)
    back = conversion.to_theirs(ours, source.parts, rows, source.system)
    original = load_file(source.path / "model.safetensors")
    assert back.shapes.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back.read(name), tensor), name
