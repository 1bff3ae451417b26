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
this does not run with the compiler switched off (NUMBA_DISABLE_JIT): the library then does the work. A pointer
keeps no array alive either: all arrays come from the caller, scratch space too.

What costs time in text that repeats its words is branches that cannot be foreseen and memory that is far away. So
letters are scanned eight at a time, keys and the usual one or two ids are made without a branch, and
`encode_byte_level` looks up words in batches whose slots it has asked for beforehand.

All functions are in one file, because numba's cache on disk notices changes in the file of the entry point
only. Numbers are int64 save for hashes and keys, which are uint64: numba makes a float of a mixture.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
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

PADDING = bytes(16)  # after the last byte of `data`, because words are read 16 bytes at a time

MAX_CACHED_BYTES = 64
MAX_CACHED_IDS = 128
MAX_MERGED_BYTES = 256  # merging takes time quadratic in the word; beyond this the library is faster

BATCH = 32  # words that are looked up together
MAX_ID = 2**20 - 1  # of a merge, so that a pair of ids and its rank fit into 64 bits
MAX_MERGES = 2**24 - 1

_NO_RANK = np.uint64(MAX_MERGES)
_NO_PAIR = np.uint32(0xFFFFFFFF)
_RANK_SHIFT = np.uint64(24)
_ID_SHIFT = np.uint64(20)
_BYTE = np.uint64(8)
_FREE = np.uint64(0xFFFFFFFFFFFFFFFF)
_MULTIPLIER_0 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xD6E8FEB86659FD93)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_LENGTH = np.uint64(0xFFFF)
_COUNT_SHIFT = np.uint64(16)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_CASE, _LOW_BITS, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (0x20, 0x7F, 0x80))
_FROM_A, _AFTER_Z = (np.uint64((0x80 - byte) * 0x0101010101010101) for byte in (ord("a"), ord("z") + 1))
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
    """Hash table from two numbers below 2**31 to an int32."""

    keys: np.ndarray  # uint64 [2**k]: first << 32 | second, _FREE where empty
    values: np.ndarray  # int32 [2**k]


class Merges(NamedTuple):
    """Which pairs of ids become one, and in which order (rank, from 0)."""

    of_bytes: np.ndarray  # uint32 [65536]: rank << 8 of the pair of two bytes
    pairs: np.ndarray  # hash table, uint64 [2**k]: first << 44 | second << 24 | rank, _FREE where empty
    merged: np.ndarray  # int32 [ranks]: the id that the pair of a rank becomes


class MergeSpace(NamedTuple):
    """Scratch space of `encode_byte_level`."""

    batch: np.ndarray  # uint64 [3 * BATCH]: of each word its key and its length
    ids: np.ndarray  # int32 [MAX_MERGED_BYTES], as all of the following
    order: np.ndarray  # uint32, see `_merge`
    right: np.ndarray
    left: np.ndarray


def new_word_cache(slots: int) -> WordCache:
    """An empty cache for `slots` / 2 words, `slots` a power of two; 56 bytes each."""
    return WordCache(
        _zeros_in_lines(slots * 4),
        np.empty(slots * 8 + MAX_CACHED_BYTES, np.uint8),
        np.empty(slots * 4 + MAX_CACHED_IDS, np.int32),
        np.zeros(3, np.int64),
    )


def _zeros_in_lines(size: int) -> np.ndarray:
    """uint64 [size] that begins with a cache line, so that no slot lies across two."""
    array = np.empty(size + 8, np.uint64)  # not zeros: NumPy asks for huge pages only here
    begin = -array.ctypes.data // 8 % 8
    array[:] = 0
    return array[begin : begin + size]


def new_pair_table(entries: int) -> PairTable:
    """An empty table with room for `entries`."""
    size = 1 << max(4, int(2 * entries).bit_length())
    return PairTable(np.full(size, _FREE, np.uint64), np.zeros(size, np.int32))


def new_merges(lefts: np.ndarray, rights: np.ndarray, merged: np.ndarray, byte_ids: np.ndarray) -> Merges:
    """The merges of ids `lefts` with `rights` to `merged`, int64 [ranks] in this order.

    Args: byte_ids: int32 [256], the id of each byte. No id may be above MAX_ID, and no more than MAX_MERGES given.
    """
    size = 1 << max(4, int(4 * len(lefts)).bit_length())
    merges = Merges(np.empty(65536, np.uint32), np.full(size, _FREE, np.uint64), merged.astype(np.int32))
    _fill_merges(merges.pairs, merges.of_bytes, lefts, rights, byte_ids)
    return merges


def new_merge_space() -> MergeSpace:
    ids, order, right, left = (np.empty(MAX_MERGED_BYTES, kind) for kind in ("i4", "u4", "i4", "i4"))
    return MergeSpace(np.empty(3 * BATCH, np.uint64), ids, order, right, left)


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


