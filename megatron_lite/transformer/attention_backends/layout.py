"""Which token of a batch may see which, and the query ranges that follow from it. NumPy only, computed once per batch.

Every objective describes visibility by `doc`, `ord` and `grp` per token (data_utils/common/batch_fields.py). The rule
`may_see` compares numbers per token that follow from them:

    document     the same number only for tokens of one document in one row of the batch
    key_time     when a key becomes visible:       ord if ord >= 0 (content), else never (query stream)
    query_bound  up to which time a query may see: ord if ord >= 0, else -ord - 1
    grp          0, or a private group whose members see each other
    position     the token's position id; a local layer leaves out keys that are farther away than its window

A token with ord < 0 belongs to the query stream, as in XLNet: it predicts, and only its private group sees it.

`Layout.visible_keys` derives from the same numbers, without a mask, which keys each token sees; tests compare it with
the rule. The tokens of a document are ordered [query stream by step | content by ord]. So a token sees a range of
content from the document's start, and the query-stream tokens of its private group, which are neighbours. Few query
ranges are needed:

    queries                                    keys                           mask type
    tokens that see the same                   that range                     full
    tokens that each see one more              the range of the last one      causal, aligned at the bottom right
    anything else, several short documents     what any of them sees          masked, in blocks of queries
    tokens that see nothing                    none                           blind

So GLM, prefix LM, T5, BART and UniLM's sequence-to-sequence objective have two query ranges (A x A full, B x [A; B]
causal), causal and bidirectional documents one, MASS two (the masked tokens come first, then both see the whole
context). XLNet has a full and a causal one for each range of its content, and a causal one for the query stream over
the content. The original tokens and pseudo masks of UniLMv2 remain masked. Where causal ranges must be square (CPU),
masked blocks replace the others.

Masks are never built here: a masked range evaluates the rule on its own queries and keys when it is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.batch_fields import PADDING_DOC

NEVER = np.int64(1) << 31  # key_time of a query-stream token
PADDING = np.array([[PADDING_DOC], [NEVER], [-1], [0], [0]])  # its columns, see `may_see`
FULL, CAUSAL, MASKED, BLIND = range(4)  # mask types; BLIND: the queries see nothing

LENGTHS = 32  # number of padded lengths per shape of batches, about: padding is 1.6 % on average
BLOCK_QUERIES = 256  # of a masked range; torch's CPU kernel is fastest with 256 to 512
KERNEL_KEYS = 512  # block size in which torch's CPU kernel skips the hidden keys of a causal range
JOINED_TOKENS = 64  # of a group of several documents: ranges for each document would cost more than they save
LEAST_FULL_QUERIES = 32  # with the same keys, so that they become a query range without a mask


def may_see(
    query: Iterable[Any],
    key: Iterable[Any],
    *,
    has_private_groups: bool = True,
    joins_documents: bool = True,
    window: int = 0,
) -> Any:
    """The attention rule, element by element: True where a query may see a key.

    Args:
        query, key: document, key_time, query_bound, grp, position; arrays or tensors of shapes that broadcast.
        has_private_groups, joins_documents: False leaves out a comparison that cannot change the result.
        window: of a local layer; 0 = none.
    """
    document, _, bound, grp, position = query
    key_document, time, _, key_grp, key_position = key
    seen = time <= bound
    if has_private_groups:
        seen = seen | ((grp == key_grp) & (grp != 0))
    if window:
        seen = seen & (abs(position - key_position) <= window)
    return seen & (document == key_document) if joins_documents else seen


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch in the order of the kernels, padding left out. Arrays of [T tokens]."""

    shape: tuple[int, int]  # B, S
    batch_index: np.ndarray  # int64, of each token in the flattened [B, S] batch
    document: np.ndarray  # int64, ascending
    key_time: np.ndarray  # int64, NEVER for the query stream
    query_bound: np.ndarray  # int64
    grp: np.ndarray  # int64
    position: np.ndarray  # int64

    @property
    def columns(self) -> np.ndarray:
        """The columns that `may_see` compares, int64 [5, T]."""
        return np.stack((self.document, self.key_time, self.query_bound, self.grp, self.position))

    def in_batch_order(self) -> np.ndarray:
        """The columns in the order of the batch, int64 [5, B, S]; padding sees nothing and is not seen."""
        columns = np.repeat(PADDING, self.shape[0] * self.shape[1], axis=1)
        columns[:, self.batch_index] = self.columns
        return columns.reshape(5, *self.shape)

    @cached_property
    def visible_keys(self) -> VisibleKeys:
        return _visible_keys(self)

    @property
    def is_target(self) -> np.ndarray:
        """Which tokens a decoder computes, where the model has one: those with ord > 0. bool [T]"""
        return (self.key_time > 0) & (self.key_time < NEVER)

    @cached_property
    def encoder_and_decoder(self) -> tuple[Layout, Layout]:
        """The layouts of an encoder's tokens and of a decoder's."""
        return self.subset(~self.is_target), self.subset(self.is_target)

    def subset(self, chosen: np.ndarray) -> Layout:
        """The layout of some of the tokens, with the rule restricted to them. Args: chosen: bool [T]."""
        return Layout(self.shape, self.batch_index[chosen], *self.columns[:, chosen])


