"""Entities in the texts of a build: where JSON lines say that they are mentioned, stored beside the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.common.errors import ConfigError
from data_utils.corpus.documents import ParsedBlock, RecordBlock, RecordCounts, SourceLocation
from data_utils.corpus.inputs import file_format
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.corpus.mentions import EntityNames, Mention, read_names, token_entities


@dataclass(frozen=True)
class EntityReader(EntityNames):
    """Reads the mentions of records. Each process has one."""

    option = "--entities-key"

    key: str
    min_score: float

    def of_tokens(
        self, record: bytes, text: str, offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[str, int]]:
        """The entity that begins at each token, int32 [tokens], -1 = none, and counts. Raises UnusableRecord."""
        mentions, counts = self.mentions(
            parse_json_object(record), self.key, text, self.min_score, f" (set with {self.option})"
        )
        return self.values(mentions, offsets, text), counts

    def values(self, mentions: list[Mention], offsets: list[tuple[int, int]], text: str) -> np.ndarray:
        """The number that stands on each token. Args and errors: as `token_entities`."""
        return token_entities(mentions, offsets, text)


def encode_with_entities(
    parsed: ParsedBlock, block: RecordBlock, tokenizer: Any, reader: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and entities of the texts; those with bad mentions are counted and leave `parsed`."""
    ids, entities = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    texts, lines = [], []
    records = block.data.split(b"\n") if isinstance(block.data, bytes) and reader.key is not None else None
    for text, line in zip(parsed.texts, parsed.lines, strict=True):
        try:
            own, offsets = tokenizer.encode_with_offsets(text)
            record = b"" if records is None else records[line - block.first_line]
            found, counts = reader.of_tokens(record, text, offsets)
            entities.append(found)
        except UnusableRecord as error:
            parsed.counts.add_bad(error.kind, SourceLocation(block.source, line, str(error), block.start))
            continue
        parsed.counts.merge(RecordCounts(mentions=counts))
        ids.append(np.array(own, np.int32))
        texts.append(text)
        lines.append(line)
    # A record with bad mentions is left out whole, as one with bad JSON.
    parsed.texts, parsed.lines = texts, lines
    lengths = np.array([len(own) for own in ids[1:]], np.int64)
    return np.concatenate(ids), lengths, np.concatenate(entities)


def open_entities(config: BuildConfig, inputs: Sequence[Path]) -> EntityReader | None:
    """Read the numbers of entities, if a build has them. Raises DataError; ConfigError for inputs without fields."""
    key, path = config.entities_key, config.entity_ids
    if key is None or path is None:
        return None
    require_json_lines(EntityReader.option, inputs)
    return EntityReader(**vars(read_names(path, "--entity-ids")), key=key, min_score=config.min_score)


def require_json_lines(option: str, inputs: Sequence[Path]) -> None:
    """Raise ConfigError for inputs without fields, which an option reads."""
    for source in inputs:
        if file_format(source, "") != "jsonl":
            raise ConfigError(
                f"{option} needs JSON lines, but {source} is another format; convert it or drop the option."
            )
