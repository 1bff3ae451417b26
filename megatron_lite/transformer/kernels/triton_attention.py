"""Attention under the rule of layout.py, within blocks that hold a visible pair: GPU kernels, written in Triton.

`Form.bias` says what is added to the scores by the distance of two positions: nothing (0); a number for each distance
(1), whose gradient is summed by bucket, within a program in the order of its blocks, over programs by torch; a number
of the query and one of the key, from tables (2), or of the query alone (3), whose gradients are scattered, see
triton_tables.py. No atomic additions: results are the same each time. Only rule_attention.py's operators import this
module.

A program computes a tile of queries, or of keys, of one head. Its lists say which blocks of keys, or of queries, hold
visible pairs only (full), or some (partial): there the rule decides. Softmax as in FlashAttention, arXiv:2205.14135.
Columns of tokens: document, key_time, query_bound, grp and position, see layout.py.

A kernel's arguments are a flat list, since launch.py passes pointers; what belongs together is grouped at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_lite.transformer.kernels.dropout import keep_threshold
from megatron_lite.transformer.kernels.launch import kernel
from megatron_lite.transformer.kernels.rule_attention import BLOCK, key_tile
from megatron_lite.transformer.kernels.triton_kernels import hash_keeps
from megatron_lite.transformer.kernels.triton_tables import lookup, scatter


@dataclass(frozen=True)
class Form:
    """The constants that a kernel is compiled for."""

    heads: int
    head_size: int
    padded_size: int  # a power of two, of at least 16
    block: int  # tokens of a block of the lists
    queries: int  # of a tile
    keys: int  # of a tile
    bias: int
    drop_threshold: int  # see `keep_threshold`; 0 = no dropout
    window: int  # of a local layer; 0 = none
    precision: str  # of products


class Batch(NamedTuple):
    """What the scores follow from."""

    qkv: tl.tensor  # [T, 3, H, D]
    columns: tl.tensor  # int32 [5, T]
    tokens: tl.tensor  # T
    scale: tl.tensor  # of the scores


class BlockList(NamedTuple):
    """For each block of queries the blocks of keys that it meets, or the other way round."""

    counts: tl.tensor  # int32 [blocks]
    entries: tl.tensor  # int32 [blocks, blocks], of which the first `counts` are used
    blocks: tl.tensor


class Bias(NamedTuple):
    """What is added to the scores, see rule_attention.py."""

    line: tl.tensor
    buckets: tl.tensor
    query_table: tl.tensor
    key_table: tl.tensor
    longest: tl.tensor  # distance
    width: tl.tensor  # of the tables


class Dropout(NamedTuple):
    """Of attention weights."""

    keys: tl.tensor
    salt: tl.tensor
    first_head: tl.tensor
    keep_scale: tl.tensor


@triton.jit
def _column(batch, number: tl.constexpr, token, other: tl.constexpr):
    return tl.load(batch.columns + number * batch.tokens + token, mask=token < batch.tokens, other=other)


@triton.jit
def _seen(batch, query, key, FORM: tl.constexpr):
    """`may_see` of layout.py for indices that broadcast. Tokens beyond the last see nothing and are not seen."""
    seen = _column(batch, 1, key, 2147483647) <= _column(batch, 2, query, -1)
    group = _column(batch, 3, query, 0)
    seen |= (group == _column(batch, 3, key, 0)) & (group != 0)
    # Different defaults: two tokens beyond the last are of no common document.
    seen &= _column(batch, 0, query, -2) == _column(batch, 0, key, -3)
    if FORM.window > 0:
        apart = _column(batch, 4, query, 0) - _column(batch, 4, key, 0)
        seen &= (apart <= FORM.window) & (apart >= -FORM.window)
    return seen


@triton.jit
def _keeps(dropout, batch, query, key, head, FORM: tl.constexpr):
    """Which attention weights dropout keeps, see dropout.py."""
    start = tl.load(dropout.keys + query, mask=query < batch.tokens, other=0) ^ tl.load(dropout.salt)
    step = tl.load(dropout.keys + key, mask=key < batch.tokens, other=0).to(tl.uint32) * 0x9E3779B9
    of_head = (head + dropout.first_head).to(tl.uint32) * 0x85EBCA6B
    return hash_keeps(start.to(tl.uint32) + step + of_head, FORM.drop_threshold)


@triton.jit
def _load_tile(x, token, stride, batch, FORM: tl.constexpr):
    """[tokens, padded size] of one head, zeros beyond the last token and feature. Args: stride: between tokens."""
    feature = tl.arange(0, FORM.padded_size)
    inside = (token < batch.tokens)[:, None] & (feature < FORM.head_size)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * stride + feature[None, :], mask=inside, other=0.0)


@triton.jit
def _load_heads(batch, part: tl.constexpr, token, head, FORM: tl.constexpr):
    """A tile of queries (part 0), keys (1) or values (2)."""
    first = batch.qkv + (part * FORM.heads + head) * FORM.head_size
    return _load_tile(first, token, 3 * FORM.heads * FORM.head_size, batch, FORM)


@triton.jit
def _store_tile(x, value, token, stride, batch, FORM: tl.constexpr):
    feature = tl.arange(0, FORM.padded_size)
    inside = (token < batch.tokens)[:, None] & (feature < FORM.head_size)[None, :]
    pointer = x + token.to(tl.int64)[:, None] * stride + feature[None, :]
    tl.store(pointer, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _store_heads(d_qkv, part: tl.constexpr, value, token, head, batch, FORM: tl.constexpr):
    """Write a tile of the gradient of queries (part 0), keys (1) or values (2)."""
    first = d_qkv + (part * FORM.heads + head) * FORM.head_size
    _store_tile(first, value, token, 3 * FORM.heads * FORM.head_size, batch, FORM)


@triton.jit
def _scores(a, b, batch, bias, query, key, head, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Scores of a tile, a b^T, and the indices of their distances or, where there are tables, their slots in these.

    Args: query, key: tokens, which broadcast to the tile.
    """
    scores = tl.dot(a, tl.trans(b), input_precision=FORM.precision)
    # Among all distances, 2 longest + 1.
    index = _column(batch, 4, key, 0) - _column(batch, 4, query, 0) + bias.longest
    if FORM.bias >= 2:
        index = tl.load(bias.buckets + index)
        scores += lookup(bias.query_table, head, query, index, batch.tokens, bias.width)
    if FORM.bias == 2:
        scores += lookup(bias.key_table, head, key, index, batch.tokens, bias.width)
    scores *= batch.scale
    if FORM.bias == 1:
        scores += tl.load(bias.line + head * (2 * bias.longest + 1) + index)
    if MASKED:
        scores = tl.where(_seen(batch, query, key, FORM), scores, float("-inf"))
    return scores, index