class QueryRange(NamedTuple):
    """Queries [start, stop) of a document group, and the ranges of its keys that they read, joined into one."""

    mask: int  # FULL, CAUSAL, MASKED or BLIND
    start: int
    stop: int
    keys: tuple[tuple[int, int], ...] = ()


class DocumentGroup(NamedTuple):
    """Tokens [start, stop) of the layout that see nothing outside: a document, or several short ones."""

    start: int
    stop: int
    query_ranges: tuple[QueryRange, ...]  # they follow each other and cover the group
    keys: tuple[int, int] | None = None  # in cross-attention: start and stop of keys, which are other tokens

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and stop in each tensor of packed inputs: of the queries first, of the keys last."""
        queries = (self.start, self.stop)
        return (queries,) if self.keys is None else (queries, self.keys)


def make_layout(
    doc: np.ndarray, order: np.ndarray, grp: np.ndarray, position: np.ndarray | None = None
) -> Layout:
    """The layout of a batch; doc, order, grp are int [B, S], padding has doc < 0. Args: position: None = without."""
    flat_doc, flat_order = doc.reshape(-1).astype(np.int64), order.reshape(-1).astype(np.int64)
    batch_index = np.flatnonzero(flat_doc >= 0)
    # Numbers of documents begin again in each row of the batch; these are unique in the batch and ascending.
    document = batch_index // doc.shape[1] * (flat_doc.max(initial=0) + 1) + flat_doc[batch_index]
    step = flat_order[batch_index]
    # Document, then query stream before content, then the time. Most batches are in this order already and are not
    # sorted.
    sort_key = ((document * 2 + (step >= 0)) << 32) + np.abs(step)
    if (np.diff(sort_key) < 0).any():
        sort = np.argsort(sort_key, kind="stable")
        batch_index, document, step = batch_index[sort], document[sort], step[sort]
    return Layout(
        shape=(doc.shape[0], doc.shape[1]),
        batch_index=batch_index,
        document=document,
        key_time=np.where(step >= 0, step, NEVER),
        # A query-stream token with ord -t - 1 predicts at time t, so it sees content up to t.
        query_bound=np.where(step >= 0, step, -step - 1),
        grp=grp.reshape(-1)[batch_index].astype(np.int64),
        position=(doc * 0 if position is None else position).reshape(-1)[batch_index].astype(np.int64),
    )


def padded_order(layout: Layout, length: int) -> np.ndarray:
    """The layout's tokens and padding after them: int64 [length], indices into the flattened batch, -1 = padding."""
    order = np.full(length, -1, np.int64)
    order[: len(layout.batch_index)] = layout.batch_index
    return order


