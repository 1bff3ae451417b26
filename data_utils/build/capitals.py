"""Capitals of a build: which words of a text begin with one, stored beside the tokens as entities are.

The first token of a word has 1 if its first letter is a capital, else 0; all other tokens have -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.build.mentions import EntityReader, open_entities
from data_utils.build.pairs import PairReader, open_pairs
from data_utils.build.spans import open_spans
from data_utils.corpus.mentions import KEPT
from data_utils.dataset.manifest import CAPITALS


class CapitalReader:
    """Gives tokens their numbers as an `EntityReader` does, from the text alone."""

    key, min_score, count, fingerprint = None, 0.0, 2, CAPITALS

    def of_tokens(
        self, record: bytes, text: str, places: list[tuple[int, int]]
    ) -> tuple[np.ndarray, dict[str, int]]:
        """As `EntityReader.of_tokens`."""
        return np.array([_capital(text, *place) for place in places], np.int32), {KEPT: 0}


Reader = EntityReader | CapitalReader | PairReader


def _capital(text: str, start: int, end: int) -> int:
    """The number of a token, which may begin with the space before a word."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    begins = text[start:end][:1].isalpha() and not text[max(0, start - 1) : start].isalnum()
    return int(text[start].isupper()) if begins else -1


def open_reader(config: BuildConfig, inputs: Sequence[Path]) -> Reader | None:
    """The reader of the numbers beside tokens, if a build has them. Raises: as `open_entities` and `open_pairs`."""
    if config.capitals:
        return CapitalReader()
    return open_spans(config, inputs) or open_entities(config, inputs) or open_pairs(config, inputs)
