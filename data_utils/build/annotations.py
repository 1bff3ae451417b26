"""Annotations of a build: an int32 stored for each token, -1 where it has none. Four types, one for a dataset:

    entities   the number of the entity that begins at the token (`--entities-key`, corpus/mentions.py)
    spans      the length in tokens of the span that begins at the token (`--spans-key`); a record lists spans as it
               lists entities, `[start, end, type]` in characters, and types are not stored
    capitals   1 or 0 on the first token of a word: whether its first letter is a capital (`--capitals`)
    labels     the label of a pair of texts, on the first token of the second (labelled_pairs.py)

The manifest and the files of a dataset name all of them entities, which came first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.build.config import BuildConfig, require_json_lines
from data_utils.build.labelled_pairs import PairReader, encode_pairs, open_pairs
from data_utils.corpus.documents import ParsedBlock, RecordBlock, RecordCounts, SourceLocation
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.corpus.mentions import (
    KEPT,
    UNKNOWN,
    EntityNames,
    Mention,
    mention_tokens,
    read_names,
    token_entities,
)
from data_utils.corpus.stored_files import InputFile
from data_utils.dataset.manifest import CAPITALS, SPANS


@dataclass(frozen=True)
class EntityReader(EntityNames):
    """Reads the entities of JSON records. Each process has one."""

    option = "--entities-key"

    key: str
    min_score: float

    def token_values(
        self, record: bytes, text: str, offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[str, int]]:
        """The annotations of a text's tokens, int32 [tokens], and counts of its mentions. Raises UnusableRecord."""
        mentions, counts = self.mentions(
            parse_json_object(record), self.key, text, self.min_score, f" (set with {self.option})"
        )
        return self.values_of_mentions(mentions, offsets, text), counts

    def values_of_mentions(
        self, mentions: list[Mention], offsets: list[tuple[int, int]], text: str
    ) -> np.ndarray:
        """Args and errors: as `token_entities`."""
        return token_entities(mentions, offsets, text)


class SpanReader(EntityReader):
    """Reads spans as `EntityReader` reads entities; no file lists their types."""

    option = "--spans-key"

    @property
    def count(self) -> int:
        """Values are below it: the lengths that an int32 holds."""
        return 1 << 31

    def number(self, name: str) -> int:
        """As `EntityNames.number`: all types are one."""
        return 0

    def mentions(
        self, tree: Mapping[str, Any], key: str, text: str, min_score: float, hint: str = ""
    ) -> tuple[list[Mention], dict[str, int]]:
        """As `EntityNames.mentions`, without a count of unknown names."""
        mentions, counts = super().mentions(tree, key, text, min_score, hint)
        del counts[UNKNOWN]
        return mentions, counts

    def values_of_mentions(
        self, mentions: list[Mention], offsets: list[tuple[int, int]], text: str
    ) -> np.ndarray:
        lengths = np.full(len(offsets), -1, np.int32)
        for first, last, _ in mention_tokens(mentions, offsets, text):
            lengths[first] = last - first
        return lengths


class CapitalReader:
    """Finds capitals in the text alone; `record` is not read."""

    key, min_score, count, fingerprint = None, 0.0, 2, CAPITALS

    def token_values(
        self, record: bytes, text: str, offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[str, int]]:
        """As `EntityReader.token_values`."""
        return np.array([_capital(text, *offset) for offset in offsets], np.int32), {KEPT: 0}


def _capital(text: str, start: int, end: int) -> int:
    """The annotation of a token, which may begin with the space before a word."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    before = text[max(0, start - 1) : start]
    is_within = before.isalnum() or (not before.isascii() and unicodedata.category(before)[0] == "M")
    begins_word = text[start:end][:1].isalpha() and not is_within
    return int(text[start].isupper()) if begins_word else -1


AnnotationReader = EntityReader | CapitalReader | PairReader


def open_annotation_reader(config: BuildConfig, inputs: Sequence[InputFile]) -> AnnotationReader | None:
    """The reader of the annotations that a build stores; None: it stores none.

    Raises: ConfigError for inputs without the fields that it needs, or a bad file of labels; DataError for a bad file
        of entities.
    """
    if config.capitals:
        return CapitalReader()
    if config.spans_key is not None:
        require_json_lines(SpanReader.option, inputs)
        none = np.zeros(0, np.int32)
        return SpanReader(SPANS, b"", none, none, config.spans_key, config.min_score)
    if config.entities_key is not None and config.entity_ids is not None:
        require_json_lines(EntityReader.option, inputs)
        names = read_names(config.entity_ids, "--entity-ids")
        return EntityReader(**vars(names), key=config.entities_key, min_score=config.min_score)
    return open_pairs(config, inputs)


def encode_annotated(
    parsed: ParsedBlock, block: RecordBlock, tokenizer: Any, reader: AnnotationReader
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and annotations of the texts of a block.

    Records with bad annotations are counted and leave `parsed`. Pairs take the place of their texts there.
    """
    if isinstance(reader, PairReader):
        return encode_pairs(parsed, block, tokenizer, reader)
    all_ids, all_values = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    texts, lines = [], []
    records = block.data.split(b"\n") if isinstance(block.data, bytes) and reader.key is not None else None
    for text, line in zip(parsed.texts, parsed.lines, strict=True):
        try:
            ids, offsets = tokenizer.encode_with_offsets(text)
            record = b"" if records is None else records[line - block.first_line]
            values, counts = reader.token_values(record, text, offsets)
        except UnusableRecord as error:
            # Left out whole, as a record with bad JSON is.
            parsed.counts.add_bad(error.kind, SourceLocation(block.source, line, str(error), block.start))
            continue
        parsed.counts.merge(RecordCounts(mentions=counts))
        all_ids.append(np.array(ids, np.int32))
        all_values.append(values)
        texts.append(text)
        lines.append(line)
    parsed.texts, parsed.lines = texts, lines
    lengths = np.array([len(ids) for ids in all_ids[1:]], np.int64)
    return np.concatenate(all_ids), lengths, np.concatenate(all_values)
