"""Attention under the rule of layout.py, within blocks that hold a visible pair: GPU kernels, written in Triton.

BIAS says what scores have by the distance of two positions: nothing (0); a number for each (1), whose gradient is
summed by bucket: within a program in the order of its blocks, over programs by torch; a number of the query and one of
the key, from tables (2), or of the query alone (3); their gradients are scattered, see triton_tables.py. No atomic
additions. Only rule_attention.py's operators import this module.

A program computes a tile of ROWS queries, or of KEYS keys, of one head. Its lists say which blocks of the others hold
visible pairs only (full), or some (partial): there the rule decides. Softmax as in FlashAttention, arXiv:2205.14135.
Columns of tokens: document, key_time, query_bound, grp and position, see layout.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_lite.model.kernels.dropout import threshold_of
from megatron_lite.model.kernels.launch import kernel
from megatron_lite.model.kernels.rule_attention import BLOCK, key_tile
from megatron_lite.model.kernels.triton_kernels import hash_stays
from megatron_lite.model.kernels.triton_tables import number, scatter


@triton.jit
def _column(columns, number: tl.constexpr, place, tokens, other: tl.constexpr):
    return tl.load(columns + number * tokens + place, mask=place < tokens, other=other)


@triton.jit
def _seen(columns, query, key, tokens, WINDOW: tl.constexpr):
    """`may_see` of layout.py for places that broadcast. Tokens beyond the last see nothing and are not seen."""
    seen = _column(columns, 1, key, tokens, 2147483647) <= _column(columns, 2, query, tokens, -1)
    group = _column(columns, 3, query, tokens, 0)
    seen |= (group == _column(columns, 3, key, tokens, 0)) & (group != 0)
    # Different defaults: two tokens beyond the last are of no common document.
    seen &= _column(columns, 0, query, tokens, -2) == _column(columns, 0, key, tokens, -3)
    if WINDOW > 0:
        apart = _column(columns, 4, query, tokens, 0) - _column(columns, 4, key, tokens, 0)
        seen &= (apart <= WINDOW) & (apart >= -WINDOW)
    return seen


@triton.jit
def _distance(columns, query, key, tokens, longest):
    """Where the distance of two tokens is in a line of 2 longest + 1."""
    return _column(columns, 4, key, tokens, 0) - _column(columns, 4, query, tokens, 0) + longest


@triton.jit
def _stays(keys, salt, query, key, head, tokens, THRESHOLD: tl.constexpr):
    """Which attention weights stay, as dropout.py says."""
    start = (tl.load(keys + query, mask=query < tokens, other=0) ^ tl.load(salt)).to(tl.uint32)
    step = tl.load(keys + key, mask=key < tokens, other=0).to(tl.uint32) * 0x9E3779B9
    return hash_stays(start + step + head.to(tl.uint32) * 0x85EBCA6B, THRESHOLD)


@triton.jit
def _tile(x, place, stride, tokens, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a matrix of heads, zeros beyond the last."""
    feature = tl.arange(0, WIDE)
    inside = (place < tokens)[:, None] & (feature < SIZE)[None, :]
    return tl.load(x + place.to(tl.int64)[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _put(x, value, place, stride, tokens, SIZE: tl.constexpr, WIDE: tl.constexpr):
    feature = tl.arange(0, WIDE)
    inside = (place < tokens)[:, None] & (feature < SIZE)[None, :]
    at = x + place.to(tl.int64)[:, None] * stride + feature[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    a, b, columns, bias, query, key, head, tokens, longest, width, scale,
    MASKED: tl.constexpr, BIAS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, a b^T, and their distances or, where there are tables, places in these.

    Args: query, key: places that broadcast to the tile. bias: line, buckets, both tables.
    """
    scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    found = _distance(columns, query, key, tokens, longest)
    if BIAS >= 2:
        found = tl.load(bias[1] + found)
        scores += number(bias[2], head, query, found, tokens, width)
    if BIAS == 2:
        scores += number(bias[3], head, key, found, tokens, width)
    scores *= scale
    if BIAS == 1:
        scores += tl.load(bias[0] + head * (2 * longest + 1) + found)
    if MASKED:
        scores = tl.where(_seen(columns, query, key, tokens, WINDOW), scores, float("-inf"))
    return scores, found


@triton.jit
def _forward_blocks(
    total, most, mixed, q, qkv, columns, counts, entries, bias, keys, salt, row, head, program, tokens, blocks,
    first_head, longest, width, scale, MASKED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With the blocks of a list: sums of exponentials and their largest exponents, and of values by weight."""
    block = program // (BLOCK // ROWS)
    stride: tl.constexpr = 3 * HEADS * SIZE
    for i in range(tl.load(counts + block) * (BLOCK // KEYS)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // KEYS))
        key = entry * BLOCK + i % (BLOCK // KEYS) * KEYS + tl.arange(0, KEYS)
        k = _tile(qkv + (HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        v = _tile(qkv + (2 * HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        query, keyed = row[:, None], key[None, :]
        scores, _ = _scores(
            q, k, columns, bias, query, keyed, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(scores, 1))
        # ---- online softmax: rescale what has been summed when a larger score appears ----
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf is no number
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(most - shift)
        # The sum is that of all weights: dropout acts on the normalised weights.
        total = total * shrink + tl.sum(weights, 1)
        if THRESHOLD > 0:
            weights = tl.where(
                _stays(keys, salt, query, keyed, head + first_head, tokens, THRESHOLD), weights, 0.0
            )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = larger
    return total, most, mixed


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "kept")
def _attend(
    qkv, columns, partial_counts, partial, full_counts, full, line, buckets, of_queries, of_keys, keys, salt, out,
    log_sums, tokens, blocks, first_head, longest, width, scale, kept,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    row = program * ROWS + tl.arange(0, ROWS)
    q = _tile(qkv + head * SIZE, row, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    bias = (line, buckets, of_queries, of_keys)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    total, most, mixed = _forward_blocks(
        total, most, mixed, q, qkv, columns, full_counts, full, bias, keys, salt, row, head, program, tokens,
        blocks, first_head, longest, width, scale, False, HEADS, SIZE, WIDE, BLOCK, ROWS, KEYS, BIAS, THRESHOLD,
        WINDOW, PRECISION,
    )  # fmt: skip
    total, most, mixed = _forward_blocks(
        total, most, mixed, q, qkv, columns, partial_counts, partial, bias, keys, salt, row, head, program,
        tokens, blocks, first_head, longest, width, scale, True, HEADS, SIZE, WIDE, BLOCK, ROWS, KEYS, BIAS,
        THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    sees = total > 0.0
    mixed = tl.where(sees[:, None], mixed * (kept / tl.where(sees, total, 1.0))[:, None], 0.0)
    _put(out + head * SIZE, mixed, row, HEADS * SIZE, tokens, SIZE, WIDE)
    # +infinity for queries that see nothing: exp(score - inf) is 0 in the backward pass.
    log_sum = tl.where(sees, tl.log(tl.where(sees, total, 1.0)) + most, float("inf"))
    tl.store(log_sums + head * tokens + row, log_sum, mask=row < tokens)


@triton.jit
def _query_blocks(
    d_q, q, grad, log_sum, product, qkv, columns, counts, entries, bias, d_of_queries, keys, salt, row, head,
    program, tokens, blocks, first_head, longest, width, scale, kept, MASKED: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of queries by the blocks of a list."""
    block = program // (BLOCK // ROWS)
    stride: tl.constexpr = 3 * HEADS * SIZE
    for i in range(tl.load(counts + block) * (BLOCK // KEYS)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // KEYS))
        key = entry * BLOCK + i % (BLOCK // KEYS) * KEYS + tl.arange(0, KEYS)
        k = _tile(qkv + (HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        v = _tile(qkv + (2 * HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        query, keyed = row[:, None], key[None, :]
        scores, found = _scores(
            q, k, columns, bias, query, keyed, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        weights = tl.exp(scores - log_sum[:, None])
        d_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if THRESHOLD > 0:
            stays = _stays(keys, salt, query, keyed, head + first_head, tokens, THRESHOLD)
            d_weights = tl.where(stays, d_weights * kept, 0.0)
        d_scores = weights * (d_weights - product[:, None])
        d_q += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        if BIAS >= 2:
            scatter(d_of_queries, head, d_scores * scale, scores > float("-inf"), found, row, tokens, width)
    return d_q


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "kept")
def _of_queries(
    grad, qkv, out, log_sums, columns, partial_counts, partial, full_counts, full, line, buckets, of_queries,
    of_keys, keys, salt, d_qkv, products, d_of_queries, tokens, blocks, first_head, longest, width, scale, kept,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    row = program * ROWS + tl.arange(0, ROWS)
    q = _tile(qkv + head * SIZE, row, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    given = _tile(grad + head * SIZE, row, HEADS * SIZE, tokens, SIZE, WIDE)
    result = _tile(out + head * SIZE, row, HEADS * SIZE, tokens, SIZE, WIDE)
    # grad . out, the row sum that the softmax's gradient subtracts (FlashAttention's delta); the kernel of keys reads
    # it.
    product = tl.sum(given.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(products + head * tokens + row, product, mask=row < tokens)
    log_sum = tl.load(log_sums + head * tokens + row, mask=row < tokens, other=float("inf"))
    bias = (line, buckets, of_queries, of_keys)
    d_q = tl.zeros([ROWS, WIDE], tl.float32)
    d_q = _query_blocks(
        d_q, q, given, log_sum, product, qkv, columns, full_counts, full, bias, d_of_queries, keys, salt, row,
        head, program, tokens, blocks, first_head, longest, width, scale, kept, False, HEADS, SIZE, WIDE, BLOCK,
        ROWS, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    d_q = _query_blocks(
        d_q, q, given, log_sum, product, qkv, columns, partial_counts, partial, bias, d_of_queries, keys, salt,
        row, head, program, tokens, blocks, first_head, longest, width, scale, kept, True, HEADS, SIZE, WIDE,
        BLOCK, ROWS, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    _put(d_qkv + head * SIZE, d_q * scale, row, 3 * HEADS * SIZE, tokens, SIZE, WIDE)


@triton.jit
def _key_blocks(
    d_k, d_v, d_table, k, v, grad, qkv, log_sums, products, columns, counts, entries, bias, d_of_keys, keys, salt,
    key, head, program, tokens, blocks, first_head, longest, width, scale, kept, MASKED: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of keys, values and biases by the blocks of queries of a list."""
    block = program // (BLOCK // KEYS)
    for i in range(tl.load(counts + block) * (BLOCK // ROWS)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // ROWS))
        row = entry * BLOCK + i % (BLOCK // ROWS) * ROWS + tl.arange(0, ROWS)
        q = _tile(qkv + head * SIZE, row, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
        given = _tile(grad + head * SIZE, row, HEADS * SIZE, tokens, SIZE, WIDE)
        log_sum = tl.load(log_sums + head * tokens + row, mask=row < tokens, other=float("inf"))
        product = tl.load(products + head * tokens + row, mask=row < tokens, other=0.0)
        query, keyed = row[None, :], key[:, None]
        scores, found = _scores(
            k, q, columns, bias, query, keyed, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        weights = tl.exp(scores - log_sum[None, :])
        d_weights = tl.dot(v, tl.trans(given), input_precision=PRECISION)
        dropped = weights
        if THRESHOLD > 0:
            stays = _stays(keys, salt, query, keyed, head + first_head, tokens, THRESHOLD)
            dropped = tl.where(stays, weights * kept, 0.0)
            d_weights = tl.where(stays, d_weights * kept, 0.0)
        d_v += tl.dot(dropped.to(given.dtype), given, input_precision=PRECISION)
        d_scores = weights * (d_weights - product[None, :])
        d_k += tl.dot(d_scores.to(q.dtype), q, input_precision=PRECISION)
        if BIAS == 2:
            scatter(d_of_keys, head, d_scores * scale, scores > float("-inf"), found, key, tokens, width)
        if BIAS == 1:
            found = tl.load(bias[1] + found)
            for bucket in range(tl.min(found), tl.max(found) + 1):
                part = tl.sum(tl.where(found == bucket, d_scores, 0.0))
                d_table += tl.where(tl.arange(0, 32) == bucket, part, 0.0)
    return d_k, d_v, d_table


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "kept")
def _of_keys(
    grad, qkv, log_sums, products, columns, partial_counts, partial, full_counts, full, line, buckets, of_queries,
    of_keys, keys, salt, d_qkv, sums, d_of_keys, tokens, blocks, first_head, longest, width, scale, kept,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    key = program * KEYS + tl.arange(0, KEYS)
    k = _tile(qkv + (HEADS + head) * SIZE, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    v = _tile(qkv + (2 * HEADS + head) * SIZE, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    bias = (line, buckets, of_queries, of_keys)
    d_k = tl.zeros([KEYS, WIDE], tl.float32)
    d_v = tl.zeros([KEYS, WIDE], tl.float32)
    d_table = tl.zeros([32], tl.float32)
    d_k, d_v, d_table = _key_blocks(
        d_k, d_v, d_table, k, v, grad, qkv, log_sums, products, columns, full_counts, full, bias, d_of_keys, keys,
        salt, key, head, program, tokens, blocks, first_head, longest, width, scale, kept, False, HEADS, SIZE,
        WIDE, BLOCK, ROWS, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    d_k, d_v, d_table = _key_blocks(
        d_k, d_v, d_table, k, v, grad, qkv, log_sums, products, columns, partial_counts, partial, bias, d_of_keys,
        keys, salt, key, head, program, tokens, blocks, first_head, longest, width, scale, kept, True, HEADS,
        SIZE, WIDE, BLOCK, ROWS, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    _put(d_qkv + (HEADS + head) * SIZE, d_k * scale, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    _put(d_qkv + (2 * HEADS + head) * SIZE, d_v, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    if BIAS == 1:
        tl.store(sums + (program * HEADS + head) * 32 + tl.arange(0, 32), d_table)


def _launch(kernel, qkv, tensors, bias, p, first_head, window, tile, along):  # type: ignore[no-untyped-def]
    """Launch a kernel. Args: bias: line, buckets and tables. tile: queries and keys. along: of which a program is."""
    tokens, _, heads, size = qkv.shape
    line, buckets, tables = bias
    wide, width = max(16, triton.next_power_of_2(size)), tables[0].shape[2] if tables else 0
    longest = 0 if buckets is None else len(buckets) // 2
    numbers = tokens, -(-tokens // BLOCK), first_head, longest, width, size**-0.5, 1.0 / (1.0 - p)
    # Three products of tf32 come close to fp32's accuracy on tensor cores.
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    kind = 4 - len(tables) if tables else int(line is not None)
    kernel(
        (-(-tokens // tile[along]), heads), tensors, numbers,
        (heads, size, wide, BLOCK, *tile, kind, threshold_of(p), window, precision), 4 if wide <= 64 else 8,
    )  # fmt: skip


def _pair(tables):  # type: ignore[no-untyped-def]
    """The tables of queries and of keys, None where there is none."""
    return (*tables, None, None)[:2]


def rule_attention(  # type: ignore[no-untyped-def]
    qkv, columns, lists, line, buckets, tables, keys, salt, p, first_head, window, out, log_sums
):
    tensors = qkv, columns, *lists, line, buckets, *_pair(tables), keys, salt, out, log_sums
    tile = key_tile(qkv.dtype, tables), key_tile(qkv.dtype)
    _launch(_attend, qkv, tensors, (line, buckets, tables), p, first_head, window, tile, 0)


def rule_attention_queries(  # type: ignore[no-untyped-def]
    d_tables, grad, qkv, out, log_sums, columns, lists, line, buckets, tables, keys, salt, p, first_head, window,
    d_qkv, products,
):  # fmt: skip
    given = grad, qkv, out, log_sums, columns, *lists, line, buckets, *_pair(tables), keys, salt
    tensors, tile = (*given, d_qkv, products, _pair(d_tables)[0]), (key_tile(qkv.dtype, tables),) * 2
    _launch(_of_queries, qkv, tensors, (line, buckets, tables), p, first_head, window, tile, 0)


def rule_attention_keys(  # type: ignore[no-untyped-def]
    d_qkv, d_tables, grad, qkv, log_sums, products, columns, lists, line, buckets, tables, keys, salt, p, first_head,
    window, sums,
):  # fmt: skip
    given = grad, qkv, log_sums, products, columns, *lists, line, buckets, *_pair(tables), keys, salt
    tensors, tile = (*given, d_qkv, sums, _pair(d_tables)[1]), (BLOCK // 4, key_tile(qkv.dtype, tables))
    _launch(_of_keys, qkv, tensors, (line, buckets, tables), p, first_head, window, tile, 1)
