"""The mixtures of a run before it opens its corpora for training, and the report of the text that it will read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_utils.common.seeds import derive_seed
from data_utils.dataset.manifest import dataset_path
from data_utils.loader.config import DataConfig, PhaseSamples
from data_utils.loader.corpus_report import corpus_report
from data_utils.loader.loader import CorpusOpener, phase_mixtures
from data_utils.loader.mixture import Mixture
from data_utils.objectives import ObjectiveChoice


def mixtures_ahead(
    data: DataConfig,
    seed: int,
    objectives: Sequence[ObjectiveChoice],
    phases: Sequence[PhaseSamples] = (),
    unit: int = 1,
) -> list[Mixture]:
    """The mixture of each phase of the training samples. Only sizes of the corpora are read.

    Args: seed: the run's. unit: `Config.sample_unit`.

    Raises: ConfigError, DataError as `open_datasets` does for corpora that are missing or too small.
    """
    lengths = (choice.section.row_length_for(data.sequence_length) for choice in objectives)
    choices = [*objectives, *(choice for phase in phases for choice in phase.objectives)]
    opener = CorpusOpener(data, objectives, choices, data.row_length or max(lengths))
    indexes = [opener.index(corpus) for corpus in data.train]
    phases = phases or [PhaseSamples(0, data, objectives)]
    return phase_mixtures(indexes, derive_seed(seed, "train"), phases, unit)


def corpus_report_if_here(
    data: DataConfig,
    seed: int,
    samples: int,
    batch_size: int,
    objectives: Sequence[ObjectiveChoice],
    phases: Sequence[PhaseSamples] = (),
    unit: int = 1,
) -> Iterator[str]:
    """`corpus_report` of a run; a line that says so where its corpora are elsewhere. Args: as for `mixtures_ahead`."""
    absent = [corpus.prefix for corpus in data.train if not dataset_path(corpus.prefix, ".json").exists()]
    if absent or not data.train:
        yield f"{absent[0] if absent else 'data.train'} is not on this machine, so the number of epochs is unknown"
        return
    yield from corpus_report(mixtures_ahead(data, seed, objectives, phases, unit), samples, batch_size)
