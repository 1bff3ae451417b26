"""The compiled loop of WordPiece: BERT's normalizer, pre-tokenizer and longest match. See encoder_kernels.py."""

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
    NEEDS_LIBRARY_AND_CACHE,
    NEEDS_PAGE,
    POSITION,
    SHIFT_32,
    SOURCE_DIGEST,
    UNKNOWN,
    WRITTEN,
    copy_ids,
    find_word,
    holds_word,
    next_code_point,
    open_cache,
    pointer,
    stop_at,
    store_word,
    word_key,
)

# Classes of code points, and what `values` holds for each:
#   SEPARATOR         ends a word; 0
#   MAPPED            becomes one code point of its word; that code point
#   EXPANDED          becomes several or none; the index in `expansions` of their number, which they follow
#   STANDALONE        is a word, such as punctuation and Chinese characters; its id
#   LEFT_TO_LIBRARY   its effect depends on its neighbours; 0
SEPARATOR, MAPPED, EXPANDED, STANDALONE, LEFT_TO_LIBRARY = range(5)


class TrieEdges(NamedTuple):
    """Hash table from a node and a code point to the child node. In compiled code the arrays are pointers."""

    keys: np.ndarray  # uint64 [2**k]: node << 32 | code point, FREE where empty
    children: np.ndarray  # int32 [2**k]
    mask: int  # 2**k - 1


def new_trie_edges(count: int) -> TrieEdges:
    """An empty table with room for `count` edges."""
    size = 1 << max(4, int(2 * count).bit_length())
    return TrieEdges(np.full(size, FREE, np.uint64), np.zeros(size, np.int32), size - 1)


@njit(forceinline=True)
def _find_edge(keys, mask, node, code_point):
    """Index of the edge in `keys`, or of the free entry where it belongs."""
    key = (np.uint64(node) << SHIFT_32) | np.uint64(code_point)
    index = np.int64((key * MULTIPLIER) >> SHIFT_32) & mask
    while keys[index] != key and keys[index] != FREE:
        index = (index + 1) & mask
    return index


@njit
def _word_end(data, i, stop, classes):
    """End of the word at i; ~code point if a class is not known yet."""
    while i < stop:
        code_point, after = next_code_point(data, i)
        point_class = classes[code_point]
        if point_class == UNKNOWN:
            return ~code_point
        if point_class in (SEPARATOR, STANDALONE):
            break
        i = after
    return i


@njit
def _normalize(data, i, end, classes, values, expansions, code_points, limit):
    """Code points of the word data[i:end] in code_points[:count].

    Returns: count, which stops at `limit`; -1 if the word has a character that is left to the library.
    """
    count = 0
    while i < end:
        code_point, i = next_code_point(data, i)
        point_class = classes[code_point]
        if point_class == LEFT_TO_LIBRARY:
            return -1
        value = np.int64(values[code_point])
        if point_class == MAPPED:
            if count < limit:
                code_points[count] = value
                count += 1
        else:
            for k in range(value + 1, value + 1 + expansions[value]):
                if count < limit:
                    code_points[count] = expansions[k]
                    count += 1
    return count


@njit
def _longest_match(code_points, count, edges, node_ids, continuation_node, unknown, ids):
    """Cut a word into the longest entries from the left, ids[:n]; one `unknown` if that fails. Returns: n."""
    n, start = 0, 0
    while start < count:
        node = np.int64(0) if start == 0 else continuation_node
        match, match_end = np.int64(-1), start
        for k in range(start, count):
            edge = _find_edge(edges.keys, edges.mask, node, code_points[k])
            if edges.keys[edge] == FREE:
                break
            node = np.int64(edges.children[edge])
            if node_ids[node] >= 0:
                match, match_end = np.int64(node_ids[node]), k + 1
        if match < 0:
            ids[0] = unknown
            return 1
        ids[n] = match
        n += 1
        start = match_end
    return n