def allowed(*fields: np.ndarray, window: int = 0) -> np.ndarray:
    """The rule as a mask: `make_layout`'s int [B, S] arrays -> bool [B, S queries, S keys], False on padding."""
    columns = make_layout(*fields).in_batch_order()
    return may_see(columns[..., None], columns[..., None, :], window=window)


@dataclass(frozen=True)
class VisibleKeys:
    """Ranges [start, stop) of the layout, in query stream and content, that hold every key a token may see."""

    stream_start: np.ndarray
    stream_stop: np.ndarray
    content_start: np.ndarray
    content_stop: np.ndarray
    count: np.ndarray  # keys that the token may see; the ranges may hold others, which need a mask

    @cached_property
    def is_exact(self) -> np.ndarray:
        """Whether the ranges of a token hold no key that it may not see: bool [T]."""
        length = self.stream_stop - self.stream_start + self.content_stop - self.content_start
        return self.count == length


def _visible_keys(layout: Layout) -> VisibleKeys:
    document, bound = layout.document, layout.query_bound
    is_content = layout.key_time < NEVER
    content = np.flatnonzero(is_content)
    # Document and time in one number: a binary search finds a time within a document, for all tokens at once.
    times = (document[content] << 32) + layout.key_time[content]  # ascending
    before = np.searchsorted(times, document << 32)
    # Content of the token's document up to its bound, as a count; with `content_start` a range.
    count = np.searchsorted(times, (document << 32) + bound, side="right") - before
    # From a count of content tokens to an index of all tokens: the query streams of all documents up to this lie
    # before.
    content_start = before + np.searchsorted(document[~is_content], document, side="right")
    content_stop = content_start + count
    stream_start = stream_stop = content_start
    if layout.grp.any():
        members = np.flatnonzero(layout.grp)
        # ---- private groups: what their members see beyond the rule of time ----
        _, number = np.unique((document[members] << 32) + layout.grp[members], return_inverse=True)
        sort = np.lexsort((layout.key_time[members], number))
        ends = np.searchsorted(number[sort], np.arange(number.max() + 1), side="right")
        begins = np.r_[0, ends[:-1]]
        # Members that the rule of time shows already; they must not be counted twice.
        revealed = np.searchsorted(
            (number[sort] << 32) + layout.key_time[members][sort],
            (number << 32) + bound[members],
            side="right",
        )
        count, content_stop = count.copy(), content_stop.copy()
        count[members] += ends[number] - revealed
        token, in_stream = members[sort], ~is_content[members[sort]]
        last_content = np.maximum.reduceat(np.where(in_stream, -1, token), begins) + 1
        # The range is extended to the private group's last content token, and may then hold tokens that are not seen
        # (`is_exact`).
        content_stop[members] = np.maximum(content_stop[members], last_content[number])
        first = np.minimum.reduceat(np.where(in_stream, token, len(document)), begins)[number]
        last = np.maximum.reduceat(np.where(in_stream, token, -1), begins)[number] + 1
        # Private groups of content alone have no range of the query stream.
        has_stream = last > 0
        stream_start, stream_stop = stream_start.copy(), stream_stop.copy()
        stream_start[members[has_stream]], stream_stop[members[has_stream]] = (
            first[has_stream],
            last[has_stream],
        )
    return VisibleKeys(stream_start, stream_stop, content_start, content_stop, count)


