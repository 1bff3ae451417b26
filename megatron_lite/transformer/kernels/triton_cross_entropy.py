"""GPU kernels of the cross entropy, written in Triton as those of triton_kernels.py. Only cross_entropy.py's operators
import this module, and only on a GPU.
"""

from __future__ import annotations

import triton.language as tl

from megatron_lite.transformer.kernels.launch import kernel, require

WIDE = 4096  # columns that a program reads at once


@kernel("first", "valid")
def _log_sums(
    logits, targets, log_sums, target_logits, first, valid, WIDTH: tl.constexpr, WIDE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * WIDTH
    largest_seen = tl.full([WIDE], float("-inf"), tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    for start in range(0, valid, WIDE):
        column = start + tl.arange(0, WIDE)
        value = tl.load(logits + column, mask=column < valid, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest_seen, value)
        # A lane that has seen nothing yet holds -inf, and -inf - -inf is no number.
        total = tl.where(
            new_largest == float("-inf"),
            0.0,
            total * tl.exp(largest_seen - new_largest) + tl.exp(value - new_largest),
        )
        largest_seen = new_largest
    largest = tl.max(largest_seen, 0)
    total = tl.sum(tl.where(largest_seen == float("-inf"), 0.0, total * tl.exp(largest_seen - largest)), 0)
    tl.store(log_sums + row, tl.log(total) + largest)
    local = tl.load(targets + row).to(tl.int64) - first
    tl.store(
        target_logits + row,
        tl.load(logits + local, mask=(local >= 0) & (local < valid), other=0.0).to(tl.float32),
    )


@kernel("first", "valid")
def _write_gradient(logits, targets, log_sums, grad, first, valid, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < WIDTH
    value = tl.load(logits + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    probability = tl.where(column < valid, tl.exp(value - tl.load(log_sums + row)), 0.0)
    is_target = (column == tl.load(targets + row).to(tl.int64) - first) & (column < valid)
    value = (probability - tl.where(is_target, 1.0, 0.0)) * tl.load(grad + row)
    tl.store(logits + row * WIDTH + column, value.to(logits.dtype.element_ty), mask=inside)


def _require(width, valid, rows, *tensors):  # type: ignore[no-untyped-def]
    if valid > width:
        raise ValueError(f"a kernel takes rows of at least {valid} logits, and got {width}.")
    require(((rows,), *tensors))


def log_sums(logits, targets, first, valid, sums, target_logits):  # type: ignore[no-untyped-def]
    rows, width = logits.shape
    _require(width, valid, rows, targets)
    if rows:
        _log_sums((rows, 1), (logits, targets, sums, target_logits), (first, valid), (width, WIDE), 8)


def write_gradient(logits, targets, sums, grad, first, valid):  # type: ignore[no-untyped-def]
    rows, width = logits.shape
    _require(width, valid, rows, targets, sums, grad)
    if rows:
        grid = rows, -(-width // WIDE)
        _write_gradient(grid, (logits, targets, sums, grad), (first, valid), (width, WIDE), 8)
