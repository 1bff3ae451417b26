"""Annotations of tokens, one number for each: the check that a dataset has what the objectives read."""

from __future__ import annotations

from collections.abc import Collection

from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import CAPITALS, LABELS, SPANS

# Annotation -> the options of a build that store it.
_OPTIONS = {
    "entities": "--entities-key and --entity-ids",
    CAPITALS: "--capitals",
    SPANS: "--spans-key",
    LABELS: "--second-key and --labels, or with --markers",
}


def require_annotation(dataset: IndexedDataset, names: Collection[str]) -> None:
    """Raise ConfigError for several annotations, DataError for a dataset without the one. Args: names: of _OPTIONS."""
    if len(names) > 1:
        raise ConfigError(
            f"the objectives read {' and '.join(sorted(names))}, but a corpus stores only one value per token; "
            "choose objectives that read the same one."
        )
    (name,) = names
    ids = dataset.manifest.get("entities", {}).get("ids")
    stored = ids and next((other for other in (CAPITALS, SPANS, LABELS) if ids.startswith(other)), "entities")
    if stored != name:
        raise DataError(
            f"dataset {dataset.prefix} has no {name}, which the objective needs; rebuild it with {_OPTIONS[name]} "
            "or choose another objective."
        )
