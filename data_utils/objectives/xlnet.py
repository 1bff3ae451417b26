"""XLNet (arXiv:1906.08237): permutation language modelling with a content and a query stream.

The text is cut in two halves, each with its own order; the second half sees all of the first. The second half is two
texts, `A [SEP] B [SEP] [CLS]`; B continues A, or with probability 1/2 is exchanged for the B of another chunk of the
window (cut_pairs.py). In each half 1/6 of the tokens are targets (K = 6), chosen as n-grams of up to 5 tokens, n with
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
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, chance, chance_threshold, seed_rng, shuffle
from data_utils.common.settings import check, checked, setting
from data_utils.objectives.base import RowSizes
from data_utils.objectives.compiled import (
    Chunks,
    Tables,
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
from data_utils.objectives.cut_pairs import PairedRows, exchange_second_texts, split_point
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.registry import register


class XlnetScratch(NamedTuple):
    """Work space for one chunk: int64 [row_length + 2] each."""

    positions: np.ndarray  # see `split_point`
    candidates: np.ndarray  # positions of a section that may be targets
    taken: np.ndarray  # 1 where a candidate is a target
    targets: np.ndarray  # their positions
    separators: np.ndarray  # positions of SEP and CLS
    ranks: np.ndarray  # of targets, then of separators, in the order


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
def _draw_targets(taken, size, goal, rng, length_table, settings):
    """Mark `goal` of `size` tokens in `taken`: n-grams in windows, then single tokens."""
    for i in range(size):
        taken[i] = 0
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
        first = window_start + below(rng, window - ngram + 1)
        for i in range(first, first + ngram):
            taken[i] = 1
        chosen += ngram
        window_start += window
    # Windows that no longer fit leave a few targets, which are drawn as single tokens.
    while chosen < goal:
        i = below(rng, size)
        if not taken[i]:
            taken[i] = 1
            chosen += 1


@compiled
def _write_text(row, offset, position, text, order, segment, candidates, count, settings):
    """Write a text at `position` of the Example, and the positions that may be targets to candidates[count:].

    Returns: their number with those before.
    """
    for i in range(len(text)):
        at = position + i
        put(row, offset + at, text[i], at, order)
        row[SEGMENT_IDS, offset + at] = segment
        candidates[count] = at  # overwritten unless the next line counts it
        count += text[i] != settings.eos
    return count


@compiled
def _write_separator(row, offset, position, token, segment, separators, count):
    """Write SEP or CLS at `position` of the Example, and the position to separators[count]. Returns count + 1."""
    put(row, offset + position, token, position, 0)
    row[SEGMENT_IDS, offset + position] = segment
    separators[count] = position
    return count + 1


@compiled
def _write_queries(row, offset, query, order, targets, separators, rng, scratch, settings):
    """Draw the order of a section's targets and separators, and write the queries of the targets.

    Args: targets, separators: the numbers of those in the scratch.
    """
    for i in range(targets + separators):
        scratch.ranks[i] = i + 1
    shuffle(rng, scratch.ranks, targets + separators)
    for i in range(separators):
        # Separators have a rank in the order like targets, but are never predicted.
        row[ORD, offset + scratch.separators[i]] = order + scratch.ranks[targets + i]
    for i in range(targets):
        position = scratch.targets[i]
        rank = order + scratch.ranks[i]
        row[ORD, offset + position] = rank
        # Queries are further tokens of the row: a negative order sees what is before its rank and is seen by
        # nobody, so that one attention serves contents and queries.
        put(row, query + i, settings.mask, position, -rank)
        row[SEGMENT_IDS, query + i] = row[SEGMENT_IDS, offset + position]
        predict(row, query + i, row[TOKENS, offset + position])


@inlined
def _fill_chunk(row, offset, document, tokens, start, pair, goal, tables, settings):
    """Write the Example of a chunk with at most `goal` targets at `offset`. Returns its end.

    Args: tokens: the text of the batch. start: where the chunk begins there.
    """
    rng, scratch = tables.rng, tables.scratch
    second, memory = pair.b_end - pair.b_start, pair.a_start - start
    length = pair.length
    # The memory of the following tokens, which block_position_ids names for the model.
    copy_range(row[TOKENS], offset, offset + memory, tokens, start)
    count_up(row[POSITION_IDS], offset, offset + memory, 0)
    set_range(row[BLOCK_POSITION_IDS], offset, offset + memory, 1)
    query = offset + memory + pair.a_end - pair.a_start + second + (3 if second > 0 else 2)
    # A memory has order 0 alone: it sees nothing that follows it.
    position, done, order, first = memory, 0, min(memory, 1), pair.a_start
    for section in range(settings.orders):
        is_last = section == settings.orders - 1
        end = pair.a_end if is_last else pair.a_start + length * (section + 1) // settings.orders
        text = tokens[first:end]
        candidates = _write_text(row, offset, position, text, order, 0, scratch.candidates, 0, settings)
        position += end - first
        first = end
        separators = 0
        if is_last:
            separators = _write_separator(
                row, offset, position, settings.sep, 0, scratch.separators, separators
            )
            position += 1
            if second > 0:
                text = tokens[pair.b_start : pair.b_end]
                candidates = _write_text(
                    row, offset, position, text, order, 1, scratch.candidates, candidates, settings
                )
                position += second
                separators = _write_separator(
                    row, offset, position, settings.sep, 1, scratch.separators, separators
                )
                position += 1
            separators = _write_separator(
                row, offset, position, settings.cls, 2, scratch.separators, separators
            )
        # Rounded up of what is left, so that the sections together have exactly `goal` targets.
        section_goal = (goal * (section + 1) + settings.orders - 1) // settings.orders - done
        section_goal = min(section_goal, candidates)
        _draw_targets(scratch.taken, candidates, section_goal, rng, tables.length_table, settings)
        targets = 0
        for i in range(candidates):
            if scratch.taken[i]:
                scratch.targets[targets] = scratch.candidates[i]
                targets += 1
        _write_queries(row, offset, query, order, targets, separators, rng, scratch, settings)
        query += targets
        done += targets
        order += targets + 1  # separators are in the last section only
    mark_document(row, offset, query, document, settings.loss)
    return query


@inlined
def _plan_pairs(pairs, chunks, first_chunk, count, start, sample, tables, settings):
    """Cut every chunk of a sample into its memory and A, and the last section of A in two.

    Args: first_chunk, count: of the sample. start: where its text begins.
    Returns: the number of targets that fit their row.
    """
    rng = tables.rng
    # One target that each chunk has in any case, and what growth leaves each.
    max_targets = count
    for number in range(count):
        whole_length = chunks.lengths[first_chunk + number]
        max_targets += np.int64(settings.growth * whole_length + 1e-9) - whole_length
        length = length_in_row(chunks.tokens[start : start + whole_length], settings)
        end = start + length
        # At most half of a text goes without targets. The memory is of the sample's own text, so that samples
        # stay functions of their numbers; the step before is not needed.
        memory = settings.memory_length if length >= 2 * settings.memory_length else 0
        length -= memory
        # B is cut from the last section only: the sections before it are A's.
        first = end - length + length * (settings.orders - 1) // settings.orders
        split = end
        pair = pairs[number]
        pair.is_wrong = False
        if settings.two_texts and end - first > 1:
            seed_rng(rng, settings.key, sample, chunks.first_document + number, 0)
            last_section = chunks.tokens[first:end]
            split = first + split_point(rng, tables.scratch.positions, last_section, tables.sentence_end)
            pair.is_wrong = chance(rng, settings.wrong_below)
        pair.length = length
        pair.a_start, pair.a_end, pair.b_start, pair.b_end = end - length, split, split, end
        start += whole_length
    exchange_second_texts(pairs, count)
    return max_targets


@inlined
def _with_scratch(tables):
    """As in compiled.py, with an XlnetScratch."""
    length_table, rng, lines, sentence_end = tables
    scratch = XlnetScratch(lines[0], lines[1], lines[2], lines[3], lines[4], lines[5])
    return Tables(length_table, rng, scratch, sentence_end)


@entry_point
def _fill_rows(batch, chunks, tables, pairs, record):
    settings, chunks, tables = record[0], Chunks(*chunks), _with_scratch(tables)
    first_chunk, start = 0, 0  # of the sample, and where its text begins
    for i in range(len(batch)):
        row, offset, sample, count = batch[i], 0, chunks.samples[i], chunks.counts[i]
        begin_row(row, settings.pad)
        max_targets = _plan_pairs(pairs, chunks, first_chunk, count, start, sample, tables, settings)
        for number in range(count):
            pair, document = pairs[number], chunks.first_document + number
            length = pair.a_end - pair.a_start + pair.b_end - pair.b_start
            # The bound is of the chunks as they were cut, and B may be a longer one's: each later chunk keeps a target.
            goal = min(max(1, length // settings.tokens_per_target), max_targets - (count - number - 1))
            max_targets -= goal
            if length > 0:
                seed_rng(tables.rng, settings.key, sample, document, 1)
                offset = _fill_chunk(
                    row, offset, document, chunks.tokens, start, pair, goal, tables, settings
                )
            start += chunks.lengths[first_chunk + number]
        first_chunk += count


@register
class Xlnet(PairedRows):
    name = "xlnet"
    config_class = XlnetConfig
    losses = (Loss("permutation", 20),)
    text_format = TextFormat("bert")
    entry = staticmethod(_fill_rows)
    scratch_type = XlnetScratch
    ends_with_sep = True

    def values(self) -> dict[str, Any]:
        return super().values() | {"wrong_below": chance_threshold(0.5)}
