"""GPU kernels of the operations between matrix products: one pass through memory where torch's operators take several.

Written in Triton, which compiles them when they are first used. Only fused.py imports this module, and only on a GPU;
its functions say what each kernel computes. Arithmetic is in fp32, whatever the tensors' types. Sums over tokens are
made in two steps, first over the rows of each program, and in the same order each time: no atomic additions.

Every kernel walks over rows of contiguous matrices of WIDTH columns. BLOCK is the width rounded up to a power of two.
The arguments of a kernel are tensors, then numbers, then constants, see launch.py.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from megatron_lite.transformer.kernels.dropout import keep_threshold
from megatron_lite.transformer.kernels.launch import kernel, require

COLUMNS = 256  # of a tile, where a row is not needed as a whole
TILE_ROWS = 16
FINISH_ROWS, FINISH_COLUMNS = 128, 32  # of a tile of sums: few iterations, and 128 bytes of each row


@functools.cache
def _block(width: int) -> tuple[int, int]:
    """BLOCK, and the warps of a program that holds a row: more than 16 numbers of it in a thread would not fit."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 32)


@triton.jit
def hash_keeps(z, THRESHOLD: tl.constexpr):
    """Whether dropout keeps an element, from the uint32 that its hash starts with, see dropout.py."""
    z = (z ^ (z >> 16)) * 0x21F0AAAD
    z = (z ^ (z >> 15)) * 0x735A2D97
    return (z ^ (z >> 15)) >= THRESHOLD


@triton.jit
def _keeps(key, salt, columns, THRESHOLD: tl.constexpr):
    return hash_keeps((key ^ salt).to(tl.uint32) + columns.to(tl.uint32) * 0x9E3779B9, THRESHOLD)


