"""The formulas that GPUs compile, through torch's compiler without its code generator, with sizes that vary."""

import numpy as np
import pytest
import torch

from megatron_lite.model import heads
from megatron_lite.model.dropout import features_formula, keep_features, salts, token_keys
from megatron_lite.model.varlen import pair_formula


def compiled(formula):
    return torch.compile(formula, dynamic=True, fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()


def test_masks_of_dropout():
    formula, of_layers = compiled(features_formula), torch.from_numpy(salts(3))
    for tokens, width, p in ((50, 64, 0.1), (70, 64, 0.1), (33, 128, 0.3)):
        keys = torch.from_numpy(token_keys(tokens, np.arange(1), tokens)[0].copy())
        for salt in of_layers[:2, 2]:
            assert torch.equal(formula(keys, salt, width, p), keep_features(keys, salt, width, p))


def test_cross_entropy():
    sums, gradient = compiled(heads.sums_formula), compiled(heads.gradient_formula)
    generator = torch.Generator().manual_seed(0)
    for rows, columns, valid, first in ((30, 64, 60, 0), (41, 64, 60, 64), (7, 128, 100, 0)):
        logits = torch.randn(rows, columns, generator=generator).bfloat16()
        targets = torch.randint(0, 160, (rows,), generator=generator).int()
        grad = torch.rand(rows, generator=generator)
        ours, expected = (f(logits, targets, first, valid) for f in (sums, heads._sums_on_cpu))
        torch.testing.assert_close(ours, expected)
        written = logits.clone(), logits.clone()
        for write, copy in zip((gradient, heads._gradient_on_cpu), written, strict=True):
            write(copy, targets, expected[0], grad, first, valid)
        torch.testing.assert_close(*written)


def test_gradients_of_a_pair_of_calls():
    formula, generator = compiled(pair_formula), torch.Generator().manual_seed(0)
    for first, second, keys, tokens in ((20, 30, 45, 60), (25, 31, 50, 64)):
        place = torch.full((tokens,), -1, dtype=torch.int32)
        place[torch.randperm(tokens, generator=generator)[:keys]] = torch.arange(keys, dtype=torch.int32)
        counts = (first, first, first, second, keys, keys)
        grads = [torch.randn(count, 4, 8, generator=generator) for count in counts]
        torch.testing.assert_close(formula(*grads, 0, place), pair_formula(*grads, 0, place))
