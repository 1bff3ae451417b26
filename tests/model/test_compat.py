"""What the program uses of torch beyond its documented interface."""

import pytest
import torch

from data_utils.base.errors import ConfigError
from megatron_lite.model import compat


def test_the_installed_torch_has_all_of_it():
    assert compat.cpu_has_half_matmul(torch.float32)
    assert all(
        compat.cpu_has_half_matmul(dtype) in (True, False) for dtype in (torch.bfloat16, torch.float16)
    )
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    out, sums = compat.flash_forward_on_cpu(q, k, v, 0.0, False, attn_mask=None)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def test_another_torch_is_told_in_one_line():
    with pytest.raises(ConfigError, match=r"torch .* has no _gone, which.*install the version"):
        compat._undocumented(torch.ops.aten, "_gone")
