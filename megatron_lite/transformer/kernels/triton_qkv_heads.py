"""GPU kernels between the joined product of queries, keys and values and their scores, see qkv_heads.py.

A row is one head of one token. Its features are read as pairs, the even and the odd one of each, since rotary positions
rotate pairs. A program computes ROWS rows; the second number of its grid position says whether they are queries (0),
keys (1) or values (2). PAIRS is half of the head size rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_lite.transformer.kernels.launch import kernel, require

_TILE, _TILE_BACK = 4096, 2048  # numbers of a program's rows


@triton.jit
def _load(x, index, inside, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """Even and odd features of rows in fp32."""
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(value, [ROWS, PAIRS, 2]))


@triton.jit
def _store(x, index, inside, even, odd, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    value = tl.reshape(tl.join(even, odd), [ROWS, 2 * PAIRS])
    tl.store(x + index, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(even, odd, cos, sin, token, tokens, sign, ROTATED: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs rotated by their angles; `sign` is 1, or -1 to rotate back. Those from ROTATED on stay."""
    pair = tl.arange(0, PAIRS)[None, :]
    rotates = (token < tokens)[:, None] & (pair < ROTATED)
    index = token.to(tl.int64)[:, None] * ROTATED + pair
    cosine = tl.load(cos + index, mask=rotates, other=1.0)
    sine = tl.load(sin + index, mask=rotates, other=0.0) * sign
    return even * cosine - odd * sine, odd * cosine + even * sine


@triton.jit
def _load_scale(query_scale, key_scale, qkv_index, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """Even and odd features of the scale of queries (qkv_index 0) or of keys (1)."""
    pair = 2 * tl.arange(0, PAIRS)
    if qkv_index == 0:
        even = tl.load(query_scale + pair, mask=pair < SIZE, other=0.0).to(tl.float32)
        odd = tl.load(query_scale + pair + 1, mask=pair + 1 < SIZE, other=0.0).to(tl.float32)
    else:
        even = tl.load(key_scale + pair, mask=pair < SIZE, other=0.0).to(tl.float32)
        odd = tl.load(key_scale + pair + 1, mask=pair + 1 < SIZE, other=0.0).to(tl.float32)
    return even[None, :], odd[None, :]


@triton.jit
def _inverse_rms(even, odd, epsilon, SIZE: tl.constexpr):
    """1 / root of the mean square of each row."""
    return (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / SIZE + epsilon))[:, None]


