"""XLNet (arXiv:1906.08237): permutation language modelling with a content and a query stream.

The text is cut in two halves, each with its own order; the second half sees all of the first. The second half is two
texts, `A [SEP] B [SEP] [CLS]`; B continues A, or with probability 1/2 is exchanged for the B of another chunk of the
window (pairs.py). In each half 1/6 of the tokens are targets (K = 6), chosen as n-grams of up to 5 tokens, n with
probability ~ 1/n, in windows of K n tokens.

The other tokens come first in the order, and the targets follow in random order. SEP and CLS have random ranks among
the targets: they are seen by what comes later, and are not predicted. The query stream has a token for each target:
[MASK] at the target's position, which sees what precedes the target in the order and predicts it. XLNet's own model
(`model.relative: xlnet`) begins these rows from one learned vector, the paper's w, instead of [MASK]'s embedding.

Segments are 0 for the first half and A, 1 for B, 2 for CLS; a SEP has the segment of the text before it.

The first `memory_length` tokens of a chunk are the memory of the rest, as in XLNet's recurrence over segments: they see
each other, are seen by all later tokens, predict nothing, have segment 0, and are read without a gradient
(megatron_lite/transformer/transformer.py). The row described above follows at the next positions. A chunk shorter than
2 * `memory_length` has no memory, so at least half of every text is trained.

Differences: in a window of one chunk B always continues A. The memory is the text before in the same sample, read with
the present weights in both directions; XLNet keeps what it computed one step before, in the orders drawn there. So a
sample needs no other one, and training sees memories as reading long texts does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, chance, chance_threshold, seed_rng, shuffle
from data_utils.common.settings import check, checked, setting
from data_utils.objectives.base import RowSizes
from data_utils.objectives.compiled import (
    ENDS,
    FREE,
    POSITIONS,
    STARTS,
    TAKEN,
    begin_row,
    compiled,
    copy_range,
    count_up,
    draw_length,
    entry_point,
    inlined,
    length_in_row,
    mark_document,
    predict,
    put,
    set_range,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.pairs import (
    A_END,
    B_END,
    CUSTOM,
    WRONG,
    A,
    B,
    PairedRows,
    exchange_second_texts,
    split_point,
)
from data_utils.objectives.registry import register

LENGTH = CUSTOM  # column of a pair: tokens of the chunk after its memory


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("xlnet")
class XlnetConfig(RowSizes):
    """Settings of the targets and their n-grams, the factorisation orders of a chunk, and its memory."""

    segments = 3
    needed_roles = ("cls", "sep", "mask")

    tokens_per_target: int = setting(6, "Predict one in this many tokens (K in the paper).", at_least=1)
    max_ngram: int = setting(
        5,
        "Longest n-gram of targets, in tokens; n is drawn with probability proportional to 1/n.",
        at_least=1,
    )
    orders: int = setting(
        2,
        "number of equal sections of a text, each with its own factorization order; a section sees the "
        "sections before it",
        at_least=1,
    )
    two_texts: bool = setting(
        True, "End a sample with `A SEP B SEP CLS`, as in XLNet's pretraining; false = `text SEP CLS`."
    )
    memory_length: int = setting(
        0,
        "number of tokens at the start of a text that are the memory of the following ones: read without loss and "
        "gradient (Transformer-XL's recurrence), in texts at least twice as long; needs model.relative xlnet; 0 = "
        "none",
        at_least=0,
    )

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless the rest is as a memory needs it."""
        if not self.memory_length or config.task is not None:
            return
        model, length = config.model, self.memory_length
        check(
            2 * length <= config.data.sequence_length,
            f"xlnet.memory_length is {length}, but only texts of twice that length have a memory, and "
            f"data.sequence_length is {config.data.sequence_length}; set that to {2 * length} or more, or "
            "memory_length to 0.",
        )
        check(
            model.relative == "xlnet" and model.positions != "learned_blocks",
            f"xlnet.memory_length is {length} with model.relative {model.relative} and model.positions "
            f"{model.positions}, but only XLNet's model has a memory; set model.system to xlnet, or memory_length to "
            "0.",
        )

    @property
    def growth(self) -> float:
        """Row tokens per token of text: every target adds a query token."""
        return 1.0 + 1.0 / self.tokens_per_target

    @property
    def loss_share(self) -> float:
        """Share of targets among the tokens outside of the memory, whose size depends on the documents."""
        return 1.0 / (self.tokens_per_target + 1)

    @property
    def length_weights(self) -> np.ndarray:
        return 1.0 / np.arange(1, self.max_ngram + 1)

    @property
    def overhead(self) -> int:
        """CLS, each SEP, and the target that even the shortest chunk has."""
        return 4 if self.two_texts else 3

    def max_position_needed(self, sequence_length: int) -> int:
        """Positions count the text with SEP and CLS."""
        return sequence_length + self.overhead - 2


