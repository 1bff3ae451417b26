"""The compiled loop of byte-level BPE: GPT-2's pre-tokenizer and merges. See encoder_kernels.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from data_utils.common.compiler import njit
from data_utils.tokenizers.fast.encoder_kernels import (
    DOCUMENT,
    DONE,
    FREE,
    MAX_CACHED_BYTES,
    MULTIPLIER,
    NEEDS_LIBRARY,
    NEEDS_PAGE,
    POSITION,
    SHIFT_32,
    SOURCE_DIGEST,
    UNKNOWN,
    WRITTEN,
    copy_ids,
    eight_bytes,
    find_word,
    holds_word,
    home_slot,
    next_code_point,
    open_cache,
    pointer,
    prefetch,
    stop_at,
    store_word,
    trailing_zeros,
    word_key,
)

LETTER, NUMBER, OTHER, SPACE = range(4)  # classes of code points
MAX_MERGED_BYTES = 256  # merging takes time quadratic in the word; beyond this the library is faster
BATCH = 32  # words that are looked up together
MAX_ID = 2**20 - 1  # of a merge, so that a pair of ids and its rank fit into 64 bits
MAX_MERGES = 2**24 - 1

_NO_RANK = np.uint64(MAX_MERGES)
_NO_PAIR = np.uint32(0xFFFFFFFF)
_RANK_SHIFT = np.uint64(24)
_ID_SHIFT = np.uint64(20)
_BYTE_SHIFT = np.uint64(8)
# Eight bytes of one value each, for `_letters_end`.
_CASE, _LOW_BITS, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (0x20, 0x7F, 0x80))
_FROM_A, _AFTER_Z = (np.uint64((0x80 - byte) * 0x0101010101010101) for byte in (ord("a"), ord("z") + 1))


class Merges(NamedTuple):
    """Which pairs of ids become one, and in which order (rank, from 0). In compiled code the arrays are pointers."""

    byte_pair_ranks: np.ndarray  # uint32 [65536]: rank << 8 of the pair of two bytes
    pair_ranks: np.ndarray  # hash table, uint64 [2**k]: left << 44 | right << 24 | rank, FREE where empty
    pair_mask: int  # entries of pair_ranks - 1
    merged_ids: np.ndarray  # int32 [ranks]: the id that the pair of a rank becomes


class MergeScratch(NamedTuple):
    """Scratch space of `encode_byte_level`. In compiled code the arrays are pointers."""

    batch: np.ndarray  # uint64 [3 * BATCH]: the key's halves and the length of each word
    ids: np.ndarray  # int32 [MAX_MERGED_BYTES], as all of the following
    order: np.ndarray  # uint32, see `_merge`
    next_position: np.ndarray
    previous_position: np.ndarray


def new_merges(lefts: np.ndarray, rights: np.ndarray, merged_ids: np.ndarray, byte_ids: np.ndarray) -> Merges:
    """The merges of ids `lefts` with `rights` to `merged_ids`, int64 [ranks] in this order.

    Args: byte_ids: int32 [256], the id of each byte.
    No id may be above MAX_ID, and there may be no more than MAX_MERGES.
    """
    size = 1 << max(4, int(4 * len(lefts)).bit_length())
    byte_pair_ranks, pair_ranks = np.empty(65536, np.uint32), np.full(size, FREE, np.uint64)
    _fill_ranks(pair_ranks, byte_pair_ranks, lefts, rights, byte_ids)
    return Merges(byte_pair_ranks, pair_ranks, size - 1, merged_ids.astype(np.int32))


def new_merge_scratch() -> MergeScratch:
    arrays = (np.empty(MAX_MERGED_BYTES, dtype) for dtype in ("i4", "u4", "i4", "i4"))
    return MergeScratch(np.empty(3 * BATCH, np.uint64), *arrays)


@njit(forceinline=True)
def _find_pair(pair_ranks, mask, left, right):
    """Index of the pair in Merges.pair_ranks, or of the free entry where it belongs, and its key."""
    key = (np.uint64(left) << _ID_SHIFT) | np.uint64(right)
    index = np.int64((key * MULTIPLIER) >> SHIFT_32) & mask
    while pair_ranks[index] >> _RANK_SHIFT != key and pair_ranks[index] != FREE:
        index = (index + 1) & mask
    return index, key


@njit(forceinline=True)
def _rank(pair_ranks, mask, left, right):
    """Rank of the pair, _NO_RANK if there is no merge of it."""
    index, _ = _find_pair(pair_ranks, mask, left, right)
    return pair_ranks[index] & _NO_RANK  # FREE has all bits


def _make_fill_ranks(digest: int) -> Any:
    @njit(cache=True)
    def _fill_ranks(pair_ranks, byte_pair_ranks, lefts, rights, byte_ids):
        """Enter all pairs; a later pair replaces an equal earlier one."""
        _ = digest  # part of the cache key
        mask = pair_ranks.size - 1
        for rank in range(len(lefts)):
            index, key = _find_pair(pointer(pair_ranks), mask, lefts[rank], rights[rank])
            pair_ranks[index] = (key << _RANK_SHIFT) | np.uint64(rank)
        for left in range(256):
            for right in range(256):
                rank_or_none = _rank(pointer(pair_ranks), mask, byte_ids[left], byte_ids[right])
                byte_pair_ranks[left << 8 | right] = np.uint32(rank_or_none << _BYTE_SHIFT)

    return _fill_ranks


_fill_ranks = _make_fill_ranks(SOURCE_DIGEST)


@njit
def _contraction_end(data, i, stop):
    """End of 's 't 'm 'd 're 've 'll at the apostrophe data[i], or i."""
    if i + 1 >= stop:
        return i
    letter = data[i + 1]
    if letter == ord("s") or letter == ord("t") or letter == ord("m") or letter == ord("d"):
        return i + 2
    if i + 2 < stop:
        second = data[i + 2]
        if (second == ord("e") and (letter == ord("r") or letter == ord("v"))) or (
            letter == ord("l") and second == ord("l")
        ):
            return i + 3
    return i


