"""What tasks of a cleaning run count: a small file for each step and task, and their sums.

A file is written when the step has seen its last document, so a task that is done again replaces its files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.files import write_atomically
from data_utils.common.untrusted import parse_json, read_bounded
from data_utils.corpus.documents import RecordCounts, SourceLocation, text_bytes

EXAMPLES = 10  # of each rule
EXAMPLE_CHARACTERS = 300  # of a document's text
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CountFile:
    """The files of a step, `FOLDER/00017.json` for task 17."""

    folder: Path

    def write(self, task: int, counts: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(counts, default=asdict).encode()
        write_atomically(self.folder / f"{task:05d}.json", content)

    def read(self) -> Iterator[dict[str, Any]]:
        """The counts of each task that wrote some, in the order of the tasks. Raises DataError for damage."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                counts = parse_json(read_bounded(path, _MAX_BYTES))
            except (OSError, ValueError) as error:
                raise DataError(f"{path} is damaged ({error}); discard the work with --restart.") from None
            yield counts


@dataclass(slots=True)
class Rule:
    """What a rule met: documents, or parts of documents that stay, their bytes of UTF-8 at that moment, and the first
    ten of the input.
    """

    documents: int = 0
    parts: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, metadata: Mapping[str, Any]) -> None:
        self.documents += 1
        self.bytes += text_bytes(text)
        self._show(text, metadata)

    def cut(self, part: str, size: int, metadata: Mapping[str, Any]) -> None:
        """Count a part that is cut out of a document. Args: part: what an example shows, if anything. size: bytes."""
        self.parts += 1
        self.bytes += size
        if part:
            self._show(part, metadata)

    def merge(self, other: Mapping[str, Any]) -> None:
        self.documents += other["documents"]
        self.parts += other["parts"]
        self.bytes += other["bytes"]
        self.examples += other["examples"][: EXAMPLES - len(self.examples)]

    def _show(self, text: str, metadata: Mapping[str, Any]) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(example(text, metadata))


def example(text: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Where a document is, the beginning of its text, and the group of near-duplicates that it belongs to, if any."""
    where = {key: metadata[key] for key in ("source", "start", "line", "group") if key in metadata}
    return {**where, "text": text[:EXAMPLE_CHARACTERS]}


def merged_rules(files: CountFile) -> dict[str, Rule]:
    """The rules of a step, over all tasks, the most frequent first."""
    rules: dict[str, Rule] = {}
    for counts in files.read():
        for name, rule in counts.items():
            rules.setdefault(name, Rule()).merge(rule)
    return dict(sorted(rules.items(), key=lambda item: (-item[1].documents, -item[1].bytes, item[0])))


def merged_records(files: CountFile) -> tuple[dict[str, Any], RecordCounts]:
    """What readers read over all tasks: documents, bytes, the names of fields that occur, and [source, start, lines] of
    each range that another one follows in its file; and the bad records.
    """
    read: dict[str, Any] = {"documents": 0, "bytes": 0, "fields": set(), "lines": []}
    records = RecordCounts()
    for counts in files.read():
        read["documents"] += counts["documents"]
        read["bytes"] += counts["bytes"]
        read["fields"].update(counts["fields"])
        read["lines"] += counts["lines"]
        examples = [SourceLocation(**location) for location in counts["records"]["examples"]]
        records.merge(RecordCounts(**{**counts["records"], "examples": examples}))
    return read, records
