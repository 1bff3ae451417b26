"""Files of predictions, in the form that the server of each benchmark takes. They are written whole or not at all.

    SuperGLUE   BoolQ.jsonl ...  {"idx": 3, "label": "true"}; COPA's label is a number, WSC's is True or False
                MultiRC.jsonl    {"idx": 1, "passage": {"questions": [{"idx": 2, "answers": [{"idx": 0, "label": 1}]}]}}
                ReCoRD.jsonl     {"idx": {...} as in the file, "label": "the entity"}
    GLUE        CoLA.tsv ...     index and prediction under a line of names; STS-B from 0 to 5 with three places
    SQuAD       NAME.json        {"id": "text", ...}; an empty text says that there is no answer
    all else    NAME.jsonl       {"idx": 3, "label": ...}, and of classes and choices "scores": the share of each

Source: the sample submissions of gluebenchmark.com and super.gluebenchmark.com, as jiant writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.files import write_whole
from data_utils.common.setting_files import shown
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.files import plain_name

_SUFFIXES = {"glue": ".tsv", "squad": ".json"}
_NAMES = {
    "superglue": ("BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "WSC", "AX-b", "AX-g"),
    "glue": ("CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI-m", "MNLI-mm", "QNLI", "RTE", "WNLI", "AX"),
}


def file_name(task: TaskConfig) -> str:
    """The name that the benchmark's server wants; for other tasks their own, of letters, digits and -_. only."""
    own = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task.name)
    return (_server_name(task) or own) + _SUFFIXES.get(_server_format(task), ".jsonl")


def _server_name(task: TaskConfig) -> str | None:
    plain = {"mnli": "mnlim"}.get(plain_name(task.name), plain_name(task.name))
    return {plain_name(name): name for name in _NAMES.get(task.reader, ())}.get(plain)


def _server_format(task: TaskConfig) -> str:
    """The reader whose benchmark's form a file of predictions has; "" for your own data in its files."""
    return task.reader if task.reader not in _NAMES or _server_name(task) else ""


def write_predictions(
    path: Path,
    task: TaskConfig,
    indices: Sequence[Any],
    predictions: Sequence[Any],
    option: str = "--output",
    beside: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> None:
    """Write a file of predictions.

    Args:
        indices: `TaskRecord.index` of each sample; of MultiRC (passage, question, answer).
        predictions: in the types of `TaskRecord.label`: names of classes, numbers, texts, lists of tags.
        option: names the path, for messages.
        beside: more of each prediction, by its name, such as the shares of classes; servers take none of it.
    Raises: DataError for unequal counts, predictions that do not fit the task, or if the file cannot be written.
    """
    if len(indices) != len(predictions):
        raise DataError(
            f"there are {len(predictions)} predictions for {len(indices)} samples; each sample needs one."
        )
    name, pairs = plain_name(task.name), list(zip(indices, predictions, strict=True))
    server_format = _server_format(task)
    if server_format == "squad":
        text = json.dumps(dict(pairs), ensure_ascii=False) + "\n"
    elif server_format == "glue":
        text = "".join(
            f"{index}\t{value}\n" for index, value in [("index", "prediction"), *_glue(name, pairs)]
        )
    elif server_format == "superglue" and name == "multirc":
        text = _lines(_multirc(pairs))
    else:
        is_superglue = server_format == "superglue"
        lines = [{"idx": i, "label": _superglue(name, p) if is_superglue else p} for i, p in pairs]
        for key, values in beside.items() if not is_superglue else ():
            lines = [{**line, key: value} for line, value in zip(lines, values, strict=True)]
        text = _lines(lines)
    write_whole(path, text.encode("utf-8"), option)


def _lines(objects: Iterable[Any]) -> str:
    return "".join(json.dumps(each, ensure_ascii=False, default=_plain) + "\n" for each in objects)


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy."""
    return value.tolist()


def _superglue(task: str, label: Any) -> Any:
    """As the server has it: it compares texts, and WSC's begin with a capital."""
    if task == "copa":
        return _number(label)
    return str(label).capitalize() if task == "wsc" else label


def _glue(task: str, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    if task == "stsb":
        return [(index, f"{min(max(float(value), 0.0), 5.0):.3f}") for index, value in pairs]
    return list(pairs)


def _multirc(pairs: Iterable[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Answers by their passage and question, all in the order of the file."""
    passages: dict[Any, dict[Any, list[dict[str, Any]]]] = {}
    for (passage, question, answer), label in pairs:
        answers = passages.setdefault(passage, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": _number(label)})
    return [
        {"idx": passage, "passage": {"questions": [{"idx": q, "answers": a} for q, a in questions.items()]}}
        for passage, questions in passages.items()
    ]


def _number(label: Any) -> int:
    if str(label) not in ("0", "1"):
        raise DataError(f"prediction {shown(label)} is not the index of a choice; the server accepts 0 or 1.")
    return int(label)