@njit
def _class_end(data, i, stop, classes, wanted):
    """End of the characters of class `wanted` from i on, and the start of the last of them.

    At a code point whose class is not known yet, ~code point instead of the end.
    """
    last = i
    while i < stop:
        code_point, after = next_code_point(data, i)
        if classes[code_point] != wanted:
            if classes[code_point] == UNKNOWN:
                return ~code_point, last
            break
        last = i
        i = after
    return i, last


@njit(forceinline=True)
def _letters_end(data, i):
    """End of the ASCII letters from i on; it may be beyond the document."""
    while True:
        word = eight_bytes(data, i)
        lower = (word | _CASE) & _LOW_BITS
        # Eight bytes at a time: the additions carry into the high bit of a byte that is at least "a", or beyond
        # "z".
        letters = (lower + _FROM_A) & ~(lower + _AFTER_Z) & ~word & _HIGH_BITS  # the high bit of each byte
        if letters != _HIGH_BITS:
            return i + (trailing_zeros(letters ^ _HIGH_BITS) >> 3)
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
    if end > start and (end >= stop or data[end] < 0x80):  # otherwise there was none, or more may follow
        return min(end, stop)
    # Beyond ASCII, classes come from pages that Python fills at first use, by the library's own expressions.
    code_point, after = next_code_point(data, start)
    first_class = classes[code_point]
    if first_class == UNKNOWN:
        return ~code_point
    if first_class != SPACE:
        end, _ = _class_end(data, after, stop, classes, first_class)
        return end
    end, last = _class_end(data, i, stop, classes, SPACE)
    if end < 0 or end == stop or last == i:
        return end
    return last  # the last space belongs to the word that follows


@njit
def _merge(data, start, length, byte_ids, merges, scratch):
    """Merge the bytes of a word, lowest rank first and leftmost first; the ids are in scratch.ids[:count].

    A pair is known by the position of its left id, which the merged id takes. order[position] is rank << 8 | position,
    so the smallest entry is the pair to merge; _NO_PAIR, or any entry of _NO_RANK, is none. next_position and
    previous_position link the ids that are left.
    Returns: count.
    """
    ids, order = scratch.ids, scratch.order
    next_position, previous_position = scratch.next_position, scratch.previous_position
    left_byte = np.int64(data[start])
    ids[0], next_position[0] = byte_ids[left_byte], 1
    for k in range(1, length):
        byte = np.int64(data[start + k])
        ids[k], next_position[k], previous_position[k] = byte_ids[byte], k + 1, k - 1
        order[k - 1] = merges.byte_pair_ranks[left_byte << 8 | byte] | np.uint32(k - 1)
        left_byte = byte
    # Most words have at most 16 pairs, whose minimum is one vector operation.
    is_short = length <= 17
    padded = 16 if is_short else (length + 14) // 16 * 16  # whole vectors
    for k in range(length - 1, padded):
        order[k] = _NO_PAIR
    while True:
        # The minimum of rank << 8 | position is the lowest rank and of equal ranks the leftmost: the order of BPE.
        best = _NO_PAIR
        if is_short:  # a fixed number: no loop is left
            for k in range(16):
                best = min(best, order[k])
        else:
            for k in range(padded):
                best = min(best, order[k])
        if np.uint64(best) >> _BYTE_SHIFT == _NO_RANK:
            break
        left = np.int64(best) & 0xFF
        # Neighbours are linked instead of moved. Only the two pairs beside the merged one change.
        merged_id, right = merges.merged_ids[np.int64(best) >> 8], next_position[left]
        after = np.int64(next_position[right])
        ids[left], next_position[left] = merged_id, after
        order[left] = order[right] = _NO_PAIR
        if after < length:
            previous_position[after] = left
            rank = _rank(merges.pair_ranks, merges.pair_mask, merged_id, ids[after])
            order[left] = np.uint32(rank << _BYTE_SHIFT | np.uint64(left))
        if left > 0:
            before = np.int64(previous_position[left])
            rank = _rank(merges.pair_ranks, merges.pair_mask, ids[before], merged_id)
            order[before] = np.uint32(rank << _BYTE_SHIFT | np.uint64(before))
    count, position = 0, np.int64(0)
    while position < length:
        ids[count] = ids[position]
        count += 1
        position = np.int64(next_position[position])
    return count


