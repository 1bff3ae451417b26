"""GPU kernels between the joined product of queries, keys and values and their scores. heads.py says what they compute.

A row is one head of one token. Its features are read as pairs, the even and the odd one of each, since rotary positions
turn pairs; a program takes ROWS rows of queries, keys or values, the second number of its place. PAIRS is half of the
head size rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_lite.model.kernels.launch import kernel, require

_TILE, _TILE_BACK = 4096, 2048  # numbers of a program's rows


@triton.jit
def _load(x, place, inside, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """Even and odd features of rows in fp32."""
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(value, [ROWS, PAIRS, 2]))


@triton.jit
def _store(x, place, inside, even, odd, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    value = tl.reshape(tl.join(even, odd), [ROWS, 2 * PAIRS])
    tl.store(x + place, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _turned(even, odd, cos, sin, token, tokens, way, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs after their turn; `way` is 1, or -1 for the turn back. Those from TURNED on stay."""
    pair = tl.arange(0, PAIRS)[None, :]
    turns = (token < tokens)[:, None] & (pair < TURNED)
    at = token.to(tl.int64)[:, None] * TURNED + pair
    c = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0) * way
    return even * c - odd * s, odd * c + even * s


@triton.jit
def _scale(query_scale, key_scale, part, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """Even and odd features of the scale of queries (part 0) or of keys."""
    pair = 2 * tl.arange(0, PAIRS)
    if part == 0:
        even = tl.load(query_scale + pair, mask=pair < SIZE, other=0.0).to(tl.float32)
        odd = tl.load(query_scale + pair + 1, mask=pair + 1 < SIZE, other=0.0).to(tl.float32)
    else:
        even = tl.load(key_scale + pair, mask=pair < SIZE, other=0.0).to(tl.float32)
        odd = tl.load(key_scale + pair + 1, mask=pair + 1 < SIZE, other=0.0).to(tl.float32)
    return even[None, :], odd[None, :]


@triton.jit
def _roots(even, odd, epsilon, SIZE: tl.constexpr):
    """1 / root of the mean square of each row."""
    return (1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 1) / SIZE + epsilon))[:, None]


