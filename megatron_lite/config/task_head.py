"""The section `model.task_head`: the head that fine-tuning adds to a model, and the rules among its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from data_utils.common.setting_files import shown
from data_utils.common.settings import check, checked, setting

if TYPE_CHECKING:  # they import this module
    from megatron_lite.config.model import ModelConfig
    from megatron_lite.config.tree import Config

OF_TEXTS = ("classes", "values")  # the types that read a whole text
TYPES = ("none", *OF_TEXTS, "tags", "spans")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model.task_head")
class TaskHeadConfig:
    type: str = setting(
        "none",
        "Head added by fine-tuning: classes or values (per text), tags (per word), spans (first and last "
        "token of an answer); none = tasks are solved by predicting tokens.",
        one_of=TYPES,
    )
    classes: int = setting(0, "Number of classes or tags of the task head.", at_least=0)
    heads: tuple[str, ...] = setting(
        (), "Heads of several tasks, each NAME:TYPE:CLASSES; filled in by fine-tuning on several tasks."
    )
    pooler: bool | None = setting(
        None,
        "Pooler (pooler_kind) before a head of classes or values: the pretrained one if the model has "
        "it, otherwise a new one; null = only if the model has one.",
    )
    pooler_kind: str = setting(
        "tanh",
        "Activation of the task pooler: tanh or gelu (ELECTRA); transform = use head_transform as pooler, "
        "for tags and spans too (ModernBERT).",
        one_of=("tanh", "gelu", "transform"),
    )
    mix: bool = setting(
        False,
        "The task head reads a learned weighted average of the outputs of the embeddings and all blocks "
        "instead of the last output (ELMo).",
    )
    pool: str = setting(
        "token",
        "Input of a head of classes or values: token = the classification token; concat = that token, max "
        "pooling and mean pooling over all tokens, through a ReLU layer (ULMFiT).",
        one_of=("token", "concat"),
    )
    dropout: float = setting(0.1, "Dropout probability before the task head.", at_least=0, below=1)

    def __post_init__(self) -> None:
        has_classes = self.type in ("classes", "tags")
        check(
            has_classes == (self.classes > 0),
            f"model.task_head.classes is {self.classes} with model.task_head.type {self.type}; "
            + ("set it to the number of classes, 2 or more." if has_classes else "set it to 0."),
        )
        check(
            self.pool == "token" or self.pooler is None,
            f"model.task_head.pool is {self.pool} with model.task_head.pooler {self.pooler}, but the pool "
            "has its own layer; remove pooler.",
        )

    @property
    def outputs(self) -> int:
        """Outputs of the head for each position or text; 0 = there is no head."""
        return {"none": 0, "values": 1, "spans": 2}.get(self.type, self.classes)

    @property
    def has_pool(self) -> bool:
        """Whether the head reads all tokens of a text."""
        return self.pool != "token" and self.type in OF_TEXTS

    def has_pooler(self, is_pretrained: bool) -> bool:
        """Whether the layer of `pooler` comes before the head. Args: is_pretrained: whether the model has one."""
        chosen = is_pretrained if self.pooler is None else self.pooler
        pooled = OF_TEXTS if self.pooler_kind != "transform" else TYPES[1:]
        types = {self.type, *(head.split(":")[1] for head in self.heads)}
        return chosen and not types.isdisjoint(pooled) and not self.has_pool


def replace_head(model: ModelConfig, **options: Any) -> ModelConfig:
    """The model with other options of its head."""
    return replace(model, task_head=replace(model.task_head, **options))


def check_task_head(model: ModelConfig) -> None:
    """Raise ConfigError for a head that the model cannot have."""
    head = model.task_head
    check(
        head.pooler_kind != "transform" or (model.head_transform and model.embedding_size is None),
        "model.task_head.pooler_kind is transform, which needs model.head_transform and no "
        "model.embedding_size; set it to tanh or gelu.",
    )
    check(
        head.type == "none" or not model.decoder_layers,
        f"model.task_head.type is {head.type} with model.decoder_layers ({model.decoder_layers}), but "
        "task heads need a single stack; remove it and solve the task by predicting tokens.",
    )


def check_head(config: Config) -> None:
    """Raise ConfigError for a head in a run that has no task for it."""
    head = config.model.task_head
    check(
        config.task is not None or head.type == "none",
        f"model.task_head.type is {head.type}, but the run has no task; use scripts/finetune.py, or set it to none.",
    )
    check(
        bool(config.tasks) or not head.heads,
        f"model.task_head.heads is {shown(list(head.heads))}, but the run has no tasks; remove it: fine-tuning on "
        "several tasks fills it in.",
    )
    if config.task is None:
        check_inputs(head, "the run has no task")


def check_inputs(head: TaskHeadConfig, why: str) -> None:
    """Raise ConfigError for inputs that a head of this type has not. Args: why: it is of this type."""
    check(
        head.type != "none" or not head.mix,
        f"model.task_head.mix is true, but {why}, so there is no head to mix layers for; set it to false.",
    )
    check(
        head.type in OF_TEXTS or head.pool == "token",
        f"model.task_head.pool is {head.pool}, but {why}, so there is no head of whole texts; set it to token.",
    )
