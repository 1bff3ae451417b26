"""The check that a dataset has the numbers beside its tokens that an objective reads."""

from __future__ import annotations

from data_utils.base.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import CAPITALS, LABELS

_OPTIONS = {
    "entities": "--entities-key and --entity-ids",
    CAPITALS: "--capitals",
    LABELS: "--second-key and --labels, or with --markers",
}


def require_beside(dataset: IndexedDataset, kind: str) -> None:
    """Raise DataError unless a dataset has numbers of a kind, one of _OPTIONS."""
    ids = dataset.manifest.get("entities", {}).get("ids")
    found = ids and next((each for each in (CAPITALS, LABELS) if ids.startswith(each)), "entities")
    if found != kind:
        raise DataError(
            f"dataset {dataset.prefix} has no {kind}, which the objective reads; build it with {_OPTIONS[kind]}, or "
            "choose another objective."
        )