def make_document_groups(layout: Layout, *, square_causal_only: bool) -> list[DocumentGroup]:
    """The document groups of a batch, with their query ranges.

    Args: square_causal_only: causal ranges with more keys than queries become masked blocks, and short documents share
        a group; false: a group for each document, with as few query ranges as the structure allows.
    """
    if not len(layout.batch_index):
        return []
    visible = layout.visible_keys
    edges = _range_edges(layout, LEAST_FULL_QUERIES if square_causal_only else 2, not square_causal_only)
    # First token of each document, and the first of its ranges.
    begins = np.flatnonzero(np.r_[True, np.diff(layout.document) != 0, True])
    cuts = np.searchsorted(edges, begins)
    summaries = _summarize(visible, edges, np.repeat(begins[:-1], np.diff(cuts)))
    groups = []
    for first, last in _grouped_documents(begins, JOINED_TOKENS if square_causal_only else 0):
        begin, end = int(begins[first]), int(begins[last])
        if square_causal_only and end - begin <= JOINED_TOKENS:
            query_ranges = _joined_ranges(visible.count[begin:end])
        else:
            query_ranges = [
                query_range
                for summary in summaries[cuts[first] : cuts[last]]
                for query_range in _query_ranges(summary, visible, square_causal_only, begin)
            ]
        groups.append(DocumentGroup(begin, end, tuple(query_ranges)))
    return groups


