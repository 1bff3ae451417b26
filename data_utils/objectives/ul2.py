"""UL2's mixture of denoisers (arXiv:2205.05131): span corruption with several numbers, and texts that are continued.

Each chunk of n tokens draws one of `denoisers`. The token of its mode, if there is one, stands before its context:

    regular, extreme   T5's spans by the denoiser's ratio and mean length; one span is the end of the text
    sequential         context `text eos`, target the rest, of 1, 2, ... or 2 noise_ratio n - 1 tokens, equally likely

Rows are T5's otherwise: see t5.py. UL2R (arXiv:2210.11399), for models that were trained on something else, is the
same with other denoisers: configs/ul2r-base.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from data_utils.common.batch_fields import POSITION_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, uniform
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives import t5
from data_utils.objectives.base import check_token
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    predict_range,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.registry import register
from data_utils.objectives.t5 import T5, SentinelConfig, corrupt, write_decoder_inputs
from data_utils.tokenizers.special_tokens import NO_TOKEN

MODES = ("regular", "extreme", "sequential")  # in the order of their losses
SEQUENTIAL = MODES.index("sequential")
UNTIL, RATIO, LENGTH, MODE, TOKEN = range(5)  # columns of the table of denoisers


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ul2.denoisers[]")
class DenoiserConfig:
    """One way to hide tokens of a text."""

    mode: str = setting("regular", "regular (R), extreme (X) or sequential (S)", one_of=MODES)
    share: float = setting(1.0, "sampling weight, relative to the other denoisers", above=0)
    noise_ratio: float = fraction(0.15, "fraction of the tokens that is predicted; sequential: on average")
    mean_span_length: float = setting(
        3.0, "Mean length of a noise span, in tokens; not used by sequential.", at_least=1
    )

    @property
    def growth(self) -> float:
        """Row tokens per token of text: every noise span adds two sentinels."""
        return 1.0 if self.mode == "sequential" else 1.0 + 2.0 * self.noise_ratio / self.mean_span_length

    @property
    def predicted(self) -> float:
        """Predicted tokens per token of text."""
        return self.noise_ratio + (self.growth - 1.0) / 2


# The paper's seven; the length of S is its mean.
PUBLISHED = (
    *(DenoiserConfig(mean_span_length=length) for length in (3.0, 8.0)),
    *(DenoiserConfig(mode="extreme", noise_ratio=0.5, mean_span_length=length) for length in (3.0, 8.0)),
    *(DenoiserConfig(mode="extreme", noise_ratio=ratio, mean_span_length=64.0) for ratio in (0.15, 0.5)),
    DenoiserConfig(mode="sequential", noise_ratio=0.25),
)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ul2")
class Ul2Config(SentinelConfig):
    """The denoisers, and the tokens of modes."""

    denoisers: tuple[DenoiserConfig, ...] = setting(
        (),
        "List of denoisers; [] = the seven of UL2 (mean span length, noise ratio): R (3, 0.15), (8, 0.15), "
        "X (3, 0.5), (8, 0.5), (64, 0.15), (64, 0.5), and S (0.25 on average).",
    )
    regular_token: int | None = setting(
        None, "Token id that precedes the input in mode R ([NLU]); null = none.", at_least=0
    )
    extreme_token: int | None = setting(
        None, "Token id that precedes the input in mode X ([NLG]); null = none.", at_least=0
    )
    sequential_token: int | None = setting(
        None, "Token id that precedes the input in mode S ([S2S]); null = none.", at_least=0
    )

    def __post_init__(self) -> None:
        SentinelConfig.__post_init__(self)
        tokens = [token for token in self.mode_tokens if token is not None]
        check(
            len(set(tokens)) == len(tokens),
            f"ul2 has the mode tokens {tokens}; give each mode a different id.",
        )

    @property
    def mode_tokens(self) -> tuple[int | None, ...]:
        """The token of each of MODES, in their order."""
        return self.regular_token, self.extreme_token, self.sequential_token

    @property
    def mixture(self) -> tuple[DenoiserConfig, ...]:
        """The denoisers, also where the section gives none."""
        return self.denoisers or PUBLISHED

    @property
    def growth(self) -> float:
        # The bound of a row holds for every draw.
        return max(denoiser.growth for denoiser in self.mixture)

    @property
    def overhead(self) -> int:
        """The mode's token, sop, and what rounding adds to the number of spans, or eos."""
        return 4

    @property
    def loss_share(self) -> float:
        shares = np.array([denoiser.share for denoiser in self.mixture])
        sizes = np.array([(denoiser.predicted, denoiser.growth) for denoiser in self.mixture])
        predicted, tokens = (shares[:, None] * sizes).sum(0)
        return float(predicted / tokens)

    def check_vocabulary_size(self, size: int) -> None:
        SentinelConfig.check_vocabulary_size(self, size)
        for mode, token in zip(MODES, self.mode_tokens, strict=True):
            check_token(f"ul2.{mode}_token", token, size)


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, rng, denoisers = chunk.text, chunk.offset, tables.rng, tables.length_table
    length = len(text)
    # A denoiser for each chunk, so that short documents of a row mix.
    denoiser, number = 0, uniform(rng)
    while number >= denoisers[denoiser, UNTIL]:
        denoiser += 1
    ratio, mode = denoisers[denoiser, RATIO], int(denoisers[denoiser, MODE])
    at = offset
    if denoisers[denoiser, TOKEN] >= 0:
        row[TOKENS, at] = int(denoisers[denoiser, TOKEN])
        at += 1
    if mode == SEQUENTIAL:
        # Uniform from 1 to 2 * ratio * length - 1, with the mean ratio * length, as in the paper.
        target = min(length - 1, 1 + below(rng, max(1, int(2 * ratio * length + 0.5) - 1)))
        part_b = at + length - target
        copy_range(row[TOKENS], at, part_b, text, 0)
        end = part_b
        if target > 0:
            row[TOKENS, part_b] = settings.eos
            part_b += 1
            end = part_b + target
            predict_range(row, part_b, end, text, length - target)
            write_decoder_inputs(row, part_b, end, settings)
        count_up(row[POSITION_IDS], offset, part_b, 0)
    else:
        end = corrupt(row, chunk, at, tables, settings, ratio, denoisers[denoiser, LENGTH])
    mark_document(row, offset, end, chunk.document, settings.loss + mode)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class Ul2(T5):
    name = "ul2"
    config_class = Ul2Config  # type: ignore[assignment]
    losses = (Loss("regular_spans", 25), Loss("extreme_spans", 26), Loss("continuations", 27))  # type: ignore
    entry = staticmethod(_fill_rows)
    compiled_files = (t5.__file__,)

    def length_table(self) -> np.ndarray:
        """The denoisers, float64 [denoisers, columns]; the first whose UNTIL is above a uniform number is chosen."""
        config: Ul2Config = self.config
        shares = np.cumsum([denoiser.share for denoiser in config.mixture])
        table = []
        for denoiser, until in zip(config.mixture, shares / shares[-1], strict=True):
            mode = MODES.index(denoiser.mode)
            token = config.mode_tokens[mode]
            columns = (
                denoiser.noise_ratio,
                denoiser.mean_span_length,
                mode,
                NO_TOKEN if token is None else token,
            )
            table.append([until, *columns])
        return np.array(table)

    @classmethod
    def text_format_for(cls, config: Ul2Config) -> TextFormat:
        modes = {
            mode: () if token is None else (token,)
            for mode, token in zip(MODES, config.mode_tokens, strict=True)
        }
        return replace(cls.text_format, before=modes["sequential"], modes=modes)