@compiled
def _draw_targets(rng, scratch, size, goal, length_table, settings):
    """Mark `goal` of `size` tokens in scratch[TAKEN]: n-grams in windows, then single tokens."""
    for i in range(size):
        scratch[TAKEN, i] = 0
    uncovered = size - goal * settings.tokens_per_target  # tokens that no window covers
    window_start, chosen = 0, 0
    if uncovered > 0:
        window_start += below(rng, uncovered + 1)
    while chosen < goal:
        longest = min(
            length_table.shape[0] - 1, goal - chosen, (size - window_start) // settings.tokens_per_target
        )
        if longest < 1:
            break
        ngram = draw_length(rng, longest, length_table)
        window = ngram * settings.tokens_per_target
        # An n-gram anywhere in a window of n * K tokens, as in XLNet's code, so that targets are spread evenly.
        begin = window_start + below(rng, window - ngram + 1)
        for i in range(begin, begin + ngram):
            scratch[TAKEN, i] = 1
        chosen += ngram
        window_start += window
    # Windows that no longer fit leave a few targets, which are drawn as single tokens.
    while chosen < goal:
        i = below(rng, size)
        if not scratch[TAKEN, i]:
            scratch[TAKEN, i] = 1
            chosen += 1


@compiled
def _write_text(row, offset, position, text, first, end, order, segment, scratch, candidates, settings):
    """Write text[first:end] at `position` of the Example, and the positions that may be targets to scratch[FREE].

    Args: candidates: the number of positions there before. Returns: the number after.
    """
    for i in range(first, end):
        at = position + i - first
        put(row, offset + at, text[i], at, order)
        row[SEGMENT_IDS, offset + at] = segment
        scratch[FREE, candidates] = at  # overwritten unless the next line counts it
        candidates += text[i] != settings.eos
    return candidates


@compiled
def _write_separator(row, offset, position, token, segment, scratch, separators):
    """Write SEP or CLS at `position` of the Example, and the position to scratch[ENDS]. Returns the number there."""
    put(row, offset + position, token, position, 0)
    row[SEGMENT_IDS, offset + position] = segment
    scratch[ENDS, separators] = position
    return separators + 1


@compiled
def _write_queries(row, offset, query, order, targets, separators, rng, scratch, settings):
    """Draw the order of a section's targets and separators, and write the queries of the targets.

    Their positions are in scratch[POSITIONS, :targets] and scratch[ENDS, :separators].
    """
    for i in range(targets + separators):
        scratch[STARTS, i] = i + 1
    shuffle(rng, scratch[STARTS], targets + separators)
    for i in range(separators):
        # Separators have a rank in the order like targets, but are never predicted.
        row[ORD, offset + scratch[ENDS, i]] = order + scratch[STARTS, targets + i]
    for i in range(targets):
        position = scratch[POSITIONS, i]
        rank = order + scratch[STARTS, i]
        row[ORD, offset + position] = rank
        # Queries are further tokens of the row: a negative order sees what is before its rank and is seen by
        # nobody, so that one attention serves contents and queries.
        put(row, query + i, settings.mask, position, -rank)
        row[SEGMENT_IDS, query + i] = row[SEGMENT_IDS, offset + position]
        predict(row, query + i, row[TOKENS, offset + position])