def _type_trailing_zeros(typing_context, word):
    """The number of zero bits below the lowest one bit of a uint64 that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _type_prefetch(typing_context, pointer, place):
    """Ask for the cache line of pointer[place]."""

    def generate(context, builder, signature, arguments):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        builder.call(function, [address, number(0), number(3), number(1)])  # to read, and keep, data
        return context.get_dummy_value()

    return types.none(pointer, types.int64), generate


_pointer: Any = intrinsic(_type_pointer)
_eight_bytes: Any = intrinsic(_type_eight_bytes)
_trailing_zeros: Any = intrinsic(_type_trailing_zeros)
_prefetch: Any = intrinsic(_type_prefetch)


# ---- hash tables ----


@njit(forceinline=True)
def _find_pair(keys, mask, first, second):
    """Place of the pair in `keys`, or of the free entry where it belongs."""
    key = (np.uint64(first) << _HALF) | np.uint64(second)
    place = np.int64((key * _MULTIPLIER_0) >> _HALF) & mask
    while keys[place] != key and keys[place] != _FREE:
        place = (place + 1) & mask
    return place


@njit(forceinline=True)
def _rank_place(pairs, mask, first, second):
    """Place of the pair in Merges.pairs, or of the free entry where it belongs, and its key."""
    key = (np.uint64(first) << _ID_SHIFT) | np.uint64(second)
    place = np.int64((key * _MULTIPLIER_0) >> _HALF) & mask
    while pairs[place] >> _RANK_SHIFT != key and pairs[place] != _FREE:
        place = (place + 1) & mask
    return place, key


@njit(forceinline=True)
def _rank(pairs, mask, first, second):
    """Rank of the pair, _NO_RANK if there is no merge of it."""
    place, _ = _rank_place(pairs, mask, first, second)
    return pairs[place] & _NO_RANK  # _FREE has all bits


@njit(cache=True)
def _fill_merges(pairs, of_bytes, lefts, rights, byte_ids):
    """Enter all pairs; a later one replaces an equal one before it."""
    mask = pairs.size - 1
    for rank in range(len(lefts)):
        place, key = _rank_place(_pointer(pairs), mask, lefts[rank], rights[rank])
        pairs[place] = (key << _RANK_SHIFT) | np.uint64(rank)
    for one in range(256):
        for other in range(256):
            rank_of_pair = _rank(_pointer(pairs), mask, byte_ids[one], byte_ids[other])
            of_bytes[one << 8 | other] = np.uint32(rank_of_pair << _BYTE)


@njit(forceinline=True)
def _lowest_bytes(count):
    """A mask of the lowest 0 to 8 bytes."""
    return _FREE if count >= 8 else (_ONE << np.uint64(8 * count)) - _ONE


@njit(forceinline=True)
def _key(data, start, length):
    """Two words: the bytes themselves up to 16, else two hashes of them."""
    first = _eight_bytes(data, start)
    if length <= _INLINE_BYTES:
        second = _eight_bytes(data, start + 8)
        return first & _lowest_bytes(length), second & _lowest_bytes(max(length - 8, 0))
    second = first * _MULTIPLIER_1
    for k in range(8, length, 8):
        word = _eight_bytes(data, start + k) & _lowest_bytes(length - k)
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


@njit(forceinline=True)
def _open(cache):
    """The cache as pointers and numbers, which cost nothing to hand over."""
    room = len(cache.slots) // 8, len(cache.keys) - MAX_CACHED_BYTES, len(cache.ids) - MAX_CACHED_IDS
    pointers = _pointer(cache.slots), _pointer(cache.keys), _pointer(cache.ids), _pointer(cache.used)
    return (*pointers, len(cache.slots) // 4 - 1, *room)


@njit(forceinline=True)
def _home(mask, length, first, second):
    """The slot where the search for a word begins."""
    mixed = (first ^ (second * _MULTIPLIER_1) ^ np.uint64(length)) * _MULTIPLIER_0
    return np.int64(mixed >> _HALF) & mask


@njit(forceinline=True)
def _find_word(words, data, start, length, first, second):
    """Slot of the word, or the free one where it belongs (its third entry is 0). words: of `_open`."""
    slots, keys, mask = words[0], words[1], words[4]
    slot = _home(mask, length, first, second)
    while True:
        tag = slots[4 * slot + 2]
        differs = (
            (slots[4 * slot] ^ first) | (slots[4 * slot + 1] ^ second) | ((tag ^ np.uint64(length)) & _LENGTH)
        )
        if differs == _ZERO and (
            length <= _INLINE_BYTES or _is_word(keys, np.int64(tag >> _HALF), data, start, length)
        ):
            return slot
        if tag == _ZERO:
            return slot
        slot = (slot + 1) & mask


@njit
def _store(words, slot, data, start, length, first, second, ids, count):
    """Enter a word and its ids[:count]. Up to two are kept in the slot itself, more in WordCache.ids."""
    slots, keys, kept, used = words[:4]
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


@njit(forceinline=True)
def _is_full(words):
    """No room for one more word of any admitted length and number of ids."""
    used, (slots, keys, ids) = words[3], words[5:]
    return used[0] >= slots or used[1] > keys or used[2] > ids


@njit
def _empty(words):
    slots, used, mask = words[0], words[3], words[4]
    for k in range(4 * (mask + 1)):
        slots[k] = _ZERO
    for k in range(3):
        used[k] = 0


@njit(cache=True)
def remember(cache, data, start, stop, ids):
    """Enter the word data[start:stop], which is not in the cache and at most MAX_CACHED_BYTES long."""
    if len(ids) > MAX_CACHED_IDS:
        return
    words, data = _open(cache), _pointer(data)
    if _is_full(words):
        _empty(words)
    first, second = _key(data, start, stop - start)
    slot = _find_word(words, data, start, stop - start, first, second)
    _store(words, slot, data, start, stop - start, first, second, ids, len(ids))


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


@njit(forceinline=True)
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


@njit(forceinline=True)
def _letters_end(data, i):
    """End of the run of ASCII letters from i on; it may lie beyond the document."""
    while True:
        word = _eight_bytes(data, i)
        lower = (word | _CASE) & _LOW_BITS
        letters = (lower + _FROM_A) & ~(lower + _AFTER_Z) & ~word & _HIGH_BITS  # the high bit of each byte
        if letters != _HIGH_BITS:
            return i + (_trailing_zeros(letters ^ _HIGH_BITS) >> 3)
        i += 8


@njit(forceinline=True)
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
    end = _letters_end(data, start)
    if end > start and (end >= stop or data[end] < 0x80):  # else none was there, or more may follow
        return min(end, stop)
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
def _merge(data, start, length, byte_ids, merges, space):
    """Merge the bytes of a word, lowest rank first and leftmost first; the ids are in ids[:count].

    A pair is known by the place of its left part, which its merged id takes. order[place] is rank << 8 | place, so the
    smallest entry is the pair to merge; _NO_PAIR, or any entry of _NO_RANK, is none. right and left link the places.
    Args: merges, space: of Merges and MergeSpace as pointers.
    Returns: count.
    """
    of_bytes, pairs, merged, mask = merges
    ids, order, right, left = space
    before = np.int64(data[start])
    ids[0], right[0] = byte_ids[before], 1
    for k in range(1, length):
        byte = np.int64(data[start + k])
        ids[k], right[k], left[k] = byte_ids[byte], k + 1, k - 1
        order[k - 1] = of_bytes[before << 8 | byte] | np.uint32(k - 1)
        before = byte
    is_short = length <= 17
    places = 16 if is_short else (length + 14) // 16 * 16  # whole vectors
    for k in range(length - 1, places):
        order[k] = _NO_PAIR
    while True:
        best = _NO_PAIR
        if is_short:  # a fixed number: no loop is left
            for k in range(16):
                best = min(best, order[k])
        else:
            for k in range(places):
                best = min(best, order[k])
        if np.uint64(best) >> _BYTE == _NO_RANK:
            break
        here = np.int64(best) & 0xFF
        joined, gone = merged[np.int64(best) >> 8], right[here]
        after = np.int64(right[gone])
        ids[here], right[here] = joined, after
        order[here] = order[gone] = _NO_PAIR
        if after < length:
            left[after] = here
            order[here] = np.uint32(_rank(pairs, mask, joined, ids[after]) << _BYTE | np.uint64(here))
        if here > 0:
            prior = np.int64(left[here])
            order[prior] = np.uint32(_rank(pairs, mask, ids[prior], joined) << _BYTE | np.uint64(prior))
    count, place = 0, np.int64(0)
    while place < length:
        ids[count] = ids[place]
        count += 1
        place = np.int64(right[place])
    return count


@njit
def _stop(state, document, position, written, point, status):
    state[DOCUMENT] = document
    state[POSITION] = position
    state[WRITTEN] = written
    state[POINT] = point
    return status


@njit(cache=True, nogil=True)
def encode_byte_level(data, ends, classes, cache, byte_ids, merges, space, out, out_ends, state):
    """Encode documents from `state` on.

    Args:
        data: uint8, all documents as UTF-8, then PADDING. ends: int64, where each of them ends.
        classes: uint8 [CODE_POINTS].
        byte_ids: int32 [256], the id of each byte.
        merges, space: Merges, MergeSpace.
        out: int32, room for one id per byte left, padding included. out_ends: int64, where documents end.
        state: int64 [STATE_SIZE], all 0 at first.
    Returns: DONE, NEEDS_PAGE of state[POINT], or NEEDS_LIBRARY for data[state[POSITION]:state[POINT]].
    """
    data, classes, out, byte_ids = _pointer(data), _pointer(classes), _pointer(out), _pointer(byte_ids)
    words, batch, ids = _open(cache), _pointer(space.batch), _pointer(space.ids)
    slots, mask = words[0], words[4]
    table = _pointer(merges.of_bytes), _pointer(merges.pairs), _pointer(merges.merged), merges.pairs.size - 1
    links = ids, _pointer(space.order), _pointer(space.right), _pointer(space.left)
    document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
    while document < len(ends):
        stop, ahead = ends[document], i
        status, point = DONE, np.int64(0)
        while i < stop:
            count = 0
            while count < BATCH and ahead < stop:
                end = _pretoken_end(data, ahead, stop, classes)
                length = end - ahead
                if end < 0:
                    status, point = NEEDS_PAGE, ~end
                    break
                if length > MAX_MERGED_BYTES:
                    status, point = NEEDS_LIBRARY, end
                    break
                first, second = _key(data, ahead, min(length, MAX_CACHED_BYTES))
                _prefetch(slots, 4 * _home(mask, length, first, second))
                batch[3 * count], batch[3 * count + 1], batch[3 * count + 2] = (
                    first,
                    second,
                    np.uint64(length),
                )
                count += 1
                ahead = end
            for k in range(count):
                first, second, length = batch[3 * k], batch[3 * k + 1], np.int64(batch[3 * k + 2])
                slot = np.int64(-1)
                if length <= MAX_CACHED_BYTES:
                    slot = _find_word(words, data, i, length, first, second)
                if slot >= 0 and slots[4 * slot + 2] != _ZERO:
                    n = _copy(words, slot, out, n)
                else:
                    n = _new_word(data, i, length, first, second, words, slot, byte_ids, table, links, out, n)
                i += length
            if status != DONE:
                return _stop(state, document, i, n, point, status)
        out_ends[document] = n
        document += 1
    return _stop(state, document, i, n, 0, DONE)


@njit
def _new_word(data, i, length, first, second, words, slot, byte_ids, table, links, out, n):
    """Merge a word, write its ids, and remember them if it has a slot. Returns: the place after them in `out`."""
    count = _merge(data, i, length, byte_ids, table, links)
    ids = links[0]
    for k in range(count):
        out[n + k] = ids[k]
    if slot >= 0:
        if _is_full(words):
            _empty(words)
            slot = _find_word(words, data, i, length, first, second)
        _store(words, slot, data, i, length, first, second, ids, count)
    return n + count


@njit(forceinline=True)
def _copy(words, slot, out, n):
    """Write the ids of a slot to out[n:], and perhaps one more entry. Returns: the place after them."""
    slots, kept = words[0], words[2]
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
            node = np.int64(nodes[place])
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

    Args: edges: PairTable of (node, code point) -> node. tokens: int32, filled with -1: id at each node.
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
                edges.values[place] = nodes
                nodes += 1
            node = np.int64(edges.values[place])
        tokens[node] = ids[j]
        start = ends[j]
        if j == 0:
            node_of_first = node
    return nodes, node_of_first


@njit(cache=True, nogil=True)
def encode_word_piece(
    data, ends, classes, values, images, cache, edges, tokens, options, space, out, out_ends, state
):
    """Encode documents from `state` on.

    Args:
        data, ends, cache, out, out_ends, state: as for `encode_byte_level`.
        classes: uint8 [CODE_POINTS]; values: int32 [CODE_POINTS]; images: int32, see BLANK.
        edges, tokens: the trie, see `fill_trie`.
        options: int64 [3]: the node of the prefix of pieces that continue a word, the id of an unknown word,
            the characters that a word may have.
        space: int32 [2, characters that a word may have + 1], scratch.
    Returns: DONE, NEEDS_PAGE of state[POINT], or for the word data[state[POSITION]:state[POINT]]
        NEEDS_LIBRARY or, if it is also to be remembered, NEEDS_LIBRARY_AND_CACHE.
    """
    next_node, unknown, max_characters = options
    points, ids = _pointer(space[0]), _pointer(space[1])
    data, classes, values, images = _pointer(data), _pointer(classes), _pointer(values), _pointer(images)
    words = _open(cache)
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
                slot = _find_word(words, data, i, length, first, second)
                if words[0][4 * slot + 2] != _ZERO:
                    n = _copy(words, slot, out, n)
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
                if _is_full(words):
                    _empty(words)
                    slot = _find_word(words, data, i, length, first, second)
                _store(words, slot, data, i, length, first, second, ids, count)
            i = end
        out_ends[document] = n
        document += 1
    return _stop(state, document, i, n, 0, DONE)
