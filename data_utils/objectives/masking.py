"""Compiled functions that choose the tokens to predict (`draw_spans`) and their input (80/10/10: `draw_corruption`).

A *mask unit* is what is masked as a whole: a token, a whole word, or a phrase. `scratch.unit_start[i]` is nonzero
where one begins; `RowObjective._unit_starts` in base.py computes it. A *span* is a sequence of consecutive mask units.
The length of a span is drawn first and then its position, so that lengths keep their distribution where text is
crowded. A position may need several tries; with 15 % of the text masked, one or two.

A token that was chosen is predicted. The model reads one of three *corruptions* of it: [MASK], a random token, or the
token itself. The probabilities are the settings `mask_token_prob` (0.8) and `random_token_prob` (0.1), and the rest
(0.1).
"""

from __future__ import annotations

import numpy as np

from data_utils.common.random_streams import below, chance, chance_threshold, next_word
from data_utils.common.settings import check
from data_utils.objectives.compiled import compiled, draw_length, inlined

POSITIONS_TRIED = 32  # random positions tried for a span before it is halved
MASK, RANDOM_TOKEN, KEEP = range(3)  # corruptions of a chosen token


@compiled
def masked_target(ratio, size):
    """round(ratio x size) tokens, at least one."""
    return max(1, int(ratio * size + 0.5))


@inlined
def _span_end(scratch, first, units, size, gap, budget):
    """The end of a span of at most `units` mask units from token `first` on, or -1 if it does not fit.

    All its mask units within `budget` tokens must be free; with `gap` its two neighbours must be unmasked.
    """
    if not scratch.free[first] or (gap and first > 0 and scratch.taken[first - 1]):
        return -1
    end = first
    for _ in range(units):
        if end == size:
            return -1
        stop = end + 1
        while stop < size and not scratch.unit_start[stop]:
            stop += 1
        if stop - first > budget:
            break
        for i in range(end, stop):
            if not scratch.free[i]:
                return -1
        end = stop
    if end == first or (gap and end < size and scratch.taken[end]):
        return -1
    return end


@inlined
def _listed_span_end(scratch, first, size, gap, budget):
    """The end of the listed span at `first`, or -1: there is none, or its tokens or neighbours are not free."""
    length = scratch.unit_start[first] >> 1
    end = first + length
    if length == 0 or length > budget or (gap and first > 0 and scratch.taken[first - 1]):
        return -1
    for i in range(first, end):
        if not scratch.free[i]:
            return -1
    return -1 if gap and end < size and scratch.taken[end] else end


@inlined
def _draw_listed_span(rng, scratch, size, gap, budget):
    """The first token of one of the listed spans that fit, all equally likely, or -1."""
    count = 0
    for i in range(size):
        count += _listed_span_end(scratch, i, size, gap, budget) >= 0
    if count == 0:
        return -1
    # Two passes instead of a list: scratch space is fixed, and listed spans are few.
    skipped = below(rng, count)
    for i in range(size):
        if _listed_span_end(scratch, i, size, gap, budget) >= 0:
            if skipped == 0:
                return i
            skipped -= 1
    return -1