@inlined
def _fill_chunk(row, offset, document, text, start, pair, goal, rng, scratch, length_table, settings):
    """Write the Example of a chunk with at most `goal` targets at `offset`. Returns its end."""
    second, memory = pair[B_END] - pair[B], pair[A] - start
    # The memory of the following tokens, which block_position_ids names for the model.
    copy_range(row, TOKENS, offset, offset + memory, text, start)
    count_up(row, POSITION_IDS, offset, offset + memory, 0)
    set_range(row, BLOCK_POSITION_IDS, offset, offset + memory, 1)
    query = offset + memory + pair[A_END] - pair[A] + second + (3 if second > 0 else 2)
    # A memory has order 0 alone: it sees nothing that follows it.
    position, done, order, first = memory, 0, min(memory, 1), pair[A]
    for section in range(settings.orders):
        is_last = section == settings.orders - 1
        end = pair[A_END] if is_last else pair[A] + pair[LENGTH] * (section + 1) // settings.orders
        candidates = _write_text(row, offset, position, text, first, end, order, 0, scratch, 0, settings)
        position += end - first
        first = end
        separators = 0
        if is_last:
            separators = _write_separator(row, offset, position, settings.sep, 0, scratch, separators)
            position += 1
            if second > 0:
                candidates = _write_text(
                    row, offset, position, text, pair[B], pair[B_END], order, 1, scratch, candidates, settings
                )
                position += second
                separators = _write_separator(row, offset, position, settings.sep, 1, scratch, separators)
                position += 1
            separators = _write_separator(row, offset, position, settings.cls, 2, scratch, separators)
        # Rounded up of what is left, so that the sections together have exactly `goal` targets.
        section_goal = (goal * (section + 1) + settings.orders - 1) // settings.orders - done
        _draw_targets(rng, scratch, candidates, min(section_goal, candidates), length_table, settings)
        targets = 0
        for i in range(candidates):
            if scratch[TAKEN, i]:
                scratch[POSITIONS, targets] = scratch[FREE, i]
                targets += 1
        _write_queries(row, offset, query, order, targets, separators, rng, scratch, settings)
        query += targets
        done += targets
        order += targets + 1  # separators are in the last section only
    mark_document(row, offset, query, document, settings.loss)
    return query


@inlined
def _plan_pairs(pairs, text, lengths, start, sample, first_chunk, rng, scratch, sentence_end, settings):
    """Cut every chunk of a sample into its memory and A, and the last section of A in two.

    Returns: the number of targets that fit their row.
    """
    # One target that each chunk has in any case, and what growth leaves each.
    max_targets = len(lengths)
    for number in range(len(lengths)):
        max_targets += np.int64(settings.growth * lengths[number] + 1e-9) - lengths[number]
        length = length_in_row(text, start, lengths[number], settings)
        end = start + length
        # At most half of a text goes without targets. The memory is of the sample's own text, so that samples
        # stay functions of their numbers; the step before is not needed.
        memory = settings.memory_length if length >= 2 * settings.memory_length else 0
        length -= memory
        # B is cut from the last section only: the sections before it are A's.
        first = end - length + length * (settings.orders - 1) // settings.orders
        split = end
        pair = pairs[number]
        pair[WRONG] = False
        if settings.two_texts and end - first > 1:
            seed_rng(rng, settings.key, sample, first_chunk + number, 0)
            split = first + split_point(rng, scratch, text, first, end - first, sentence_end)
            pair[WRONG] = chance(rng, settings.wrong_below)
        pair[LENGTH] = length
        pair[A], pair[A_END], pair[B], pair[B_END] = end - length, split, split, end
        start += lengths[number]
    exchange_second_texts(pairs, len(lengths))
    return max_targets


@entry_point
def _fill_rows(batch, chunks, tables, pairs, sentence_end, record):
    text, _, chunk_lengths, chunks_per_sample, sample_indices, first_chunk = chunks
    length_table, rng, scratch = tables
    settings = record[0]
    chunk, start = 0, 0
    for i in range(len(batch)):
        row, offset, sample = batch[i], 0, sample_indices[i]
        begin_row(row, settings.pad)
        lengths = chunk_lengths[chunk : chunk + chunks_per_sample[i]]
        max_targets = _plan_pairs(
            pairs, text, lengths, start, sample, first_chunk, rng, scratch, sentence_end, settings
        )
        for number in range(len(lengths)):
            pair, document = pairs[number], first_chunk + number
            length = pair[A_END] - pair[A] + pair[B_END] - pair[B]
            # The bound is of the chunks as they were cut, and B may be a longer one's: each later chunk keeps a target.
            goal = min(
                max(1, length // settings.tokens_per_target), max_targets - (len(lengths) - number - 1)
            )
            max_targets -= goal
            if length > 0:
                seed_rng(rng, settings.key, sample, document, 1)
                offset = _fill_chunk(
                    row, offset, document, text, start, pair, goal, rng, scratch, length_table, settings
                )
            start += lengths[number]
        chunk += len(lengths)


@register
class Xlnet(PairedRows):
    name = "xlnet"
    config_class = XlnetConfig
    losses = (Loss("permutation", 20),)
    text_format = TextFormat("bert")
    entry = staticmethod(_fill_rows)
    ends_with_sep = True

    def values(self) -> dict[str, Any]:
        return super().values() | {"wrong_below": chance_threshold(0.5)}
