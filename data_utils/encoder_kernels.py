"""Compiled inner loops of the fast encoders: cut UTF-8 bytes into words, look each up in a cache of words.

Two loops, one per family: `encode_byte_level` (GPT-2's pre-tokenizer and merges) and `encode_word_piece`
(BERT's normaliser, pre-tokenizer and longest match). Both work through a block of documents and write ids.
What they cannot decide they leave to the caller: they stop with a status and their place in `state`, and
called again they go on from there. That keeps Unicode tables out of this file: the caller fills a page of
256 code points when a text first needs it, by asking the library whose ids are to be met.

A word is its bytes. One of up to 16 bytes is held whole in its slot of the hash table; a longer one, up to
MAX_CACHED_BYTES, is compared byte by byte with the copy kept: equal hashes never give wrong ids. When the
cache is full it is emptied, which costs less than any bookkeeping of use.

The helpers take pointers, not arrays. Numba counts references to an array at every call, with atomic
operations that made the whole four times slower; a pointer is only a number. So nothing checks a bound, and
this does not run with the compiler switched off (NUMBA_DISABLE_JIT): the library then does the work.

All functions are in one file, because numba's cache on disk notices changes in the file of the entry point
only. Numbers are int64 save for hashes and keys, which are uint64: numba makes a float of a mixture.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

# What the caller has to do. state[POINT] is a code point, or the end of the pending word.
DONE, NEEDS_PAGE, NEEDS_LIBRARY, NEEDS_LIBRARY_AND_CACHE = range(4)
DOCUMENT, POSITION, WRITTEN, POINT = range(4)  # entries of `state`
STATE_SIZE = 4

CODE_POINTS = 0x110000
UNKNOWN = 255  # class of a code point whose page has not been filled
LETTER, NUMBER, OTHER, SPACE = range(4)  # classes of encode_byte_level
# Classes of encode_word_piece. `values` holds for PLAIN the code point it is normalised to, for EXPANDED the
# place of its code points in `images` (after their number), for ALONE its id.
BLANK, PLAIN, EXPANDED, ALONE, UNUSUAL = range(5)

PADDING = bytes(8)  # after the last byte of `data`, because words are read 8 bytes at a time

MAX_CACHED_BYTES = 64
MAX_CACHED_IDS = 128
MAX_MERGED_BYTES = 256  # merging takes time quadratic in the word; beyond this the library is faster

_NO_RANK = 2**31 - 1
_FREE = np.uint64(0xFFFFFFFFFFFFFFFF)
_MULTIPLIER_0 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xD6E8FEB86659FD93)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_LENGTH = np.uint64(0xFFFF)
_COUNT_SHIFT = np.uint64(16)
_ZERO = np.uint64(0)
_INLINE_BYTES = 16


class WordCache(NamedTuple):
    """Hash table from words to ids."""

    slots: (
        np.ndarray
    )  # uint64 [4 * 2**k]: two key words; length | number of ids << 16 | place in keys << 32; ids
    keys: np.ndarray  # uint8: the bytes of words longer than 16
    ids: np.ndarray  # int32
    used: np.ndarray  # int64 [3]: slots, keys, ids


class PairTable(NamedTuple):
    """Hash table from two numbers below 2**31 to two int32."""

    keys: np.ndarray  # uint64 [2**k]: first << 32 | second, _FREE where empty
    values: np.ndarray  # int32 [2 * 2**k]


def new_word_cache(slots: int) -> WordCache:
    """An empty cache for `slots` / 2 words, `slots` a power of two; 56 bytes each."""
    return WordCache(
        np.zeros(slots * 4, np.uint64),
        np.empty(slots * 8 + MAX_CACHED_BYTES, np.uint8),
        np.empty(slots * 4 + MAX_CACHED_IDS, np.int32),
        np.zeros(3, np.int64),
    )


def new_pair_table(entries: int) -> PairTable:
    """An empty table with room for `entries`."""
    size = 1 << max(4, int(2 * entries).bit_length())
    return PairTable(np.full(size, _FREE, np.uint64), np.zeros(2 * size, np.int32))


def _type_pointer(typing_context, array):
    """The address of an array's first element, to be indexed like the array."""

    def generate(context, builder, signature, arguments):
        return arrayobj.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


