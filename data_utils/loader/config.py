"""The section `data`: the corpora, and the length of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from data_utils.common.settings import REQUIRED, check, checked, fraction, setting
from data_utils.objectives import ObjectiveChoice


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data.train")
class CorpusConfig:
    prefix: str = setting(REQUIRED, "Dataset path without .bin/.idx/.json.", is_path=True)
    weight: float = setting(
        1.0,
        "Sampling weight, relative to the other corpora; 0 = not sampled (for example before a later phase).",
        at_least=0,
    )
    name: str | None = setting(
        None, "Name by which the weights of a phase refer to this corpus; null = last component of prefix."
    )
    objective: str | None = setting(
        None,
        "For a corpus of pairs: the objective that reads it; null = every objective that reads plain text.",
    )
    decoder_prefix: str | None = setting(
        None,
        "Prefix of the same texts tokenized with decoder_tokenizer; null if the run has no "
        "decoder_tokenizer.",
        is_path=True,
    )

    @property
    def key(self) -> str:
        """The name in the weights of phases."""
        return PurePath(self.prefix).name if self.name is None else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data")
class DataConfig:
    train: tuple[CorpusConfig, ...] = setting(
        (), "Training corpora: list of {prefix, weight, name, objective, decoder_prefix}."
    )
    validation: tuple[CorpusConfig, ...] = setting((), "Validation corpora, as train; [] = no evaluation.")
    sequence_length: int = setting(512, "Source tokens per sample, before masking.", at_least=16)
    short_prob: float = fraction(
        0.0,
        "Fraction of the texts that is cropped to a uniform random length of at least 2 tokens (BERT: 0.1).",
    )
    region: int = setting(
        0,
        "For phases that change sequence_length: number of tokens kept contiguous in the shuffled order, "
        "such as 8192; 0 = the whole corpus.",
        at_least=0,
    )
    local_directory: str | None = setting(
        None,
        "Node-local directory to copy the corpora to before training; null = read them in place.",
        is_path=True,
    )
    row_length: int | None = setting(
        None,
        "Padded length of a sequence; null = derived from sequence_length and the objective.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check(
            self.region == 0 or self.region >= self.sequence_length,
            f"data.region ({self.region}) is below data.sequence_length ({self.sequence_length}); set it to that or "
            "more, or to 0.",
        )

    def require_train(self) -> None:
        """Raise ConfigError without a training corpus, which a configuration need not have before it is trained."""
        check(bool(self.train), "data.train is empty; give at least one corpus as [{prefix: PATH}].")

    def check_decoder(self, has_tokenizer: bool) -> None:
        """Raise ConfigError unless all corpora have the decoder's texts where it has a tokenizer, and none else."""
        for name in ("train", "validation"):
            for number, corpus in enumerate(getattr(self, name)):
                check(
                    has_tokenizer or corpus.decoder_prefix is None,
                    f"data.{name}[{number}].decoder_prefix is {corpus.decoder_prefix} without a decoder_tokenizer; "
                    "give that, or set the prefix to null.",
                )
                check(
                    not has_tokenizer or corpus.decoder_prefix is not None,
                    f"data.{name}[{number}] ({corpus.prefix}) has no decoder_prefix, but the run has a "
                    "decoder_tokenizer; build the same texts with it and name them there.",
                )


class PhaseSamples(NamedTuple):
    """All that makes the samples of a phase of the run."""

    first_sample: int
    data: DataConfig  # with the phase's weights
    objectives: Sequence[ObjectiveChoice]
