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
    prefix: str = setting(REQUIRED, "dataset path without .bin/.idx/.json", is_path=True)
    weight: float = setting(
        1.0,
        "share of the samples drawn from this corpus, relative to the others; 0 = no part (before a later phase)",
        at_least=0,
    )
    name: str | None = setting(None, "by which the weights of a phase name it; null = the end of its prefix")
    objective: str | None = setting(
        None, "of a corpus of pairs, the only one that reads it; null = those of text"
    )
    decoder_prefix: str | None = setting(
        None, "the same texts built with decoder_tokenizer; null where the run has none", is_path=True
    )

    @property
    def key(self) -> str:
        """The name in the weights of phases."""
        return PurePath(self.prefix).name if self.name is None else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data")
class DataConfig:
    train: tuple[CorpusConfig, ...] = setting((), "list of {prefix, weight, name, objective, decoder_prefix}")
    validation: tuple[CorpusConfig, ...] = setting((), "as train; empty = no evaluation")
    sequence_length: int = setting(512, "tokens of source text per sample (before corruption)", at_least=16)
    short_prob: float = fraction(0.0, "part of texts cropped to a uniform length from 2 tokens (BERT: 0.1)")
    region: int = setting(
        0,
        "where the length of samples changes in phases: tokens that stay together in the shuffled order, such as "
        "8192; 0 = all of a corpus",
        at_least=0,
    )
    local_directory: str | None = setting(
        None,
        "node-local directory to which the corpora are copied before training; null = read where they are",
        is_path=True,
    )
    row_length: int | None = setting(
        None, "padded length of a row; null = derived from sequence_length and the objective", at_least=1
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