def _type_eight_bytes(typing_context, pointer, place):
    """The 8 bytes from pointer[place] on as uint64; no boundary need be kept."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(64).as_pointer())
        word = builder.load(address)
        word.align = 1
        return word

    return types.uint64(pointer, types.int64), generate


_pointer: Any = intrinsic(_type_pointer)
_eight_bytes: Any = intrinsic(_type_eight_bytes)


# ---- hash tables ----


@njit
def _find_pair(keys, mask, first, second):
    """Place of the pair in `keys`, or of the free entry where it belongs."""
    key = (np.uint64(first) << _HALF) | np.uint64(second)
    place = np.int64((key * _MULTIPLIER_0) >> _HALF) & mask
    while keys[place] != key and keys[place] != _FREE:
        place = (place + 1) & mask
    return place


@njit(cache=True)
def fill_pair_table(table, firsts, seconds, values_0, values_1):
    """Enter all pairs and their two values (all int64); a later pair replaces an earlier one."""
    mask = table.keys.size - 1
    for i in range(len(firsts)):
        place = _find_pair(_pointer(table.keys), mask, firsts[i], seconds[i])
        table.keys[place] = (np.uint64(firsts[i]) << _HALF) | np.uint64(seconds[i])
        table.values[2 * place] = values_0[i]
        table.values[2 * place + 1] = values_1[i]


@njit
def _load(data, start, count):
    """1 to 8 bytes as one word."""
    return _eight_bytes(data, start) & (_FREE >> np.uint64(64 - 8 * count))


@njit
def _key(data, start, length):
    """Two words: the bytes themselves up to 16, else two hashes of them."""
    if length <= 8:
        return _load(data, start, length), _ZERO
    first = _load(data, start, 8)
    if length <= _INLINE_BYTES:
        return first, _load(data, start + 8, length - 8)
    second = first * _MULTIPLIER_1
    for k in range(8, length, 8):
        word = _load(data, start + k, min(8, length - k))
        first = (first ^ word) * _MULTIPLIER_0
        first ^= first >> _HALF
        second = (second + word) * _MULTIPLIER_1
    return first, second


@njit
def _is_word(keys, place, data, start, length):
    for k in range(length):  # noqa: SIM110 - numba has no all()
        if keys[place + k] != data[start + k]:
            return False
    return True


@njit
def _find_word(slots, mask, keys, data, start, length, first, second):
    """Slot of the word, or the free one where it belongs (its third entry is 0)."""
    mixed = (first ^ (second * _MULTIPLIER_1) ^ np.uint64(length)) * _MULTIPLIER_0
    slot = np.int64(mixed >> _HALF) & mask
    while True:
        tag = slots[4 * slot + 2]
        if tag == _ZERO:
            return slot
        if slots[4 * slot] == first and slots[4 * slot + 1] == second and np.int64(tag & _LENGTH) == length:
            place = np.int64(tag >> _HALF)
            if length <= _INLINE_BYTES or _is_word(keys, place, data, start, length):
                return slot
        slot = (slot + 1) & mask


@njit
def _store(cache, slot, data, start, length, first, second, ids, count):
    """Enter a word and its ids[:count]. Up to two are kept in the slot itself, more in cache.ids."""
    slots, keys, kept, used = cache.slots, cache.keys, cache.ids, cache.used
    place = np.int64(0)
    if length > _INLINE_BYTES:
        place = used[1]
        for k in range(length):
            keys[place + k] = data[start + k]
        used[1] += length
    value = _ZERO
    if count > 2:
        value = np.uint64(used[2])
        for k in range(count):
            kept[used[2] + k] = ids[k]
        used[2] += count
    else:
        for k in range(count):
            value |= np.uint64(ids[k]) << np.uint64(32 * k)
    slots[4 * slot] = first
    slots[4 * slot + 1] = second
    slots[4 * slot + 2] = np.uint64(length | (count << 16) | (place << 32))
    slots[4 * slot + 3] = value
    used[0] += 1


@njit
def _is_full(cache):
    """No room for one more word of any admitted length and number of ids."""
    return (
        8 * cache.used[0] >= len(cache.slots)
        or cache.used[1] + MAX_CACHED_BYTES > len(cache.keys)
        or cache.used[2] + MAX_CACHED_IDS > len(cache.ids)
    )


@njit
def _empty(cache):
    cache.slots[:] = _ZERO
    cache.used[:] = 0


@njit(cache=True)
def remember(cache, data, start, stop, ids):
    """Enter the word data[start:stop], which is not in the cache and at most MAX_CACHED_BYTES long."""
    if len(ids) > MAX_CACHED_IDS:
        return
    if _is_full(cache):
        _empty(cache)
    data, slots, mask = _pointer(data), _pointer(cache.slots), len(cache.slots) // 4 - 1
    first, second = _key(data, start, stop - start)
    slot = _find_word(slots, mask, _pointer(cache.keys), data, start, stop - start, first, second)
    _store(cache, slot, data, start, stop - start, first, second, ids, len(ids))


# ---- text ----


@njit
def _code_point(data, i):
    """The code point at byte i of valid UTF-8 that is not ASCII, and the place after it."""
    byte = np.int64(data[i])
    if byte < 0xE0:
        return ((byte & 0x1F) << 6) | (data[i + 1] & 0x3F), i + 2
    if byte < 0xF0:
        return ((byte & 0x0F) << 12) | ((data[i + 1] & 0x3F) << 6) | (data[i + 2] & 0x3F), i + 3
    high = ((byte & 0x07) << 18) | ((data[i + 1] & 0x3F) << 12)
    return high | ((data[i + 2] & 0x3F) << 6) | (data[i + 3] & 0x3F), i + 4


@njit
def _next(data, i):
    if data[i] < 0x80:
        return np.int64(data[i]), i + 1
    return _code_point(data, i)


# ---- byte-level BPE ----


@njit
def _contraction_end(data, i, stop):
    """End of 's 't 'm 'd 're 've 'll at the apostrophe data[i], or i."""
    if i + 1 >= stop:
        return i
    c = data[i + 1]
    if c == ord("s") or c == ord("t") or c == ord("m") or c == ord("d"):
        return i + 2
    if i + 2 < stop:
        e = data[i + 2]
        if (e == ord("e") and (c == ord("r") or c == ord("v"))) or (c == ord("l") and e == ord("l")):
            return i + 3
    return i


