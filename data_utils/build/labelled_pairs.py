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
from typing import Any, NamedTuple

import numpy as np

from data_utils.build.config import BuildConfig, require_json_lines
from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import read_text, shown
from data_utils.common.words import SENTENCE_END
from data_utils.corpus.documents import ParsedBlock, RecordBlock, RecordCounts, SourceLocation
from data_utils.corpus.json_records import UnusableRecord, json_type, parse_json_object
from data_utils.corpus.mentions import KEPT
from data_utils.corpus.stored_files import InputFile
from data_utils.dataset.manifest import LABELS

WITHOUT = "without"  # texts in which no pair was found
_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n")


class Pair(NamedTuple):
    first: str
    second: str
    label: int


@dataclass(frozen=True)
class PairReader:
    """Reads the pairs of records, or finds them in texts where `key` is None."""

    names: tuple[str, ...]  # the names of the labels
    key: str | None  # the field of B; None: pairs are found in texts

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
        return re.compile(
            rf"({'|'.join(map(re.escape, longest_first))})\s*[,\u060c\uff0c\u3001]\s*", re.IGNORECASE
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name.lower(): number for number, name in enumerate(self.names)}

    def pairs(self, record: bytes, text: str) -> list[Pair]:
        """The pairs of a text, or of a JSON line whose first text it is. Raises UnusableRecord."""
        return list(self._find(text)) if self.key is None else [self._read(record, text)]

    def _find(self, text: str) -> Iterator[Pair]:
        for paragraph in _PARAGRAPHS.split(text):
            gaps = [match.span(1) for match in SENTENCE_END.finditer(paragraph)]
            starts, ends = [0, *(end for _, end in gaps)], [*(start for start, _ in gaps), len(paragraph)]
            for previous, sentence in itertools.pairwise(zip(starts, ends, strict=True)):
                if match := self._marker.match(paragraph, sentence[0]):
                    first = paragraph[slice(*previous)].strip()
                    second = paragraph[match.end() : sentence[1]].strip()
                    if first and second:
                        yield Pair(first, second, self._numbers[match[1].lower()])

    def _read(self, record: bytes, text: str) -> Pair:
        tree = parse_json_object(record)
        second, label = tree.get(self.key or ""), tree.get("label")
        if not isinstance(second, str) or not second.strip():
            problem = f"field {self.key!r} holds {json_type(second)}, not text (set with --second-key)"
            raise UnusableRecord(
                "no_second_text", problem if second != "" else f"field {self.key!r} is empty"
            )
        number = self._numbers.get(label.lower(), -1) if isinstance(label, str) else label
        if type(number) is not int or not 0 <= number < self.count:
            rule = f"it must be a name in the --labels file or a number from 0 to {self.count - 1}"
            raise UnusableRecord("bad_label", f"the label is {shown(label)}; {rule}")
        return Pair(text, second, number)


def encode_pairs(
    parsed: ParsedBlock, block: RecordBlock, tokenizer: Any, reader: PairReader
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and labels of the pairs of a block, which take the place of their texts in `parsed`.

    A label is on the first token of its B, as annotations are (annotations.py).
    """
    pairs: list[Pair] = []
    origins: list[str] = []
    lines: list[int] = []
    records = block.data.split(b"\n") if isinstance(block.data, bytes) and reader.key is not None else None
    for text, line in zip(parsed.texts, parsed.lines, strict=True):
        try:
            record = b"" if records is None else records[line - block.first_line]
            text_pairs = reader.pairs(record, text)
        except UnusableRecord as error:
            parsed.counts.add_bad(error.kind, SourceLocation(block.source, line, str(error), block.start))
            continue
        parsed.counts.merge(RecordCounts(mentions={KEPT: len(text_pairs), WITHOUT: int(not text_pairs)}))
        pairs += text_pairs
        origins += [text] * len(text_pairs)
        lines += [line] * len(text_pairs)
    ids, lengths = tokenizer.encode_batch([text for pair in pairs for text in pair[:2]])
    lengths = lengths.reshape(-1, 2)  # of A and B
    is_whole = lengths.all(axis=1)  # a tokenizer may drop all of a text (control characters)
    parsed.counts.empty_documents += int((~is_whole).sum())
    ids = ids[np.repeat(is_whole, lengths.sum(axis=1))]
    pairs, lengths = list(itertools.compress(pairs, is_whole)), lengths[is_whole]
    labels = np.full(len(ids), -1, np.int32)
    ends = lengths.sum(axis=1).cumsum()
    labels[ends - lengths[:, 1]] = [pair.label for pair in pairs]
    parsed.texts = [f"{pair.first}\n{pair.second}" for pair in pairs]
    parsed.origins = list(itertools.compress(origins, is_whole))
    parsed.lines = list(itertools.compress(lines, is_whole))
    return ids, lengths.sum(axis=1), labels


def open_pairs(config: BuildConfig, inputs: Sequence[InputFile]) -> PairReader | None:
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
                f"{option} {path}:{number}: the name {shown(name)} is empty, repeated or has a comma; put one "
                "unique name without a comma on each line."
            )
        numbers[name.lower()] = number
    if len(names) < 2:
        raise ConfigError(f"{option} {path} has {len(names)} names; it needs 2 or more, one per line.")
    return PairReader(tuple(names), config.second_key)
