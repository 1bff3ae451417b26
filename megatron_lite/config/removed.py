"""Settings that a record or file of an earlier version has, and this version lacks or names otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_utils.common.settings import merge, nest

# Dotted key -> its default, which means nothing and is left out, and what replaces another value.
REMOVED: dict[str, tuple[Any, str]] = {
    "blank_infilling.short_seq_prob": (0.0, "data.short_prob crops texts"),
    "prefix_lm.min_prefix_ratio": (0.0, "the length of the prefix is uniform"),
    "prefix_lm.max_prefix_ratio": (1.0, "the length of the prefix is uniform"),
    "objective_starts": ({}, "write phases with `objectives`"),
    "task.bidirectional": (True, "scripts/harness.py --left-to-right reads the context from left to right"),
    "events.skip_samples": ([], "write phases, the later one with `skip_samples`"),
    "events.learning_rate": ([], "write phases, the later one with `lr`"),
    "events.embedding_gradient_shrink": ([], "write phases, the later one with `embedding_gradient_shrink`"),
}
# Dotted key -> the one that replaces it. The head's type comes first: the others go into its place.
MOVED = {
    f"{section}.{former}": f"{section}.task_head.{name}"
    for section in ("model", "decoder")
    for former, name in {
        "task_head": "type",
        "task_classes": "classes",
        "task_heads": "heads",
        "task_pooler": "pooler",
        "task_pooler_kind": "pooler_kind",
        "task_mix": "mix",
        "task_pool": "pool",
        "task_dropout": "dropout",
    }.items()
}


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration in this version's settings. Raises ValueError as `without_removed`."""
    return renamed(without_removed(record))


def renamed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A recorded configuration under this version's names."""
    found = dict(record)
    for former in moved_settings(found):
        section, _, key = former.partition(".")
        rest = {name: value for name, value in found[section].items() if name != key}
        found = merge({**found, section: rest}, nest(MOVED[former], found[section][key]))
    return found


def moved_settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """The former names in a configuration, each with a sentence that tells the present one."""
    found = {}
    for former, name in MOVED.items():
        section, _, key = former.partition(".")
        values = tree.get(section)
        if isinstance(values, Mapping) and not isinstance(values.get(key, {}), Mapping):
            found[former] = f"unknown setting {former}; it is now {name}."
    return found


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without these settings. Raises ValueError for one that is not its default."""
    found = dict(tree)
    for key, (default, instead) in REMOVED.items():
        section, _, name = key.rpartition(".")
        values = found.get(section) if section else found
        if not isinstance(values, Mapping) or name not in values:
            continue
        if values[name] != default:
            raise ValueError(f"sets {key} to {values[name]!r:.40}, which this version lacks: {instead}")
        rest = {other: value for other, value in values.items() if other != name}
        if not section:
            found = rest
        elif rest:
            found[section] = rest
        else:
            del found[section]
    if isinstance(tasks := found.get("tasks"), list):
        found["tasks"] = [without_removed({"task": task}).get("task", {}) for task in tasks]
    return found