@njit
def _run_end(data, i, stop, classes, kind):
    """End of the run of class `kind` from i on, and the start of its last character.

    ~code point instead of the end, where one is met whose class is not known yet.
    """
    last = i
    while i < stop:
        point, after = _next(data, i)
        found = classes[point]
        if found != kind:
            if found == UNKNOWN:
                return ~point, last
            break
        last = i
        i = after
    return i, last


@njit
def _pretoken_end(data, i, stop, classes):
    """End of the first match of GPT-2's expression at i; ~code point if a class is not known yet.

    '(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
    """
    byte = data[i]
    if byte == ord("'"):
        end = _contraction_end(data, i, stop)
        if end > i:
            return end
    start = i + 1 if byte == ord(" ") and i + 1 < stop else i
    point, after = _next(data, start)
    kind = classes[point]
    if kind == UNKNOWN:
        return ~point
    if kind != SPACE:
        end, _ = _run_end(data, after, stop, classes, kind)
        return end
    end, last = _run_end(data, i, stop, classes, SPACE)
    if end < 0 or end == stop or last == i:
        return end
    return last  # the last space belongs to the word that follows


@njit
def _merge(data, start, length, byte_ids, keys, mask, values, ids, pairs):
    """Merge the bytes of a word, lowest rank first and leftmost first; the ids are in ids[:count].

    Args: pairs: int32 scratch [2 * MAX_MERGED_BYTES]: rank and result of each pair of neighbours.
    Returns: count.
    """
    for k in range(length):
        ids[k] = byte_ids[data[start + k]]
    for k in range(length - 1):
        _rank(keys, mask, values, ids, pairs, k)
    count = length
    while count > 1:
        best, lowest = -1, np.int32(_NO_RANK)
        for k in range(count - 1):
            if pairs[2 * k] < lowest:
                best, lowest = k, pairs[2 * k]
        if best < 0:
            break
        ids[best] = pairs[2 * best + 1]
        count -= 1
        for k in range(best + 1, count):
            ids[k] = ids[k + 1]
        for k in range(2 * best + 2, 2 * count - 2):
            pairs[k] = pairs[k + 2]
        if best > 0:
            _rank(keys, mask, values, ids, pairs, best - 1)
        if best < count - 1:
            _rank(keys, mask, values, ids, pairs, best)
    return count


@njit
def _rank(keys, mask, values, ids, pairs, k):
    place = _find_pair(keys, mask, ids[k], ids[k + 1])
    if keys[place] == _FREE:
        pairs[2 * k] = np.int32(_NO_RANK)
    else:
        pairs[2 * k] = values[2 * place]
        pairs[2 * k + 1] = values[2 * place + 1]


@njit
def _stop(state, document, position, written, point, status):
    state[DOCUMENT] = document
    state[POSITION] = position
    state[WRITTEN] = written
    state[POINT] = point
    return status


