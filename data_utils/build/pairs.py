"""Labelled pairs of texts of a build: read from JSON lines, or found in plain text.

A pair is a document: A, then B, and beside the first token of B its label, where entities stand in other datasets. A
file has the name of a label on each line; the first is 0.

Pairs are found where a sentence begins with one of these names, a discourse marker, and a comma: A is the sentence
before it in its paragraph, B the sentence without marker and comma. A JSON line names A, B, and as `label` a number or
a name. The marker's letter case does not matter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.build.mentions import require_json_lines
from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import read_text, shown
from data_utils.corpus.documents import Block, ParsedBlock, Place, RecordCounts
from data_utils.corpus.json_records import UnusableRecord, json_type, parse_json_object
from data_utils.corpus.mentions import KEPT
from data_utils.dataset.manifest import LABELS

WITHOUT = "without"  # texts in which no pair was found
_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n")
_SENTENCE_END = re.compile("[.!?\u2026][\"'\u201d\u2019)\\]]*(\\s+)")  # dots, quotes and brackets, and space


class Pair(NamedTuple):
    first: str
    second: str
    label: int


@dataclass(frozen=True)
class PairReader:
    """Reads the pairs of records, or finds them in texts where `key` is None."""

    names: tuple[str, ...]  # of the labels
    key: str | None  # field of B

    min_score = 0.0

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        return f"{LABELS} {hashlib.sha256(json.dumps(self.names).encode()).hexdigest()}"

    @cached_property
    def _marker(self) -> re.Pattern[str]:
        longest_first = sorted(self.names, key=len, reverse=True)
        return re.compile(rf"({'|'.join(map(re.escape, longest_first))})\s*,\s*", re.IGNORECASE)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name.lower(): number for number, name in enumerate(self.names)}

    def pairs(self, record: bytes, text: str) -> list[Pair]:
        """The pairs of a text, or of a JSON line whose first text it is. Raises UnusableRecord."""
        return list(self._found(text)) if self.key is None else [self._read(record, text)]

    def _found(self, text: str) -> Iterator[Pair]:
        for paragraph in _PARAGRAPHS.split(text):
            ends = [match.span(1) for match in _SENTENCE_END.finditer(paragraph)]
            begins, stops = [0, *(end for _, end in ends)], [*(start for start, _ in ends), len(paragraph)]
            for begin, stop, start, end in zip(begins, stops, begins[1:], stops[1:], strict=False):
                if match := self._marker.match(paragraph, start):
                    first, second = paragraph[begin:stop].strip(), paragraph[match.end() : end].strip()
                    if first and second:
                        yield Pair(first, second, self._numbers[match[1].lower()])

    def _read(self, record: bytes, text: str) -> Pair:
        tree = parse_json_object(record)
        second, label = tree.get(self.key or ""), tree.get("label")
        if not isinstance(second, str) or not second.strip():
            problem = f"field {self.key!r} holds {json_type(second)}, not text (--second-key names it)"
            raise UnusableRecord(
                "no_second_text", problem if second != "" else f"field {self.key!r} is empty"
            )
        number = self._numbers.get(label.lower(), -1) if isinstance(label, str) else label
        if type(number) is not int or not 0 <= number < self.count:
            rule = f"it must be a name in the file of --labels, or 0 to {self.count - 1}"
            raise UnusableRecord("bad_label", f"the label is {shown(label)}; {rule}")
        return Pair(text, second, number)


def encode_pairs(
    parsed: ParsedBlock, block: Block, tokenizer: Any, reader: PairReader
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and labels beside tokens of the pairs, which take the place of their texts in `parsed`."""
    pairs: list[Pair] = []
    origins: list[str] = []
    lines: list[int] = []
    records = block.data.split(b"\n") if isinstance(block.data, bytes) and reader.key is not None else None
    for text, line in zip(parsed.texts, parsed.lines, strict=True):
        try:
            found = reader.pairs(b"" if records is None else records[line - block.first_line], text)
        except UnusableRecord as error:
            parsed.counts.add_bad(error.kind, Place(block.source, line, str(error), block.start))
            continue
        parsed.counts.merge(RecordCounts(mentions={KEPT: len(found), WITHOUT: int(not found)}))
        pairs += found
        origins += [text] * len(found)
        lines += [line] * len(found)
    ids, lengths = tokenizer.encode_batch([text for pair in pairs for text in pair[:2]])
    halves = lengths.reshape(-1, 2)
    whole = halves.all(axis=1)  # a tokenizer may drop all of a text (control characters)
    parsed.counts.empty_documents += int((~whole).sum())
    ids = ids[np.repeat(whole, halves.sum(axis=1))]
    pairs, halves = list(itertools.compress(pairs, whole)), halves[whole]
    beside = np.full(len(ids), -1, np.int32)
    ends = halves.sum(axis=1).cumsum()
    beside[ends - halves[:, 1]] = [pair.label for pair in pairs]
    parsed.texts = [f"{pair.first}\n{pair.second}" for pair in pairs]
    parsed.origins = list(itertools.compress(origins, whole))
    parsed.lines = list(itertools.compress(lines, whole))
    return ids, halves.sum(axis=1), beside


def open_pairs(config: BuildConfig, inputs: Sequence[Path]) -> PairReader | None:
    """Read the names of labels, if a build has pairs. Raises ConfigError for a bad file, or inputs without fields."""
    path = config.labels or config.markers
    if path is None:
        return None
    option = "--labels" if config.labels else "--markers"
    if config.labels:
        require_json_lines("--second-key", inputs)
    names = [line.strip() for line in read_text(path, option).splitlines()]
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if not name or (config.markers and "," in name) or name.lower() in numbers:
            raise ConfigError(
                f"{option} {path}:{number}: the name is {shown(name)}; give one on each line, each once, and without a "
                "comma."
            )
        numbers[name.lower()] = number
    if len(names) < 2:
        raise ConfigError(f"{option} {path} has {len(names)} names; give two or more, one on each line.")
    return PairReader(tuple(names), config.second_key)
