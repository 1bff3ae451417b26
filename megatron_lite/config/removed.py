"""Settings that a record of version 0.5 holds and this version lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Dotted key -> its default. A run that had another value cannot be continued.
REMOVED: dict[str, Any] = {"blank_infilling.short_seq_prob": 0.0}


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration without these settings. Raises ValueError for one that is not its default."""
    found = dict(tree)
    for key, default in REMOVED.items():
        section, _, name = key.rpartition(".")
        values = found.get(section)
        if not isinstance(values, Mapping) or name not in values:
            continue
        if values[name] != default:
            raise ValueError(f"sets {key} to {values[name]!r:.40}, a setting that this version lacks")
        found[section] = {key: value for key, value in values.items() if key != name}
    return found
