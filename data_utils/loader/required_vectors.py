"""The check that a dataset has the numbers beside its tokens that objectives read."""

from __future__ import annotations

from collections.abc import Collection

from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import CAPITALS, LABELS, SPANS

_OPTIONS = {
    "entities": "--entities-key and --entity-ids",
    CAPITALS: "--capitals",
    SPANS: "--spans-key",
    LABELS: "--second-key and --labels, or with --markers",
}


def require_beside(dataset: IndexedDataset, kinds: Collection[str]) -> None:
    """Raise ConfigError for several kinds, DataError for a dataset without the one. Args: kinds: keys of _OPTIONS."""
    if len(kinds) > 1:
        raise ConfigError(
            f"the objectives read {' and '.join(sorted(kinds))}, but a corpus has one of them beside its tokens; "
            "choose objectives that read one."
        )
    (kind,) = kinds
    ids = dataset.manifest.get("entities", {}).get("ids")
    found = ids and next((each for each in (CAPITALS, SPANS, LABELS) if ids.startswith(each)), "entities")
    if found != kind:
        raise DataError(
            f"dataset {dataset.prefix} has no {kind}, which the objective reads; build it with {_OPTIONS[kind]}, or "
            "choose another objective."
        )
