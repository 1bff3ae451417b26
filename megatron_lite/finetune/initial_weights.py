"""The weights that fine-tuning begins with, noted in OUTPUT/begins_with.json.

A repeated call goes on with the seeds that are there. A call with other weights is refused, since results of the first
weights would be taken for results of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.files import write_whole
from data_utils.common.untrusted import load_json
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.finetune.setup import is_export

NOTE = "begins_with.json"
IMPORTED = "imported"  # an export, as a run
_INITIAL = "initial weights"


@dataclass(frozen=True)
class InitialWeights:
    """Where weights are, and what tells them from others."""

    path: Path | None
    identity: str

    def __str__(self) -> str:
        return str(self.path or _INITIAL)


def initial_weights_of(start: Path | None) -> InitialWeights:
    """Of a run, a checkpoint or an export.

    A checkpoint is known by its checksums, wherever it lies; an export, which has none, by its files' sizes and times.
    """
    if start is None:
        return InitialWeights(None, _INITIAL)
    facts: list[tuple[str, Any]]
    if is_export(start):
        stats = [(file.name, file.stat()) for file in start.iterdir() if file.is_file()]
        path, facts = start, [(name, [stat.st_size, stat.st_mtime_ns]) for name, stat in stats]
    else:
        checkpoint = find_manifest(start)
        path, facts = checkpoint.path, list(checkpoint.files.items())
    content = json.dumps(sorted(facts, key=lambda fact: fact[0]), sort_keys=True)
    return InitialWeights(path, hashlib.sha256(content.encode()).hexdigest())


def check_initial_weights(output: Path, initial: InitialWeights) -> None:
    """Raise ConfigError if the directory has seeds, or an import, that began with other weights."""
    note = output / NOTE
    if not _has_begun(output):
        return
    before = load_json(note, "the note of the weights")
    if before.get("identity") != initial.identity:
        raise ConfigError(
            f"{output} began with other weights ({before.get('path') or _INITIAL}, now {initial}); give the former "
            "as --checkpoint, choose another --output, or remove it."
        )


def note_initial_weights(output: Path, initial: InitialWeights) -> None:
    """Note the weights, unless something in the directory began before. Raises DataError if it cannot be written."""
    if not _has_begun(output):
        path = None if initial.path is None else str(initial.path)
        content = json.dumps({"path": path, "identity": initial.identity}, indent=1) + "\n"
        write_whole(output / NOTE, content.encode(), "--output")


def _has_begun(output: Path) -> bool:
    return (output / IMPORTED).exists() or any(output.glob("seed_*"))
