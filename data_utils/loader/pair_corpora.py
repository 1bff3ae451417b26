"""Corpora of labelled pairs: whole pairs packed into samples, and the objective that reads them and nothing else.

A corpus of `data.train` names its `objective`. The shares of the objectives then become shares of the corpora: each
objective with corpora of its own divides its share among them by their weights, the other objectives theirs among the
rest. So a sample's corpus says its objective, and the mixture counts pairs as it counts text: exact quotas, each pair
once in an epoch, phases that go on where the one before ended.

A window is as many whole pairs, one after another, as fit. Those that do not fit alone are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_utils.common.compiler import njit
from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.common.settings import check
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import LABELS
from data_utils.loader.annotations import require_annotation
from data_utils.loader.config import CorpusConfig
from data_utils.loader.mixture import Mixture
from data_utils.loader.sampler import WindowIndex
from data_utils.loader.text_pairs import TextPairIndex, open_text_pairs
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, Objective
from data_utils.objectives.mixed import Mixed
from data_utils.objectives.own_corpora import TEXT_PAIRS, pair_objective


def open_pairs(
    corpus: CorpusConfig, dataset: IndexedDataset, length: int, choices: Sequence[ObjectiveChoice]
) -> PairIndex | TextPairIndex:
    """The samples of a corpus of pairs.

    Raises: ConfigError for an objective that the run has not or that reads text; DataError for a dataset without pairs,
        or with another number of labels than the objective.
    """
    section: Any = next(
        (choice.section for choice in choices if pair_objective(choice) == corpus.objective), None
    )
    check(
        section is not None,
        f"corpus {corpus.prefix} has objective {shown(corpus.objective)}, which is not one of the run's objectives "
        f"for pairs ({', '.join(filter(None, map(pair_objective, choices))) or 'none'}); add it to objectives or "
        "remove the corpus.",
    )
    if section.own_corpora == TEXT_PAIRS:
        return open_text_pairs(corpus, dataset, length, section)
    require_annotation(dataset, {LABELS})
    count = dataset.manifest["entities"]["count"]
    if count != section.classes:
        raise DataError(
            f"dataset {corpus.prefix} has {count} labels, but {corpus.objective}.classes is {section.classes}; set "
            f"both it and the head in model.class_heads to {count}, or rebuild the dataset with other labels."
        )
    return PairIndex(dataset, length, DOCUMENT_OVERHEAD)


@njit(cache=True, error_model="numpy", nogil=True)
def _pack(costs, longest, starts, stops):
    """Write the first cost and the end of each window of whole documents; return how many there are."""
    windows, begin, is_open = 0, np.int64(0), False
    for document in range(costs.shape[0]):
        end = begin + costs[document]
        # Half of a pair has no label that is true, so pairs are whole or left out. One that is left out also
        # ends its window, since a window is one range of the dataset.
        if costs[document] > longest:
            is_open = False
        else:
            if not is_open or end - starts[windows - 1] > longest:
                starts[windows] = begin
                windows += 1
                is_open = True
            stops[windows - 1] = end
        begin = end
    return windows


class PairIndex(WindowIndex):
    """Windows of whole documents with their labels: as many, one after another, as fit `window_length`.

    Attributes: too_long: documents that do not fit alone and are in no window. num_tokens: of the others.
    Raises: DataError if none fits.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        window_length: int,
        document_overhead: int = 0,
        has_entities: bool = True,
    ) -> None:
        super().__init__(dataset, window_length, document_overhead, has_entities)
        costs = dataset.read_lengths(0, len(dataset)).astype(np.int64) + document_overhead
        starts, stops = np.empty_like(costs), np.empty_like(costs)
        self.num_windows = int(_pack(costs, window_length, starts, stops))
        self._starts, self._stops = (bounds[: self.num_windows].copy() for bounds in (starts, stops))
        fits = costs <= window_length
        self.too_long = int((~fits).sum())
        self.num_tokens = int((costs[fits] - document_overhead).sum())
        if not self.num_windows:
            raise DataError(
                f"dataset {dataset.prefix} has no pair of at most {window_length - document_overhead} tokens; raise "
                "data.sequence_length."
            )

    def __str__(self) -> str:
        """Number of pairs and samples, and of the pairs left out, for the log."""
        pairs = len(self.dataset) - self.too_long
        return (
            f"{self.dataset.prefix}: {pairs:,} labelled pairs in {self.num_windows:,} samples; skipped: "
            f"{self.too_long:,} pairs with more than {self.window_length - self.document_overhead} tokens"
        )

    def costs(self, windows: Any) -> tuple[Any, Any]:
        return self._starts[windows], self._stops[windows]


class Linked(Mixed):
    """Objectives of a run of which some read corpora of their own.

    Args:
        mixture: the run's. owners: for each of its corpora the number of the objective that alone reads it; -1 = text.
    """

    def __init__(self, mixed: Mixed, mixture: Mixture, owners: Sequence[int]) -> None:
        super().__init__(mixed.objectives, mixed.weights.tolist(), int(mixed._key))
        self._mixture, self._owners = mixture, np.array(owners)
        # Their shares are weights of corpora: the mixture says a sample's corpus, and with it the objective.
        # Drawing the objective first would need the number of earlier draws to find the next pair.
        self.weights[[number for number in owners if number >= 0]] = 0.0

    def choose(self, sample_indices: np.ndarray) -> np.ndarray:
        owners = self._owners[self._mixture.deal(sample_indices)[0]]
        return np.where(owners >= 0, owners, super().choose(sample_indices))


def linked(
    objective: Objective,
    mixture: Mixture,
    corpora: Sequence[CorpusConfig],
    choices: Sequence[ObjectiveChoice],
) -> Objective:
    """The objectives of a run or phase, in which samples of a corpus of pairs are its objective's."""
    names = [pair_objective(choice) for choice in choices]
    owners = [
        names.index(corpus.objective) if corpus.objective and corpus.objective in names else -1
        for corpus in corpora
    ]
    return Linked(objective, mixture, owners) if isinstance(objective, Mixed) else objective
