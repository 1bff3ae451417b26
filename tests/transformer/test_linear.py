import pytest
import torch
import torch.nn.functional as F

from megatron_lite.transformer.kernels import compat as module
from megatron_lite.transformer.tensor_parallel import add_product, linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_widened_half_precision_is_the_fp32_product_rounded_once(monkeypatch, dtype, with_bias):
    monkeypatch.setattr(module, "cpu_has_half_matmul", lambda dtype: False)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((2, 3, 16), (8, 16), (8,))
    )
    grad = torch.randn(2, 3, 8, generator=generator).to(dtype)
    inputs = (x, weight, bias) if with_bias else (x, weight)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    expected = F.linear(*wide)
    expected_grads = torch.autograd.grad(expected, wide, grad.float())
    ours = linear(*inputs)
    torch.testing.assert_close(ours, expected.to(dtype), rtol=0, atol=0)
    for mine, theirs in zip(torch.autograd.grad(ours, inputs, grad), expected_grads, strict=True):
        assert mine.dtype == dtype
        # One rounding of the fp32 gradient; the order of its fp32 sum may differ by an ulp of the half type.
        torch.testing.assert_close(mine, theirs.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("with_bias", [True, False])
def test_native_half_precision_is_torch(monkeypatch, with_bias):
    """Up to the order of sums: the gradient of the weight is another product."""
    monkeypatch.setattr(module, "cpu_has_half_matmul", lambda dtype: True)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((2, 3, 16), (8, 16), (8,))
    )
    inputs = (x, weight, bias) if with_bias else (x, weight)
    grad = torch.randn(2, 3, 8, generator=generator).bfloat16()
    ours, expected = linear(*inputs), F.linear(*inputs)
    assert torch.equal(ours, expected)
    gradients = (torch.autograd.grad(out, inputs, grad) for out in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-2)


def test_fp32_is_torch():
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert not module.widens(x)


@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_up_in_fp32(dtype, has_instructions, monkeypatch):
    """Of two micro-batches. Without instructions for half precision nothing is rounded to it."""
    monkeypatch.setattr(module, "cpu_has_half_matmul", lambda kind: has_instructions or kind == torch.float32)
    generator = torch.Generator().manual_seed(0)
    total, expected = torch.full((6, 5), torch.nan), torch.zeros(6, 5, dtype=torch.float64)
    for begun in (False, True):
        grad, rows = (torch.randn(40, width, generator=generator).to(dtype) for width in (6, 5))
        add_product(total, grad, rows, begun)
        expected += grad.double().T @ rows.double()
    rounded = dtype == torch.bfloat16 and has_instructions
    tolerance = 2**-8 * expected.abs().max() if rounded else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=float(tolerance))
