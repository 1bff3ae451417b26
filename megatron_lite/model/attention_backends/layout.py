"""Which token of a batch may see which, and the structure of that. NumPy only, computed once per batch.

Every objective describes visibility by `doc`, `ord` and `grp` per token (data_utils/common/batch_fields.py). The rule
`may_see` compares numbers per token that follow from them:

    document     the same number only for tokens of one document in one row of the batch
    key_time     when a key becomes visible:       ord if ord >= 0 (content), else never (query stream)
    query_bound  up to which time a query may see: ord if ord >= 0, else -ord - 1
    grp          0, or a private group whose members see each other
    position     the token's position id; a local layer leaves out keys that are farther away than its window

A token with ord < 0 belongs to the query stream, as in XLNet: it predicts, and only its group sees it.

`Layout.views` derives from the same numbers, without a mask, which keys each token sees; tests compare it with the
rule. The tokens of a document are ordered [query stream by step | content by ord]. So a token sees a stretch of content
from the document's start, and the query-stream tokens of its group, which are neighbours. Few kernel calls do:

    queries                                    keys                           call
    tokens that see the same                   that stretch                   full
    tokens that each see one more              the stretch of the last one    causal, aligned at the bottom right
    anything else, several short documents     what any of them sees          masked, by blocks of queries

So GLM, prefix LM, T5, BART and UniLM's sequence-to-sequence kind are two calls (A x A full, B x [A; B] causal), causal
and bidirectional documents one, MASS two (the masked tokens come first, then both see the whole context). XLNet is a
full and a causal call for each stretch of its content, and a causal one for the query stream over the content. The
original tokens and pseudo masks of UniLMv2 remain masked calls. Where causal calls must be square (CPU), masked blocks
replace the others.

Masks are never built here: a masked call evaluates the rule on its own queries and keys when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.batch_fields import PADDING_DOC

NEVER = np.int64(1) << 31  # key_time of a query-stream token
PADDING = np.array([[PADDING_DOC], [NEVER], [-1], [0], [0]])  # its columns, see `may_see`
FULL, CAUSAL, MASKED, BLIND = range(4)  # BLIND: queries that see nothing

LENGTHS = 32  # number of padded lengths per shape of batches, about: padding is 1.6 % on average
BLOCK_ROWS = 256  # queries of a masked call; torch's CPU kernel is fastest with 256 to 512
KERNEL_KEYS = 512  # block size in which torch's CPU kernel skips the hidden keys of a causal call
JOINED_ROWS = 64  # tokens of a unit that documents share: calls of their own would cost more than they save
LEAST_FULL_ROWS = 32  # minimum number of queries with the same keys for a separate call


def may_see(
    query: Iterable[Any],
    key: Iterable[Any],
    *,
    has_groups: bool = True,
    joins_documents: bool = True,
    window: int = 0,
) -> Any:
    """The attention rule, element by element: True where a query may see a key.

    Args:
        query, key: document, key_time, query_bound, grp, position; arrays or tensors of shapes that broadcast.
        has_groups, joins_documents: False leaves out a comparison that cannot change the result.
        window: of a local layer; 0 = none.
    """
    document, _, bound, grp, position = query
    key_document, time, _, key_grp, key_position = key
    seen = time <= bound
    if has_groups:
        seen = seen | ((grp == key_grp) & (grp != 0))
    if window:
        seen = seen & (abs(position - key_position) <= window)
    return seen & (document == key_document) if joins_documents else seen


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch in the order of the kernels, padding left out. Arrays of [T tokens]."""

    shape: tuple[int, int]  # B, S
    rows: np.ndarray  # int64, index into the flattened [B, S] batch
    document: np.ndarray  # int64, ascending
    key_time: np.ndarray  # int64, NEVER for the query stream
    query_bound: np.ndarray  # int64
    grp: np.ndarray  # int64
    position: np.ndarray  # int64

    @property
    def columns(self) -> np.ndarray:
        """The columns that `may_see` compares, int64 [5, T]."""
        return np.stack((self.document, self.key_time, self.query_bound, self.grp, self.position))

    def in_place(self) -> np.ndarray:
        """The same in the order of the batch, int64 [5, B, S]; padding sees nothing and is not seen."""
        whole = np.repeat(PADDING, self.shape[0] * self.shape[1], axis=1)
        whole[:, self.rows] = self.columns
        return whole.reshape(5, *self.shape)

    @cached_property
    def views(self) -> Views:
        return _views(self)

    @property
    def is_target(self) -> np.ndarray:
        """Which tokens a decoder computes, where the model has one: those with ord > 0. bool [T]"""
        return (self.key_time > 0) & (self.key_time < NEVER)

    @cached_property
    def parts(self) -> tuple[Layout, Layout]:
        """The layouts of an encoder's tokens and of a decoder's."""
        return self.part(~self.is_target), self.part(self.is_target)

    def part(self, chosen: np.ndarray) -> Layout:
        """The layout of some of the tokens, with the rule restricted to them. Args: chosen: bool [T]."""
        return Layout(self.shape, self.rows[chosen], *self.columns[:, chosen])


