"""GPU kernels of what lies between matrix products: one pass through memory where torch's operators take several.

Written in Triton, which compiles them when they are first used. Only fused.py imports this module, and only on a GPU;
its functions say what each kernel computes. Arithmetic is in fp32, whatever the tensors' types. Sums over tokens are
made in two steps, first over the rows of each program, and in the same order each time: no atomic additions.

Every kernel walks over rows of contiguous matrices. BLOCK is the width of a row rounded up to a power of two.
"""

from __future__ import annotations

import functools
import math

import triton
import triton.language as tl

from megatron_lite.model.dropout import threshold_of

COLUMNS = 256  # of a tile, where a row is not needed as a whole
TILE_ROWS = 16
WIDE = 4096  # columns that a program of the cross entropy reads at once


def _grid_of_tiles(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, COLUMNS)


@functools.cache
def _block(width: int) -> dict[str, int]:
    """How a program holds a whole row: more than 16 numbers of it in a thread would not fit into registers."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 32)}


@triton.jit
def _stays(key, salt, columns, THRESHOLD: tl.constexpr):
    """The hash of dropout.py."""
    z = (key ^ salt).to(tl.uint32) + columns.to(tl.uint32) * 0x9E3779B9
    z = (z ^ (z >> 16)) * 0x21F0AAAD
    z = (z ^ (z >> 15)) * 0x735A2D97
    return (z ^ (z >> 15)) >= THRESHOLD


@triton.jit
def _add_norm(
    x, x_bias, keys, salt, hidden, weight, bias, total, normed, mean, rstd, width, epsilon, scale,
    HAS_X: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_HIDDEN: tl.constexpr, HAS_NORM: tl.constexpr,
    THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.zeros([BLOCK], tl.float32)
    if HAS_HIDDEN:
        value += tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_X_BIAS:
            added += tl.load(x_bias + column, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            added = tl.where(
                _stays(tl.load(keys + row), tl.load(salt), column, THRESHOLD), added * scale, 0.0
            )
        rounded = (value + added).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the backward pass normalises what was stored
    if HAS_NORM:
        center = tl.sum(value, 0) / width
        centered = tl.where(inside, value - center, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / width + epsilon)
        tl.store(mean + row, center)
        tl.store(rstd + row, factor)
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, (centered * factor * w + b).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    d_total, d_normed, total, weight, mean, rstd, keys, salt, d_hidden, d_x, sums,
    rows, width, rows_of_a_program, scale,
    HAS_D_TOTAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_X_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    d_x_bias = tl.zeros([BLOCK], tl.float32)
    first = program.to(tl.int64) * rows_of_a_program
    for row in range(first, tl.minimum(first + rows_of_a_program, rows)):
        place = row * width + column
        grad = tl.zeros([BLOCK], tl.float32)
        if HAS_D_TOTAL:
            grad += tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            dy = tl.load(d_normed + place, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(rstd + row)
            normal = tl.where(inside, (value - tl.load(mean + row)) * factor, 0.0)
            d_weight += dy * normal
            d_bias += dy
            weighted = dy * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            along = tl.sum(weighted * normal, 0) / width
            grad += (weighted - tl.sum(weighted, 0) / width - normal * along) * factor
            tl.store(d_hidden + place, grad.to(d_hidden.dtype.element_ty), mask=inside)
        if THRESHOLD > 0:
            kept = _stays(tl.load(keys + row), tl.load(salt), column, THRESHOLD)
            grad = tl.where(kept, grad * scale, 0.0)
            tl.store(d_x + place, grad.to(d_x.dtype.element_ty), mask=inside)
        d_x_bias += tl.where(inside, grad, 0.0)
    out = sums + program.to(tl.int64) * (2 * HAS_NORM + HAS_X_BIAS) * width + column
    if HAS_NORM:
        tl.store(out, d_weight, mask=inside)
        tl.store(out + width, d_bias, mask=inside)
        out += 2 * width
    if HAS_X_BIAS:
        tl.store(out, d_x_bias, mask=inside)


@triton.jit
def _finish_sums(sums, out, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(sums + row * width + column[None, :], mask=inside & (row < programs), other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _inner(x):
    """The argument of the hyperbolic tangent: sqrt(2 / pi) (x + 0.044715 x^3)."""
    return 0.7978845608028654 * (x + 0.044715 * x * x * x)


@triton.jit
def _tail(x, TANH: tl.constexpr):
    """erf(x / sqrt(2)), or what approximates it."""
    return _tanh(_inner(x)) if TANH else tl.erf(x * 0.7071067811865476)


@triton.jit
def _biased_tile(x, bias, row, column, rows, width, HAS_BIAS: tl.constexpr):
    """A tile in fp32, where its elements are, and which of them exist."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    return value, place, inside


