"""Spans of a build: entities, phrases and the like that JSON lines list, without numbers of a knowledge base.

A record names them as it names entities (mentions.py): `[start, end, kind]`, in characters of its text. The first token
of a span has its length in tokens, so that both ends are known; all other tokens have -1. Kinds are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.build.mentions import EntityReader, require_json_lines
from data_utils.corpus.mentions import UNKNOWN, Mention, tokens_of
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

    def mentions(
        self, tree: Mapping[str, Any], key: str, text: str, min_score: float, hint: str = ""
    ) -> tuple[list[Mention], dict[str, int]]:
        """As `EntityReader.mentions`, without a count of unknown names."""
        mentions, counts = super().mentions(tree, key, text, min_score, hint)
        del counts[UNKNOWN]
        return mentions, counts

    def values(self, mentions: list[Mention], places: list[tuple[int, int]], text: str) -> np.ndarray:
        """The length of a span in tokens on its first one."""
        lengths = np.full(len(places), -1, np.int32)
        for first, last, _ in tokens_of(mentions, places, text):
            lengths[first] = last - first
        return lengths


def open_spans(config: BuildConfig, inputs: Sequence[Path]) -> SpanReader | None:
    """The reader of spans, if a build has them. Raises: ConfigError for inputs without fields."""
    if config.spans_key is None:
        return None
    require_json_lines(SpanReader.option, inputs)
    none = np.zeros(0, np.int32)
    return SpanReader(SPANS, b"", none, none, config.spans_key, config.min_score)
