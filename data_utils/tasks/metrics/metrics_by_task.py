"""Which metrics a task has, and the one number by which evaluations of it are compared.

Tasks are found by their name without case and signs: `SST-2`, `sst2` and `sst_2` are one. A task that is not in the
table has the metrics of its kind. The type of a task's predictions decides which metrics it can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.tasks.config import KINDS, TaskConfig
from data_utils.tasks.metrics.metrics import BLEU, ROUGE, require_metrics
from data_utils.tasks.readers.files import plain_name

LOSS = "loss"  # of each target token, nats: what can be had where the model does not write

_LABEL_METRICS = ("accuracy", "f1", "macro_f1", "matthews", "f1a", "group_em")
_TEXT_METRICS = (
    *("exact_match", "answer_em", "answer_f1", "answer_em_v2", "answer_f1_v2"),
    *BLEU,
    *(name + suffix for name in ROUGE for suffix in ("", "_char")),
)
WITH_POSITIVE = ("f1", "f1a")  # of one class, `task.positive`
# Type of predictions (decode_outputs.py) -> the metrics that compare them with labels. Every other pair is refused.
METRICS_BY_PREDICTION_TYPE: dict[str, tuple[str, ...]] = {
    "classes": (*_LABEL_METRICS, "micro_f1"),
    "numbers of choices": _LABEL_METRICS,
    "label sets": ("strict_accuracy", "loose_macro_f1", "loose_micro_f1"),
    "numbers": ("pearson", "spearman"),
    "texts": _TEXT_METRICS,
    "entities": ("entity_f1", "tag_accuracy"),
    "tags": ("tag_accuracy",),
}


@dataclass(frozen=True)
class Metrics:
    """The metrics of a task.

    Args:
        names: in the order in which they are shown.
        compared: the metrics whose mean ranks evaluations; () = all.
    """

    names: tuple[str, ...]
    compared: tuple[str, ...] = ()

    def score(self, measured: Mapping[str, float]) -> float:
        """The number that ranks evaluations; higher is better.

        Losses count negative, and BLEU up to 1, as the others do.
        """
        numbers = [measured[name] * _WEIGHTS.get(name, 1.0) for name in self.compared or self.names]
        return sum(numbers) / len(numbers)

    @property
    def has_costs(self) -> bool:
        """Whether a loss is compared, of which lower is better, and which has no upper bound."""
        return any(map(is_cost, self.compared or self.names))


def is_cost(metric: str) -> bool:
    """Whether lower is better."""
    return _WEIGHTS.get(metric, 1.0) < 0


_WEIGHTS = {LOSS: -1.0, **dict.fromkeys(BLEU, 0.01)}


_COMPARED = {"spans": ("answer_f1",), "typing": ("loose_micro_f1",)}
METRICS_BY_KIND = {kind: Metrics(names, _COMPARED.get(kind, ())) for kind, names in KINDS.items()}

_ACCURACY_F1 = Metrics(("accuracy", "f1"))
_MAY_HAVE_NO_ANSWER = Metrics(("answer_em_v2", "answer_f1_v2"), ("answer_f1_v2",))
_SUMMARIES = Metrics(("rouge1", "rouge2", "rougeLsum"))

SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
METRICS_BY_TASK = {
    **dict.fromkeys((*SUPERGLUE, "axg", "sst2", "mnli", "mnlimm", "qnli", "wnli"), METRICS_BY_KIND["classification"]),
    "cb": Metrics(("accuracy", "macro_f1")),
    "multirc": Metrics(("f1a", "group_em")),
    "record": Metrics(("answer_f1", "answer_em")),
    **dict.fromkeys(("cola", "ax", "axb"), Metrics(("matthews",))),
    **dict.fromkeys(("mrpc", "qqp"), _ACCURACY_F1),
    "stsb": METRICS_BY_KIND["regression"],
    **dict.fromkeys(("squad", "squadv1", "squad11"), METRICS_BY_KIND["spans"]),
    **dict.fromkeys(("squad2", "squadv2", "squad20"), _MAY_HAVE_NO_ANSWER),
    **dict.fromkeys(("gigaword", "cnndm", "cnndailymail", "xsum"), _SUMMARIES),
    "fewrel": Metrics(("accuracy", "macro_f1"), ("accuracy",)), "tacred": Metrics(("micro_f1",)),
    "squadquestions": Metrics(("bleu", "rougeL")),
}  # fmt: skip


def task_metrics(task: TaskConfig) -> Metrics:
    """The metrics that the configuration names, else those of the task, else those of its kind.

    Raises: ConfigError for a metric that is unknown, or whose package is not installed.
    """
    metrics = METRICS_BY_TASK.get(plain_name(task.name), METRICS_BY_KIND[task.kind])
    if task.metrics:
        # The same names as those of a known set are compared as it is.
        known_sets = (metrics, _MAY_HAVE_NO_ANSWER)
        metrics = next((known for known in known_sets if known.names == task.metrics), Metrics(task.metrics))
    require_metrics(metrics.names)
    return metrics


def check_metrics(task: TaskConfig, prediction_type: str, labels: Sequence[str]) -> None:
    """Raise ConfigError unless the task's metrics compare what it predicts.

    Args:
        prediction_type: a key of METRICS_BY_PREDICTION_TYPE.
        labels: the classes; () where there are none.
    """
    names = task_metrics(task).names
    for name in names:
        if name not in METRICS_BY_PREDICTION_TYPE[prediction_type]:
            source = "task.metrics names" if task.metrics else f"task.name is {task.name}, whose metrics are"
            raise ConfigError(
                f"{source} {name}, but this task (task.kind {task.kind}) predicts {prediction_type}, which {name} "
                f"does not measure; choose task.metrics from {', '.join(METRICS_BY_PREDICTION_TYPE[prediction_type])}."
            )
    if ("micro_f1" in names) != (task.negative is not None) or task.negative not in (None, *labels):
        raise ConfigError(
            f"task.negative is {shown(task.negative)} and the metrics are {', '.join(names)}; micro_f1 needs the "
            f"negative class, one of {', '.join(labels)}; without micro_f1 remove task.negative."
        )
    one_class_metrics = [name for name in names if name in WITH_POSITIVE]
    if not one_class_metrics:
        if task.positive is not None:
            raise ConfigError(
                f"task.positive is {shown(task.positive)}, but no metric of the task ({', '.join(names)}) needs a "
                "positive class; add f1 to task.metrics or set task.positive to null."
            )
    elif task.positive is None:
        if len(labels) != 2:
            known = f"one of {', '.join(labels)}" if labels else "the index of a choice, from 0"
            raise ConfigError(
                f"{one_class_metrics[0]} needs a positive class, but task.positive is null; set it to {known}, or use "
                "macro_f1."
            )
    elif not (task.positive in labels if labels else task.positive.isascii() and task.positive.isdigit()):
        known = f"one of {', '.join(labels)}" if labels else "the index of a choice, from 0"
        raise ConfigError(f"task.positive is {shown(task.positive)}; it must be {known}.")


def with_no_answers(task: TaskConfig) -> TaskConfig:
    """The task with metrics for questions that have no answer. Raises: ConfigError where it names others."""
    if set(task_metrics(task).names) <= set(_MAY_HAVE_NO_ANSWER.names):
        return task
    if task.metrics:
        raise ConfigError(
            f"task.metrics names {', '.join(task.metrics)}, but the files have questions without an answer "
            f"(is_impossible), which these metrics do not cover; set it to [{', '.join(_MAY_HAVE_NO_ANSWER.names)}]."
        )
    return replace(task, metrics=_MAY_HAVE_NO_ANSWER.names)


def compared_by(task: TaskConfig, best: str | None) -> Metrics:
    """The metrics of a task, compared by `finetune.best` where that names one.

    Raises: ConfigError if it names no metric of the task, and as `task_metrics`.
    """
    metrics = task_metrics(task)
    if task.writes_text:
        metrics = Metrics((*metrics.names, LOSS), metrics.compared or metrics.names)
    if best is not None and best not in metrics.names:
        raise ConfigError(
            f"finetune.best is {best}, but the task measures {', '.join(metrics.names)}; choose one of them."
        )
    return metrics if best is None else Metrics(metrics.names, (best,))