class Call(NamedTuple):
    """One kernel call. Queries are [start, stop) in the unit, as is each stretch of keys; the stretches are joined."""

    kind: int
    start: int
    stop: int
    keys: tuple[tuple[int, int], ...] = ()


class Unit(NamedTuple):
    """Neighbouring tokens of the layout that see nothing outside: a document, or several short ones."""

    start: int
    stop: int
    calls: tuple[Call, ...]  # their queries follow each other and cover the unit
    keys: tuple[int, int] | None = None  # in cross-attention: start and stop of keys, which are other tokens


def make_layout(
    doc: np.ndarray, order: np.ndarray, grp: np.ndarray, position: np.ndarray | None = None
) -> Layout:
    """The layout of a batch; doc, order, grp are int [B, S], padding has doc < 0. Args: position: None = without."""
    flat_doc, flat_order = doc.reshape(-1).astype(np.int64), order.reshape(-1).astype(np.int64)
    rows = np.flatnonzero(flat_doc >= 0)
    # Numbers of documents begin again in each row of the batch; these are unique in the batch and ascending.
    document = rows // doc.shape[1] * (flat_doc.max(initial=0) + 1) + flat_doc[rows]
    step = flat_order[rows]
    # One sort key: document, then query stream before content, then the time. Most batches lie so already and are not
    # sorted.
    place = ((document * 2 + (step >= 0)) << 32) + np.abs(step)
    if (np.diff(place) < 0).any():
        sort = np.argsort(place, kind="stable")
        rows, document, step = rows[sort], document[sort], step[sort]
    return Layout(
        shape=(doc.shape[0], doc.shape[1]),
        rows=rows,
        document=document,
        key_time=np.where(step >= 0, step, NEVER),
        # A query-stream token with ord -t - 1 predicts at time t, so it sees content up to t.
        query_bound=np.where(step >= 0, step, -step - 1),
        grp=grp.reshape(-1)[rows].astype(np.int64),
        position=(doc * 0 if position is None else position).reshape(-1)[rows].astype(np.int64),
    )


def padded_order(layout: Layout, length: int) -> np.ndarray:
    """The layout's tokens and padding after them: int64 [length], indices into the flattened batch, -1 = padding."""
    order = np.full(length, -1, np.int64)
    order[: len(layout.rows)] = layout.rows
    return order


def allowed(*fields: np.ndarray, window: int = 0) -> np.ndarray:
    """The rule as a mask: `make_layout`'s int [B, S] arrays -> bool [B, S queries, S keys], False on padding."""
    columns = make_layout(*fields).in_place()
    return may_see(columns[..., None], columns[..., None, :], window=window)


@dataclass(frozen=True)
class Views:
    """Ranges [start, stop) of the layout, in query stream and content, that hold every key a token may see."""

    stream_start: np.ndarray
    stream_stop: np.ndarray
    content_start: np.ndarray
    content_stop: np.ndarray
    seen: np.ndarray  # number of keys that the token may see; no mask is needed if the ranges hold as many

    @cached_property
    def exact(self) -> np.ndarray:
        stretches = self.stream_stop - self.stream_start + self.content_stop - self.content_start
        return self.seen == stretches