@inlined
def draw_spans(tables, size, target, gap, listed_below):
    """Choose disjoint spans of mask units until `target` of `size` tokens are chosen. Returns the number of spans.

    Args:
        tables: its scratch.free[:size] is 1 where a token may be chosen, and becomes 0 where one is chosen;
            scratch.unit_start[:size] marks where mask units begin (a token that is not free must be one by itself);
            length_table has the span lengths in mask units, see `cumulative_table`.
        gap: whether a token must stay between two spans.
        listed_below: threshold of the probability that a listed span is drawn, where one fits; 0 = never.
    The spans are then in scratch.starts and scratch.ends, in the order in which they were drawn, and scratch.taken
    marks their tokens. A span that exceeds the rest of the target loses its last mask units. Fewer than `target` tokens
    are chosen only where no mask unit fits; where every mask unit is longer than the target, one is chosen.
    """
    rng, scratch, length_table = tables.rng, tables.scratch, tables.length_table
    candidates = 0  # positions in scratch.positions where a span may begin
    for i in range(size):
        scratch.taken[i] = 0
        # Overwritten unless the next line counts it: avoids a mispredicted branch.
        scratch.positions[candidates] = i
        candidates += scratch.free[i] & scratch.unit_start[i]
    count, chosen = 0, 0
    while chosen < target and candidates > 0:
        first, end = 0, -1
        if listed_below > 0 and chance(rng, listed_below):
            first = _draw_listed_span(rng, scratch, size, gap, target - chosen)
            if first >= 0:
                end = first + (scratch.unit_start[first] >> 1)
        units = draw_length(rng, length_table.shape[0] - 1, length_table) if end < 0 else 0
        while end < 0 and units > 0:
            # The length is drawn before the position: positions drawn first would favour short spans where text
            # is crowded.
            for _ in range(POSITIONS_TRIED):
                first = scratch.positions[below(rng, candidates)]
                end = _span_end(scratch, first, units, size, gap, target - chosen)
                if end >= 0:
                    break
            # Halved instead of drawn again, so that the loop ends where free text is in short stretches.
            units >>= 1
        if end < 0:  # try every position, from a random one on
            first_tried = below(rng, candidates)
            # The first unit may exceed the target: every Example has something to predict.
            budget = target - chosen if count > 0 else size
            for i in range(candidates):
                first = scratch.positions[(first_tried + i) % candidates]
                end = _span_end(scratch, first, 1, size, gap, budget)
                if end >= 0:
                    break
        if end < 0:
            break
        for i in range(first, end):
            scratch.taken[i] = 1
            scratch.free[i] = 0
        scratch.starts[count] = first
        scratch.ends[count] = end
        count += 1
        chosen += end - first
    return count


def check_corruption(section: str, mask_token_prob: float, random_token_prob: float) -> None:
    """Raise ConfigError if the probabilities of [MASK] and of a random token exceed 1 together."""
    check(
        mask_token_prob + random_token_prob <= 1.0 + 1e-9,
        f"{section}.mask_token_prob ({mask_token_prob}) + random_token_prob ({random_token_prob}) exceeds 1; lower "
        "one of them (the remaining tokens are kept).",
    )


def corruption_thresholds(mask_token_prob: float, random_token_prob: float) -> dict[str, np.uint64]:
    """The settings that `draw_corruption` compares 32 random bits with."""
    return {
        "mask_below": chance_threshold(mask_token_prob),
        "mask_or_random_below": chance_threshold(min(1.0, mask_token_prob + random_token_prob)),
    }


@compiled
def draw_corruption(rng, settings):
    """MASK, RANDOM_TOKEN or KEEP, by default with BERT's 80/10/10. Consumes one word of 32 bits.

    The thresholds are `mask_token_prob` and `mask_token_prob + random_token_prob`, see `corruption_thresholds`.
    """
    word = next_word(rng)
    if word < settings.mask_below:
        return MASK
    return RANDOM_TOKEN if word < settings.mask_or_random_below else KEEP


@compiled
def is_special(token, settings):
    """Whether a token is a special token, which never replaces a word."""
    return (
        token == settings.cls
        or token == settings.sep
        or token == settings.mask
        or token == settings.smask
        or token == settings.gmask
        or token == settings.sop
        or token == settings.eop
        or token == settings.eos
        or token == settings.pad
        or token == settings.unk
        or token == settings.dblock
    )


@compiled
def corrupted_token(rng, token, corruption, settings):
    """The input in place of a chosen token: [MASK], a uniform random token (not special), or itself."""
    if corruption == MASK:
        return settings.mask
    if corruption == KEEP:
        return token
    while True:
        other = below(rng, settings.vocabulary_size)
        if not is_special(other, settings):
            return other
