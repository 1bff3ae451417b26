"""The mixtures of a run before it opens its corpora for training, and the report of the text that it will read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_utils.common.seeds import derive_seed
from data_utils.dataset.manifest import dataset_path
from data_utils.loader.config import DataConfig, PhaseSamples
from data_utils.loader.extent import extent
from data_utils.loader.loader import CorpusOpener, phase_mixtures
from data_utils.loader.mixture import Mixture
from data_utils.objectives import ObjectiveChoice


def mixtures_ahead(
    data: DataConfig, seed: int, objectives: Sequence[ObjectiveChoice], phases: Sequence[PhaseSamples] = ()
) -> list[Mixture]:
    """The mixture of each phase of the training samples. Only sizes of the corpora are read. Args: seed: the run's.

    Raises: ConfigError, DataError as `open_datasets` does for corpora that are missing or too small.
    """
    lengths = (choice.section.row_length_for(data.sequence_length) for choice in objectives)
    choices = [*objectives, *(choice for phase in phases for choice in phase.objectives)]
    opener = CorpusOpener(data, objectives, choices, data.row_length or max(lengths))
    indexes = [opener.index(corpus) for corpus in data.train]
    return phase_mixtures(indexes, derive_seed(seed, "train"), phases or [PhaseSamples(0, data, objectives)])


def extent_if_here(
    data: DataConfig,
    seed: int,
    samples: int,
    batch_size: int,
    objectives: Sequence[ObjectiveChoice],
    phases: Sequence[PhaseSamples] = (),
) -> Iterator[str]:
    """`extent` of a run; a line that says so where its corpora are elsewhere. Args: seed: the run's."""
    absent = [corpus.prefix for corpus in data.train if not dataset_path(corpus.prefix, ".json").exists()]
    if absent or not data.train:
        yield f"{absent[0] if absent else 'data.train'} is not on this machine, so the number of epochs is unknown"
        return
    yield from extent(mixtures_ahead(data, seed, objectives, phases), samples, batch_size)
