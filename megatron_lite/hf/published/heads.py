"""Task heads of published systems: the classes of transformers that compute what our heads compute.

    classes, values   a layer (task_head.pooler) on the first token, and a classifier: ...ForSequenceClassification
    tags              a classifier on each token: ...ForTokenClassification
    spans             two numbers for each token: ...ForQuestionAnswering

ModernBERT's layer is the transform before its output projection, on all tokens.

A class has the head of its task and no other. Other heads of the model (the one that predicts tokens, ...) are written
to the file OTHER_HEADS of an export, from which an import reads them.

Source: the modeling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.system_table import PublishedSystem, TensorRule

OTHER_HEADS = "other_heads.safetensors"
SEVERAL_LABELS: Final = "multi_label_classification"  # of each text: `problem_type` of the kind typing


@dataclass(frozen=True)
class TaskClass:
    """A class of transformers with the head of a task.

    Args:
        classifier: its module with the last layer.
        pooler: its module with the layer before that.
        dropout: its field of config.json for `model.task_head.dropout`.
    """

    name: str
    classifier: str
    pooler: str | None = None
    dropout: str | None = "classifier_dropout"


def _bert_like(name: str, prefix: str, pooler: str = "pooler.dense") -> dict[str, TaskClass]:
    return {
        "text": TaskClass(f"{name}ForSequenceClassification", "classifier", f"{prefix}.{pooler}"),
        "tags": TaskClass(f"{name}ForTokenClassification", "classifier"),
        "spans": TaskClass(f"{name}ForQuestionAnswering", "qa_outputs", dropout=None),
    }


def _roberta_like(name: str) -> dict[str, TaskClass]:
    text = TaskClass(f"{name}ForSequenceClassification", "classifier.out_proj", "classifier.dense")
    return {**_bert_like(name, "roberta"), "text": text}


_HEAD_TYPES = {
    "classes": "text",
    "values": "text",
    "tags": "tags",
    "spans": "spans",
}  # of `model.task_head.type`
# By the type in config.json. GPT-2's and GLM-4's classifiers have no bias, BART's reads its decoder.
TASK_CLASSES: dict[str, dict[str, TaskClass]] = {
    "bert": _bert_like("Bert", "bert"),
    "ernie": _bert_like("Ernie", "ernie"),
    "albert": _bert_like("Albert", "albert", "pooler"),
    "roberta": _roberta_like("Roberta"),
    "xlm-roberta": _roberta_like("XLMRoberta"),
    "camembert": _roberta_like("Camembert"),
    "electra": _roberta_like("Electra"),
    "deberta-v2": {
        "text": TaskClass("DebertaV2ForSequenceClassification", "classifier", "pooler.dense", "cls_dropout"),
        "tags": TaskClass("DebertaV2ForTokenClassification", "classifier", dropout=None),
        "spans": TaskClass("DebertaV2ForQuestionAnswering", "qa_outputs", dropout=None),
    },
    "eurobert": {"tags": TaskClass("EuroBertForTokenClassification", "classifier", dropout=None)},
    "modernbert": {
        kind: TaskClass(head_class.name, "classifier", "head")
        for kind, head_class in _bert_like("ModernBert", "").items()
    },
    "xlnet": {
        "text": TaskClass(
            "XLNetForSequenceClassification",
            "logits_proj",
            "sequence_summary.summary",
            "summary_last_dropout",
        ),
        "tags": TaskClass("XLNetForTokenClassification", "classifier", dropout=None),
        "spans": TaskClass("XLNetForQuestionAnsweringSimple", "qa_outputs", dropout=None),
    },
}


def task_class(system: PublishedSystem, config: ModelConfig) -> TaskClass:
    """The class with the head of a model's task. Raises: CheckpointError if none computes what it does."""
    head_class = TASK_CLASSES.get(system.model_type, {}).get(_HEAD_TYPES[config.task_head.type])
    if head_class is None:
        raise CheckpointError(
            f"model.task_head.type is {shown(config.task_head.type)}, whose head no class of transformers for "
            f"{system.model_type} has; export the checkpoint before it was tuned, or tune one of "
            f"{', '.join(TASK_CLASSES)}."
        )
    if config.has_task_pooler and head_class.pooler is None:
        raise CheckpointError(
            f"the head has a layer before its classifier, but {head_class.name} has none; tune with "
            "model.task_head.pooler=false to export it."
        )
    if lacks_pooler(system, config):
        raise CheckpointError(
            f"the head has no layer before its classifier, but {head_class.name} has one; tune with "
            "model.task_head.pooler=true to export it."
        )
    return head_class


