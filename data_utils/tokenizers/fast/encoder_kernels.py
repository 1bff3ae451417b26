"""Helpers of the compiled loops of both fast encoders: memory access, UTF-8, and a cache of words.

`encode_byte_level` (byte_level_kernels.py) and `encode_word_piece` (word_piece_kernels.py) work through a block of
documents and write ids. Where they cannot decide, they stop with a status and note in `state` where the next call
continues. This keeps Unicode tables out of these files: the caller asks the library about a page of 256 code
points when a text first needs it.

A word is its bytes. A word of up to 16 bytes is stored in its slot of the hash table. A longer word, up to
MAX_CACHED_BYTES, is compared byte by byte with a stored copy, so equal hashes never give wrong ids. A full cache is
emptied, which costs less than keeping track of use.

The helpers take pointers, not arrays. Numba counts references to an array at every call, with atomic operations that
made the whole four times slower; a pointer is only a number. There is a price. Nothing checks a bound. The code does
not run with the compiler switched off (NUMBA_DISABLE_JIT); the library then does the work. A pointer keeps no array
alive, so all arrays come from the caller, scratch space too.

Text repeats its words, so time goes into mispredicted branches and into cache misses. Therefore letters are scanned
eight at a time, keys and the usual one or two ids are made without a branch, and `encode_byte_level` looks up words in
batches whose slots it has prefetched.

Numbers are int64, except for hashes and keys, which are uint64: numba turns a mixture into a float.

Numba's cache on disk compares only the file of an entry point. An entry point of another file therefore closes over
SOURCE_DIGEST, which is part of the cache key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from data_utils.common.compiler import njit
from data_utils.common.random_streams import source_digest

SOURCE_DIGEST = source_digest(__file__)

# Status: the caller's next action.
DONE, NEEDS_PAGE, NEEDS_LIBRARY, NEEDS_LIBRARY_AND_CACHE = range(4)
# Entries of `state`: the document, the byte at which the next call continues, the ids written, and what the status is
# about: the code point whose page is missing, or the end of the word for the library.
DOCUMENT, POSITION, WRITTEN, PENDING = range(4)
STATE_SIZE = 4

CODE_POINTS = 0x110000
UNKNOWN = 255  # class of a code point whose page has not been filled

PADDING = bytes(16)  # after the last byte of `data`, because words are read 16 bytes at a time

MAX_CACHED_BYTES = 64
MAX_CACHED_IDS = 128

FREE = np.uint64(0xFFFFFFFFFFFFFFFF)  # an empty entry of a hash table of pairs
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SECOND_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)
_LOW_16_BITS = np.uint64(0xFFFF)
_SHIFT_16 = np.uint64(16)
ZERO, _ONE = np.uint64(0), np.uint64(1)
_INLINE_BYTES = 16  # words up to this length are their own key


class WordCache(NamedTuple):
    """Hash table from words to ids.

    A slot is 4 uint64: the two halves of the word's key; a tag; one or two ids, or the offset of more of them in `ids`.
    The tag is length | number of ids << 16 | offset in long_words << 32, and 0 in a free slot.
    """

    slots: np.ndarray  # uint64 [4 * slots], a power of two
    long_words: np.ndarray  # uint8: the bytes of words longer than 16
    ids: np.ndarray  # int32: the ids of words that have more than two
    used: np.ndarray  # int64 [3]: used slots, bytes of long_words, entries of ids


class CachePointers(NamedTuple):
    """A `WordCache` in compiled code: pointers and numbers, which cost nothing to pass on."""

    slots: Any
    long_words: Any
    ids: Any
    used: Any
    slot_mask: int  # slots - 1
    max_slots: int  # the most that may be used
    max_long_bytes: int
    max_ids: int


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


def _type_pointer(typing_context, array):
    """The address of an array's first element, to be indexed like the array."""

    def generate(context, builder, signature, arguments):
        return arrayobj.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


def _type_eight_bytes(typing_context, pointer, index):
    """The 8 bytes from pointer[index] on as uint64; any alignment."""

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


def _type_prefetch(typing_context, pointer, index):
    """Prefetch the cache line of pointer[index]."""

    def generate(context, builder, signature, arguments):
        byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte_pointer)
        builder.call(function, [address, int32(0), int32(3), int32(1)])  # to read, and keep, data
        return context.get_dummy_value()

    return types.none(pointer, types.int64), generate


pointer: Any = intrinsic(_type_pointer)
eight_bytes: Any = intrinsic(_type_eight_bytes)
trailing_zeros: Any = intrinsic(_type_trailing_zeros)
prefetch: Any = intrinsic(_type_prefetch)


@njit(forceinline=True)
def _lowest_bytes(count):
    """A mask of the lowest 0 to 8 bytes."""
    return FREE if count >= 8 else (_ONE << np.uint64(8 * count)) - _ONE


@njit(forceinline=True)
def word_key(data, start, length):
    """The key of a word in two halves: the bytes themselves up to 16, else two hashes of them."""
    key_low = eight_bytes(data, start)
    if length <= _INLINE_BYTES:
        key_high = eight_bytes(data, start + 8)
        return key_low & _lowest_bytes(length), key_high & _lowest_bytes(max(length - 8, 0))
    key_high = key_low * _SECOND_MULTIPLIER
    for k in range(8, length, 8):
        word = eight_bytes(data, start + k) & _lowest_bytes(length - k)
        key_low = (key_low ^ word) * MULTIPLIER
        key_low ^= key_low >> SHIFT_32
        key_high = (key_high + word) * _SECOND_MULTIPLIER
    return key_low, key_high


