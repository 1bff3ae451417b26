"""MASS (arXiv:1905.02450): a fragment is masked in the context and predicted by part B.

The context is the text with one fragment of half its tokens corrupted 80/10/10 in place. The fragment has order -1, the
other tokens 0, and all share group 1: the context sees itself in full, part B sees only what is outside the fragment.
Part B has, for each token of the fragment, the token before it at that token's own position (the first one is CLS or a
token of the text), and predicts it, as in the authors' code. The fragment is at the head of the text with probability
0.2, at its tail with 0.2, and anywhere with 0.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.batch_fields import GRP, ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, chance_threshold, next_word
from data_utils.common.settings import check, checked, fraction
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    compiled,
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    predict_range,
    set_range,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masking import (
    check_corruption,
    corrupted_token,
    corruption_thresholds,
    draw_corruption,
)
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("mass")
class MassConfig(RowSizes):
    """The fragment: its length, its position, and what replaces it."""

    needed_roles = ("cls", "sep", "mask")

    fragment_ratio: float = fraction(0.5, "Length of the masked fragment as a fraction of the text.")
    head_prob: float = fraction(0.2, "Probability that the fragment is at the start of the text.")
    tail_prob: float = fraction(
        0.2, "Probability that the fragment is at the end of the text; otherwise it is anywhere."
    )
    mask_token_prob: float = fraction(0.8, "Probability that a token of the fragment becomes [MASK].")
    random_token_prob: float = fraction(
        0.1, "Probability that a token of the fragment becomes a random token; otherwise it is kept."
    )

    def __post_init__(self) -> None:
        check_corruption("mass", self.mask_token_prob, self.random_token_prob)
        check(
            self.head_prob + self.tail_prob <= 1.0 + 1e-9,
            f"mass.head_prob ({self.head_prob}) + tail_prob ({self.tail_prob}) exceeds 1; lower one of them (the "
            "remaining probability places the fragment anywhere).",
        )

    @property
    def growth(self) -> float:
        """Row tokens per token of text: the context and the fragment."""
        return 1.0 + self.fragment_ratio

    @property
    def has_target(self) -> bool:
        return True

    @property
    def loss_share(self) -> float:
        return self.fragment_ratio / self.growth

    @property
    def overhead(self) -> int:
        """CLS, SEP, and what rounding adds to the fragment."""
        return 3

    def max_position_needed(self, sequence_length: int) -> int:
        """Positions count the context."""
        return sequence_length + 1


@compiled
def _draw_start(rng, positions, settings):
    """Where the fragment starts, 0..positions - 1: the head, the tail or anywhere."""
    word = next_word(rng)
    if word < settings.head_below:
        return 0
    if word < settings.head_or_tail_below:
        return positions - 1
    return below(rng, positions)


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, rng = chunk.text, chunk.offset, tables.rng
    length = len(text)
    maskable = maskable_length(text, settings)
    size = min(max(1, int(settings.fragment_ratio * maskable + 0.5)), maskable)
    first = _draw_start(rng, maskable - size + 1, settings)
    begin, part_b = offset + 1, offset + 2 + length
    end = part_b + size
    row[TOKENS, offset] = settings.cls
    copy_range(row[TOKENS], begin, begin + length, text, 0)
    for i in range(first, first + size):
        row[TOKENS, begin + i] = corrupted_token(rng, text[i], draw_corruption(rng, settings), settings)
    row[TOKENS, part_b - 1] = settings.sep
    # Order -1 hides the fragment from part B; the context sees it all the same by its group.
    set_range(row[ORD], begin + first, begin + first + size, -1)
    count_up(row[POSITION_IDS], offset, part_b, 0)
    set_range(row[GRP], offset, part_b, 1)
    if size > 0:
        # The decoder begins with the token before the fragment, and at its position.
        row[TOKENS, part_b] = row[TOKENS, begin + first - 1]
    copy_range(row[TOKENS], part_b + 1, end, text, first)
    count_up(row[POSITION_IDS], part_b, end, first)
    count_up(row[ORD], part_b, end, 1)
    predict_range(row, part_b, end, text, first)
    set_range(row[SEGMENT_IDS], part_b, end, 1)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class Mass(RowObjective):
    name = "mass"
    config_class = MassConfig
    losses = (Loss("fragment", 17),)
    text_format = TextFormat(
        "encoder_decoder",
        "encoder_decoder",
        before=("cls",),
        after=("sep",),
        start=("cls",),
        ends=("sep", "eos"),
        segments=(0, 1),
        group=1,
    )
    entry = staticmethod(_fill_rows)
    ends_with_sep = True

    def values(self) -> dict[str, Any]:
        config = self.config
        return {
            **super().values(),
            **corruption_thresholds(config.mask_token_prob, config.random_token_prob),
            "head_below": chance_threshold(config.head_prob),
            "head_or_tail_below": chance_threshold(min(1.0, config.head_prob + config.tail_prob)),
        }