def lacks_pooler(system: PublishedSystem, config: ModelConfig) -> str | None:
    """The class of a model's task, if it has a layer before its classifier that the model's head does not have."""
    head_class = TASK_CLASSES.get(system.model_type, {}).get(_HEAD_TYPES.get(config.task_head.type, ""))
    is_lacking = head_class is not None and head_class.pooler is not None and not config.has_task_pooler
    return head_class.name if head_class is not None and is_lacking else None


def transformers_class_name(system: PublishedSystem, config: ModelConfig) -> str:
    """The class that a model is exported to. Raises: as `task_class`."""
    return (
        system.pretraining_class(config)
        if config.task_head.type == "none"
        else task_class(system, config).name
    )


def tensor_rules(system: PublishedSystem, config: ModelConfig) -> tuple[TensorRule, ...]:
    """The table of a model with its heads. Raises: as `task_class`."""
    if config.task_head.type == "none":
        return system.rules
    head_class = task_class(system, config)
    is_transform = config.task_head.pooler_kind == "transform"
    body_prefixes = ("heads.projection.",) if is_transform else ()
    body = tuple(
        rule
        for rule in system.rules
        if not rule.ours.startswith("heads") or rule.ours.startswith(body_prefixes)
    )
    head = [TensorRule("heads.task.classifier", (head_class.classifier,))]
    if head_class.pooler is not None and not is_transform:
        ours = "heads.sentence.dense" if config.sentence_classes else "heads.task.pooler"
        head.append(TensorRule(ours, (head_class.pooler,)))
    return (*body, *head)


def architectures(system: PublishedSystem) -> dict[str, str]:
    """The name of each class with a task's head -> its key in TASK_CLASSES."""
    return {head.name: head_type for head_type, head in TASK_CLASSES.get(system.model_type, {}).items()}


def head_settings(system: PublishedSystem, head_type: str, class_config: Any) -> dict[str, Any]:
    """The section `model.task_head` of a head. Args: head_type: key in TASK_CLASSES. class_config: of its class."""
    head_class, labels = TASK_CLASSES[system.model_type][head_type], class_config.num_labels
    dropout = None if head_class.dropout is None else getattr(class_config, head_class.dropout, None)
    settings = {} if dropout is None else {"dropout": dropout}
    settings |= {"pooler": True} if head_class.pooler else {}
    if head_type == "spans":
        return {**settings, "type": "spans"}
    if head_type == "text" and labels == 1:
        return {**settings, "type": "values"}
    return {**settings, "type": "tags" if head_type == "tags" else "classes", "classes": labels}


def head_problems(system: PublishedSystem, head_type: str, class_config: Any) -> list[str]:
    """A sentence on each field by which a head computes something else, in spite of its class."""
    head_class = TASK_CLASSES[system.model_type][head_type]
    return [
        f"{name} is {shown(getattr(class_config, name))}; only {shown(value)} can be imported with {head_class.name}."
        for name, value in _pooling_fields(system, head_class).items()
        if getattr(class_config, name, value) != value
    ]


_TASK_KINDS = {"classes": "classification", "values": "regression", "tags": "tagging", "spans": "spans"}


def task_section(head: str, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The section `task` of a run with an imported head. Args: config_json: config.json, which names the classes."""
    is_typing = head == "classes" and config_json.get("problem_type") == SEVERAL_LABELS
    kind = "typing" if is_typing else _TASK_KINDS[head]
    section = {"name": "imported", "kind": kind, "reader": "jsonl"}
    names = config_json.get("id2label") or {}
    if head not in ("classes", "tags") or not names:
        return section
    return {**section, "labels": [str(names[number]) for number in sorted(names, key=int)]}


def _pooling_fields(system: PublishedSystem, head_class: TaskClass) -> dict[str, Any]:
    """Fields of config.json that change what the layer before the classifier computes, with the only value here."""
    if head_class.name == "ModernBertForSequenceClassification":
        return {"classifier_pooling": "cls"}
    if head_class.name == "DebertaV2ForSequenceClassification":
        return {"pooler_hidden_act": "gelu"}
    if system.model_type != "xlnet" or head_class.pooler is None:
        return {}
    return {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}


def head_fields(system: PublishedSystem, config: ModelConfig, labels: Sequence[str]) -> Mapping[str, Any]:
    """Fields of config.json that describe a model's head. Args: labels: names of the classes; () = numbers."""
    if config.task_head.type == "none":
        return {}
    head_class = task_class(system, config)
    names = dict(enumerate(labels or map(str, range(config.task_head.outputs))))
    values: dict[str, Any] = {"num_labels": config.task_head.outputs}
    if config.task_head.type in ("classes", "tags"):
        values |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if head_class.dropout is not None:
        values[head_class.dropout] = config.task_head.dropout
    return {**values, **_pooling_fields(system, head_class)}