def _views(layout: Layout) -> Views:
    document, bound = layout.document, layout.query_bound
    is_content = layout.key_time < NEVER
    content = np.flatnonzero(is_content)
    # Document and time in one number: a binary search finds a time within a document, for all tokens at once.
    times = (document[content] << 32) + layout.key_time[content]  # ascending
    before = np.searchsorted(times, document << 32)
    # Content of the token's document up to its bound, as a count; with `content_start` a stretch.
    seen = np.searchsorted(times, (document << 32) + bound, side="right") - before
    # From a count of content tokens to an index of all tokens: the query streams of all documents up to this lie
    # before.
    content_start = before + np.searchsorted(document[~is_content], document, side="right")
    content_stop = content_start + seen
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
        seen, content_stop = seen.copy(), content_stop.copy()
        seen[members] += ends[number] - revealed
        at, in_stream = members[sort], ~is_content[members[sort]]
        last_content = np.maximum.reduceat(np.where(in_stream, -1, at), begins) + 1
        # The stretch is extended to the group's last content token, and may then hold tokens that are not seen: `exact`
        # tells.
        content_stop[members] = np.maximum(content_stop[members], last_content[number])
        first = np.minimum.reduceat(np.where(in_stream, at, len(document)), begins)[number]
        last = np.maximum.reduceat(np.where(in_stream, at, -1), begins)[number] + 1
        # Groups of content alone have no stretch of the query stream.
        some = last > 0
        stream_start, stream_stop = stream_start.copy(), stream_stop.copy()
        stream_start[members[some]], stream_stop[members[some]] = first[some], last[some]
    return Views(stream_start, stream_stop, content_start, content_stop, seen)


def _stretches(layout: Layout, views: Views, least_full_rows: int, split_steps: bool) -> np.ndarray:
    """Where stretches of queries begin that one kind of call serves, int64, and at the end the number of tokens.

    A stretch is one of: queries of one document that see the same keys (at least `least_full_rows`, no mask needed);
    queries that see nothing; the queries in between. With `split_steps`, the last kind ends where the view does not
    grow by one key.
    """
    no_stream = views.stream_start == views.stream_stop
    parts = (views.stream_start, views.stream_stop, views.content_stop, views.exact, layout.document)
    changes = np.r_[True, np.any([np.diff(part) != 0 for part in parts], axis=0)]
    # Numbers of runs of queries with the same view. Short runs go to the kind in between, -1: a call of its own for
    # each would cost more than it computes.
    number = np.cumsum(changes) - 1
    kind = np.where(views.exact & (np.bincount(number)[number] >= least_full_rows), number, -1)
    # -2, unlike any run: blind queries cannot be part of a softmax.
    kind[views.seen == 0] = -2
    begins = (np.diff(kind) != 0) | (np.diff(layout.document) != 0)
    if split_steps:
        is_step = (np.diff(views.content_stop) == 1) & no_stream[1:] & no_stream[:-1]
        begins |= (kind[1:] == -1) & ~is_step
    return np.flatnonzero(np.r_[True, begins, True])


def _look(views: Views, edges: np.ndarray, begin: np.ndarray | int) -> list[list[int]]:
    """The stretches between ascending edges, by passes over all, which leave Python to other threads.

    Returns: of each: start and stop of itself, of content, and of query stream, if that has a stop after its start;
        fewest keys of a query, whether all are exact, whether each sees one key more, most keys.
    Args: begin: of their units, from which tokens are counted.
    """
    here, starts = slice(edges[0], edges[-1]), edges[:-1] - edges[0]
    first, last, stop = views.stream_start[here], views.stream_stop[here], views.content_stop[here]
    # All stretches at once by `reduceat`: a Python loop over thousands of stretches would hold the interpreter's lock.
    grows, seen, exact = np.diff(stop, prepend=0) == 1, views.seen[here], views.exact[here]
    grows[starts] = True
    low = [seen, exact, exact & grows & (first == last), np.where(first < last, first, edges[-1])]
    *lowest, stream_start = np.minimum.reduceat(low, starts, axis=1)
    most, *stops = np.maximum.reduceat([seen, stop, np.where(first < last, last, 0)], starts, axis=1)
    spans = edges[:-1], edges[1:], views.content_start[here][starts], stops[0], stream_start, stops[1]
    return np.stack([*(np.stack(spans) - begin), *lowest, most], axis=1).tolist()


