"""T5's span corruption (arXiv:1910.10683), for an encoder and a decoder or one stack.

Part A (order 0) is the text with every noise span replaced by a sentinel. Part B (order 1, 2, ...) is
`sentinel span sentinel span ... eos` after a `sop`, or after [PAD] in a vocabulary without `sop`, such as T5's. The
numbers are T5's: round(0.15 n) noise tokens in round(noise / 3) spans. Noise and the other tokens are each divided into
that many segments, every division equally likely; the segments alternate, and the other tokens come first. Positions of
part B count from 0 again and its segment id is 1, as in a separate text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from data_utils.common.batch_fields import (
    ONE_AS_INT32,
    ORD,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.base import RowObjective, RowSizes, check_token
from data_utils.objectives.compiled import (
    compiled,
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    set_range,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class SentinelConfig(RowSizes):
    """The ids of the sentinels."""

    section_key: ClassVar[str]

    sentinel_first: int | None = setting(
        None,
        "Id of the first sentinel; sentinel k has id sentinel_first - k, as in T5. null = the vocabulary's "
        "<extra_id_0>, <extra_id_1>, ..., which tokenizer.added_tokens=t5 adds.",
        at_least=0,
    )
    sentinels_ascend: bool = setting(False, "Sentinel k has id sentinel_first + k instead.")
    sentinel_count: int = setting(
        100, "Number of sentinels; further spans start again with the first.", at_least=1
    )

    needed_roles = ("eos",)

    def __post_init__(self) -> None:
        first, count = self.sentinel_first, self.sentinel_count
        check(
            first is None or self.sentinels_ascend or first >= count - 1,
            f"{self.section_key}.sentinel_first ({first}) must be at least sentinel_count - 1 ({count - 1}): ids "
            "count down unless sentinels_ascend is true; raise it.",
        )
        check(
            first is not None or not self.sentinels_ascend,
            f"{self.section_key}.sentinels_ascend is true, but sentinel_first is null; set it to the id of the "
            "first sentinel.",
        )

    def sentinels(self, vocabulary: Vocabulary) -> tuple[int, int, int]:
        """Id of the first one, step to the next, and number. Raises: ConfigError."""
        first, count, known = self.sentinel_first, self.sentinel_count, vocabulary.sentinels
        if first is not None:
            return first, 1 if self.sentinels_ascend else -1, count
        check(
            bool(known),
            f"{self.section_key} needs the sentinels <extra_id_0>, <extra_id_1>, ..., which the tokenizer does not "
            "have; set tokenizer.added_tokens=t5 and rebuild the corpora with --added-tokens t5, or set "
            f"{self.section_key}.sentinel_first to the id of the first one.",
        )
        step = known[1] - known[0] if len(known) > 1 else -1
        check(
            step in (-1, 1) and known == tuple(range(known[0], known[0] + step * len(known), step)),
            f"the ids of <extra_id_0>, <extra_id_1>, ... ({', '.join(map(str, known[:3]))}, ...) do not count up or "
            f"down by 1; set {self.section_key}.sentinel_first and sentinel_count to ids that do so.",
        )
        return known[0], step, min(count, len(known))

    @property
    def has_target(self) -> bool:
        return True

    @property
    def overhead(self) -> int:
        """sop, and what rounding adds to the number of spans."""
        return 3

    def max_position_needed(self, sequence_length: int) -> int:
        """Neither part is longer than the text and its sop."""
        return sequence_length

    def check_vocabulary_size(self, size: int) -> None:
        last = self.sentinel_first
        if last is not None and self.sentinels_ascend:
            last += self.sentinel_count - 1
        check_token(f"{self.section_key}.sentinel_first", last, size)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("t5")
class T5Config(SentinelConfig):
    """Settings of the noise spans."""

    noise_ratio: float = fraction(0.15, "Fraction of the tokens that is noise.")
    mean_span_length: float = setting(3.0, "Mean length of a noise span, in tokens.", at_least=1)

    @property
    def growth(self) -> float:
        """Row tokens per token of text: every noise span adds two sentinels."""
        return 1.0 + 2.0 * self.noise_ratio / self.mean_span_length

    @property
    def loss_share(self) -> float:
        """Share of predicted tokens: the noise, and a sentinel for each of its spans."""
        return self.noise_ratio * (1.0 + 1.0 / self.mean_span_length) / self.growth


@compiled
def _divide(rng, lengths, total, count):
    """Divide `total` into `count` lengths >= 1, every division equally likely."""
    boundaries, cuts = total - 1, count - 1
    part, length = 0, 1
    # Selection sampling: each of the total - 1 boundaries is a cut with probability cuts / remaining boundaries.
    for _ in range(total - 1):  # does a part end between this token and the next?
        if below(rng, boundaries) < cuts:
            lengths[part] = length
            part += 1
            length = 0
            cuts -= 1
        length += 1
        boundaries -= 1
    lengths[part] = length


@compiled
def _sentinel(span, settings):
    return settings.sentinel_first + settings.sentinel_step * (span % settings.sentinel_count)


@inlined
def _write_target(row, part_b, text, spans, scratch, settings):
    """Each sentinel with its span, then eos, all shifted by sop. Returns the end."""
    at, source = part_b, 0
    for span in range(spans):
        source += scratch.text_lengths[span]
        row[TARGETS, at] = _sentinel(span, settings)
        for i in range(scratch.span_lengths[span]):
            row[TARGETS, at + 1 + i] = text[source + i]
        at += 1 + scratch.span_lengths[span]
        source += scratch.span_lengths[span]
    row[TARGETS, at] = settings.eos
    set_range(row[WEIGHTS], part_b, at + 1, ONE_AS_INT32)
    write_decoder_inputs(row, part_b, at + 1, settings)
    return at + 1


@compiled
def write_decoder_inputs(row, part_b, end, settings):
    """Write the inputs of part B, whose targets are there: sop, then each target one position later."""
    row[TOKENS, part_b] = settings.sop
    # Inputs are the targets shifted right by one.
    copy_range(row[TOKENS], part_b + 1, end, row[TARGETS], part_b)
    count_up(row[POSITION_IDS], part_b, end, 0)
    count_up(row[ORD], part_b, end, 1)
    set_range(row[SEGMENT_IDS], part_b, end, 1)


@inlined
def corrupt(row, chunk, at, tables, settings, noise_ratio, mean_span_length):
    """Write parts A and B of a chunk: A's text begins at `at`, its positions count from the chunk's offset. Returns
    the end.
    """
    text, scratch = chunk.text, tables.scratch
    maskable = maskable_length(text, settings)
    # At least one token is noise and one is not; a text of one token has no target.
    noise = min(max(1, int(noise_ratio * maskable + 0.5)), maskable - 1)
    spans = 0
    if noise > 0:
        spans = min(max(1, int(noise / mean_span_length + 0.5)), noise, maskable - noise)
        _divide(tables.rng, scratch.text_lengths, maskable - noise, spans)
        _divide(tables.rng, scratch.span_lengths, noise, spans)
    source = 0
    for span in range(spans):
        sentinel_at = at + scratch.text_lengths[span]
        copy_range(row[TOKENS], at, sentinel_at, text, source)
        row[TOKENS, sentinel_at] = _sentinel(span, settings)
        source += scratch.text_lengths[span] + scratch.span_lengths[span]
        at = sentinel_at + 1
    part_b = end = at + len(text) - source
    copy_range(row[TOKENS], at, part_b, text, source)
    count_up(row[POSITION_IDS], chunk.offset, part_b, 0)
    if spans > 0:
        end = _write_target(row, part_b, text, spans, scratch, settings)
    return end


@inlined
def _fill_chunk(row, chunk, tables, settings):
    end = corrupt(row, chunk, chunk.offset, tables, settings, settings.noise_ratio, settings.mean_span_length)
    mark_document(row, chunk.offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class T5(RowObjective):
    name = "t5"
    config_class = T5Config
    losses = (Loss("span_corruption", 15),)
    text_format = TextFormat(
        "encoder_decoder",
        "encoder_decoder",
        after=("eos",),
        start=("sop", "pad"),
        ends=("eos",),
        segments=(0, 1),
    )
    entry = staticmethod(_fill_rows)

    def values(self) -> dict[str, Any]:
        special = self.vocabulary.special
        first, step, count = self.config.sentinels(self.vocabulary)
        return super().values() | {
            "sop": int(special.pad if "sop" in self.vocabulary.lacking else special.sop),
            "sentinel_first": first,
            "sentinel_step": step,
            "sentinel_count": count,
        }