@njit
def _bytes_are_equal(long_words, offset, data, start, length):
    for k in range(length):  # noqa: SIM110 - numba has no all()
        if long_words[offset + k] != data[start + k]:
            return False
    return True


@njit(forceinline=True)
def open_cache(cache):
    """The `CachePointers` of a `WordCache`."""
    return CachePointers(
        pointer(cache.slots),
        pointer(cache.long_words),
        pointer(cache.ids),
        pointer(cache.used),
        len(cache.slots) // 4 - 1,
        len(cache.slots) // 8,  # half of the slots: a fuller table is searched for long
        len(cache.long_words) - MAX_CACHED_BYTES,
        len(cache.ids) - MAX_CACHED_IDS,
    )


@njit(forceinline=True)
def home_slot(slot_mask, length, key_low, key_high):
    """The slot where the search for a word begins."""
    mixed = (key_low ^ (key_high * _SECOND_MULTIPLIER) ^ np.uint64(length)) * MULTIPLIER
    return np.int64(mixed >> SHIFT_32) & slot_mask


@njit(forceinline=True)
def find_word(cache, data, start, length, key_low, key_high):
    """Slot of the word data[start:start + length], or the free one where it belongs, whose tag is 0."""
    slots = cache.slots
    slot = home_slot(cache.slot_mask, length, key_low, key_high)
    while True:
        tag = slots[4 * slot + 2]
        difference = (
            (slots[4 * slot] ^ key_low)
            | (slots[4 * slot + 1] ^ key_high)
            | ((tag ^ np.uint64(length)) & _LOW_16_BITS)
        )
        if difference == ZERO and (
            length <= _INLINE_BYTES
            or _bytes_are_equal(cache.long_words, np.int64(tag >> SHIFT_32), data, start, length)
        ):
            return slot
        if tag == ZERO:
            return slot
        slot = (slot + 1) & cache.slot_mask


@njit(forceinline=True)
def holds_word(cache, slot):
    """Whether a slot is in use."""
    return cache.slots[4 * slot + 2] != ZERO


@njit
def store_word(cache, slot, data, start, length, key_low, key_high, ids, count):
    """Enter a word and its ids[:count] in a free slot; a full cache is emptied first.

    Up to two ids are stored in the slot, more in WordCache.ids.
    """
    slots, used = cache.slots, cache.used
    # Full where one more word might not fit, whatever its length and number of ids.
    if used[0] >= cache.max_slots or used[1] > cache.max_long_bytes or used[2] > cache.max_ids:
        for k in range(4 * (cache.slot_mask + 1)):
            slots[k] = ZERO
        for k in range(3):
            used[k] = 0
        slot = find_word(cache, data, start, length, key_low, key_high)
    offset = np.int64(0)
    if length > _INLINE_BYTES:
        offset = used[1]
        for k in range(length):
            cache.long_words[offset + k] = data[start + k]
        used[1] += length
    value = ZERO
    if count > 2:
        value = np.uint64(used[2])
        for k in range(count):
            cache.ids[used[2] + k] = ids[k]
        used[2] += count
    else:
        for k in range(count):
            value |= np.uint64(ids[k]) << np.uint64(32 * k)
    slots[4 * slot] = key_low
    slots[4 * slot + 1] = key_high
    slots[4 * slot + 2] = np.uint64(length | (count << 16) | (offset << 32))
    slots[4 * slot + 3] = value
    used[0] += 1


@njit(forceinline=True)
def copy_ids(cache, slot, out, n):
    """Write the ids of a slot to out[n:], and perhaps one more entry. Returns: the index after them."""
    value = cache.slots[4 * slot + 3]
    count = np.int64((cache.slots[4 * slot + 2] >> _SHIFT_16) & _LOW_16_BITS)
    if count > 2:
        offset = np.int64(value)
        for k in range(count):
            out[n + k] = cache.ids[offset + k]
    else:  # always both: a mispredicted branch costs more
        out[n] = np.int32(value & _LOW_32_BITS)
        out[n + 1] = np.int32(value >> SHIFT_32)
    return n + count


@njit(cache=True)
def remember(cache, data, start, stop, ids):
    """Enter the word data[start:stop], which is not in the cache and at most MAX_CACHED_BYTES long."""
    if len(ids) > MAX_CACHED_IDS:
        return
    cache, data, length = open_cache(cache), pointer(data), stop - start
    key_low, key_high = word_key(data, start, length)
    slot = find_word(cache, data, start, length, key_low, key_high)
    store_word(cache, slot, data, start, length, key_low, key_high, ids, len(ids))


@njit(forceinline=True)
def next_code_point(data, i):
    """The code point at byte i of valid UTF-8, and the index after it."""
    if data[i] < 0x80:
        return np.int64(data[i]), i + 1
    return _code_point_beyond_ascii(data, i)


@njit
def _code_point_beyond_ascii(data, i):
    byte = np.int64(data[i])
    if byte < 0xE0:
        return ((byte & 0x1F) << 6) | (data[i + 1] & 0x3F), i + 2
    if byte < 0xF0:
        return ((byte & 0x0F) << 12) | ((data[i + 1] & 0x3F) << 6) | (data[i + 2] & 0x3F), i + 3
    high = ((byte & 0x07) << 18) | ((data[i + 1] & 0x3F) << 12)
    return high | ((data[i + 2] & 0x3F) << 6) | (data[i + 3] & 0x3F), i + 4


@njit
def stop_at(state, document, position, written, pending, status):
    """Note in `state` where the next call continues. Returns: `status`."""
    state[DOCUMENT] = document
    state[POSITION] = position
    state[WRITTEN] = written
    state[PENDING] = pending
    return status
