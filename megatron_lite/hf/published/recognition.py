"""Recognises the system of a published directory, and completes a config.json that lacks or misstates fields.

    system_in         the system, by model_type, by architectures, or by tensor names if exactly one system fits
    complete_config   config.json as the rest of the import reads it, and a line for each change

A class of transformers is named after its system (Bert), and what follows says which head it has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shorten
from megatron_lite.hf.files.config_json import CONFIG_JSON
from megatron_lite.hf.files.left_out import reason
from megatron_lite.hf.files.system_table import PublishedSystem
from megatron_lite.hf.files.weights import Weights
from megatron_lite.hf.published.heads import TASK_CLASSES, TaskClass
from megatron_lite.hf.published.systems import PUBLISHED

_HEADS = re.compile(r"(For[A-Z]\w*|WithLMHeadModel|LMHeadModel|LMHead|DoubleHeadsModel|EncoderModel|Model)$")
_FORMER_CLASSES = {  # of first releases: the class of today
    "T5WithLMHeadModel": "T5ForConditionalGeneration", "MT5WithLMHeadModel": "MT5ForConditionalGeneration",
    "BartForMaskedLM": "BartForConditionalGeneration",
}  # fmt: skip


def stem(class_name: str) -> str:
    """The name of a class without its head: Bert of BertForMaskedLM."""
    return _HEADS.sub("", class_name)


def body_class(system: PublishedSystem) -> str:
    """The class of a system without a head."""
    return f"{stem(next(iter(system.classes)))}Model"


def is_body(class_name: str) -> bool:
    return class_name == f"{stem(class_name)}Model"


def architecture(described: Mapping[str, Any]) -> str | None:
    """The class that config.json names, if it names one."""
    (name,) = (described.get("architectures") or [None])[:1]
    return _FORMER_CLASSES.get(name or "", name)


def system_in(path: Path, described: Mapping[str, Any], weights: Weights) -> PublishedSystem | None:
    """The system of a directory, None if it is of none here. Raises: CheckpointError if several fit its tensors."""
    if (model_type := described.get("model_type")) is not None:
        return PUBLISHED.get(model_type)
    if (name := architecture(described)) is not None:
        return next(
            (
                system
                for system in PUBLISHED.values()
                if stem(name) in {stem(each) for each in system.classes}
            ),
            None,
        )
    fitting = [system for system in PUBLISHED.values() if _fits(system, weights.shapes)]
    if len(fitting) > 1:
        types = ", ".join(system.model_type for system in fitting)
        raise CheckpointError(
            f"{path / CONFIG_JSON} has neither model_type nor architectures, and the tensors fit {types}; "
            'add "model_type" to it, with the one that this model is.'
        )
    return next(iter(fitting), None)


def _fits(system: PublishedSystem, names: Iterable[str]) -> bool:
    """Whether all tensors can be of a system, its words among them. Files of a base model alone may lack the prefix."""
    names = set(names)
    if not any(name.startswith(system.prefix) for name in names):
        names = {name if reason(name, system.model_type, "") else f"{system.prefix}{name}" for name in names}
    modules = {re.sub(r"\\{i\\}", r"\\d+", re.escape(each)) for rule in system.rules for each in rule.theirs}
    pattern = re.compile(rf"({'|'.join(sorted(modules))})(\.weight|\.bias|\.gamma|\.beta)?")
    known = {*system.ties, *system.zeros}
    (words,) = (rule.theirs[0] for rule in system.rules if rule.ours == "embedding.word_embeddings")
    return f"{words}.weight" in names and all(
        pattern.fullmatch(name) or name in known or reason(name, system.model_type, system.prefix)
        for name in names
    )


def head_modules(system: PublishedSystem) -> set[str]:
    """Modules of theirs that predict tokens."""
    return {
        each
        for rule in system.rules
        if rule.ours.startswith("heads") and not rule.ours.startswith("heads.sentence.")
        for each in rule.theirs
    }


def has_head(system: PublishedSystem, names: Iterable[str]) -> bool:
    """Whether tensors have any of what predicts tokens. Args: names: of today."""
    modules = tuple(f"{module}." for module in head_modules(system))
    return any(name.startswith(modules) for name in names)


def with_head_names(
    system: PublishedSystem, described: Mapping[str, Any], names: Collection[str]
) -> PublishedSystem:
    """The table with the names of the head that a directory has. Args: names: of its tensors."""
    if system.legacy is None or not has_head(system.legacy, names):
        return system
    is_both = has_head(system, names)
    return system if is_both and described.get("legacy") is False else system.legacy


def complete_config(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """config.json with what it leaves open and what the weights decide, and a line for each change that a user notices.

    Args: theirs: under their names of today. Raises: CheckpointError for a head that can be of two tasks.
    """
    found, lines = {**described, "model_type": system.model_type}, []
    name = architecture(described)
    if name is None:
        name = _class_by_tensors(system, theirs, path)
        if name is not None:
            lines.append(f"architectures is not given; the tensors fit {name}")
    if name is not None:
        found["architectures"] = [name]
    if system.legacy is not None and has_head(system, theirs.shapes):
        found["legacy"] = False
    elif system.is_legacy:
        found["legacy"] = True
    if system.model_type == "modernbert-decoder" and "local_attention" not in found:
        window = found.get("sliding_window")  # version 4 writes it alone, and it is half of the other
        if isinstance(window, int) and window > 0:
            found["local_attention"] = 2 * window
    head = next(
        (each for each in TASK_CLASSES.get(system.model_type, {}).values() if each.name == name), None
    )
    if head is not None:
        lines += _with_labels(found, head, theirs, path)
    return found, lines


def _class_by_tensors(system: PublishedSystem, theirs: Weights, path: Path) -> str | None:
    """The class with the head that the tensors have, None where the first class or none has it."""
    if has_head(system, theirs.shapes):
        *_, last = system.classes.items()
        return last[0] if last[1] not in next(iter(system.classes.items())) else None
    names = [
        head.name
        for head in TASK_CLASSES.get(system.model_type, {}).values()
        if all(
            f"{each}.weight" in theirs.shapes for each in (head.classifier, head.pooler) if each is not None
        )
    ]
    if len(names) > 1:
        raise CheckpointError(
            f"{path / CONFIG_JSON} names no architectures, and the head fits {' or '.join(names)}; add "
            '"architectures" to it, with the one that this model is.'
        )
    return next(iter(names), None)


def _with_labels(described: dict[str, Any], head: TaskClass, theirs: Weights, path: Path) -> list[str]:
    """Make the names of labels as many as the classifier's rows. Returns: what was changed.

    Raises: CheckpointError for a name of two labels, which no task can have.
    """
    rows = theirs.shapes.get(f"{head.classifier}.weight", (0,))[0]
    names = {int(number): name for number, name in (described.get("id2label") or {}).items()}
    of_rows = Counter(names.get(number, f"LABEL_{number}") for number in range(rows))
    twice = [name for name, count in of_rows.items() if count > 1]
    if twice and head.classifier != "qa_outputs":  # its two rows are no labels
        raise CheckpointError(
            f"{path / CONFIG_JSON}: id2label gives {shorten(', '.join(map(repr, twice)))} to more than one of {rows} "
            "labels; give each its own name."
        )
    said = {len(names)} if names else set()
    said |= {described["num_labels"]} if described.get("num_labels") is not None else set()
    if not rows or (
        (said or {2}) == {rows} and set(names) in (set(), set(range(rows)))
    ):  # 2 where nothing is said
        return []
    taken = {number: name for number, name in names.items() if number < rows}
    for number in range(rows):
        taken.setdefault(number, f"LABEL_{number}")
    described.pop("num_labels", None)
    described["id2label"] = {str(number): taken[number] for number in range(rows)}
    described["label2id"] = {name: int(number) for number, name in described["id2label"].items()}
    declared = " and ".join(map(str, sorted(said))) if said else "no number of"
    more = "" if set(range(rows)) <= set(names) else "; those without a name are LABEL_i"
    more += "; the other names are left out" if set(names) - set(range(rows)) else ""
    return [f"{CONFIG_JSON} says {declared} labels, and the head has {rows}{more}"]
