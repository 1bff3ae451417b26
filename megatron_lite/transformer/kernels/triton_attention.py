"""Attention under the rule of layout.py, within blocks that hold a visible pair: GPU kernels, written in Triton.

BIAS says what is added to the scores by the distance of two positions: nothing (0); a number for each distance (1),
whose gradient is summed by bucket, within a program in the order of its blocks, over programs by torch; a number of the
query and one of the key, from tables (2), or of the query alone (3), whose gradients are scattered, see
triton_tables.py. No atomic additions: results are the same each time. Only rule_attention.py's operators import this
module.

A program computes a tile of QUERIES queries, or of KEYS keys, of one head. Its lists say which blocks of keys, or of
queries, hold visible pairs only (full), or some (partial): there the rule decides. Softmax as in FlashAttention,
arXiv:2205.14135.
Columns of tokens: document, key_time, query_bound, grp and position, see layout.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_lite.transformer.kernels.dropout import keep_threshold
from megatron_lite.transformer.kernels.launch import kernel
from megatron_lite.transformer.kernels.rule_attention import BLOCK, key_tile
from megatron_lite.transformer.kernels.triton_kernels import hash_keeps
from megatron_lite.transformer.kernels.triton_tables import lookup, scatter


@triton.jit
def _column(columns, number: tl.constexpr, token, tokens, other: tl.constexpr):
    return tl.load(columns + number * tokens + token, mask=token < tokens, other=other)


@triton.jit
def _seen(columns, query, key, tokens, WINDOW: tl.constexpr):
    """`may_see` of layout.py for indices that broadcast. Tokens beyond the last see nothing and are not seen."""
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
def _distance_index(columns, query, key, tokens, longest):
    """The index of the distance of two tokens among all distances, 2 longest + 1."""
    return _column(columns, 4, key, tokens, 0) - _column(columns, 4, query, tokens, 0) + longest


@triton.jit
def _keeps(keys, salt, query, key, head, tokens, THRESHOLD: tl.constexpr):
    """Which attention weights dropout keeps, see dropout.py."""
    start = (tl.load(keys + query, mask=query < tokens, other=0) ^ tl.load(salt)).to(tl.uint32)
    step = tl.load(keys + key, mask=key < tokens, other=0).to(tl.uint32) * 0x9E3779B9
    return hash_keeps(start + step + head.to(tl.uint32) * 0x85EBCA6B, THRESHOLD)


@triton.jit
def _load_tile(x, token, stride, tokens, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """[tokens, WIDE] of one head, zeros beyond the last token and feature. Args: stride: from token to token."""
    feature = tl.arange(0, WIDE)
    inside = (token < tokens)[:, None] & (feature < SIZE)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(x, value, token, stride, tokens, SIZE: tl.constexpr, WIDE: tl.constexpr):
    feature = tl.arange(0, WIDE)
    inside = (token < tokens)[:, None] & (feature < SIZE)[None, :]
    pointer = x + token.to(tl.int64)[:, None] * stride + feature[None, :]
    tl.store(pointer, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _scores(
    a, b, columns, bias, query, key, head, tokens, longest, width, scale,
    MASKED: tl.constexpr, BIAS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, a b^T, and the indices of their distances or, where there are tables, their slots in these.

    Args: query, key: tokens, which broadcast to the tile. bias: line, buckets, both tables.
    """
    scores = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    index = _distance_index(columns, query, key, tokens, longest)
    if BIAS >= 2:
        index = tl.load(bias[1] + index)
        scores += lookup(bias[2], head, query, index, tokens, width)
    if BIAS == 2:
        scores += lookup(bias[3], head, key, index, tokens, width)
    scores *= scale
    if BIAS == 1:
        scores += tl.load(bias[0] + head * (2 * longest + 1) + index)
    if MASKED:
        scores = tl.where(_seen(columns, query, key, tokens, WINDOW), scores, float("-inf"))
    return scores, index


