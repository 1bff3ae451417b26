"""The compiled loop of byte-level BPE: GPT-2's pre-tokenizer and merges. See encoder_kernels.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from data_utils.tokenizers.fast.encoder_kernels import (
    DOCUMENT,
    DONE,
    FREE,
    HALF,
    MAX_CACHED_BYTES,
    MULTIPLIER,
    NEEDS_LIBRARY,
    NEEDS_PAGE,
    POSITION,
    SOURCE_DIGEST,
    UNKNOWN,
    WRITTEN,
    ZERO,
    copy_ids,
    eight_bytes,
    find_word,
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
_BYTE = np.uint64(8)
_CASE, _LOW_BITS, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (0x20, 0x7F, 0x80))
_FROM_A, _AFTER_Z = (np.uint64((0x80 - byte) * 0x0101010101010101) for byte in (ord("a"), ord("z") + 1))


class Merges(NamedTuple):
    """Which pairs of ids become one, and in which order (rank, from 0)."""

    of_bytes: np.ndarray  # uint32 [65536]: rank << 8 of the pair of two bytes
    pairs: np.ndarray  # hash table, uint64 [2**k]: first << 44 | second << 24 | rank, FREE where empty
    merged: np.ndarray  # int32 [ranks]: the id that the pair of a rank becomes


class MergeSpace(NamedTuple):
    """Scratch space of `encode_byte_level`."""

    batch: np.ndarray  # uint64 [3 * BATCH]: of each word its key and its length
    ids: np.ndarray  # int32 [MAX_MERGED_BYTES], as all of the following
    order: np.ndarray  # uint32, see `_merge`
    right: np.ndarray
    left: np.ndarray


def new_merges(lefts: np.ndarray, rights: np.ndarray, merged: np.ndarray, byte_ids: np.ndarray) -> Merges:
    """The merges of ids `lefts` with `rights` to `merged`, int64 [ranks] in this order.

    Args: byte_ids: int32 [256], the id of each byte. No id may be above MAX_ID, and no more than MAX_MERGES given.
    """
    size = 1 << max(4, int(4 * len(lefts)).bit_length())
    merges = Merges(np.empty(65536, np.uint32), np.full(size, FREE, np.uint64), merged.astype(np.int32))
    _fill_merges(merges.pairs, merges.of_bytes, lefts, rights, byte_ids)
    return merges


def new_merge_space() -> MergeSpace:
    ids, order, right, left = (np.empty(MAX_MERGED_BYTES, kind) for kind in ("i4", "u4", "i4", "i4"))
    return MergeSpace(np.empty(3 * BATCH, np.uint64), ids, order, right, left)


@njit(forceinline=True)
def _rank_place(pairs, mask, first, second):
    """Place of the pair in Merges.pairs, or of the free entry where it belongs, and its key."""
    key = (np.uint64(first) << _ID_SHIFT) | np.uint64(second)
    place = np.int64((key * MULTIPLIER) >> HALF) & mask
    while pairs[place] >> _RANK_SHIFT != key and pairs[place] != FREE:
        place = (place + 1) & mask
    return place, key


@njit(forceinline=True)
def _rank(pairs, mask, first, second):
    """Rank of the pair, _NO_RANK if there is no merge of it."""
    place, _ = _rank_place(pairs, mask, first, second)
    return pairs[place] & _NO_RANK  # FREE has all bits


def _make_fill_merges(digest: int) -> Any:
    @njit(cache=True)
    def _fill_merges(pairs, of_bytes, lefts, rights, byte_ids):
        """Enter all pairs; a later pair replaces an equal earlier one."""
        _ = digest  # part of the cache key
        mask = pairs.size - 1
        for rank in range(len(lefts)):
            place, key = _rank_place(pointer(pairs), mask, lefts[rank], rights[rank])
            pairs[place] = (key << _RANK_SHIFT) | np.uint64(rank)
        for one in range(256):
            for other in range(256):
                rank_of_pair = _rank(pointer(pairs), mask, byte_ids[one], byte_ids[other])
                of_bytes[one << 8 | other] = np.uint32(rank_of_pair << _BYTE)

    return _fill_merges


_fill_merges = _make_fill_merges(SOURCE_DIGEST)


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
def _class_end(data, i, stop, classes, kind):
    """End of the characters of class `kind` from i on, and the start of the last of them.

    At a code point whose class is not known yet, ~code point instead of the end.
    """
    last = i
    while i < stop:
        point, after = next_code_point(data, i)
        point_class = classes[point]
        if point_class != kind:
            if point_class == UNKNOWN:
                return ~point, last
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
    point, after = next_code_point(data, start)
    kind = classes[point]
    if kind == UNKNOWN:
        return ~point
    if kind != SPACE:
        end, _ = _class_end(data, after, stop, classes, kind)
        return end
    end, last = _class_end(data, i, stop, classes, SPACE)
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
    # Most words have at most 16 pairs, whose minimum is one vector operation.
    is_short = length <= 17
    places = 16 if is_short else (length + 14) // 16 * 16  # whole vectors
    for k in range(length - 1, places):
        order[k] = _NO_PAIR
    while True:
        # The minimum of rank << 8 | place is the lowest rank and of equal ranks the leftmost: the order of BPE.
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
        # Neighbours are linked instead of moved. Only the two pairs beside the merged one change.
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
def _new_word(data, i, length, first, second, words, slot, byte_ids, table, links, out, n):
    """Merge a word, write its ids, and remember them if it has a slot. Returns: the place after them in `out`."""
    count = _merge(data, i, length, byte_ids, table, links)
    ids = links[0]
    for k in range(count):
        out[n + k] = ids[k]
    if slot >= 0:
        store_word(words, slot, data, i, length, first, second, ids, count)
    return n + count


def _make_encode_byte_level(digest: int) -> Any:
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
        _ = digest  # part of the cache key
        data, classes, out, byte_ids = pointer(data), pointer(classes), pointer(out), pointer(byte_ids)
        words, batch, ids = open_cache(cache), pointer(space.batch), pointer(space.ids)
        slots, mask = words[0], words[4]
        table = pointer(merges.of_bytes), pointer(merges.pairs), pointer(merges.merged), merges.pairs.size - 1
        links = ids, pointer(space.order), pointer(space.right), pointer(space.left)
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
                    first, second = word_key(data, ahead, min(length, MAX_CACHED_BYTES))
                    # Slots of a batch are fetched before the first is read, since the cache exceeds a
                    # processor's caches.
                    prefetch(slots, 4 * home_slot(mask, length, first, second))
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
                        slot = find_word(words, data, i, length, first, second)
                    if slot >= 0 and slots[4 * slot + 2] != ZERO:
                        n = copy_ids(words, slot, out, n)
                    else:
                        n = _new_word(
                            data, i, length, first, second, words, slot, byte_ids, table, links, out, n
                        )
                    i += length
                if status != DONE:
                    return stop_at(state, document, i, n, point, status)
            out_ends[document] = n
            document += 1
        return stop_at(state, document, i, n, 0, DONE)

    return encode_byte_level


encode_byte_level = _make_encode_byte_level(SOURCE_DIGEST)
