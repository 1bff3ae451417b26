"""Compiled functions, shared by objectives, that choose the tokens to hide and draw their replacements.

A *span* is a sequence of consecutive units (tokens, words, phrases) that are masked together. The length of a span is
drawn first and then its place, so that lengths keep their distribution where text is crowded. A place may need several
tries; with 15 % of the text masked, one or two.
"""

from __future__ import annotations

from data_utils.common.random_streams import below, chance, next_word
from data_utils.objectives.row_loops import ENDS, FREE, PLACES, STARTS, TAKEN, UNIT, compiled, draw_length

PLACES_TRIED = 32  # random places tried for a span before it is halved
MASKED, REPLACED, KEPT = range(3)  # what becomes of a chosen token


@compiled
def masked_target(ratio, size):
    """round(ratio x size) tokens, at least one."""
    return max(1, int(ratio * size + 0.5))


@compiled
def _end_of_span(w, first, units, size, gap, budget):
    """Where a span of at most `units` units from `first` ends, or -1: it does not fit.

    All its units within the budget must be free; with `gap` its two neighbours must be unmasked.
    """
    if not w[FREE, first] or (gap and first > 0 and w[TAKEN, first - 1]):
        return -1
    end = first
    for _ in range(units):
        if end == size:
            return -1
        stop = end + 1
        while stop < size and not w[UNIT, stop]:
            stop += 1
        if stop - first > budget:
            break
        for i in range(end, stop):
            if not w[FREE, i]:
                return -1
        end = stop
    if end == first or (gap and end < size and w[TAKEN, end]):
        return -1
    return end


@compiled
def _end_of_listed(w, first, size, gap, budget):
    """Where the listed span at `first` ends, or -1: there is none, or its tokens or neighbours are not free."""
    length = w[UNIT, first] >> 1
    end = first + length
    if length == 0 or length > budget or (gap and first > 0 and w[TAKEN, first - 1]):
        return -1
    for i in range(first, end):
        if not w[FREE, i]:
            return -1
    return -1 if gap and end < size and w[TAKEN, end] else end


@compiled
def _listed_span(stream, w, size, gap, budget):
    """The first token of one of the listed spans that fit, all equally likely, or -1."""
    count = 0
    for i in range(size):
        count += _end_of_listed(w, i, size, gap, budget) >= 0
    if count == 0:
        return -1
    skipped = below(stream, count)
    for i in range(size):
        if _end_of_listed(w, i, size, gap, budget) >= 0:
            if skipped == 0:
                return i
            skipped -= 1
    return -1


@compiled
def draw_spans(stream, w, size, target, gap, cumulative, listed_below):
    """Choose disjoint spans of units until `target` of `size` tokens are chosen. Returns their number.

    Args:
        w: scratch; w[FREE, :size] says which tokens may be chosen, w[UNIT, :size] where units begin (a
            token that is not free must be a unit of its own). Chosen tokens leave FREE.
        gap: whether a token must stay between two spans.
        cumulative: table of span lengths, units.
        listed_below: threshold of the probability that a listed span is drawn, where one fits; 0 = never.
    Spans are in w[STARTS] and w[ENDS] in the order they were drawn, the tokens of all in w[TAKEN]. A span that
    exceeds the rest of the target loses its last units. Fewer than `target` tokens are chosen only where
    no unit fits; where every unit is longer than the target, one is chosen.
    """
    places = 0
    for i in range(size):
        w[TAKEN, i] = 0
        w[PLACES, places] = i  # overwritten unless the next line counts it: avoids a mispredicted branch
        places += w[FREE, i] & w[UNIT, i]
    count, chosen = 0, 0
    while chosen < target and places > 0:
        first, end = 0, -1
        if listed_below > 0 and chance(stream, listed_below):
            first = _listed_span(stream, w, size, gap, target - chosen)
            if first >= 0:
                end = first + (w[UNIT, first] >> 1)
        units = draw_length(stream, cumulative.shape[0] - 1, cumulative) if end < 0 else 0
        while end < 0 and units > 0:
            for _ in range(PLACES_TRIED):
                first = w[PLACES, below(stream, places)]
                end = _end_of_span(w, first, units, size, gap, target - chosen)
                if end >= 0:
                    break
            units >>= 1
        if end < 0:  # look at every place, from a random one on
            at = below(stream, places)
            budget = target - chosen if count > 0 else size
            for i in range(places):
                first = w[PLACES, (at + i) % places]
                end = _end_of_span(w, first, 1, size, gap, budget)
                if end >= 0:
                    break
        if end < 0:
            break
        for i in range(first, end):
            w[TAKEN, i] = 1
            w[FREE, i] = 0
        w[STARTS, count] = first
        w[ENDS, count] = end
        count += 1
        chosen += end - first
    return count


@compiled
def draw_treatment(stream, s):
    """MASKED, REPLACED or KEPT with the probabilities of the settings (80/10/10)."""
    word = next_word(stream)
    if word < s.mask_below:
        return MASKED
    return REPLACED if word < s.mask_or_replace_below else KEPT


@compiled
def is_special(token, s):
    """Whether a token is no ordinary one."""
    return (
        token == s.cls
        or token == s.sep
        or token == s.mask
        or token == s.smask
        or token == s.gmask
        or token == s.sop
        or token == s.eop
        or token == s.eos
        or token == s.pad
        or token == s.unk
        or token == s.dblock
    )


@compiled
def treated(stream, token, treatment, s):
    """The input in place of a chosen token: [MASK], a uniformly drawn ordinary token, or the token itself."""
    if treatment == MASKED:
        return s.mask
    if treatment == KEPT:
        return token
    while True:
        other = below(stream, s.vocabulary_size)
        if not is_special(other, s):
            return other