@triton.jit
def _forward_blocks(
    total, largest, weighted, q, qkv, columns, counts, entries, bias, keys, salt, query, head, program, tokens, blocks,
    first_head, longest, width, scale, MASKED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of a list to the sums of exponentials, the largest scores and the sums of weighted values."""
    block = program // (BLOCK // QUERIES)
    stride: tl.constexpr = 3 * HEADS * SIZE
    for i in range(tl.load(counts + block) * (BLOCK // KEYS)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // KEYS))
        key = entry * BLOCK + i % (BLOCK // KEYS) * KEYS + tl.arange(0, KEYS)
        k = _load_tile(qkv + (HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        v = _load_tile(qkv + (2 * HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        query_2d, key_2d = query[:, None], key[None, :]
        scores, _ = _scores(
            q, k, columns, bias, query_2d, key_2d, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # ---- online softmax: rescale what has been summed when a larger score appears ----
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf - -inf is no number
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(largest - shift)
        # The sum is that of all weights: dropout acts on the normalised weights.
        total = total * shrink + tl.sum(weights, 1)
        if THRESHOLD > 0:
            weights = tl.where(
                _keeps(keys, salt, query_2d, key_2d, head + first_head, tokens, THRESHOLD), weights, 0.0
            )
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    return total, largest, weighted


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _attend(
    qkv, columns, partial_counts, partial, full_counts, full, line, buckets, query_table, key_table, keys, salt, out,
    log_sums, tokens, blocks, first_head, longest, width, scale, keep_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    query = program * QUERIES + tl.arange(0, QUERIES)
    q = _load_tile(qkv + head * SIZE, query, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    bias = (line, buckets, query_table, key_table)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    weighted = tl.zeros([QUERIES, WIDE], tl.float32)
    total, largest, weighted = _forward_blocks(
        total, largest, weighted, q, qkv, columns, full_counts, full, bias, keys, salt, query, head, program, tokens,
        blocks, first_head, longest, width, scale, False, HEADS, SIZE, WIDE, BLOCK, QUERIES, KEYS, BIAS, THRESHOLD,
        WINDOW, PRECISION,
    )  # fmt: skip
    total, largest, weighted = _forward_blocks(
        total, largest, weighted, q, qkv, columns, partial_counts, partial, bias, keys, salt, query, head, program,
        tokens, blocks, first_head, longest, width, scale, True, HEADS, SIZE, WIDE, BLOCK, QUERIES, KEYS, BIAS,
        THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    sees = total > 0.0
    weighted = tl.where(sees[:, None], weighted * (keep_scale / tl.where(sees, total, 1.0))[:, None], 0.0)
    _store_tile(out + head * SIZE, weighted, query, HEADS * SIZE, tokens, SIZE, WIDE)
    # +infinity for queries that see nothing: exp(score - inf) is 0 in the backward pass.
    log_sum = tl.where(sees, tl.log(tl.where(sees, total, 1.0)) + largest, float("inf"))
    tl.store(log_sums + head * tokens + query, log_sum, mask=query < tokens)


@triton.jit
def _query_blocks(
    d_q, q, grad, log_sum, delta, qkv, columns, counts, entries, bias, d_query_table, keys, salt, query, head,
    program, tokens, blocks, first_head, longest, width, scale, keep_scale, MASKED: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of queries by the blocks of a list."""
    block = program // (BLOCK // QUERIES)
    stride: tl.constexpr = 3 * HEADS * SIZE
    for i in range(tl.load(counts + block) * (BLOCK // KEYS)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // KEYS))
        key = entry * BLOCK + i % (BLOCK // KEYS) * KEYS + tl.arange(0, KEYS)
        k = _load_tile(qkv + (HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        v = _load_tile(qkv + (2 * HEADS + head) * SIZE, key, stride, tokens, SIZE, WIDE)
        query_2d, key_2d = query[:, None], key[None, :]
        scores, index = _scores(
            q, k, columns, bias, query_2d, key_2d, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        weights = tl.exp(scores - log_sum[:, None])
        d_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if THRESHOLD > 0:
            keep = _keeps(keys, salt, query_2d, key_2d, head + first_head, tokens, THRESHOLD)
            d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
        d_scores = weights * (d_weights - delta[:, None])
        d_q += tl.dot(d_scores.to(k.dtype), k, input_precision=PRECISION)
        if BIAS >= 2:
            scatter(
                d_query_table, head, d_scores * scale, scores > float("-inf"), index, query, tokens, width
            )
    return d_q


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _query_grads(
    grad, qkv, out, log_sums, columns, partial_counts, partial, full_counts, full, line, buckets, query_table,
    key_table, keys, salt, d_qkv, deltas, d_query_table, tokens, blocks, first_head, longest, width, scale, keep_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    query = program * QUERIES + tl.arange(0, QUERIES)
    q = _load_tile(qkv + head * SIZE, query, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    grad_tile = _load_tile(grad + head * SIZE, query, HEADS * SIZE, tokens, SIZE, WIDE)
    out_tile = _load_tile(out + head * SIZE, query, HEADS * SIZE, tokens, SIZE, WIDE)
    # The sum over features of grad x out, which the softmax's gradient subtracts (delta in FlashAttention); the kernel
    # of keys reads it.
    delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(deltas + head * tokens + query, delta, mask=query < tokens)
    log_sum = tl.load(log_sums + head * tokens + query, mask=query < tokens, other=float("inf"))
    bias = (line, buckets, query_table, key_table)
    d_q = tl.zeros([QUERIES, WIDE], tl.float32)
    d_q = _query_blocks(
        d_q, q, grad_tile, log_sum, delta, qkv, columns, full_counts, full, bias, d_query_table, keys, salt, query,
        head, program, tokens, blocks, first_head, longest, width, scale, keep_scale, False, HEADS, SIZE, WIDE, BLOCK,
        QUERIES, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    d_q = _query_blocks(
        d_q, q, grad_tile, log_sum, delta, qkv, columns, partial_counts, partial, bias, d_query_table, keys, salt,
        query, head, program, tokens, blocks, first_head, longest, width, scale, keep_scale, True, HEADS, SIZE, WIDE,
        BLOCK, QUERIES, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    _store_tile(d_qkv + head * SIZE, d_q * scale, query, 3 * HEADS * SIZE, tokens, SIZE, WIDE)


@triton.jit
def _key_blocks(
    d_k, d_v, d_line, k, v, grad, qkv, log_sums, deltas, columns, counts, entries, bias, d_key_table, keys, salt,
    key, head, program, tokens, blocks, first_head, longest, width, scale, keep_scale, MASKED: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of keys, values and biases by the blocks of queries of a list."""
    block = program // (BLOCK // KEYS)
    for i in range(tl.load(counts + block) * (BLOCK // QUERIES)):
        entry = tl.load(entries + block * blocks + i // (BLOCK // QUERIES))
        query = entry * BLOCK + i % (BLOCK // QUERIES) * QUERIES + tl.arange(0, QUERIES)
        q = _load_tile(qkv + head * SIZE, query, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
        grad_tile = _load_tile(grad + head * SIZE, query, HEADS * SIZE, tokens, SIZE, WIDE)
        log_sum = tl.load(log_sums + head * tokens + query, mask=query < tokens, other=float("inf"))
        delta = tl.load(deltas + head * tokens + query, mask=query < tokens, other=0.0)
        query_2d, key_2d = query[None, :], key[:, None]
        scores, index = _scores(
            k, q, columns, bias, query_2d, key_2d, head, tokens, longest, width, scale,
            MASKED, BIAS, WINDOW, PRECISION,
        )  # fmt: skip
        weights = tl.exp(scores - log_sum[None, :])
        d_weights = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION)
        dropped = weights
        if THRESHOLD > 0:
            keep = _keeps(keys, salt, query_2d, key_2d, head + first_head, tokens, THRESHOLD)
            dropped = tl.where(keep, weights * keep_scale, 0.0)
            d_weights = tl.where(keep, d_weights * keep_scale, 0.0)
        d_v += tl.dot(dropped.to(grad_tile.dtype), grad_tile, input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[None, :])
        d_k += tl.dot(d_scores.to(q.dtype), q, input_precision=PRECISION)
        if BIAS == 2:
            scatter(d_key_table, head, d_scores * scale, scores > float("-inf"), index, key, tokens, width)
        if BIAS == 1:
            index = tl.load(bias[1] + index)
            for bucket in range(tl.min(index), tl.max(index) + 1):
                total = tl.sum(tl.where(index == bucket, d_scores, 0.0))
                d_line += tl.where(tl.arange(0, 32) == bucket, total, 0.0)
    return d_k, d_v, d_line


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _key_grads(
    grad, qkv, log_sums, deltas, columns, partial_counts, partial, full_counts, full, line, buckets, query_table,
    key_table, keys, salt, d_qkv, sums, d_key_table, tokens, blocks, first_head, longest, width, scale, keep_scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BIAS: tl.constexpr, THRESHOLD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    key = program * KEYS + tl.arange(0, KEYS)
    k = _load_tile(qkv + (HEADS + head) * SIZE, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    v = _load_tile(qkv + (2 * HEADS + head) * SIZE, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    bias = (line, buckets, query_table, key_table)
    d_k = tl.zeros([KEYS, WIDE], tl.float32)
    d_v = tl.zeros([KEYS, WIDE], tl.float32)
    d_line = tl.zeros([32], tl.float32)
    d_k, d_v, d_line = _key_blocks(
        d_k, d_v, d_line, k, v, grad, qkv, log_sums, deltas, columns, full_counts, full, bias, d_key_table, keys,
        salt, key, head, program, tokens, blocks, first_head, longest, width, scale, keep_scale, False, HEADS, SIZE,
        WIDE, BLOCK, QUERIES, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    d_k, d_v, d_line = _key_blocks(
        d_k, d_v, d_line, k, v, grad, qkv, log_sums, deltas, columns, partial_counts, partial, bias, d_key_table,
        keys, salt, key, head, program, tokens, blocks, first_head, longest, width, scale, keep_scale, True, HEADS,
        SIZE, WIDE, BLOCK, QUERIES, KEYS, BIAS, THRESHOLD, WINDOW, PRECISION,
    )  # fmt: skip
    _store_tile(d_qkv + (HEADS + head) * SIZE, d_k * scale, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    _store_tile(d_qkv + (2 * HEADS + head) * SIZE, d_v, key, 3 * HEADS * SIZE, tokens, SIZE, WIDE)
    if BIAS == 1:
        tl.store(sums + (program * HEADS + head) * 32 + tl.arange(0, 32), d_line)


def _launch(kernel, qkv, tensors, bias, p, first_head, window, tile, along):  # type: ignore[no-untyped-def]
    """Launch a kernel.

    Args: bias: line, buckets and tables. tile: numbers of queries and keys. along: 0 = of queries, 1 = of keys.
    """
    tokens, _, heads, size = qkv.shape
    line, buckets, tables = bias
    wide, width = max(16, triton.next_power_of_2(size)), tables[0].shape[2] if tables else 0
    longest = 0 if buckets is None else len(buckets) // 2
    numbers = tokens, -(-tokens // BLOCK), first_head, longest, width, size**-0.5, 1.0 / (1.0 - p)
    # Three products of tf32 come close to fp32's accuracy on tensor cores.
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    bias_type = 4 - len(tables) if tables else int(line is not None)
    kernel(
        (-(-tokens // tile[along]), heads), tensors, numbers,
        (heads, size, wide, BLOCK, *tile, bias_type, keep_threshold(p), window, precision), 4 if wide <= 64 else 8,
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
    d_qkv, deltas,
):  # fmt: skip
    inputs = grad, qkv, out, log_sums, columns, *lists, line, buckets, *_pair(tables), keys, salt
    tensors, tile = (*inputs, d_qkv, deltas, _pair(d_tables)[0]), (key_tile(qkv.dtype, tables),) * 2
    _launch(_query_grads, qkv, tensors, (line, buckets, tables), p, first_head, window, tile, 0)


def rule_attention_keys(  # type: ignore[no-untyped-def]
    d_qkv, d_tables, grad, qkv, log_sums, deltas, columns, lists, line, buckets, tables, keys, salt, p, first_head,
    window, sums,
):  # fmt: skip
    inputs = grad, qkv, log_sums, deltas, columns, *lists, line, buckets, *_pair(tables), keys, salt
    tensors, tile = (*inputs, d_qkv, sums, _pair(d_tables)[1]), (BLOCK // 4, key_tile(qkv.dtype, tables))
    _launch(_key_grads, qkv, tensors, (line, buckets, tables), p, first_head, window, tile, 1)
