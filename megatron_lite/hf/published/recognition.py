"""Recognizes the system of a published directory, and completes a config.json that lacks or misstates fields.

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
from megatron_lite.hf.common.config_json import CONFIG_JSON
from megatron_lite.hf.common.ignored_tensors import reason
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.heads import TASK_CLASSES, TaskClass
from megatron_lite.hf.published.systems import PUBLISHED

_HEADS = re.compile(r"(For[A-Z]\w*|WithLMHeadModel|LMHeadModel|LMHead|DoubleHeadsModel|EncoderModel|Model)$")
_RENAMED_CLASSES = {  # class of the first releases -> its present name
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


def architecture(config_json: Mapping[str, Any]) -> str | None:
    """The class that config.json names, if it names one."""
    (name,) = (config_json.get("architectures") or [None])[:1]
    return _RENAMED_CLASSES.get(name or "", name)


def system_in(path: Path, config_json: Mapping[str, Any], weights: Weights) -> PublishedSystem | None:
    """The system of a directory, None if no table fits. Raises: CheckpointError if several fit its tensors."""
    if (model_type := config_json.get("model_type")) is not None:
        return PUBLISHED.get(model_type)
    if (name := architecture(config_json)) is not None:
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
    """Whether a system's table knows all tensors, and its word embedding is among them.

    Files of a base model may lack the prefix.
    """
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
    """Their modules that predict tokens."""
    return {
        each
        for rule in system.rules
        if rule.ours.startswith("heads") and not rule.ours.startswith("heads.sentence.")
        for each in rule.theirs
    }


def has_head(system: PublishedSystem, names: Iterable[str]) -> bool:
    """Whether a tensor belongs to a head that predicts tokens. Args: names: as today's classes have them."""
    modules = tuple(f"{module}." for module in head_modules(system))
    return any(name.startswith(modules) for name in names)


def with_head_names(
    system: PublishedSystem, config_json: Mapping[str, Any], names: Collection[str]
) -> PublishedSystem:
    """The table of the system, or its legacy table if a directory names its head so. Args: names: of its tensors."""
    if system.legacy is None or not has_head(system.legacy, names):
        return system
    is_both = has_head(system, names)
    return system if is_both and config_json.get("legacy") is False else system.legacy


def complete_config(
    system: PublishedSystem, config_json: Mapping[str, Any], theirs: Weights, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """config.json with the fields that it lacks or that the weights contradict, and a line for each visible change.

    Args: theirs: under the names of today's class. Raises: CheckpointError for a head that fits two tasks.
    """
    completed, lines = {**config_json, "model_type": system.model_type}, []
    name = architecture(config_json)
    if name is None:
        name = _class_by_tensors(system, theirs, path)
        if name is not None:
            lines.append(f"architectures is not given; the tensors fit {name}")
    if name is not None:
        completed["architectures"] = [name]
    if system.legacy is not None and has_head(system, theirs.shapes):
        completed["legacy"] = False
    elif system.is_legacy:
        completed["legacy"] = True
    if system.model_type == "modernbert-decoder" and "local_attention" not in completed:
        # Version 4 writes sliding_window alone, which is half of local_attention.
        window = completed.get("sliding_window")
        if isinstance(window, int) and window > 0:
            completed["local_attention"] = 2 * window
    head = next(
        (each for each in TASK_CLASSES.get(system.model_type, {}).values() if each.name == name), None
    )
    if head is not None:
        lines += _fit_labels(completed, head, theirs, path)
    return completed, lines


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


def _fit_labels(config_json: dict[str, Any], head: TaskClass, theirs: Weights, path: Path) -> list[str]:
    """Give config.json as many labels as the classifier has rows. Returns: a line if that changes it.

    Raises: CheckpointError for two labels with one name, which no task can have.
    """
    rows = theirs.shapes.get(f"{head.classifier}.weight", (0,))[0]
    names = {int(number): name for number, name in (config_json.get("id2label") or {}).items()}
    labels = {number: names.get(number, f"LABEL_{number}") for number in range(rows)}
    twice = [name for name, count in Counter(labels.values()).items() if count > 1]
    if twice and head.classifier != "qa_outputs":  # its two rows are no labels
        raise CheckpointError(
            f"{path / CONFIG_JSON}: id2label gives {shorten(', '.join(map(repr, twice)))} to more than one of {rows} "
            "labels; give each its own name."
        )
    declared_counts = {len(names)} if names else set()
    declared_counts |= {config_json["num_labels"]} if config_json.get("num_labels") is not None else set()
    # transformers takes 2 labels where nothing is declared.
    if not rows or ((declared_counts or {2}) == {rows} and set(names) in (set(), set(range(rows)))):
        return []
    config_json.pop("num_labels", None)
    config_json["id2label"] = {str(number): name for number, name in labels.items()}
    config_json["label2id"] = {name: number for number, name in labels.items()}
    declared = " and ".join(map(str, sorted(declared_counts))) if declared_counts else "no number of"
    details = "" if set(range(rows)) <= set(names) else "; those without a name are LABEL_i"
    details += "; the other names are left out" if set(names) - set(range(rows)) else ""
    return [f"{CONFIG_JSON} says {declared} labels, and the head has {rows}{details}"]
