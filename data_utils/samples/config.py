"""The section `data`: which corpora, and how much text a sample has."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.base.settings import REQUIRED, check, checked, setting


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data.train")
class CorpusConfig:
    prefix: str = setting(REQUIRED, "dataset path without .bin/.idx/.json")
    weight: float = setting(
        1.0, "share of the samples drawn from this corpus, relative to the others", above=0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data")
class DataConfig:
    train: tuple[CorpusConfig, ...] = setting((), "list of {prefix, weight}: the training corpora")
    validation: tuple[CorpusConfig, ...] = setting(
        (), "list of {prefix, weight}: the validation corpora; empty = no evaluation"
    )
    sequence_length: int = setting(512, "tokens of source text per sample (before corruption)", at_least=16)
    local_directory: str | None = setting(
        None,
        "node-local directory to which the corpora are copied before training; null = read where they are",
    )
    row_length: int | None = setting(
        None, "padded length of a row; null = derived from sequence_length and the objective", at_least=1
    )

    def require_train(self) -> None:
        """Raise ConfigError without a training corpus, which a configuration need not have before it is trained."""
        check(bool(self.train), "data.train is empty; give at least one corpus as [{prefix: PATH}].")