@kernel("tokens", "epsilon", "factor", "way")
def _spread(
    heads, cos, sin, query_scale, key_scale, out, tokens, epsilon, factor, way,
    HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr,
    HAS_NORMS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`out` has as many heads of each part as there are queries, or is `heads`."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    first = head
    if part > 0:
        first = HEADS + (part - 1) * KEYS + head // (HEADS // KEYS)
    feature = tl.arange(0, 2 * PAIRS)[None, :]
    inside = (token < tokens)[:, None] & (feature < SIZE)
    start = token.to(tl.int64) * (HEADS + 2 * KEYS) + first
    even, odd = _load(heads, start[:, None] * SIZE + feature, inside, PAIRS, ROWS)
    if part < 2:
        if HAS_NORMS:
            root = _roots(even, odd, epsilon, SIZE)
            scale_even, scale_odd = _scale(query_scale, key_scale, part, SIZE, PAIRS)
            even *= root * scale_even
            odd *= root * scale_odd
        if TURNED > 0:
            even, odd = _turned(even, odd, cos, sin, token, tokens, way, TURNED, PAIRS)
    if part == 0:
        even *= factor
        odd *= factor
    to = (token.to(tl.int64) * 3 + part) * HEADS + head
    _store(out, to[:, None] * SIZE + feature, inside, even, odd, PAIRS, ROWS)


@triton.jit
def _sum(d_q, d_k, d_v, part, token, head, first, count, feature, times,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the heads that rows have become, `times` each, even and odd features; zeros where there is none."""
    source = d_q
    if PACKED:
        source += part * HEADS * SIZE
    else:
        if part == 1:
            source = d_k
        if part == 2:
            source = d_v
    start = (token - first).to(tl.int64) * HEADS * (3 if PACKED else 1)
    inside = ((token >= first) & (token < first + count))[:, None] & (feature < SIZE)
    even = tl.zeros([ROWS, PAIRS], tl.float32)
    odd = tl.zeros([ROWS, PAIRS], tl.float32)
    for i in range(times):
        more = _load(source, (start + head * times + i)[:, None] * SIZE + feature, inside, PAIRS, ROWS)
        even += more[0]
        odd += more[1]
    return even, odd


@kernel("tokens", "tiles", "queries", "first_key", "keys", "epsilon", "factor")
def _gather(
    d_q, d_k, d_v, heads, cos, sin, query_scale, key_scale, out, sums,
    tokens, tiles, queries, first_key, keys, epsilon, factor,
    HEADS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr, HAS_NORMS: tl.constexpr,
    PACKED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Args: tiles: of ROWS rows, of a program."""
    program, part = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, 2 * PAIRS)[None, :]
    sum_even = tl.zeros([PAIRS], tl.float32)
    sum_odd = tl.zeros([PAIRS], tl.float32)
    of_part = HEADS if KEYS == HEADS else tl.where(part > 0, KEYS, HEADS)
    times = 1 if KEYS == HEADS else tl.where(part > 0, HEADS // KEYS, 1)
    first = tl.where(part > 0, first_key, 0)
    count = tl.where(part > 0, keys, queries)
    begin = tl.where(part > 0, HEADS + (part - 1) * KEYS, 0)
    for tile in range(program * tiles, tl.minimum((program + 1) * tiles, tl.cdiv(tokens * of_part, ROWS))):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // of_part, row % of_part
        even, odd = _sum(
            d_q, d_k, d_v, part, token, head, first, count, feature, times, HEADS, SIZE, PACKED, PAIRS, ROWS
        )
        if part == 0:
            even *= factor
            odd *= factor
        inside = (token < tokens)[:, None] & (feature < SIZE)
        place = (token.to(tl.int64) * (HEADS + 2 * KEYS) + begin + head)[:, None] * SIZE + feature
        if part < 2:
            if TURNED > 0:
                even, odd = _turned(even, odd, cos, sin, token, tokens, -1.0, TURNED, PAIRS)
            if HAS_NORMS:
                x_even, x_odd = _load(heads, place, inside, PAIRS, ROWS)
                root = _roots(x_even, x_odd, epsilon, SIZE)
                scale_even, scale_odd = _scale(query_scale, key_scale, part, SIZE, PAIRS)
                x_even *= root
                x_odd *= root
                sum_even += tl.sum(even * x_even, 0)
                sum_odd += tl.sum(odd * x_odd, 0)
                even *= scale_even
                odd *= scale_odd
                shared = (tl.sum(even * x_even + odd * x_odd, 1) / SIZE)[:, None]
                even = (even - x_even * shared) * root
                odd = (odd - x_odd * shared) * root
        _store(out, place, inside, even, odd, PAIRS, ROWS)
    if HAS_NORMS:  # noqa: SIM102 (the first is known when it is compiled)
        if part < 2:
            pair = 2 * tl.arange(0, PAIRS)
            to = sums + (program * 2 + part) * SIZE + pair
            tl.store(to, sum_even, mask=pair < SIZE)
            tl.store(to + 1, sum_odd, mask=pair + 1 < SIZE)


def _tile(size, most):  # type: ignore[no-untyped-def]
    """Pairs of a row, and rows of a program."""
    pairs = triton.next_power_of_2(size) // 2
    return pairs, most // pairs // 2


def _width(cos):  # type: ignore[no-untyped-def]
    """Pairs of a row that are turned."""
    return 0 if cos is None else cos.shape[-1]


def _require(cos, sin, query_scale, key_scale, tokens, size):  # type: ignore[no-untyped-def]
    require(((tokens, 1, _width(cos)), cos, sin), ((size,), query_scale, key_scale))
    if 2 * _width(cos) > size:
        raise ValueError(f"a kernel takes angles of at most {size // 2} pairs, and got {_width(cos)}.")


def spread_heads(heads, cos, sin, query_scale, key_scale, epsilon, key_heads, factor, out):  # type: ignore[no-untyped-def]
    tokens, _, count, size = out.shape
    _require(cos, sin, query_scale, key_scale, tokens, size)
    pairs, rows = _tile(size, _TILE)
    if tokens:
        _spread(
            (-(-tokens * count // rows), 3), (heads, cos, sin, query_scale, key_scale, out),
            (tokens, epsilon, factor, 1.0),
            (count, key_heads, size, _width(cos), query_scale is not None, pairs, rows),
        )  # fmt: skip


def turn_heads(heads, cos, sin, back):  # type: ignore[no-untyped-def]
    tokens, _, count, size = heads.shape
    _require(cos, sin, None, None, tokens, size)
    pairs, rows = _tile(size, _TILE)
    if tokens:
        _spread(
            (-(-tokens * count // rows), 2), (heads, cos, sin, None, None, heads),
            (tokens, 0.0, 1.0, -1.0 if back else 1.0), (count, count, size, _width(cos), False, pairs, rows),
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
    of_queries = (tokens, 3, count, size) if packed else (len(d_q), count, size)
    require((of_queries, d_q), ((keys, count, size), d_k, d_v), (out.shape, heads))
    if tokens:
        tiles = -(-tokens * count // rows)
        of_program = -(-tiles // sums.shape[0]) if has_norms else 1
        _gather(
            (sums.shape[0] if has_norms else tiles, 3),
            (d_q, d_k, d_v, heads, cos, sin, query_scale, key_scale, out, sums),
            (tokens, of_program, d_q.shape[0], first_key, keys, epsilon, factor),
            (count, key_heads, size, _width(cos), has_norms, packed, pairs, rows),
        )  # fmt: skip
