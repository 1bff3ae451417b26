"""Check of what stands beside the tokens of a corpus: entities, capitals or spans, as objectives read them."""

from __future__ import annotations

from collections.abc import Collection

from data_utils.base.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import CAPITALS, SPANS

_OPTIONS = {CAPITALS: "--capitals", SPANS: "--spans-key", "entities": "--entities-key and --entity-ids"}


def require_beside(dataset: IndexedDataset, prefix: str, kinds: Collection[str]) -> None:
    """Raise ConfigError for several kinds, DataError for a dataset that has not the one. Args: kinds: keys above."""
    if len(kinds) > 1:
        raise ConfigError(
            f"the objectives read {' and '.join(sorted(kinds))}, but a corpus has one of them beside its tokens; "
            "choose objectives that read one."
        )
    (kind,) = kinds
    ids = dataset.manifest.get("entities", {}).get("ids", "nothing")
    has = ids if ids in (CAPITALS, SPANS, "nothing") else "entities"  # which have a checksum there
    if has != kind:
        raise DataError(
            f"dataset {prefix} has no {kind}, which the objective reads; build it with {_OPTIONS[kind]}, or "
            "choose another objective."
        )
