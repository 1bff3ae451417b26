"""Fill in the middle (arXiv:2207.14255): a causal model learns to write what stands between two texts.

With probability `rate` a chunk of n tokens is cut at two places, uniform over 0 .. n, into prefix, middle and suffix,
and written in another order, each segment after its token; [p], [s] and [m] are these tokens:

    [p] prefix [s] suffix [m] middle eos      the suffix after the prefix (PSM)
    [p] [s] suffix [m] prefix middle eos      the suffix before it: the middle goes on where the prefix ends (SPM)

Every token is predicted from those before it in the new order, as in `causal`, whose rows the other chunks have. The
cuts are between tokens. The sources cut between characters and tokenize each segment alone, which a dataset of tokens
cannot: a middle never begins within a token here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.batch_fields import ORD, POSITION_IDS, TARGETS, TOKENS
from data_utils.common.losses import MTP, Loss
from data_utils.common.random_streams import below, chance, chance_threshold
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.base import check_token
from data_utils.objectives.causal import Causal, CausalConfig
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    predict_range,
)
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary

# Setting -> the role of the special token that is used where the setting is null.
_ROLES = {"prefix_token": "cls", "suffix_token": "sep", "middle_token": "mask"}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("fill_in_middle")
class FillInMiddleConfig(CausalConfig):
    """How often chunks are cut, the ids of the three tokens, and the token before a text."""

    rate: float = fraction(
        0.5,
        "fraction of the texts that are cut in three and reordered; the others are as in causal",
    )
    suffix_first_rate: float = fraction(0.5, "fraction of the cut texts that start with the suffix (SPM)")
    prefix_token: int | None = setting(None, "id of the token before a prefix; null = [CLS]", at_least=0)
    suffix_token: int | None = setting(None, "id of the token before a suffix; null = [SEP]", at_least=0)
    middle_token: int | None = setting(None, "id of the token before a middle; null = [MASK]", at_least=0)

    def __post_init__(self) -> None:
        tokens = [token for name in _ROLES if (token := getattr(self, name)) is not None]
        check(
            len(set(tokens)) == len(tokens),
            f"fill_in_middle.prefix_token, suffix_token and middle_token are {tokens}; give each a different id.",
        )

    @property
    def needed_roles(self) -> tuple[str, ...]:  # type: ignore[override]
        roles = [role for name, role in _ROLES.items() if getattr(self, name) is None]
        return tuple(dict.fromkeys([*roles, *(("cls",) if self.begin == "cls" else ())]))

    @property
    def overhead(self) -> int:
        """The three tokens."""
        return 3

    def check_vocabulary_size(self, size: int) -> None:
        for name in _ROLES:
            check_token(f"fill_in_middle.{name}", getattr(self, name), size)

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        check(
            self.begin != "cls" or self.prefix_token is not None,
            "fill_in_middle.begin is cls, which is also the prefix token; set prefix_token to another id.",
        )


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, rng = chunk.text, chunk.offset, tables.rng
    size = maskable_length(text, settings)  # without the eos at its end
    end = offset + len(text)
    # The reordered text is written as targets; the inputs below are the same tokens, one position later.
    if chance(rng, settings.cut_below):
        first, last = below(rng, size + 1), below(rng, size + 1)
        if first > last:
            first, last = last, first
        end += 3
        at = offset
        row[TARGETS, at] = settings.prefix_id
        at += 1
        is_suffix_first = chance(rng, settings.suffix_first_below)
        if not is_suffix_first:
            copy_range(row[TARGETS], at, at + first, text, 0)
            at += first
        row[TARGETS, at] = settings.suffix_id
        copy_range(row[TARGETS], at + 1, at + 1 + size - last, text, last)
        at += 1 + size - last
        row[TARGETS, at] = settings.middle_id
        at += 1
        if is_suffix_first:
            copy_range(row[TARGETS], at, at + first, text, 0)
            at += first
        copy_range(row[TARGETS], at, at + last - first, text, first)
        at += last - first
        copy_range(row[TARGETS], at, end, text, size)
    else:
        copy_range(row[TARGETS], offset, end, text, 0)
    if settings.begin >= 0:
        row[TOKENS, offset] = settings.begin
        copy_range(row[TOKENS], offset + 1, end, row[TARGETS], offset)
        predict_range(row, offset, end, row[TARGETS], offset)
    else:
        copy_range(row[TOKENS], offset, end, row[TARGETS], offset)
        predict_range(row, offset, end - 1, row[TARGETS], offset + 1)
        row[TARGETS, end - 1] = 0
    count_up(row[POSITION_IDS], offset, end, 0)
    count_up(row[ORD], offset, end, 0)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class FillInMiddle(Causal):
    name = "fill_in_middle"
    config_class = FillInMiddleConfig
    losses = (Loss("fill_in_middle", 24), MTP)
    entry = staticmethod(_fill_rows)

    def values(self) -> dict[str, Any]:
        ids = {}
        for name, role in _ROLES.items():
            token = getattr(self.config, name)
            ids[f"{name.removesuffix('_token')}_id"] = int(
                getattr(self.vocabulary.special, role) if token is None else token
            )
        return {
            **super().values(),
            **ids,
            "cut_below": chance_threshold(self.config.rate),
            "suffix_first_below": chance_threshold(self.config.suffix_first_rate),
        }
