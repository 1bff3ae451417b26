"""Spans of a build: entities, phrases and the like that JSON lines list, without numbers of a knowledge base.

A record names them as it names entities (mentions.py): `[start, end, kind]`, in characters of its text. The first token
of a span has its length in tokens, so that both ends are known; all other tokens have -1. Kinds are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.build.mentions import UNKNOWN, EntityReader, Mention, require_json_lines
from data_utils.dataset.manifest import SPANS


class SpanReader(EntityReader):
    """Gives tokens their numbers as an `EntityReader` does; every kind is known."""

    option = "--spans-key"

    @property
    def count(self) -> int:
        """Lengths are below it: those of an int32."""
        return 1 << 31

    def number(self, name: str) -> int:
        """As `EntityReader.number`: all kinds are one."""
        return 0

    def mentions(self, record: bytes, text: str) -> tuple[list[Mention], dict[str, int]]:
        """As `EntityReader.mentions`."""
        mentions, counts = super().mentions(record, text)
        del counts[UNKNOWN]
        return mentions, counts

    def value(self, first: int, last: int, entity: int) -> int:
        """The length of the span, tokens."""
        return last - first


def open_spans(config: BuildConfig, inputs: Sequence[Path]) -> SpanReader | None:
    """The reader of spans, if a build has them. Raises: ConfigError for inputs without fields."""
    if config.spans_key is None:
        return None
    require_json_lines(SpanReader.option, inputs)
    none = np.zeros(0, np.int32)
    return SpanReader(config.spans_key, config.min_score, SPANS, none.astype("S1"), none)