@triton.jit
def _listed_tile(listed, i, TILE: tl.constexpr, OWN_TILE: tl.constexpr, FORM: tl.constexpr):
    """The tokens of tile i of the listed blocks. Args: TILE, OWN_TILE: tokens of theirs and of this program's tiles."""
    block = tl.program_id(0) // (FORM.block // OWN_TILE)
    entry = tl.load(listed.entries + block * listed.blocks + i // (FORM.block // TILE))
    return entry * FORM.block + i % (FORM.block // TILE) * TILE + tl.arange(0, TILE)


@triton.jit
def _listed_tiles(listed, TILE: tl.constexpr, OWN_TILE: tl.constexpr, FORM: tl.constexpr):
    """How many tiles the listed blocks have."""
    block = tl.program_id(0) // (FORM.block // OWN_TILE)
    return tl.load(listed.counts + block) * (FORM.block // TILE)


@triton.jit
def _forward_blocks(
    total, largest, weighted, q, batch, listed, bias, dropout, query, head, MASKED: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of a list to the sums of exponentials, the largest scores and the sums of weighted values."""
    for i in range(_listed_tiles(listed, FORM.keys, FORM.queries, FORM)):
        key = _listed_tile(listed, i, FORM.keys, FORM.queries, FORM)
        k = _load_heads(batch, 1, key, head, FORM)
        v = _load_heads(batch, 2, key, head, FORM)
        query_2d, key_2d = query[:, None], key[None, :]
        scores, _ = _scores(q, k, batch, bias, query_2d, key_2d, head, MASKED, FORM)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # ---- online softmax: rescale what has been summed when a larger score appears ----
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf - -inf is no number
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(largest - shift)
        # The sum is that of all weights: dropout acts on the normalized weights.
        total = total * shrink + tl.sum(weights, 1)
        if FORM.drop_threshold > 0:
            weights = tl.where(_keeps(dropout, batch, query_2d, key_2d, head, FORM), weights, 0.0)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=FORM.precision)
        largest = new_largest
    return total, largest, weighted


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _attend(
    qkv, columns, partial_counts, partial, full_counts, full, line, buckets, query_table, key_table, keys, salt, out,
    log_sums, tokens, blocks, first_head, longest, width, scale, keep_scale, FORM: tl.constexpr,
):  # fmt: skip
    batch = Batch(qkv, columns, tokens, scale)
    bias = Bias(line, buckets, query_table, key_table, longest, width)
    dropout = Dropout(keys, salt, first_head, keep_scale)
    QUERIES: tl.constexpr = FORM.queries
    WIDE: tl.constexpr = FORM.padded_size
    head = tl.program_id(1)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    q = _load_heads(batch, 0, query, head, FORM)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    weighted = tl.zeros([QUERIES, WIDE], tl.float32)
    listed = BlockList(full_counts, full, blocks)
    total, largest, weighted = _forward_blocks(
        total, largest, weighted, q, batch, listed, bias, dropout, query, head, False, FORM
    )
    listed = BlockList(partial_counts, partial, blocks)
    total, largest, weighted = _forward_blocks(
        total, largest, weighted, q, batch, listed, bias, dropout, query, head, True, FORM
    )
    sees = total > 0.0
    weighted = tl.where(sees[:, None], weighted * (keep_scale / tl.where(sees, total, 1.0))[:, None], 0.0)
    stride = FORM.heads * FORM.head_size
    _store_tile(out + head * FORM.head_size, weighted, query, stride, batch, FORM)
    # +infinity for queries that see nothing: exp(score - inf) is 0 in the backward pass.
    log_sum = tl.where(sees, tl.log(tl.where(sees, total, 1.0)) + largest, float("inf"))
    tl.store(log_sums + head * tokens + query, log_sum, mask=query < tokens)


@triton.jit
def _query_blocks(
    d_q, q, grad, log_sum, delta, batch, listed, bias, d_query_table, dropout, query, head, MASKED: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Adds the gradient of queries by the blocks of a list."""
    for i in range(_listed_tiles(listed, FORM.keys, FORM.queries, FORM)):
        key = _listed_tile(listed, i, FORM.keys, FORM.queries, FORM)
        k = _load_heads(batch, 1, key, head, FORM)
        v = _load_heads(batch, 2, key, head, FORM)
        query_2d, key_2d = query[:, None], key[None, :]
        scores, index = _scores(q, k, batch, bias, query_2d, key_2d, head, MASKED, FORM)
        weights = tl.exp(scores - log_sum[:, None])
        d_weights = tl.dot(grad, tl.trans(v), input_precision=FORM.precision)
        if FORM.drop_threshold > 0:
            keep = _keeps(dropout, batch, query_2d, key_2d, head, FORM)
            d_weights = tl.where(keep, d_weights * dropout.keep_scale, 0.0)
        d_scores = weights * (d_weights - delta[:, None])
        d_q += tl.dot(d_scores.to(k.dtype), k, input_precision=FORM.precision)
        if FORM.bias >= 2:
            seen = scores > float("-inf")
            d_table = d_scores * batch.scale
            scatter(d_query_table, head, d_table, seen, index, query, batch.tokens, bias.width)
    return d_q


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _query_grads(
    grad, qkv, out, log_sums, columns, partial_counts, partial, full_counts, full, line, buckets, query_table,
    key_table, keys, salt, d_qkv, deltas, d_query_table, tokens, blocks, first_head, longest, width, scale, keep_scale,
    FORM: tl.constexpr,
):  # fmt: skip
    batch = Batch(qkv, columns, tokens, scale)
    bias = Bias(line, buckets, query_table, key_table, longest, width)
    dropout = Dropout(keys, salt, first_head, keep_scale)
    QUERIES: tl.constexpr = FORM.queries
    WIDE: tl.constexpr = FORM.padded_size
    head = tl.program_id(1)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    q = _load_heads(batch, 0, query, head, FORM)
    stride = FORM.heads * FORM.head_size
    grad_tile = _load_tile(grad + head * FORM.head_size, query, stride, batch, FORM)
    out_tile = _load_tile(out + head * FORM.head_size, query, stride, batch, FORM)
    # The sum over features of grad x out, which the softmax's gradient subtracts (delta in FlashAttention); the kernel
    # of keys reads it.
    delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(deltas + head * tokens + query, delta, mask=query < tokens)
    log_sum = tl.load(log_sums + head * tokens + query, mask=query < tokens, other=float("inf"))
    d_q = tl.zeros([QUERIES, WIDE], tl.float32)
    listed = BlockList(full_counts, full, blocks)
    d_q = _query_blocks(
        d_q,
        q,
        grad_tile,
        log_sum,
        delta,
        batch,
        listed,
        bias,
        d_query_table,
        dropout,
        query,
        head,
        False,
        FORM,
    )
    listed = BlockList(partial_counts, partial, blocks)
    d_q = _query_blocks(
        d_q,
        q,
        grad_tile,
        log_sum,
        delta,
        batch,
        listed,
        bias,
        d_query_table,
        dropout,
        query,
        head,
        True,
        FORM,
    )
    _store_heads(d_qkv, 0, d_q * scale, query, head, batch, FORM)


@triton.jit
def _key_blocks(
    d_k, d_v, d_line, k, v, grad, log_sums, deltas, batch, listed, bias, d_key_table, dropout, key, head,
    MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of keys, values and biases by the blocks of queries of a list."""
    for i in range(_listed_tiles(listed, FORM.queries, FORM.keys, FORM)):
        query = _listed_tile(listed, i, FORM.queries, FORM.keys, FORM)
        q = _load_heads(batch, 0, query, head, FORM)
        grad_tile = _load_tile(grad + head * FORM.head_size, query, FORM.heads * FORM.head_size, batch, FORM)
        inside = query < batch.tokens
        log_sum = tl.load(log_sums + head * batch.tokens + query, mask=inside, other=float("inf"))
        delta = tl.load(deltas + head * batch.tokens + query, mask=inside, other=0.0)
        query_2d, key_2d = query[None, :], key[:, None]
        scores, index = _scores(k, q, batch, bias, query_2d, key_2d, head, MASKED, FORM)
        weights = tl.exp(scores - log_sum[None, :])
        d_weights = tl.dot(v, tl.trans(grad_tile), input_precision=FORM.precision)
        dropped = weights
        if FORM.drop_threshold > 0:
            keep = _keeps(dropout, batch, query_2d, key_2d, head, FORM)
            dropped = tl.where(keep, weights * dropout.keep_scale, 0.0)
            d_weights = tl.where(keep, d_weights * dropout.keep_scale, 0.0)
        d_v += tl.dot(dropped.to(grad_tile.dtype), grad_tile, input_precision=FORM.precision)
        d_scores = weights * (d_weights - delta[None, :])
        d_k += tl.dot(d_scores.to(q.dtype), q, input_precision=FORM.precision)
        if FORM.bias == 2:
            seen = scores > float("-inf")
            d_table = d_scores * batch.scale
            scatter(d_key_table, head, d_table, seen, index, key, batch.tokens, bias.width)
        if FORM.bias == 1:
            index = tl.load(bias.buckets + index)
            for bucket in range(tl.min(index), tl.max(index) + 1):
                total = tl.sum(tl.where(index == bucket, d_scores, 0.0))
                d_line += tl.where(tl.arange(0, 32) == bucket, total, 0.0)
    return d_k, d_v, d_line


@kernel("tokens", "blocks", "first_head", "longest", "width", "scale", "keep_scale")
def _key_grads(
    grad, qkv, log_sums, deltas, columns, partial_counts, partial, full_counts, full, line, buckets, query_table,
    key_table, keys, salt, d_qkv, sums, d_key_table, tokens, blocks, first_head, longest, width, scale, keep_scale,
    FORM: tl.constexpr,
):  # fmt: skip
    batch = Batch(qkv, columns, tokens, scale)
    bias = Bias(line, buckets, query_table, key_table, longest, width)
    dropout = Dropout(keys, salt, first_head, keep_scale)
    KEYS: tl.constexpr = FORM.keys
    WIDE: tl.constexpr = FORM.padded_size
    program, head = tl.program_id(0), tl.program_id(1)
    key = program * KEYS + tl.arange(0, KEYS)
    k = _load_heads(batch, 1, key, head, FORM)
    v = _load_heads(batch, 2, key, head, FORM)
    d_k = tl.zeros([KEYS, WIDE], tl.float32)
    d_v = tl.zeros([KEYS, WIDE], tl.float32)
    d_line = tl.zeros([32], tl.float32)
    listed = BlockList(full_counts, full, blocks)
    d_k, d_v, d_line = _key_blocks(
        d_k, d_v, d_line, k, v, grad, log_sums, deltas, batch, listed, bias, d_key_table, dropout, key, head, False,
        FORM,
    )  # fmt: skip
    listed = BlockList(partial_counts, partial, blocks)
    d_k, d_v, d_line = _key_blocks(
        d_k, d_v, d_line, k, v, grad, log_sums, deltas, batch, listed, bias, d_key_table, dropout, key, head, True,
        FORM,
    )  # fmt: skip
    _store_heads(d_qkv, 1, d_k * scale, key, head, batch, FORM)
    _store_heads(d_qkv, 2, d_v, key, head, batch, FORM)
    if FORM.bias == 1:
        tl.store(sums + (program * FORM.heads + head) * 32 + tl.arange(0, 32), d_line)


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
    queries, keys = tile
    form = Form(heads, size, wide, BLOCK, queries, keys, bias_type, keep_threshold(p), window, precision)
    kernel((-(-tokens // tile[along]), heads), tensors, numbers, (form,), 4 if wide <= 64 else 8)


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
