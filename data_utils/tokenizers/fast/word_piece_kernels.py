"""The compiled loop of WordPiece: BERT's normaliser, pre-tokenizer and longest match. See encoder_kernels.py."""

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
    NEEDS_LIBRARY_AND_CACHE,
    NEEDS_PAGE,
    POSITION,
    SOURCE_DIGEST,
    UNKNOWN,
    WRITTEN,
    ZERO,
    copy_ids,
    find_word,
    next_code_point,
    open_cache,
    pointer,
    stop_at,
    store_word,
    word_key,
)

# Classes of code points. `values` holds for PLAIN the code point it is normalised to, for EXPANDED the place of its
# code points in `images` (after their number), for ALONE its id.
BLANK, PLAIN, EXPANDED, ALONE, UNUSUAL = range(5)


class PairTable(NamedTuple):
    """Hash table from two numbers below 2**31 to an int32."""

    keys: np.ndarray  # uint64 [2**k]: first << 32 | second, FREE where empty
    values: np.ndarray  # int32 [2**k]


def new_pair_table(entries: int) -> PairTable:
    """An empty table with room for `entries`."""
    size = 1 << max(4, int(2 * entries).bit_length())
    return PairTable(np.full(size, FREE, np.uint64), np.zeros(size, np.int32))


@njit(forceinline=True)
def _find_pair(keys, mask, first, second):
    """Place of the pair in `keys`, or of the free entry where it belongs."""
    key = (np.uint64(first) << HALF) | np.uint64(second)
    place = np.int64((key * MULTIPLIER) >> HALF) & mask
    while keys[place] != key and keys[place] != FREE:
        place = (place + 1) & mask
    return place


@njit
def _word_end(data, i, stop, classes):
    """End of the characters PLAIN, EXPANDED and UNUSUAL from i on; ~code point if a class is not known yet."""
    while i < stop:
        point, after = next_code_point(data, i)
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
        point, i = next_code_point(data, i)
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
    """Cut a word into the longest entries from the left, ids[:n]; one `unknown` if that fails. Returns: n."""
    n, start = 0, 0
    while start < count:
        node = np.int64(0) if start == 0 else next_node
        match, match_end = np.int64(-1), start
        for k in range(start, count):
            place = _find_pair(edges, mask, node, points[k])
            if edges[place] == FREE:
                break
            node = np.int64(nodes[place])
            if tokens[node] >= 0:
                match, match_end = np.int64(tokens[node]), k + 1
        if match < 0:
            ids[0] = unknown
            return 1
        ids[n] = match
        n += 1
        start = match_end
    return n


def _make_fill_trie(digest: int) -> Any:
    @njit(cache=True)
    def fill_trie(edges, tokens, points, ends, ids):
        """Enter strings: number j is the code points points[ends[j - 1]:ends[j]], with id ids[j] or -1.

        Args: edges: PairTable of (node, code point) -> node. tokens: int32, filled with -1: id at each node.
        Returns: the number of nodes, of which 0 is the root, and the node of string 0.
        """
        _ = digest  # part of the cache key
        nodes, start, node_of_first = np.int64(1), np.int64(0), np.int64(0)
        mask = edges.keys.size - 1
        for j in range(len(ends)):
            node = np.int64(0)
            for k in range(start, ends[j]):
                place = _find_pair(pointer(edges.keys), mask, node, points[k])
                if edges.keys[place] == FREE:
                    edges.keys[place] = (np.uint64(node) << HALF) | np.uint64(points[k])
                    edges.values[place] = nodes
                    nodes += 1
                node = np.int64(edges.values[place])
            tokens[node] = ids[j]
            start = ends[j]
            if j == 0:
                node_of_first = node
        return nodes, node_of_first

    return fill_trie


fill_trie = _make_fill_trie(SOURCE_DIGEST)


def _make_encode_word_piece(digest: int) -> Any:
    @njit(cache=True, nogil=True)
    def encode_word_piece(
        data, ends, classes, values, images, cache, edges, tokens, options, space, out, out_ends, state
    ):
        """Encode documents from `state` on.

        Args:
            data, ends, cache, out, out_ends, state: as for `encode_byte_level`.
            classes: uint8 [CODE_POINTS]; values: int32 [CODE_POINTS]; images: int32, see BLANK.
            edges, tokens: the trie, see `fill_trie`.
            options: int64 [3]: the node of the prefix of entries that continue a word, the id of an unknown word,
                the characters that a word may have.
            space: int32 [2, characters that a word may have + 1], scratch.
        Returns: DONE, NEEDS_PAGE of state[POINT], or for the word data[state[POSITION]:state[POINT]]
            NEEDS_LIBRARY or, if it is also to be remembered, NEEDS_LIBRARY_AND_CACHE.
        """
        _ = digest  # part of the cache key
        next_node, unknown, max_characters = options
        points, ids = pointer(space[0]), pointer(space[1])
        data, classes, values, images = pointer(data), pointer(classes), pointer(values), pointer(images)
        words = open_cache(cache)
        edge_keys, nodes, edge_mask = pointer(edges.keys), pointer(edges.values), edges.keys.size - 1
        tokens, out = pointer(tokens), pointer(out)
        document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
        while document < len(ends):
            stop = ends[document]
            while i < stop:
                point, end = next_code_point(data, i)
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
                    return stop_at(state, document, i, n, ~end, NEEDS_PAGE)
                length = end - i
                is_short = length <= MAX_CACHED_BYTES
                if is_short:
                    first, second = word_key(data, i, length)
                    slot = find_word(words, data, i, length, first, second)
                    if words[0][4 * slot + 2] != ZERO:
                        n = copy_ids(words, slot, out, n)
                        i = end
                        continue
                count = _normalise(data, i, end, classes, values, images, points, max_characters + 1)
                if count < 0:
                    status = NEEDS_LIBRARY_AND_CACHE if is_short else NEEDS_LIBRARY
                    return stop_at(state, document, i, n, end, status)
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
                    store_word(words, slot, data, i, length, first, second, ids, count)
                i = end
            out_ends[document] = n
            document += 1
        return stop_at(state, document, i, n, 0, DONE)

    return encode_word_piece


encode_word_piece = _make_encode_word_piece(SOURCE_DIGEST)