def _make_encode_byte_level(digest: int) -> Any:
    @njit(cache=True, nogil=True)
    def encode_byte_level(data, ends, classes, cache, byte_ids, merges, scratch, out, out_ends, state):
        """Encode documents from `state` on.

        Args:
            data: uint8, all documents as UTF-8, then PADDING. ends: int64, where each of them ends.
            classes: uint8 [CODE_POINTS].
            cache: WordCache.
            byte_ids: int32 [256], the id of each byte.
            merges, scratch: Merges, MergeScratch.
            out: int32, room for one id per byte left, padding included. out_ends: int64, where documents end.
            state: int64 [STATE_SIZE], all 0 at first.
        Returns: DONE, NEEDS_PAGE of state[PENDING], or NEEDS_LIBRARY for data[state[POSITION]:state[PENDING]].
        """
        _ = digest  # part of the cache key
        data, classes, out, byte_ids = pointer(data), pointer(classes), pointer(out), pointer(byte_ids)
        cache = open_cache(cache)
        merges = Merges(
            pointer(merges.byte_pair_ranks),
            pointer(merges.pair_ranks),
            merges.pair_mask,
            pointer(merges.merged_ids),
        )
        scratch = MergeScratch(
            pointer(scratch.batch),
            pointer(scratch.ids),
            pointer(scratch.order),
            pointer(scratch.next_position),
            pointer(scratch.previous_position),
        )
        batch, ids = scratch.batch, scratch.ids
        document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
        while document < len(ends):
            stop, ahead = ends[document], i
            status, pending = DONE, np.int64(0)
            while i < stop:
                num_words = 0
                while num_words < BATCH and ahead < stop:
                    end = _pretoken_end(data, ahead, stop, classes)
                    length = end - ahead
                    if end < 0:
                        status, pending = NEEDS_PAGE, ~end
                        break
                    if length > MAX_MERGED_BYTES:
                        status, pending = NEEDS_LIBRARY, end
                        break
                    key_low, key_high = word_key(data, ahead, min(length, MAX_CACHED_BYTES))
                    # Slots of a batch are fetched before the first is read, since the cache exceeds a
                    # processor's caches.
                    prefetch(cache.slots, 4 * home_slot(cache.slot_mask, length, key_low, key_high))
                    batch[3 * num_words] = key_low
                    batch[3 * num_words + 1] = key_high
                    batch[3 * num_words + 2] = np.uint64(length)
                    num_words += 1
                    ahead = end
                for k in range(num_words):
                    key_low, key_high, length = batch[3 * k], batch[3 * k + 1], np.int64(batch[3 * k + 2])
                    is_short = length <= MAX_CACHED_BYTES
                    slot = np.int64(-1)
                    if is_short:
                        slot = find_word(cache, data, i, length, key_low, key_high)
                    if is_short and holds_word(cache, slot):
                        n = copy_ids(cache, slot, out, n)
                    else:
                        count = _merge(data, i, length, byte_ids, merges, scratch)
                        for j in range(count):
                            out[n + j] = ids[j]
                        n += count
                        if is_short:
                            store_word(cache, slot, data, i, length, key_low, key_high, ids, count)
                    i += length
                if status != DONE:
                    return stop_at(state, document, i, n, pending, status)
            out_ends[document] = n
            document += 1
        return stop_at(state, document, i, n, 0, DONE)

    return encode_byte_level


encode_byte_level = _make_encode_byte_level(SOURCE_DIGEST)