@triton.jit
def _gelu(
    x, bias, out, rows, width,
    TANH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value, place, inside = _biased_tile(x, bias, row, column, rows, width, HAS_BIAS)
    share = 0.5 * (1.0 + _tail(value, TANH))
    tl.store(out + place, (value * share).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(
    x, bias, grad, d_x, sums, rows, width, rows_of_a_program,
    TANH: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.minimum((program + 1) * rows_of_a_program, rows)
    for first in range(program * rows_of_a_program, last, ROWS):
        row = first + tl.arange(0, ROWS)
        value, place, inside = _biased_tile(x, bias, row, column, last, width, HAS_BIAS)
        dy = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        tail = _tail(value, TANH)
        if TANH:
            steepness = 0.7978845608028654 * (1.0 + 3 * 0.044715 * value * value) * (1.0 - tail * tail)
        else:
            steepness = 0.7978845608028654 * tl.exp(-0.5 * value * value)
        slope = 0.5 * (1.0 + tail + value * steepness)
        tl.store(d_x + place, (dy * slope).to(d_x.dtype.element_ty), mask=inside)
        total += dy * slope
    if HAS_BIAS:
        out = sums + program.to(tl.int64) * width + column
        tl.store(out, tl.sum(total, 0), mask=column < width)


@triton.jit
def _row(matrix, row, rows, column, width):
    """A row in fp32, zeros if there is no such row."""
    last = tl.where(row < rows, width, 0)
    last = tl.where(row >= 0, last, 0)
    return tl.load(matrix + row * width + column, mask=column < last, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["queries_0", "queries_1", "first_key", "keys_0", "keys_1"])
def _join_pair(
    dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, place, out,
    queries_0, queries_1, first_key, keys_0, keys_1, width, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    out += token * 3 * width + column
    dq = _row(dq_0, token, queries_0, column, width) + _row(dq_1, token - queries_0, queries_1, column, width)
    tl.store(out, dq.to(out.dtype.element_ty), mask=inside)
    gathered = tl.load(place + token).to(tl.int64)
    dk = _row(dk_0, token - first_key, keys_0, column, width) + _row(dk_1, gathered, keys_1, column, width)
    tl.store(out + width, dk.to(out.dtype.element_ty), mask=inside)
    dv = _row(dv_0, token - first_key, keys_0, column, width) + _row(dv_1, gathered, keys_1, column, width)
    tl.store(out + 2 * width, dv.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _log_sums(logits, targets, log_sums, picked, width, first, valid, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    most = tl.full([WIDE], float("-inf"), tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    for start in range(0, valid, WIDE):
        column = start + tl.arange(0, WIDE)
        value = tl.load(logits + column, mask=column < valid, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, value)
        # A lane that has seen nothing yet holds -inf, and -inf - -inf is no number.
        total = tl.where(larger == float("-inf"), 0.0, total * tl.exp(most - larger) + tl.exp(value - larger))
        most = larger
    largest = tl.max(most, 0)
    total = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - largest)), 0)
    tl.store(log_sums + row, tl.log(total) + largest)
    local = tl.load(targets + row).to(tl.int64) - first
    tl.store(
        picked + row, tl.load(logits + local, mask=(local >= 0) & (local < valid), other=0.0).to(tl.float32)
    )


@triton.jit
def _write_gradient(logits, targets, log_sums, grad, width, first, valid, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < width
    value = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    probability = tl.where(column < valid, tl.exp(value - tl.load(log_sums + row)), 0.0)
    is_target = (column == tl.load(targets + row).to(tl.int64) - first) & (column < valid)
    value = (probability - tl.where(is_target, 1.0, 0.0)) * tl.load(grad + row)
    tl.store(logits + row * width + column, value.to(logits.dtype.element_ty), mask=inside)


# What fused.py calls: the arguments of its operators, then their results, which are written.


def add_norm(x, x_bias, keys, salt, p, hidden, weight, bias, epsilon, total, normed, mean, rstd):  # type: ignore[no-untyped-def]
    like = hidden if x is None else x
    rows, width = like.shape
    if rows:
        _add_norm[(rows,)](
            x, x_bias, keys, salt, hidden, weight, bias, total, normed, mean, rstd, width, epsilon, 1.0 / (1.0 - p),
            HAS_X=x is not None, HAS_X_BIAS=x_bias is not None, HAS_HIDDEN=hidden is not None,
            HAS_NORM=weight is not None, THRESHOLD=threshold_of(p), **_block(width),
        )  # fmt: skip


def add_norm_backward(  # type: ignore[no-untyped-def]
    d_total, d_normed, total, weight, mean, rstd, keys, salt, p, has_x_bias, d_hidden, d_x, sums
):
    like = d_total if d_normed is None else d_normed
    rows, width = like.shape
    programs = len(sums)
    _add_norm_backward[(programs,)](
        d_total, d_normed, total, weight, mean, rstd, keys, salt, d_hidden, d_x, sums,
        rows, width, math.ceil(rows / programs), 1.0 / (1.0 - p),
        HAS_D_TOTAL=d_total is not None, HAS_NORM=d_normed is not None, HAS_X_BIAS=has_x_bias,
        THRESHOLD=threshold_of(p), **_block(width),
    )  # fmt: skip


def finish_sums(sums, like, out):  # type: ignore[no-untyped-def]
    programs, width = len(sums), out.numel()
    _finish_sums[(triton.cdiv(width, 64),)](sums, out, programs, width, ROWS=32, COLUMNS=64)


def bias_gelu(x, bias, tanh, out):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    if rows:
        _gelu[_grid_of_tiles(rows, width)](
            x, bias, out, rows, width, TANH=tanh, HAS_BIAS=bias is not None, ROWS=TILE_ROWS, COLUMNS=COLUMNS
        )


def bias_gelu_backward(x, bias, grad, tanh, d_x, sums):  # type: ignore[no-untyped-def]
    rows, width = x.shape
    _gelu_backward[(len(sums), triton.cdiv(width, COLUMNS))](
        x, bias, grad, d_x, sums, rows, width, math.ceil(rows / len(sums)),
        TANH=tanh, HAS_BIAS=bias is not None, ROWS=TILE_ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip


def join_pair(dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, first_key, place, out):  # type: ignore[no-untyped-def]
    width = dq_0.shape[1] * dq_0.shape[2]
    counts = len(dq_0), len(dq_1), first_key, len(dk_0), len(dk_1)
    tensors = dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, place, out
    _join_pair[(len(place),)](*tensors, *counts, width, **_block(width))


def log_sums(logits, targets, first, valid, sums, picked):  # type: ignore[no-untyped-def]
    rows, width = logits.shape
    if rows:
        _log_sums[(rows,)](logits, targets, sums, picked, width, first, valid, WIDE=WIDE, num_warps=8)


def write_gradient(logits, targets, sums, grad, first, valid):  # type: ignore[no-untyped-def]
    rows, width = logits.shape
    if rows:
        grid = rows, triton.cdiv(width, WIDE)
        _write_gradient[grid](logits, targets, sums, grad, width, first, valid, WIDE=WIDE, num_warps=8)