def make_units(layout: Layout, *, square_causal_only: bool) -> list[Unit]:
    """The calls of a batch.

    Args: square_causal_only: causal calls with more keys than queries become masked blocks, and short documents share
        a unit; false: a unit for each document, with as few calls as the structure allows.
    """
    if not len(layout.rows):
        return []
    views = layout.views
    edges = _stretches(layout, views, LEAST_FULL_ROWS if square_causal_only else 2, not square_causal_only)
    begins = np.flatnonzero(np.r_[True, np.diff(layout.document) != 0, True])
    cuts = np.searchsorted(edges, begins)
    stretches = _look(views, edges, np.repeat(begins[:-1], np.diff(cuts)))
    units, places, cuts, first = list[Unit](), begins.tolist(), cuts.tolist(), 0
    while first < len(cuts) - 1:
        begin, last = places[first], first + 1
        if square_causal_only:
            last = max(last, int(np.searchsorted(begins, begin + JOINED_ROWS, side="right")) - 1)
        end = places[last]
        if square_causal_only and end - begin <= JOINED_ROWS:
            calls = _joined_calls(begin, end, views)
        else:
            chosen = stretches[cuts[first] : cuts[last]]
            calls = [call for one in chosen for call in _calls(one, views, square_causal_only, begin)]
        units.append(Unit(begin, end, tuple(calls)))
        first = last
    return units


def _joined_calls(begin: int, end: int, views: Views) -> list[Call]:
    """Calls on short documents: all keys for all queries that see any."""
    blind, rows = views.seen[begin:end] == 0, end - begin
    edges = [0, *(np.flatnonzero(np.diff(blind)) + 1).tolist(), rows]
    kind = FULL if (views.seen[begin:end] == rows).all() else MASKED
    return [
        Call(BLIND, start, stop) if blind[start] else Call(kind, start, stop, ((0, rows),))
        for start, stop in itertools.pairwise(edges)
    ]


def _calls(one: list[int], views: Views, square_causal_only: bool, begin: int) -> list[Call]:
    """Calls for a stretch of queries of one document (see `_look`). Args: begin: of the unit."""
    start, stop, *spans, least, exact, steps, most = one
    if not most:
        return [Call(BLIND, start, stop)]
    keys, rows = _keys(exact, *spans), stop - start
    # All queries see all keys of the stretch: no mask.
    if exact and least == most:
        return [Call(FULL, start, stop, keys)]
    if steps and (not square_causal_only or keys == ((start, stop),)):
        if not square_causal_only or not BLOCK_ROWS < rows <= KERNEL_KEYS:
            return [Call(CAUSAL, start, stop, keys)]
        # One call would skip nothing; a square of half the size and a masked call need 3/4 of the pairs.
        middle = start + rows // 2
        return [Call(CAUSAL, start, middle, ((start, middle),)), *_masked(views, [middle, stop], begin)]
    if not square_causal_only:
        return [Call(MASKED, start, stop, keys)]
    blocks = -(-rows // BLOCK_ROWS)
    return _masked(views, [start + rows * i // blocks for i in range(blocks + 1)], begin)


def _masked(views: Views, edges: list[int], begin: int) -> list[Call]:
    found = _look(views, np.array(edges) + begin, begin)
    return [Call(MASKED, start, stop, _keys(False, *rest[:4])) for start, stop, *rest in found]


def _keys(exact: int, start: int, stop: int, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Stretches of keys, content or stream, that hold all that is seen; `exact`: no others for the last query."""
    if first >= last:
        return ((start, stop),)
    if start == stop:
        return ((first, last),)
    if start == last or (not exact and 8 * (start - last) <= stop - first):  # cheaper to mask than to join
        return ((first, stop),)
    return (first, last), (start, stop)
