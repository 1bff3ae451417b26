"""Entities that texts mention: the numbers of their names, their offsets in a text, and the tokens they begin at.

A mention is `[start, end, name]` or `[start, end, name, score]`: characters of its text, `end` not included. A file
gives each name a number: its first line is their count, each other line `name<TAB>number`, as in the entity2id.txt of
knowledge bases (OpenKE). An entity stands on the first token of its mention.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord
from data_utils.corpus.stored_files import open_regular

KEPT, UNKNOWN, LOW_SCORE = "kept", "unknown", "low_score"  # what became of a mention
_SCHEMA = '[start, end, "name"] or [start, end, "name", score]'


class Mention(NamedTuple):
    start: int  # characters of the text
    end: int
    entity: int


@dataclass(frozen=True)
class EntityNames:
    """The numbers of entities by their names, which stand in one text: so millions need little memory."""

    fingerprint: str  # of the file of numbers
    names: bytes  # sorted, one after another
    ends: np.ndarray  # int64: of each name in it
    numbers: np.ndarray  # int32

    @property
    def count(self) -> int:
        return len(self.ends)

    def number(self, name: str) -> int:
        """The entity of a name, -1 if it has none."""
        wanted = name.encode("utf-8", "surrogatepass")
        index = bisect.bisect_left(range(len(self.ends)), wanted, key=self._name)
        is_known = index < len(self.ends) and self._name(index) == wanted
        return int(self.numbers[index]) if is_known else -1

    def _name(self, index: int) -> bytes:
        return self.names[self.ends[index - 1] if index else 0 : self.ends[index]]

    def mentions(
        self, tree: Mapping[str, Any], key: str, text: str, min_score: float, hint: str = ""
    ) -> tuple[list[Mention], dict[str, int]]:
        """The mentions of an object in order, and how many were kept or left out. Raises UnusableRecord.

        Args: key: field of the list. hint: follows what is said where there is none.
        """
        entries = tree.get(key)
        if not isinstance(entries, list):
            raise UnusableRecord("no_entities", f"there is no list {key!r} of {_SCHEMA}{hint}")
        mentions, counts = [], {KEPT: 0, UNKNOWN: 0, LOW_SCORE: 0}
        for entry in entries:
            start, end, name, score = _parsed(entry)
            if not 0 <= start < end <= len(text):
                problem = f"the mention {shown(entry)} is not within the text of {len(text)} characters"
                raise UnusableRecord("bad_mention", problem)
            entity = self.number(name)
            fate = LOW_SCORE if score < min_score else UNKNOWN if entity < 0 else KEPT
            counts[fate] += 1
            if fate == KEPT:
                mentions.append(Mention(start, end, entity))
        mentions.sort()
        for first, second in itertools.pairwise(mentions):
            if second.start < first.end:
                problem = f"two mentions overlap: {[*first[:2]]} and {[*second[:2]]}"
                raise UnusableRecord("bad_mention", problem)
        return mentions, counts


def _parsed(entry: object) -> tuple[int, int, str, float]:
    """Start, end, name and score (1 where there is none). Raises UnusableRecord."""
    if isinstance(entry, list) and len(entry) in (3, 4):
        start, end, name, score = (*entry, 1.0)[:4]
        is_score = type(score) in (int, float) and score == score  # NaN is below no --min-score
        if type(start) is int and type(end) is int and isinstance(name, str) and is_score:
            return start, end, name, score
    raise UnusableRecord("bad_mention", f"the mention {shown(entry)} is not {_SCHEMA}")


def token_entities(mentions: list[Mention], offsets: list[tuple[int, int]], text: str) -> np.ndarray:
    """The entity that begins at each token, int32 [tokens], -1 = none. Args and errors: as `mention_tokens`."""
    entities = np.full(len(offsets), -1, np.int32)
    for first, _, entity in mention_tokens(mentions, offsets, text):
        entities[first] = entity
    return entities


def mention_tokens(
    mentions: list[Mention], offsets: list[tuple[int, int]], text: str
) -> Iterator[tuple[int, int, int]]:
    """First token, end and entity of each mention. Raises UnusableRecord for half a token.

    Args: offsets: first character and end of each token.
    """
    token = 0
    for start, end, entity in mentions:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        last = token
        while last < len(offsets) and offsets[last][0] < end:
            last += 1
        words = shown(text[start:end])
        if last == token:
            raise UnusableRecord("bad_mention", f"the mention {words} at {start} covers no token")
        before, after = text[offsets[token][0] : start], text[end : offsets[last - 1][1]]
        if before.strip() or after.strip():  # a token may begin with the space before a word
            problem = f"the mention {words} at {start} begins or ends inside a token"
            raise UnusableRecord("bad_mention", problem)
        yield token, last, entity
        token = last


def read_names(path: str, option: str) -> EntityNames:
    """Read the numbers of entities. Args: option: names the path, for messages. Raises DataError."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise DataError(f"{option} {path}: {error.strerror}; give the file with the entity ids.") from None
    first, *lines = data.split(b"\n")
    lines = lines[:-1] if lines and not lines[-1] else lines
    if _number(first.strip()) != len(lines) or not lines:
        raise DataError(
            f"{path}:1: the first line is {shown(first[:40].decode(errors='replace'))}, but {len(lines)} lines "
            "follow; it must be the number of these lines, 1 or more."
        )
    names, numbers = [], np.full(len(lines), -1, np.int32)
    for index, line in enumerate(lines):
        name, _, digits = line.rstrip(b"\r").rpartition(b"\t")
        number = _number(digits)
        if not name or not 0 <= number < len(lines):
            raise DataError(
                f"{path}:{index + 2}: the line is {shown(line[:80].decode(errors='replace'))}; it must be a name, a "
                f"tab and a number below {len(lines)}."
            )
        names.append(name)
        numbers[index] = number
    order = sorted(range(len(names)), key=names.__getitem__)
    names = [names[index] for index in order]
    repeated_name = next((name for name, following in itertools.pairwise(names) if name == following), None)
    values, counts = np.unique(numbers, return_counts=True)
    for column, repeated in (
        ("name", None if repeated_name is None else shown(repeated_name.decode(errors="replace"))),
        ("number", next(iter(values[counts > 1].tolist()), None)),
    ):
        if repeated is not None:
            raise DataError(f"{path}: the {column} {repeated} appears twice; give each entity its own.")
    ends = np.cumsum([len(name) for name in names])
    return EntityNames(hashlib.sha256(data).hexdigest(), b"".join(names), ends, numbers[order])


def _number(digits: bytes) -> int:
    """A whole number, -1 for anything else; of thousands of digits Python makes none."""
    return int(digits) if digits.isdigit() and len(digits) < 19 else -1
