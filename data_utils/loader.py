"""Corpora and objective -> batches by sample number: the one place where the data rooms are wired together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_utils.checksums import identity
from data_utils.collate import Collator
from data_utils.indexed_dataset import IndexedDataset
from data_utils.local_copy import local_copy
from data_utils.mixture import Mixture
from data_utils.objectives import LOSS_NAMES, ObjectiveChoice, make_objective
from data_utils.objectives.planes import DOCUMENT_OVERHEAD
from data_utils.random_streams import derive_seed
from data_utils.sampler import WindowIndex
from data_utils.tokenizers import Tokenizer
from data_utils.vocabulary import vocabulary_of
from megatron_lite.config import CorpusConfig, DataConfig
from megatron_lite.errors import ConfigError, DataError

_BLOCKS_CHECKED = 4  # MiB of each file of a corpus, by each rank at its start


class SampleLoader:
    """Sample numbers -> batch. Stateless: the caller's count of consumed samples is the only state."""

    def __init__(self, mixture: Mixture, collator: Collator):
        self.mixture = mixture
        self.collator = collator

    def batch(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Samples int64 [B] as int32 [B, len(FIELDS), row_length], in `out` if given: a new array costs more."""
        return self.collator(*self.mixture.fetch(indices), indices, out)

    def prefetch(self, indices: np.ndarray) -> None:
        """Let the kernel start to read samples int64 [B] of a batch to come; see `Mixture.prefetch`."""
        self.mixture.prefetch(indices)

    def fingerprint(self) -> list[dict[str, object]]:
        """What the samples are drawn from: for each corpus what identifies its token file (null: a foreign dataset)."""
        manifests = [index.dataset.manifest for index, _ in self.mixture.corpora]
        return [
            {
                "documents": len(index.dataset),
                "tokens": index.dataset.num_tokens,
                "sha256": None if manifest is None else identity(manifest["files"][".bin"]),
                "weight": weight,
            }
            for (index, weight), manifest in zip(self.mixture.corpora, manifests, strict=True)
        ]


@dataclass(frozen=True)
class Datasets:
    train: SampleLoader
    validation: SampleLoader | None
    loss_names: Sequence[str]


def open_datasets(
    data: DataConfig, objectives: Sequence[ObjectiveChoice], tokenizer: Tokenizer, seed: int
) -> Datasets:
    """Open the corpora of a run and check that `tokenizer` made them.

    Args: objectives: `Config.objective_choices`.
    Raises: ConfigError without a training corpus or for objectives that do not suit the vocabulary;
        DataError for a missing, damaged or foreign dataset.
    """
    if not data.train:
        raise ConfigError("data.train is empty; give at least one corpus as [{prefix: PATH}].")
    vocabulary = vocabulary_of(tokenizer)
    collator = Collator(make_objective(objectives, vocabulary, seed, data.sequence_length, data.row_length))
    train = _open_mixture(data.train, data, tokenizer, derive_seed(seed, "train"))
    validation = None
    if data.validation:
        mixture = _open_mixture(data.validation, data, tokenizer, derive_seed(seed, "validation"))
        validation = SampleLoader(mixture, collator)
    return Datasets(SampleLoader(train, collator), validation, LOSS_NAMES)


def _open_mixture(
    corpora: Sequence[CorpusConfig], data: DataConfig, tokenizer: Tokenizer, seed: int
) -> Mixture:
    windows = []
    for corpus in corpora:
        place = (
            corpus.prefix if data.local_directory is None else local_copy(corpus.prefix, data.local_directory)
        )
        dataset = IndexedDataset(place)
        dataset.require_tokenizer(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.special.eos)
        try:
            dataset.verify_some(_BLOCKS_CHECKED)
        except DataError as error:
            error.only_here = True  # other ranks draw other blocks
            raise
        windows.append((WindowIndex(dataset, data.sequence_length, DOCUMENT_OVERHEAD), corpus.weight))
    return Mixture(windows, seed)