@kernel("tokens", "epsilon", "factor", "sign")
def _expand(
    heads, cos, sin, query_scale, key_scale, out, tokens, epsilon, factor, sign,
    HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr,
    HAS_NORMS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`out` is [T, 3, HEADS, SIZE], or `heads` itself, which is rotated in place."""
    qkv_index = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    first = head
    if qkv_index > 0:
        first = HEADS + (qkv_index - 1) * KEYS + head // (HEADS // KEYS)
    feature = tl.arange(0, 2 * PAIRS)[None, :]
    inside = (token < tokens)[:, None] & (feature < SIZE)
    start = token.to(tl.int64) * (HEADS + 2 * KEYS) + first
    even, odd = _load(heads, start[:, None] * SIZE + feature, inside, PAIRS, ROWS)
    if qkv_index < 2:
        if HAS_NORMS:
            root = _inverse_rms(even, odd, epsilon, SIZE)
            scale_even, scale_odd = _load_scale(query_scale, key_scale, qkv_index, SIZE, PAIRS)
            even *= root * scale_even
            odd *= root * scale_odd
        if ROTATED > 0:
            even, odd = _rotate(even, odd, cos, sin, token, tokens, sign, ROTATED, PAIRS)
    if qkv_index == 0:
        even *= factor
        odd *= factor
    target = (token.to(tl.int64) * 3 + qkv_index) * HEADS + head
    _store(out, target[:, None] * SIZE + feature, inside, even, odd, PAIRS, ROWS)


@triton.jit
def _sum_grads(d_q, d_k, d_v, qkv_index, token, head, first, count, feature, copies,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the gradients of the `copies` of each row's head, even and odd features; zeros where there is none."""
    source = d_q
    if PACKED:
        source += qkv_index * HEADS * SIZE
    else:
        if qkv_index == 1:
            source = d_k
        if qkv_index == 2:
            source = d_v
    start = (token - first).to(tl.int64) * HEADS * (3 if PACKED else 1)
    inside = ((token >= first) & (token < first + count))[:, None] & (feature < SIZE)
    even = tl.zeros([ROWS, PAIRS], tl.float32)
    odd = tl.zeros([ROWS, PAIRS], tl.float32)
    for i in range(copies):
        copy_even, copy_odd = _load(
            source, (start + head * copies + i)[:, None] * SIZE + feature, inside, PAIRS, ROWS
        )
        even += copy_even
        odd += copy_odd
    return even, odd


@kernel("tokens", "tiles", "queries", "first_key", "keys", "epsilon", "factor")
def _gather(
    d_q, d_k, d_v, heads, cos, sin, query_scale, key_scale, out, sums,
    tokens, tiles, queries, first_key, keys, epsilon, factor,
    HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, HAS_NORMS: tl.constexpr,
    PACKED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Args: tiles: of ROWS rows, for each program. queries, keys: tokens that have gradients."""
    program, qkv_index = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, 2 * PAIRS)[None, :]
    sum_even = tl.zeros([PAIRS], tl.float32)
    sum_odd = tl.zeros([PAIRS], tl.float32)
    heads_here = HEADS if KEYS == HEADS else tl.where(qkv_index > 0, KEYS, HEADS)
    copies = 1 if KEYS == HEADS else tl.where(qkv_index > 0, HEADS // KEYS, 1)
    first = tl.where(qkv_index > 0, first_key, 0)
    count = tl.where(qkv_index > 0, keys, queries)
    begin = tl.where(qkv_index > 0, HEADS + (qkv_index - 1) * KEYS, 0)
    for tile in range(program * tiles, tl.minimum((program + 1) * tiles, tl.cdiv(tokens * heads_here, ROWS))):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // heads_here, row % heads_here
        even, odd = _sum_grads(
            d_q,
            d_k,
            d_v,
            qkv_index,
            token,
            head,
            first,
            count,
            feature,
            copies,
            HEADS,
            SIZE,
            PACKED,
            PAIRS,
            ROWS,
        )
        if qkv_index == 0:
            even *= factor
            odd *= factor
        inside = (token < tokens)[:, None] & (feature < SIZE)
        index = (token.to(tl.int64) * (HEADS + 2 * KEYS) + begin + head)[:, None] * SIZE + feature
        if qkv_index < 2:
            if ROTATED > 0:
                even, odd = _rotate(even, odd, cos, sin, token, tokens, -1.0, ROTATED, PAIRS)
            if HAS_NORMS:
                x_even, x_odd = _load(heads, index, inside, PAIRS, ROWS)
                root = _inverse_rms(x_even, x_odd, epsilon, SIZE)
                scale_even, scale_odd = _load_scale(query_scale, key_scale, qkv_index, SIZE, PAIRS)
                x_even *= root
                x_odd *= root
                sum_even += tl.sum(even * x_even, 0)
                sum_odd += tl.sum(odd * x_odd, 0)
                even *= scale_even
                odd *= scale_odd
                projection = (tl.sum(even * x_even + odd * x_odd, 1) / SIZE)[:, None]
                even = (even - x_even * projection) * root
                odd = (odd - x_odd * projection) * root
        _store(out, index, inside, even, odd, PAIRS, ROWS)
    if HAS_NORMS:  # noqa: SIM102 (the first is known when it is compiled)
        if qkv_index < 2:
            pair = 2 * tl.arange(0, PAIRS)
            target = sums + (program * 2 + qkv_index) * SIZE + pair
            tl.store(target, sum_even, mask=pair < SIZE)
            tl.store(target + 1, sum_odd, mask=pair + 1 < SIZE)


def _tile(size, most):  # type: ignore[no-untyped-def]
    """Pairs of a row, and rows of a program."""
    pairs = triton.next_power_of_2(size) // 2
    return pairs, most // pairs // 2


def _rotated_pairs(cos):  # type: ignore[no-untyped-def]
    """Pairs of a row that are rotated."""
    return 0 if cos is None else cos.shape[-1]


def _require(cos, sin, query_scale, key_scale, tokens, size):  # type: ignore[no-untyped-def]
    require(((tokens, 1, _rotated_pairs(cos)), cos, sin), ((size,), query_scale, key_scale))
    if 2 * _rotated_pairs(cos) > size:
        raise ValueError(
            f"a kernel takes angles of at most {size // 2} pairs, and got {_rotated_pairs(cos)}."
        )


def expand_heads(heads, cos, sin, query_scale, key_scale, epsilon, key_heads, factor, out):  # type: ignore[no-untyped-def]
    tokens, _, count, size = out.shape
    _require(cos, sin, query_scale, key_scale, tokens, size)
    pairs, rows = _tile(size, _TILE)
    if tokens:
        _expand(
            (-(-tokens * count // rows), 3), (heads, cos, sin, query_scale, key_scale, out),
            (tokens, epsilon, factor, 1.0),
            (count, key_heads, size, _rotated_pairs(cos), query_scale is not None, pairs, rows),
        )  # fmt: skip


def rotate_heads(heads, cos, sin, back):  # type: ignore[no-untyped-def]
    tokens, _, count, size = heads.shape
    _require(cos, sin, None, None, tokens, size)
    pairs, rows = _tile(size, _TILE)
    if tokens:
        _expand(
            (-(-tokens * count // rows), 2), (heads, cos, sin, None, None, heads),
            (tokens, 0.0, 1.0, -1.0 if back else 1.0), (count, count, size, _rotated_pairs(cos), False, pairs, rows),
        )  # fmt: skip


def gather_heads(  # type: ignore[no-untyped-def]
    d_q,
    d_k,
    d_v,
    first_key,
    heads,
    cos,
    sin,
    query_scale,
    key_scale,
    epsilon,
    key_heads,
    factor,
    tokens,
    out,
    sums,
):
    count, size = d_q.shape[-2:]
    packed, has_norms = d_k is None, query_scale is not None
    pairs, rows = _tile(size, _TILE_BACK)
    keys = tokens if packed else d_k.shape[0]
    _require(cos, sin, query_scale, key_scale, tokens, size)
    q_shape = (tokens, 3, count, size) if packed else (len(d_q), count, size)
    require((q_shape, d_q), ((keys, count, size), d_k, d_v), (out.shape, heads))
    if tokens:
        tiles = -(-tokens * count // rows)
        tiles_per_program = -(-tiles // sums.shape[0]) if has_norms else 1
        _gather(
            (sums.shape[0] if has_norms else tiles, 3),
            (d_q, d_k, d_v, heads, cos, sin, query_scale, key_scale, out, sums),
            (tokens, tiles_per_program, d_q.shape[0], first_key, keys, epsilon, factor),
            (count, key_heads, size, _rotated_pairs(cos), has_norms, packed, pairs, rows),
        )  # fmt: skip
