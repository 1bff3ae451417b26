import pytest
import torch
import torch.nn.functional as F

from megatron_lite.model import heads as module
from megatron_lite.model.heads import cross_entropy


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 3, 1 << 24])  # one row, three rows, all rows at a time
def test_equals_torch_for_every_chunking(monkeypatch, chunk_bytes):
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    ours = cross_entropy(logits * 1.0, targets)
    (grad,) = torch.autograd.grad((ours * weights).sum(), logits)
    # fp32 with another order of summation.
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.zeros(1, 50_000, dtype=torch.bfloat16)
    loss = cross_entropy(logits, torch.tensor([3]))
    assert loss.dtype == torch.float32
    # ln 50000; a bf16 sum of 50000 ones would stop at 256.
    torch.testing.assert_close(loss, torch.tensor([10.819778]), rtol=1e-6, atol=0)


def test_no_rows_give_no_loss_and_a_zero_gradient():
    weight = torch.randn(5, 4, requires_grad=True)
    loss = cross_entropy(torch.empty(0, 4) @ weight.T, torch.empty(0, dtype=torch.int64)).sum()
    loss.backward()
    assert loss == 0 and not weight.grad.any()