@njit(cache=True, nogil=True)
def encode_byte_level(data, ends, classes, cache, byte_ids, merges, out, out_ends, state):
    """Encode documents from `state` on.

    Args:
        data: uint8, all documents as UTF-8, then PADDING. ends: int64, where each of them ends.
        classes: uint8 [CODE_POINTS].
        byte_ids: int32 [256], the id of each byte.
        merges: PairTable of ids -> (rank, id of the merged pair).
        out: int32, room for one id per byte left, padding included. out_ends: int64, where documents end.
        state: int64 [STATE_SIZE], all 0 at first.
    Returns: DONE, NEEDS_PAGE of state[POINT], or NEEDS_LIBRARY for data[state[POSITION]:state[POINT]].
    """
    data, classes, out, byte_ids = _pointer(data), _pointer(classes), _pointer(out), _pointer(byte_ids)
    slots, keys, kept, mask = _pointers(cache)
    merge_keys, merge_values, merge_mask = (
        _pointer(merges.keys),
        _pointer(merges.values),
        merges.keys.size - 1,
    )
    ids_array, pairs_array = np.empty(MAX_MERGED_BYTES, np.int32), np.empty(2 * MAX_MERGED_BYTES, np.int32)
    ids, pairs = _pointer(ids_array), _pointer(pairs_array)
    document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
    while document < len(ends):
        stop = ends[document]
        while i < stop:
            end = _pretoken_end(data, i, stop, classes)
            if end < 0:
                return _stop(state, document, i, n, ~end, NEEDS_PAGE)
            length = end - i
            if length > MAX_MERGED_BYTES:
                return _stop(state, document, i, n, end, NEEDS_LIBRARY)
            is_short = length <= MAX_CACHED_BYTES
            if is_short:
                first, second = _key(data, i, length)
                slot = _find_word(slots, mask, keys, data, i, length, first, second)
                if slots[4 * slot + 2] != _ZERO:
                    n = _copy(slots, kept, slot, out, n)
                    i = end
                    continue
            count = _merge(data, i, length, byte_ids, merge_keys, merge_mask, merge_values, ids, pairs)
            for k in range(count):
                out[n + k] = ids[k]
            n += count
            if is_short:
                if _is_full(cache):
                    _empty(cache)
                    slot = _find_word(slots, mask, keys, data, i, length, first, second)
                _store(cache, slot, data, i, length, first, second, ids, count)
            i = end
        out_ends[document] = n
        document += 1
    return _stop(state, document, i, n, 0, DONE)


@njit
def _pointers(cache):
    return _pointer(cache.slots), _pointer(cache.keys), _pointer(cache.ids), len(cache.slots) // 4 - 1


@njit
def _copy(slots, kept, slot, out, n):
    """Write the ids of a slot to out[n:], and perhaps one more entry. Returns: the place after them."""
    value, count = slots[4 * slot + 3], np.int64((slots[4 * slot + 2] >> _COUNT_SHIFT) & _LENGTH)
    if count > 2:
        place = np.int64(value)
        for k in range(count):
            out[n + k] = kept[place + k]
    else:  # both, whether they count or not: a branch that cannot be foreseen costs more
        out[n] = np.int32(value & _LOW_HALF)
        out[n + 1] = np.int32(value >> _HALF)
    return n + count


# ---- WordPiece ----


@njit
def _word_end(data, i, stop, classes):
    """End of the run of PLAIN, EXPANDED and UNUSUAL from i on; ~code point if a class is not known yet."""
    while i < stop:
        point, after = _next(data, i)
        kind = classes[point]
        if kind == UNKNOWN:
            return ~point
        if kind in (BLANK, ALONE):
            break
        i = after
    return i


@njit
def _normalise(data, i, end, classes, values, images, points, limit):
    """Code points of the word data[i:end] in points[:count].

    Returns: count, which stops at `limit`; -1 if the word has an unusual character.
    """
    count = 0
    while i < end:
        point, i = _next(data, i)
        kind = classes[point]
        if kind == UNUSUAL:
            return -1
        value = np.int64(values[point])
        if kind == PLAIN:
            if count < limit:
                points[count] = value
                count += 1
        else:  # EXPANDED, perhaps to nothing
            for k in range(value + 1, value + 1 + images[value]):
                if count < limit:
                    points[count] = images[k]
                    count += 1
    return count


