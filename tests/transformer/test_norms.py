"""RMSNorm on CPUs against torch's own, which is many operators with a backward pass each."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.transformer.norms import rms_norm

# Relative to the largest element: sums of 48 numbers, or the last digit of bf16.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("shape", [(7, 48), (5, 3, 48), (0, 48)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_output_and_gradients_are_torchs(dtype, shape):
    torch.manual_seed(0)
    x, gradient = (torch.randn(shape, dtype=dtype) * 3 + 1 for _ in range(2))
    weight = torch.randn(48, dtype=dtype)
    kept = x.clone(), weight.clone(), gradient.clone()
    for tensor in (x, weight):
        tensor.requires_grad_()
    ours = rms_norm(x, weight, 1e-5)
    theirs = F.rms_norm(x, weight.shape, weight, 1e-5)
    found = ours, *torch.autograd.grad(ours, (x, weight), gradient)
    expected = theirs, *torch.autograd.grad(theirs, (x, weight), gradient)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == dtype and mine.shape == other.shape
        if other.numel():
            assert (mine - other).abs().max() <= TOLERANCES[dtype] * other.abs().max()
    assert all(map(torch.equal, (x, weight, gradient), kept))  # nothing that others read is overwritten
    (alone,) = torch.autograd.grad(rms_norm(x, weight.detach(), 1e-5), x, gradient)
    assert torch.equal(alone, found[1])