@kernel("salt", "rows", "epsilon", "scale")
def _add_norm(
    x, x_bias, keys, hidden, weight, bias, total, normed, stats,
    salt, rows, epsilon, scale,
    HAS_X: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, CENTERED: tl.constexpr,
    THRESHOLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    index = row * WIDTH + column
    value = tl.zeros([BLOCK], tl.float32)
    if HAS_HIDDEN:
        value += tl.load(hidden + index, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        added = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
        if HAS_X_BIAS:
            added += tl.load(x_bias + column, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            added = tl.where(_keeps(tl.load(keys + row), salt, column, THRESHOLD), added * scale, 0.0)
        rounded = (value + added).to(total.dtype.element_ty)
        tl.store(total + index, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the backward pass normalizes what was stored
    if HAS_NORM:
        if CENTERED:
            center = tl.sum(value, 0) / WIDTH
            tl.store(stats + rows + row, center)
            value = tl.where(inside, value - center, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
        tl.store(stats + row, factor)
        value *= factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + index, value.to(normed.dtype.element_ty), mask=inside)


@kernel("salt", "rows", "rows_per_program", "scale")
def _add_norm_backward(
    d_total, d_normed, total, weight, stats, keys, d_hidden, d_x, sums,
    salt, rows, rows_per_program, scale,
    HAS_D_TOTAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, CENTERED: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    d_x_bias = tl.zeros([BLOCK], tl.float32)
    first = program.to(tl.int64) * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, rows)):
        index = row * WIDTH + column
        grad = tl.zeros([BLOCK], tl.float32)
        if HAS_D_TOTAL:
            grad += tl.load(d_total + index, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            dy = tl.load(d_normed + index, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(total + index, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(stats + row)
            if CENTERED:
                value -= tl.load(stats + rows + row)
            normal = tl.where(inside, value * factor, 0.0)
            d_weight += dy * normal
            d_bias += dy
            weighted = dy * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            projection = normal * (tl.sum(weighted * normal, 0) / WIDTH)
            if CENTERED:
                projection += tl.sum(weighted, 0) / WIDTH
            grad += (weighted - projection) * factor
            tl.store(d_hidden + index, grad.to(d_hidden.dtype.element_ty), mask=inside)
        if THRESHOLD > 0:
            keep = _keeps(tl.load(keys + row), salt, column, THRESHOLD)
            grad = tl.where(keep, grad * scale, 0.0)
            tl.store(d_x + index, grad.to(d_x.dtype.element_ty), mask=inside)
        d_x_bias += tl.where(inside, grad, 0.0)
    out = sums + program.to(tl.int64) * (HAS_NORM + HAS_BIAS + HAS_X_BIAS) * WIDTH + column
    if HAS_NORM:
        tl.store(out, d_weight, mask=inside)
        out += WIDTH
    if HAS_BIAS:
        tl.store(out, d_bias, mask=inside)
        out += WIDTH
    if HAS_X_BIAS:
        tl.store(out, d_x_bias, mask=inside)


@triton.jit
def _finish(sums, out, programs, block, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(sums + row * WIDTH + column[None, :], mask=inside & (row < programs), other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < WIDTH)


@kernel("programs_0", "programs_1", "programs_2", "programs_3")
def _finish_sums(
    sums_0, sums_1, sums_2, sums_3, out, programs_0, programs_1, programs_2, programs_3,
    WIDTH_0: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_3: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    blocks_0: tl.constexpr = (WIDTH_0 + COLUMNS - 1) // COLUMNS
    blocks_1: tl.constexpr = (WIDTH_1 + COLUMNS - 1) // COLUMNS
    blocks_2: tl.constexpr = (WIDTH_2 + COLUMNS - 1) // COLUMNS
    if block < blocks_0:
        _finish(sums_0, out, programs_0, block, WIDTH_0, ROWS, COLUMNS)
    block -= blocks_0
    out += WIDTH_0
    if WIDTH_1 > 0:
        if (block >= 0) & (block < blocks_1):
            _finish(sums_1, out, programs_1, block, WIDTH_1, ROWS, COLUMNS)
        block -= blocks_1
        out += WIDTH_1
    if WIDTH_2 > 0:
        if (block >= 0) & (block < blocks_2):
            _finish(sums_2, out, programs_2, block, WIDTH_2, ROWS, COLUMNS)
        block -= blocks_2
        out += WIDTH_2
    if WIDTH_3 > 0:  # noqa: SIM102 (the first is known when it is compiled)
        if block >= 0:
            _finish(sums_3, out, programs_3, block, WIDTH_3, ROWS, COLUMNS)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _tanh_argument(x):
    """The argument of the hyperbolic tangent: sqrt(2 / pi) (x + 0.044715 x^3)."""
    return 0.7978845608028654 * (x + 0.044715 * x * x * x)


@triton.jit
def _activation(x, ACTIVATION: tl.constexpr):
    """The value of an activation of config/model.py, and its derivative."""
    if ACTIVATION == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x - value)
    elif ACTIVATION == "gelu_tanh":
        tanh = _tanh(_tanh_argument(x))
        value = 0.5 * x * (1.0 + tanh)
        steepness = 0.7978845608028654 * (1.0 + 3 * 0.044715 * x * x) * (1.0 - tanh * tanh)
        slope = 0.5 * (1.0 + tanh + x * steepness)
    else:
        tl.static_assert(ACTIVATION == "gelu_erf")
        erf = tl.erf(x * 0.7071067811865476)
        value = 0.5 * x * (1.0 + erf)
        slope = 0.5 * (1.0 + erf + x * 0.7978845608028654 * tl.exp(-0.5 * x * x))
    return value, slope


@triton.jit
def _biased_tile(x, bias, index, column, inside, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A tile in fp32. The bias has WIDTH columns."""
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _dropped_tile(value, keys, salt, scale, row, column, rows, THRESHOLD: tl.constexpr):
    """A tile, or its gradient, after dropout."""
    key = tl.load(keys + row, mask=row < rows, other=0)[:, None]
    return tl.where(_keeps(key, salt, column[None, :], THRESHOLD), value * scale, 0.0)


@kernel("salt", "rows", "scale")
def _activate(
    x, bias, keys, out, salt, rows, scale,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, THRESHOLD: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    index = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    first = index + GATED * row.to(tl.int64)[:, None] * WIDTH  # a gate lies before what it multiplies
    value, _ = _activation(_biased_tile(x, bias, first, column, inside, WIDTH, HAS_BIAS), ACTIVATION)
    if GATED:
        value *= _biased_tile(x + WIDTH, bias, first, column + WIDTH, inside, 2 * WIDTH, HAS_BIAS)
    if THRESHOLD > 0:
        value = _dropped_tile(value, keys, salt, scale, row, column, rows, THRESHOLD)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


@kernel("salt", "rows", "rows_per_program", "scale")
def _activate_backward(
    x, bias, grad, keys, d_x, sums, salt, rows, rows_per_program, scale,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, THRESHOLD: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.minimum((program + 1) * rows_per_program, rows)
    for start in range(program * rows_per_program, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < WIDTH)[None, :]
        index = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        first = index + GATED * row.to(tl.int64)[:, None] * WIDTH
        dy = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
        if THRESHOLD > 0:
            dy = _dropped_tile(dy, keys, salt, scale, row, column, last, THRESHOLD)
        value, slope = _activation(_biased_tile(x, bias, first, column, inside, WIDTH, HAS_BIAS), ACTIVATION)
        if GATED:
            up = _biased_tile(x + WIDTH, bias, first, column + WIDTH, inside, 2 * WIDTH, HAS_BIAS)
            d_up = dy * value
            tl.store(d_x + WIDTH + first, d_up.to(d_x.dtype.element_ty), mask=inside)
            total_up += d_up
            dy *= up
        tl.store(d_x + first, (dy * slope).to(d_x.dtype.element_ty), mask=inside)
        total += dy * slope
    if HAS_BIAS:
        out = sums + program.to(tl.int64) * WIDTH * (1 + GATED) + column
        tl.store(out, tl.sum(total, 0), mask=column < WIDTH)
        if GATED:
            tl.store(out + WIDTH, tl.sum(total_up, 0), mask=column < WIDTH)


@triton.jit
def _load_row(matrix, row, rows, column, WIDTH: tl.constexpr):
    """A row in fp32, zeros if there is no such row."""
    last = tl.where((row >= 0) & (row < rows), WIDTH, 0)
    return tl.load(matrix + row * WIDTH + column, mask=column < last, other=0.0).to(tl.float32)


@kernel("tokens", "tokens_per_program", "queries_0", "queries_1", "first_key", "keys_0", "keys_1")
def _join_pair(
    dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, gathered_index, second_start, out, sums,
    tokens, tokens_per_program, queries_0, queries_1, first_key, keys_0, keys_1,
    HAS_SECOND_START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if HAS_SECOND_START:
        queries_0 = tl.load(second_start)
        keys_0 = queries_0
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    sum_q = tl.zeros([BLOCK], tl.float32)
    sum_k = tl.zeros([BLOCK], tl.float32)
    sum_v = tl.zeros([BLOCK], tl.float32)
    first = program * tokens_per_program
    for token in range(first, tl.minimum(first + tokens_per_program, tokens)):
        target = out + token * 3 * WIDTH + column
        second = tl.where(token < queries_0, -1, token - (0 if HAS_SECOND_START else queries_0))
        dq = _load_row(dq_0, token, queries_0, column, WIDTH) + _load_row(
            dq_1, second, queries_1, column, WIDTH
        )
        tl.store(target, dq.to(out.dtype.element_ty), mask=inside)
        sum_q += dq
        key = token - first_key
        gathered = tl.load(gathered_index + token).to(tl.int64)
        dk = _load_row(dk_0, key, keys_0, column, WIDTH) + _load_row(dk_1, gathered, keys_1, column, WIDTH)
        tl.store(target + WIDTH, dk.to(out.dtype.element_ty), mask=inside)
        sum_k += dk
        dv = _load_row(dv_0, key, keys_0, column, WIDTH) + _load_row(dv_1, gathered, keys_1, column, WIDTH)
        tl.store(target + 2 * WIDTH, dv.to(out.dtype.element_ty), mask=inside)
        sum_v += dv
    target = sums + program * 3 * WIDTH + column
    tl.store(target, sum_q, mask=inside)
    tl.store(target + WIDTH, sum_k, mask=inside)
    tl.store(target + 2 * WIDTH, sum_v, mask=inside)


# The functions that fused.py calls: arguments of its operators, then the results to write.


def add_norm(  # type: ignore[no-untyped-def]
    x, x_bias, keys, salt, p, hidden, weight, bias, epsilon, centered, total, normed, stats
):
    rows, width = (hidden if x is None else x).shape
    require(((rows, width), x, hidden), ((width,), x_bias, weight, bias), ((rows,), keys))
    if rows:
        block, warps = _block(width)
        is_present = [tensor is not None for tensor in (x, x_bias, hidden, weight, bias)]
        _add_norm(
            (rows, 1), (x, x_bias, keys, hidden, weight, bias, total, normed, stats),
            (salt, rows, epsilon, 1.0 / (1.0 - p)), (*is_present, centered, keep_threshold(p), width, block), warps,
        )  # fmt: skip


def add_norm_backward(  # type: ignore[no-untyped-def]
    d_total, d_normed, total, weight, stats, has_bias, centered, keys, salt, p, has_x_bias, d_hidden, d_x, sums
):  # fmt: skip
    rows, width = (d_total if d_normed is None else d_normed).shape
    require(((rows, width), d_total, d_normed), ((rows,), keys))
    if d_normed is not None:
        require(((rows, width), total), ((width,), weight), ((1 + centered, rows), stats))
    if programs := sums.shape[0]:  # no rows, no programs; `finish_sums` then adds up nothing
        block, warps = _block(width)
        is_present = d_total is not None, d_normed is not None, has_bias, centered, has_x_bias
        _add_norm_backward(
            (programs, 1), (d_total, d_normed, total, weight, stats, keys, d_hidden, d_x, sums),
            (salt, rows, -(-rows // programs), 1.0 / (1.0 - p)), (*is_present, keep_threshold(p), width, block), warps,
        )  # fmt: skip


def finish_sums(sums, like, out):  # type: ignore[no-untyped-def]
    missing, widths = 4 - len(sums), [partial.shape[1] for partial in sums]
    require(((sum(widths),), out))
    _finish_sums(
        (sum(-(-width // FINISH_COLUMNS) for width in widths), 1), (*sums, *[None] * missing, out),
        (*(partial.shape[0] for partial in sums), *[0] * missing),
        (*widths, *[0] * missing, FINISH_ROWS, FINISH_COLUMNS),
    )  # fmt: skip


def activate(x, bias, activation, gated, keys, salt, p, out):  # type: ignore[no-untyped-def]
    rows, width = out.shape
    require(((rows, (1 + gated) * width), x), (((1 + gated) * width,), bias), ((rows,), keys))
    if rows:
        high = TILE_ROWS // (1 + gated)  # two numbers for each of a tile: more would not fit into registers
        _activate(
            (-(-rows // high), -(-width // COLUMNS)), (x, bias, keys, out), (salt, rows, 1.0 / (1.0 - p)),
            (activation, gated, bias is not None, keep_threshold(p), width, high, COLUMNS),
        )  # fmt: skip


def activate_backward(x, bias, grad, activation, gated, keys, salt, p, d_x, sums):  # type: ignore[no-untyped-def]
    rows, width = grad.shape
    require(((rows, (1 + gated) * width), x), (((1 + gated) * width,), bias), ((rows,), keys))
    if programs := sums.shape[0]:
        _activate_backward(
            (programs, -(-width // COLUMNS)), (x, bias, grad, keys, d_x, sums),
            (salt, rows, -(-rows // programs), 1.0 / (1.0 - p)),
            (activation, gated, bias is not None, keep_threshold(p), width, TILE_ROWS // (1 + gated), COLUMNS),
        )  # fmt: skip


def join_pair(  # type: ignore[no-untyped-def]
    dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, first_key, gathered_index, second_start, out, sums
):  # fmt: skip
    (queries, heads, size), tokens = dq_0.shape, gathered_index.shape[0]
    key_shapes = [((len(dk), heads, size), dk, dv) for dk, dv in ((dk_0, dv_0), (dk_1, dv_1))]
    require(*key_shapes, ((len(dq_1), heads, size), dq_1), ((1,), second_start))
    if programs := sums.shape[0]:
        block, warps = _block(heads * size)
        counts = queries, dq_1.shape[0], first_key, dk_0.shape[0], dk_1.shape[0]
        _join_pair(
            (programs, 1), (dq_0, dk_0, dv_0, dq_1, dk_1, dv_1, gathered_index, second_start, out, sums),
            (tokens, -(-tokens // programs), *counts), (second_start is not None, heads * size, block), warps,
        )  # fmt: skip
