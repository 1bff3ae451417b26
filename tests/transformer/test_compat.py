"""What the program uses of torch beyond its documented interface."""

import re

import pytest
import torch
from support.code_structure import product_files
from support.project import ROOT

from megatron_lite.transformer.kernels import compat
from megatron_lite.transformer.kernels.compat import widens
from megatron_lite.transformer.lengths import builds_kernels


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


@pytest.mark.parametrize(
    "cpu, native",
    [
        ("no half precision", []),
        ("AVX512-BF16", [torch.bfloat16]),
        ("AMX", [torch.bfloat16]),
        ("AMX with fp16", [torch.bfloat16, torch.float16]),
    ],
    indirect=["cpu"],
)
def test_half_precision_is_native_where_the_cpu_says_so(cpu, native):
    half = (torch.bfloat16, torch.float16)
    assert [dtype for dtype in half if compat.cpu_has_half_matmul(dtype)] == native
    assert compat.cpu_has_half_matmul(torch.float32)
    for dtype in half:
        x = torch.zeros(1, dtype=dtype)
        assert widens(x) == (dtype not in native)
        assert builds_kernels(x.device, dtype) == (dtype in native)


def test_one_function_asks_torch_about_the_cpu():
    asks = [
        path
        for path in product_files()
        if re.search(r"torch\.cpu\b|cpu_capability|cpuinfo\.get|mkldnn", path.read_text())
    ]
    assert [str(path.relative_to(ROOT)) for path in asks] == [
        "data_utils/common/private_names.py",  # the list of such names
        "megatron_lite/transformer/kernels/compat.py",
    ]
