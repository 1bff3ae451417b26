"""TSDAE (arXiv:2104.06979): most words of a text are deleted, and a decoder writes the text from one vector.

The encoder's tokens are the words that are left, with the special tokens of a text; they see each other by a common
group. All have order -1 but the last, of order 0: it is the only one that the decoder sees, and in its place the model
puts the vector of the text (megatron_lite/models/tsdae.py). The decoder's tokens are `sop text`, which predict
`text eos`; order 1, 2, ..., positions from 0. Each word is deleted by itself; where none would be left, one is.

Rows hold whole texts, as those of OPTIMUS do: a vector of a part of a text is that of another text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.batch_fields import GRP, ONE_AS_INT32, ORD, POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, chance, chance_threshold
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives import t5
from data_utils.objectives.base import RowObjective, WholeTextSizes
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    set_range,
)
from data_utils.objectives.contrastive import FORMS
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.own_model import require, require_alone
from data_utils.objectives.registry import register
from data_utils.objectives.t5 import write_decoder_inputs

_FORMS_READ = ("t5", "bart")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("tsdae")
class TsdaeConfig(WholeTextSizes):
    """What is deleted of a text, and how the encoder reads the rest."""

    deleted_ratio: float = fraction(0.6, "Probability that a word is deleted; one word is always left.")
    whole_words: bool = setting(True, "Delete whole words; false = tokens.")
    form: str = setting(
        "t5",
        "How a text is written for the encoder: t5 (x eos) or bart ([CLS] x eos). Where it is left out, as the run's "
        "other objective has it, or model.system.",
        one_of=tuple(FORMS),
    )

    model_module = "megatron_lite.models.tsdae"

    def __post_init__(self) -> None:
        # Most who come here have an encoder alone, and have set no form.
        check(
            self.form in _FORMS_READ,
            f"tsdae.form is {self.form}, but tsdae trains an encoder and a decoder that read texts as T5 or BART do; "
            "start from one of these, set tsdae.form to t5 or bart, or train an encoder by contrastive.",
        )

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless a decoder reads one vector of each text."""
        require_alone(config, "tsdae has rows of whole texts and stands", solves_tasks=True)
        require(config.data, "data", {"short_prob": 0.0}, "but samples of tsdae are rows of whole texts")
        check(
            config.model.decoder_layers > 0,
            "model.decoder_layers is 0, but tsdae needs a decoder that writes a text from its vector; start from a "
            "model with encoder and decoder, such as T5, or set model.decoder_layers.",
        )

    @property
    def reads_as(self) -> str:
        return self.form

    @property
    def needed_roles(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*map(str, FORMS[self.form].before), *FORMS[self.form].after)

    @property
    def has_target(self) -> bool:
        return True

    @property
    def loss_share(self) -> float:
        """Share of the decoder's tokens, which are the whole text."""
        return 1.0 / (2.0 - self.deleted_ratio)

    @property
    def overhead(self) -> int:
        """The special tokens of a text, and sop."""
        return len(self.needed_roles) + 1

    def max_position_needed(self, sequence_length: int) -> int:
        """Of eos in the encoder, where nothing is deleted."""
        return sequence_length + len(self.needed_roles) - 1

    @property
    def mask_units(self) -> str | None:
        return "words" if self.whole_words else None


@inlined
def _copy_kept(row, at, text, unit_start, rng, settings):
    """Write the words that are left of a text from `at` on. Returns the end."""
    units, is_kept, first = 0, False, at
    for i in range(len(text)):
        if i == 0 or unit_start[i]:
            units += 1
            is_kept = not chance(rng, settings.deleted_below)
        if is_kept:
            row[TOKENS, at] = text[i]
            at += 1
    if at == first and units > 0:
        left, unit = below(rng, units), -1
        for i in range(len(text)):
            unit += i == 0 or unit_start[i]
            if unit == left:
                row[TOKENS, at] = text[i]
                at += 1
    return at


@inlined
def _fill_chunk(row, chunk, tables, settings):
    offset, length = chunk.offset, maskable_length(chunk.text, settings)
    text, at = chunk.text[:length], offset
    if settings.has_cls:
        row[TOKENS, at] = settings.cls
        at += 1
    at = _copy_kept(row, at, text, chunk.unit_start, tables.rng, settings)
    row[TOKENS, at] = settings.eos
    part_b = at + 1
    count_up(row[POSITION_IDS], offset, part_b, 0)
    # Hidden from the decoder: all but the last token, which stands for the vector.
    set_range(row[ORD], offset, at, -1)
    set_range(row[GRP], offset, part_b, 1)
    end = part_b + length + 1
    copy_range(row[TARGETS], part_b, end - 1, text, 0)
    row[TARGETS, end - 1] = settings.eos
    set_range(row[WEIGHTS], part_b, end, ONE_AS_INT32)
    write_decoder_inputs(row, part_b, end, settings)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class Tsdae(RowObjective):
    name = "tsdae"
    config_class = TsdaeConfig
    losses = (Loss("tsdae", 45),)
    entry = staticmethod(_fill_rows)
    compiled_files = (t5.__file__,)

    @classmethod
    def text_format_for(cls, config: TsdaeConfig) -> TextFormat:
        return FORMS[config.form]

    def values(self) -> dict[str, Any]:
        special = self.vocabulary.special
        return super().values() | {
            "sop": int(special.pad if "sop" in self.vocabulary.lacking else special.sop),
            "has_cls": "cls" in self.config.needed_roles,
            "deleted_below": chance_threshold(self.config.deleted_ratio),
        }
