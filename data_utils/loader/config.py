"""The section `data`: the corpora, and the length of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple, cast

from data_utils.common.settings import REQUIRED, check, checked, fraction, setting
from data_utils.common.urls import is_url
from data_utils.dataset.manifest import require_public
from data_utils.objectives import ObjectiveChoice


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data.train")
class CorpusConfig:
    prefix: str = setting(
        REQUIRED, "Dataset path or URL (s3://...) without .bin/.idx/.json.", is_path=True, or_url=True
    )
    weight: float | None = setting(
        None,
        "sampling weight in samples, relative to the other corpora; 0 = not used (until a later phase); null = 1 "
        "where tokens is null",
        at_least=0,
    )
    tokens: float | None = setting(
        None,
        "in place of weight: share of the tokens, relative to the other corpora, which all set it",
        at_least=0,
    )
    max_epochs: float | None = setting(
        None,
        "how often the run reads the corpus at most; what is left of its share goes to the other corpora; null = no "
        "limit; only in data.train",
        above=0,
    )
    name: str | None = setting(
        None, "name that the weights of a phase refer to; null = the last component of its prefix"
    )
    objective: str | None = setting(
        None,
        "corpus of pairs: the one objective that reads it; null = a text corpus, read by all text objectives (what is "
        "trained is chosen in the section objectives)",
    )
    decoder_prefix: str | None = setting(
        None,
        "prefix of the same texts built with decoder_tokenizer; null if there is no decoder_tokenizer",
        is_path=True,
        or_url=True,
    )

    vectors: str | None = setting(
        None,
        "for contrastive.loss mse: .npy of scripts/embed.py with the teacher's vector of each record's query",
        is_path=True,
    )

    def __post_init__(self) -> None:
        if self.weight is None and self.tokens is None:
            # The dataclass is frozen; this is its only moment to be completed. A default of 1 could not be told from a
            # weight that is set together with tokens.
            object.__setattr__(self, "weight", 1.0)

    @property
    def key(self) -> str:
        """The name in the weights of phases."""
        return PurePath(self.prefix).name if self.name is None else self.name

    @property
    def share(self) -> float:
        """Of the samples or of the tokens, relative to the other corpora."""
        return cast(float, self.weight if self.tokens is None else self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("data")
class DataConfig:
    train: tuple[CorpusConfig, ...] = setting(
        (),
        "list of {prefix, weight, tokens, max_epochs, name, objective, decoder_prefix, vectors}",
        on_resume="phase",
    )
    validation: tuple[CorpusConfig, ...] = setting(
        (), "as data.train; empty = no evaluation", on_resume="free"
    )
    sequence_length: int = setting(
        512, "source tokens per sample, before the objective changes them", at_least=16, on_resume="phase"
    )
    short_prob: float = fraction(
        0.0, "probability that a text is cropped to a uniformly drawn length of 2 tokens or more (BERT: 0.1)"
    )
    region: int = setting(
        0,
        "needed where phases change sequence_length: contiguous tokens that are shuffled as one block, such as "
        "8192; 0 = the whole corpus is one block",
        at_least=0,
    )
    local_directory: str | None = setting(
        None,
        "node-local directory to which corpora are copied before training; required for those in a store (s3://...), "
        "null = no copy",
        is_path=True,
        on_resume="free",
    )
    row_length: int | None = setting(
        None,
        "padded length of a row of the batch; null = derived from sequence_length and the objective",
        at_least=1,
        on_resume="phase",
    )

    def __post_init__(self) -> None:
        check(
            self.region == 0 or self.region >= self.sequence_length,
            f"data.region ({self.region}) is below data.sequence_length ({self.sequence_length}); set it to at "
            "least that, or to 0.",
        )
        conflicts = [
            *_conflicts_of_shares("train", self.train),
            *_conflicts_of_shares("validation", self.validation),
        ]
        conflicts += [
            f"data.validation[{number}].max_epochs is {corpus.max_epochs:g}, but only training has epochs; remove it."
            for number, corpus in enumerate(self.validation)
            if corpus.max_epochs is not None
        ]
        check(not conflicts, " ".join(conflicts))
        self._check_stored()

    def _check_stored(self) -> None:
        """Raise ConfigError for a dataset in a store that cannot be copied from there."""
        corpora = [*self.train, *self.validation]
        prefixes = [prefix for corpus in corpora for prefix in (corpus.prefix, corpus.decoder_prefix)]
        for prefix in filter(is_url, prefixes):
            require_public(prefix)
            check(
                self.local_directory is not None,
                f"the dataset {prefix} is in a store, but data.local_directory is null; set it to a directory of each "
                "node to which the dataset is copied.",
            )

    @property
    def has_caps(self) -> bool:
        """Whether the shares depend on the length of the run and the size of the corpora."""
        return any(corpus.max_epochs is not None for corpus in self.train)

    @property
    def has_token_shares(self) -> bool:
        """Whether the shares depend on the size of the corpora."""
        return any(corpus.tokens is not None for corpus in self.train)

    def require_train(self) -> None:
        """Raise ConfigError without a training corpus, which a configuration need not have before it is trained."""
        check(bool(self.train), "data.train is empty; give at least one corpus as [{prefix: PATH}].")

    def check_decoder(self, has_tokenizer: bool) -> None:
        """Raise ConfigError unless all corpora have the decoder's texts where it has a tokenizer, and none else."""
        for name in ("train", "validation"):
            for number, corpus in enumerate(getattr(self, name)):
                check(
                    has_tokenizer or corpus.decoder_prefix is None,
                    f"data.{name}[{number}].decoder_prefix is {corpus.decoder_prefix}, but decoder_tokenizer is "
                    "null; set decoder_tokenizer, or the prefix to null.",
                )
                check(
                    not has_tokenizer or corpus.decoder_prefix is not None,
                    f"data.{name}[{number}] ({corpus.prefix}) has no decoder_prefix, but decoder_tokenizer is set; "
                    "build the same texts with it and set decoder_prefix.",
                )


def _conflicts_of_shares(name: str, corpora: Sequence[CorpusConfig]) -> Iterator[str]:
    """What is wrong with the units of the shares of a list of corpora."""
    by_unit = {
        unit: [f"data.{name}[{i}]" for i, corpus in enumerate(corpora) if getattr(corpus, unit) is not None]
        for unit in ("tokens", "weight")
    }
    if all(by_unit.values()):
        tokens, weights = (", ".join(dict.fromkeys(entries)) for entries in by_unit.values())
        yield (
            f"{tokens} set{'s' * (len(by_unit['tokens']) == 1)} tokens and {weights} weight (1 where nothing is set), "
            "but shares are of the tokens or of the samples; set tokens in all of the list and weight in none, or "
            "weight alone."
        )


class PhaseSamples(NamedTuple):
    """All that makes the samples of a phase of the run."""

    first_sample: int
    data: DataConfig  # with the phase's weights
    objectives: Sequence[ObjectiveChoice]
    # The rest is read only where a corpus has max_epochs.
    stop_sample: int = 0  # the first one after the phase
    steps: int = 0