def _grouped_documents(begins: np.ndarray, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Documents [first, last) of each group: as many as have `most_tokens` together, at least one.

    Args: begins: first token of each document, and the number of tokens.
    """
    first = 0
    while first < len(begins) - 1:
        last = int(np.searchsorted(begins, begins[first] + most_tokens, side="right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def _range_edges(layout: Layout, least_full_queries: int, split_steps: bool) -> np.ndarray:
    """The first query of each range that one mask type serves, int64, and at the end the number of tokens.

    A range is one of: queries of one document that see the same keys (at least `least_full_queries`, no mask needed);
    queries that see nothing; the queries in between. With `split_steps`, the last sort ends where a query does not see
    exactly one key more than the query before.
    """
    visible = layout.visible_keys
    no_stream = visible.stream_start == visible.stream_stop
    compared = (
        visible.stream_start,
        visible.stream_stop,
        visible.content_stop,
        visible.is_exact,
        layout.document,
    )
    changes = np.r_[True, np.any([np.diff(numbers) != 0 for numbers in compared], axis=0)]
    # Queries that see the same keys have the same number. Short runs join the queries in between, -1: a range for each
    # would cost more than it computes.
    run = np.cumsum(changes) - 1
    run = np.where(visible.is_exact & (np.bincount(run)[run] >= least_full_queries), run, -1)
    # -2, unlike any run: blind queries cannot be part of a softmax.
    run[visible.count == 0] = -2
    begins = (np.diff(run) != 0) | (np.diff(layout.document) != 0)
    if split_steps:
        is_step = (np.diff(visible.content_stop) == 1) & no_stream[1:] & no_stream[:-1]
        begins |= (run[1:] == -1) & ~is_step
    return np.flatnonzero(np.r_[True, begins, True])


class _RangeSummary(NamedTuple):
    """Neighbouring queries of a document, counted from the start of their group, and the keys that they see."""

    start: int
    stop: int
    content_start: int  # keys that any of them sees
    content_stop: int
    stream_start: int
    stream_stop: int  # not after the start: no keys of the query stream
    fewest_keys: int  # of a query
    most_keys: int  # of a query
    is_exact: bool  # no range of a query holds a key that it does not see
    is_causal: bool  # and each query sees one key more than the query before, none of the query stream


def _summarize(visible: VisibleKeys, edges: np.ndarray, begin: np.ndarray | int) -> list[_RangeSummary]:
    """The summaries of the ranges between ascending edges. Args: begin: first token of their groups."""
    here, starts = slice(edges[0], edges[-1]), edges[:-1] - edges[0]
    stream_start, stream_stop = visible.stream_start[here], visible.stream_stop[here]
    content_stop, count, is_exact = visible.content_stop[here], visible.count[here], visible.is_exact[here]
    has_stream = stream_start < stream_stop
    sees_one_more = np.diff(content_stop, prepend=0) == 1  # than the query before
    sees_one_more[starts] = True

    # All ranges at once by `reduceat`: a Python loop over thousands of ranges would hold the interpreter's lock.
    def least(numbers: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(numbers, starts)

    def most(numbers: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(numbers, starts)

    columns = {
        "start": edges[:-1] - begin,
        "stop": edges[1:] - begin,
        "content_start": visible.content_start[here][starts] - begin,
        "content_stop": most(content_stop) - begin,
        "stream_start": least(np.where(has_stream, stream_start, edges[-1])) - begin,
        "stream_stop": most(np.where(has_stream, stream_stop, 0)) - begin,
        "fewest_keys": least(count),
        "most_keys": most(count),
        "is_exact": least(is_exact),
        "is_causal": least(is_exact & sees_one_more & ~has_stream),
    }
    in_order = (columns[name].tolist() for name in _RangeSummary._fields)
    return [_RangeSummary(*numbers) for numbers in zip(*in_order, strict=True)]


def _joined_ranges(count: np.ndarray) -> list[QueryRange]:
    """Query ranges of short documents that share a group: all keys for all queries that see any.

    Args: count: of the visible keys of each token of the group.
    """
    is_blind, tokens = count == 0, len(count)
    edges = [0, *(np.flatnonzero(np.diff(is_blind)) + 1).tolist(), tokens]
    mask = FULL if (count == tokens).all() else MASKED
    return [
        QueryRange(BLIND, start, stop) if is_blind[start] else QueryRange(mask, start, stop, ((0, tokens),))
        for start, stop in itertools.pairwise(edges)
    ]


def _query_ranges(
    summary: _RangeSummary, visible: VisibleKeys, square_causal_only: bool, begin: int
) -> list[QueryRange]:
    """The query ranges of some queries of one document. Args: begin: first token of the group."""
    start, stop = summary.start, summary.stop
    if not summary.most_keys:
        return [QueryRange(BLIND, start, stop)]
    keys, queries = _key_ranges(summary, summary.is_exact), stop - start
    # All queries see all keys of the range: no mask.
    if summary.is_exact and summary.fewest_keys == summary.most_keys:
        return [QueryRange(FULL, start, stop, keys)]
    if summary.is_causal and (not square_causal_only or keys == ((start, stop),)):
        if not square_causal_only or not BLOCK_QUERIES < queries <= KERNEL_KEYS:
            return [QueryRange(CAUSAL, start, stop, keys)]
        # One causal range would skip nothing; a square of half the size and a masked range need 3/4 of the pairs.
        middle = start + queries // 2
        square = QueryRange(CAUSAL, start, middle, ((start, middle),))
        return [square, *_masked_ranges(visible, [middle, stop], begin)]
    if not square_causal_only:
        return [QueryRange(MASKED, start, stop, keys)]
    blocks = -(-queries // BLOCK_QUERIES)
    return _masked_ranges(visible, [start + queries * i // blocks for i in range(blocks + 1)], begin)


def _masked_ranges(visible: VisibleKeys, edges: list[int], begin: int) -> list[QueryRange]:
    summaries = _summarize(visible, np.array(edges) + begin, begin)
    return [QueryRange(MASKED, each.start, each.stop, _key_ranges(each, False)) for each in summaries]


def _key_ranges(summary: _RangeSummary, is_exact: bool) -> tuple[tuple[int, int], ...]:
    """Ranges of keys that hold all that is seen. Args: is_exact: no other keys for the last query."""
    start, stop = summary.content_start, summary.content_stop
    first, last = summary.stream_start, summary.stream_stop
    if first >= last:
        return ((start, stop),)
    if start == stop:
        return ((first, last),)
    # Without a mask the two ranges must touch; under one, a small gap is cheaper to mask than the ranges to join.
    if start == last or (not is_exact and 8 * (start - last) <= stop - first):
        return ((first, stop),)
    return (first, last), (start, stop)
