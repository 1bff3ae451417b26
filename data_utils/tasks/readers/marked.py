"""Mentions in lines of JSON: spans of a text that marks will surround, sets of classes, and entities with scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.corpus.mentions import EntityNames, read_names
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.files import BadLine, Intake, value_in

ENTITIES = "entities"  # field of a line and of a TaskRecord


def task_marks(config: TaskConfig) -> Mapping[str, str]:
    """Field of a span -> the mark before and after it. Source: thunlp/ERNIE, its code for typing."""
    return config.marks or ({"mention": "\u3002"} if config.kind == "typing" else {})


def is_marked(config: TaskConfig) -> bool:
    """Whether samples have mentions or entities."""
    return bool(task_marks(config)) or config.entity_ids is not None


def mentions_in(config: TaskConfig, tree: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a TaskRecord that hold offsets. Raises BadLine, UnusableRecord, ConfigError, DataError."""
    if len(texts) != 1:
        raise ConfigError(
            f"task.marks and task.entity_ids need samples with one text, but these have {', '.join(texts)}; set "
            "task.text_fields to one of them."
        )
    (text,) = texts.values()
    fields: dict[str, Any] = {name: _span_in(tree, name, text) for name in task_marks(config)}
    for (name, span), (other_name, other_span) in itertools.combinations(fields.items(), 2):
        (_, end), (start, last) = sorted((span, other_span))
        if start < end < last and span[0] != other_span[0]:
            raise BadLine(
                f"the spans {name} {[*span]} and {other_name} {[*other_span]} overlap; spans must be disjoint or "
                "nested"
            )
    if config.entity_ids is not None:
        mentions, _ = _names(config.entity_ids).mentions(tree, ENTITIES, text, config.min_score)
        fields[ENTITIES] = tuple(tuple(mention) for mention in mentions)
    return fields


def entity_count(path: str) -> int:
    """How many entities a file of numbers has. Raises DataError."""
    return _names(path).count


@functools.lru_cache(maxsize=2)
def _names(path: str) -> EntityNames:
    return read_names(path, "task.entity_ids")


def _span_in(tree: Mapping[str, Any], name: str, text: str) -> tuple[int, int]:
    span = value_in(tree, name)
    is_pair = isinstance(span, list) and [type(offset) for offset in span] == [int, int]
    if not is_pair or not 0 <= span[0] < span[1] <= len(text) or not text[slice(*span)].strip():
        raise BadLine(
            f"field {name!r} is {shown(span)}; it must be [start, end], a non-empty range within the {len(text)} "
            "characters of the text, excluding the end"
        )
    return span[0], span[1]


def class_names(intake: Intake, value: Any) -> tuple[str, ...]:
    """The classes of a label in the order of their numbers, each once; [] says none. Raises BadLine."""
    if not isinstance(value, list):
        raise BadLine(f"the label is {shown(value)}; typing needs a list of labels, which may be empty")
    names = {intake.class_name(label) for label in value}
    if None in names:
        raise BadLine(f"the label {shown(value)} contains a NUL character; remove it")
    return tuple(label for label in intake.labels if label in names)
