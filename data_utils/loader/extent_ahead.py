"""Report of the text that a run will read, before it runs, where its corpora are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_utils.common.random_streams import derive_seed
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import dataset_path
from data_utils.loader.config import DataConfig, PhaseSamples
from data_utils.loader.extent import extent
from data_utils.loader.loader import phase_mixtures
from data_utils.loader.mixture import Index
from data_utils.loader.pair_corpora import open_pairs
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.interface import DOCUMENT_OVERHEAD


def extent_if_here(
    data: DataConfig,
    seed: int,
    samples: int,
    batch_size: int,
    phases: Sequence[PhaseSamples] = (),
    objectives: Sequence[ObjectiveChoice] = (),
) -> Iterator[str]:
    """`extent` of a run with windows; a line that says so where its corpora are elsewhere. Args: seed: the run's."""
    absent = [corpus.prefix for corpus in data.train if not dataset_path(corpus.prefix, ".json").exists()]
    if absent or not data.train:
        yield f"{absent[0] if absent else 'data.train'} is not on this machine, so the number of epochs is unknown"
        return
    length = data.sequence_length
    indexes: list[Index] = [
        WindowIndex(IndexedDataset(corpus.prefix), length, DOCUMENT_OVERHEAD)
        if corpus.objective is None
        else open_pairs(corpus, IndexedDataset(corpus.prefix), length, objectives)
        for corpus in data.train
    ]
    mixtures = phase_mixtures(
        indexes, derive_seed(seed, "train"), phases or [PhaseSamples(0, data, objectives)]
    )
    yield from extent(mixtures, samples, batch_size)