@njit
def _longest_match(points, count, edges, mask, nodes, tokens, next_node, unknown, ids):
    """Cut a word into the longest pieces from the left, ids[:n]; one `unknown` if that fails. Returns: n."""
    n, start = 0, 0
    while start < count:
        node = np.int64(0) if start == 0 else next_node
        found, found_end = np.int64(-1), start
        for k in range(start, count):
            place = _find_pair(edges, mask, node, points[k])
            if edges[place] == _FREE:
                break
            node = np.int64(nodes[2 * place])
            if tokens[node] >= 0:
                found, found_end = np.int64(tokens[node]), k + 1
        if found < 0:
            ids[0] = unknown
            return 1
        ids[n] = found
        n += 1
        start = found_end
    return n


@njit(cache=True)
def fill_trie(edges, tokens, points, ends, ids):
    """Enter strings: number j is the code points points[ends[j - 1]:ends[j]], with id ids[j] or -1.

    Args: edges: PairTable of (node, code point) -> (node, 0). tokens: int32, filled with -1: id at each node.
    Returns: the number of nodes, of which 0 is the root, and the node of string 0.
    """
    nodes, start, node_of_first = np.int64(1), np.int64(0), np.int64(0)
    mask = edges.keys.size - 1
    for j in range(len(ends)):
        node = np.int64(0)
        for k in range(start, ends[j]):
            place = _find_pair(_pointer(edges.keys), mask, node, points[k])
            if edges.keys[place] == _FREE:
                edges.keys[place] = (np.uint64(node) << _HALF) | np.uint64(points[k])
                edges.values[2 * place] = nodes
                nodes += 1
            node = np.int64(edges.values[2 * place])
        tokens[node] = ids[j]
        start = ends[j]
        if j == 0:
            node_of_first = node
    return nodes, node_of_first


@njit(cache=True, nogil=True)
def encode_word_piece(
    data, ends, classes, values, images, cache, edges, tokens, options, out, out_ends, state
):
    """Encode documents from `state` on.

    Args:
        data, ends, cache, out, out_ends, state: as for `encode_byte_level`.
        classes: uint8 [CODE_POINTS]; values: int32 [CODE_POINTS]; images: int32, see BLANK.
        edges, tokens: the trie, see `fill_trie`.
        options: int64 [3]: the node of the prefix of pieces that continue a word, the id of an unknown word,
            the characters that a word may have.
    Returns: DONE, NEEDS_PAGE of state[POINT], or for the word data[state[POSITION]:state[POINT]]
        NEEDS_LIBRARY or, if it is also to be remembered, NEEDS_LIBRARY_AND_CACHE.
    """
    next_node, unknown, max_characters = options
    points_array = np.empty(max_characters + 1, np.int32)
    ids_array = np.empty(max_characters + 1, np.int32)
    points, ids = _pointer(points_array), _pointer(ids_array)
    data, classes, values, images = _pointer(data), _pointer(classes), _pointer(values), _pointer(images)
    slots, keys, kept, mask = _pointers(cache)
    edge_keys, nodes, edge_mask = _pointer(edges.keys), _pointer(edges.values), edges.keys.size - 1
    tokens, out = _pointer(tokens), _pointer(out)
    document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
    while document < len(ends):
        stop = ends[document]
        while i < stop:
            point, end = _next(data, i)
            kind = classes[point]
            if kind == BLANK:
                i = end
                continue
            if kind == ALONE:
                out[n] = values[point]
                n += 1
                i = end
                continue
            end = _word_end(data, i, stop, classes)
            if end < 0:
                return _stop(state, document, i, n, ~end, NEEDS_PAGE)
            length = end - i
            is_short = length <= MAX_CACHED_BYTES
            if is_short:
                first, second = _key(data, i, length)
                slot = _find_word(slots, mask, keys, data, i, length, first, second)
                if slots[4 * slot + 2] != _ZERO:
                    n = _copy(slots, kept, slot, out, n)
                    i = end
                    continue
            count = _normalise(data, i, end, classes, values, images, points, max_characters + 1)
            if count < 0:
                status = NEEDS_LIBRARY_AND_CACHE if is_short else NEEDS_LIBRARY
                return _stop(state, document, i, n, end, status)
            if count > max_characters:
                ids[0] = unknown
                count = 1
            else:
                count = _longest_match(
                    points, count, edge_keys, edge_mask, nodes, tokens, next_node, unknown, ids
                )
            for k in range(count):
                out[n + k] = ids[k]
            n += count
            if is_short:
                if _is_full(cache):
                    _empty(cache)
                    slot = _find_word(slots, mask, keys, data, i, length, first, second)
                _store(cache, slot, data, i, length, first, second, ids, count)
            i = end
        out_ends[document] = n
        document += 1
    return _stop(state, document, i, n, 0, DONE)