def _make_fill_trie(digest: int) -> Any:
    @njit(cache=True)
    def fill_trie(edges, node_ids, code_points, ends, ids):
        """Enter strings: number j is code_points[ends[j - 1]:ends[j]], with id ids[j] or -1.

        Args: edges: an empty TrieEdges. node_ids: int32, filled with -1: the id of the string that ends at each node.
        Returns: the number of nodes, of which 0 is the root, and the node of string 0.
        """
        _ = digest  # part of the cache key
        num_nodes, start, first_node = np.int64(1), np.int64(0), np.int64(0)
        for j in range(len(ends)):
            node = np.int64(0)
            for k in range(start, ends[j]):
                edge = _find_edge(pointer(edges.keys), edges.mask, node, code_points[k])
                if edges.keys[edge] == FREE:
                    edges.keys[edge] = (np.uint64(node) << SHIFT_32) | np.uint64(code_points[k])
                    edges.children[edge] = num_nodes
                    num_nodes += 1
                node = np.int64(edges.children[edge])
            node_ids[node] = ids[j]
            start = ends[j]
            if j == 0:
                first_node = node
        return num_nodes, first_node

    return fill_trie


fill_trie = _make_fill_trie(SOURCE_DIGEST)


def _make_encode_word_piece(digest: int) -> Any:
    @njit(cache=True, nogil=True)
    def encode_word_piece(
        data,
        ends,
        classes,
        values,
        expansions,
        cache,
        edges,
        node_ids,
        options,
        scratch,
        out,
        out_ends,
        state,
    ):
        """Encode documents from `state` on.

        Args:
            data, ends, cache, out, out_ends, state: as for `encode_byte_level`.
            classes: uint8 [CODE_POINTS]; values: int32 [CODE_POINTS]; expansions: int32. See SEPARATOR.
            edges, node_ids: the trie, see `fill_trie`.
            options: int64 [3]: the node of the prefix of entries that continue a word, the id of an unknown word,
                the characters that a word may have.
            scratch: int32 [2, characters that a word may have + 1].
        Returns: DONE, NEEDS_PAGE of state[PENDING], or for the word data[state[POSITION]:state[PENDING]]
            NEEDS_LIBRARY or, if it is also to be remembered, NEEDS_LIBRARY_AND_CACHE.
        """
        _ = digest  # part of the cache key
        continuation_node, unknown, max_characters = options
        code_points, ids = pointer(scratch[0]), pointer(scratch[1])
        data, out, node_ids = pointer(data), pointer(out), pointer(node_ids)
        classes, values, expansions = pointer(classes), pointer(values), pointer(expansions)
        cache = open_cache(cache)
        edges = TrieEdges(pointer(edges.keys), pointer(edges.children), edges.mask)
        document, i, n = state[DOCUMENT], state[POSITION], state[WRITTEN]
        while document < len(ends):
            stop = ends[document]
            while i < stop:
                code_point, end = next_code_point(data, i)
                point_class = classes[code_point]
                if point_class == SEPARATOR:
                    i = end
                    continue
                if point_class == STANDALONE:
                    out[n] = values[code_point]
                    n += 1
                    i = end
                    continue
                end = _word_end(data, i, stop, classes)
                if end < 0:
                    return stop_at(state, document, i, n, ~end, NEEDS_PAGE)
                length = end - i
                is_short = length <= MAX_CACHED_BYTES
                if is_short:
                    key_low, key_high = word_key(data, i, length)
                    slot = find_word(cache, data, i, length, key_low, key_high)
                    if holds_word(cache, slot):
                        n = copy_ids(cache, slot, out, n)
                        i = end
                        continue
                # One more than a word may have, so that a longer one is seen.
                count = _normalize(data, i, end, classes, values, expansions, code_points, max_characters + 1)
                if count < 0:
                    status = NEEDS_LIBRARY_AND_CACHE if is_short else NEEDS_LIBRARY
                    return stop_at(state, document, i, n, end, status)
                if count > max_characters:
                    ids[0] = unknown
                    count = 1
                else:
                    count = _longest_match(
                        code_points, count, edges, node_ids, continuation_node, unknown, ids
                    )
                for k in range(count):
                    out[n + k] = ids[k]
                n += count
                if is_short:
                    store_word(cache, slot, data, i, length, key_low, key_high, ids, count)
                i = end
            out_ends[document] = n
            document += 1
        return stop_at(state, document, i, n, 0, DONE)

    return encode_word_piece


encode_word_piece = _make_encode_word_piece(SOURCE_DIGEST)
