"""Texts with marks around mentions, and the entities that stand on their tokens.

    typing      . Bob Dylan . wrote a song     {mention: .}, written as an ideographic full stop
    relations   # Bob Dylan # wrote $ a song $     {head: #, tail: $}

A space stands between a mark and its mention. Source: thunlp/ERNIE, code for typing and FewRel.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord
from data_utils.corpus.mentions import Mention, token_entities
from data_utils.objectives import OBJECTIVES
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.marked import ENTITIES, is_marked, task_marks
from data_utils.tasks.templates.inputs import Inputs


def check_marks(inputs: Inputs) -> None:
    """Raise ConfigError for marks that are not one token of the vocabulary each."""
    for name, mark in task_marks(inputs.config).items():
        ids = inputs.tokenizer.encode(mark) if isinstance(mark, str) else []
        # A tokenizer may have a token of its own for the space that it thinks before a text.
        if len(ids) > 1 and not inputs.tokenizer.decode(ids[:1]).strip():
            ids = ids[1:]
        if len(ids) != 1 or inputs.special.unk in ids:
            is_known = len(ids) > 1 and inputs.special.unk not in ids
            count = f"{len(ids)} tokens" if is_known else "no token"
            raise ConfigError(
                f"task.marks.{name} is {shown(mark)}, which is {count} of the vocabulary; choose a sign that is one "
                "token, in quotes."
            )


def refuse_marks(config: TaskConfig) -> None:
    """Raise ConfigError for marks or entities of a kind that does not read them."""
    if is_marked(config):
        raise ConfigError(
            f"task.marks or task.entity_ids is set, but task.kind {config.kind} does not use them; remove them, or "
            "set task.kind to typing, classification or regression."
        )


class MarkedText:
    """A text with its marks. Args: spans: (start, end, mark) in characters of the text."""

    def __init__(self, text: str, spans: Sequence[tuple[int, int, str]]):
        # At one position, what ends comes before what begins; of two that end, the one that began last.
        inserted = [(end, 0, -start, f" {mark}") for start, end, mark in spans]
        inserted += [(start, 1, -end, f"{mark} ") for start, end, mark in spans]
        self._positions: list[int] = []  # where each mark stands, in characters of the text without marks
        self._added = [0]  # characters of the first 0, 1, 2, ... marks
        texts, done = [], 0
        for position, _, _, mark in sorted(inserted):
            texts += [text[done:position], mark]
            done = position
            self._positions.append(position)
            self._added.append(self._added[-1] + len(mark))
        self.text = "".join([*texts, text[done:]])

    def start(self, position: int) -> int:
        """Where a mention begins that began at `position`: after all marks there."""
        return position + self._added[bisect.bisect_right(self._positions, position)]

    def end(self, position: int) -> int:
        """Where a mention ends that ended at `position`: before all marks there."""
        return position + self._added[bisect.bisect_left(self._positions, position)]


def marked_tokens(
    inputs: Inputs, text: str, record: TaskRecord, max_tokens: int
) -> tuple[list[int], np.ndarray | None, int]:
    """The tokens of a text with its marks, at most `max_tokens`.

    Of a text that is too long the end is cut off, and so much of its beginning that all marks are there.

    Returns: token ids, what `block_position_ids` holds of their entities (1 + the entity, 0 = none; None for models
        without), and the number of tokens cut off.
    Raises: DataError if the marks and what lies between them do not fit.
    """
    spans = [(*record.needed(name), mark) for name, mark in task_marks(inputs.config).items()]
    marked = MarkedText(text, spans)
    ids, offsets = inputs.tokenizer.encode_with_offsets(marked.text)
    begin, cut = 0, max(0, len(ids) - max_tokens)
    if cut and spans:
        ends = [end for _, end in offsets]
        first = min(bisect.bisect_right(ends, marked.end(start)) for start, _, _ in spans)
        last = max(bisect.bisect_left(ends, marked.start(end)) for _, end, _ in spans) + 1
        begin = max(0, min(last, len(ids)) - max_tokens)
        if begin > first:
            needed = inputs.config.sequence_length + last - first - max_tokens
            raise DataError(
                f"{record.location}: the marked mentions and the text between them need {needed} tokens, but "
                f"task.sequence_length is {inputs.config.sequence_length}; set it to {needed} or more."
            )
    entities = None
    if OBJECTIVES[inputs.input_format.objective].config_class.token_annotation == ENTITIES:
        entities = np.zeros(len(ids), np.int32)
        for values in _aligned(record, marked, offsets):
            entities = np.where(values >= 0, values + 1, entities)
        entities = entities[begin : begin + max_tokens]
    return ids[begin : begin + max_tokens], entities, cut


def _aligned(record: TaskRecord, marked: MarkedText, offsets: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The tokens of each entity of a record, as `token_entities`; one that is half a token is left out."""
    for start, end, entity in record.fields.get(ENTITIES, ()):
        mention = Mention(marked.start(start), marked.end(end), entity)
        with contextlib.suppress(UnusableRecord):
            yield token_entities([mention], offsets, marked.text)
