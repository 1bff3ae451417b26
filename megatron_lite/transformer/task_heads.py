"""Heads that not every model has: BERT's sentence head, SpanBERT's boundary head, and the head of a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.losses import CLASS_HEADS, MOST_LOSSES, SENTENCE_LEVEL
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.task_head import replace_head
from megatron_lite.parallel.collectives import gather_tokens
from megatron_lite.transformer.dense import Linear, Transform, embedding_table
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels.dropout import Dropout, FeatureDropout
from megatron_lite.transformer.task_batch import TaskInputs
from megatron_lite.transformer.task_losses import first_positions, group_pools
from megatron_lite.transformer.tensor_parallel import TensorParallel

SPAN_POSITION_SIZE = 200  # width of the position embedding of SpanBERT's head


class SentenceHead(nn.Module):
    """BERT's pooler and classifier: [M, D] -> [M, classes]. Class 0: the original pair of texts, 1: a changed one."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.classifier = Linear(config.hidden_size, config.sentence_classes, 1 / config.width_ratio)
        # Losses other than BERT's of two sentences have separate classifiers; those of tokens read no pooler.
        counts = {name: int(count) for name, count in (head.split(":") for head in config.class_heads)}
        self.classifiers = nn.ModuleDict(
            {
                name: Linear(config.hidden_size, count, 1 / config.width_ratio)
                for name, count in counts.items()
            }
        )
        self._columns = _class_columns([config.sentence_classes, *counts.values()], list(counts))

    def forward(
        self,
        x: torch.Tensor,
        dropout: FeatureDropout | None = None,
        objectives: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[M, D] -> [M, classes].

        Args:
            dropout: of these M tokens, before the classifiers.
            objectives: int [M or more], the loss of each prediction; these M are the last.
        """
        pooled = torch.tanh(self.dense(x))
        pooled = pooled if dropout is None else fused.dropout_add(pooled, None, dropout)
        classes = self.classifier(pooled)
        if not self.classifiers or objectives is None:
            return classes
        others = [
            head(pooled if CLASS_HEADS[name] in SENTENCE_LEVEL else x)
            for name, head in self.classifiers.items()
        ]
        # A class that a loss lacks gets the logit -infinity, so that one gather serves losses with different class
        # counts.
        no_class = classes.new_full((len(x), 1), float("-inf"))
        self._columns = self._columns.to(x.device)
        columns = self._columns[objectives[len(objectives) - len(x) :].long()]
        return torch.cat([classes, *others, no_class], dim=1).gather(1, columns)


def _class_columns(counts: Sequence[int], names: Sequence[str]) -> torch.Tensor:
    """The columns of each loss's classes among those of all heads, int64 [losses, most classes].

    The last column, which stands for no class, fills up. Losses without a head have the columns of the first head.
    """
    first = np.cumsum([0, *counts])
    columns = np.full((MOST_LOSSES, max(counts)), first[-1])
    columns[:, : counts[0]] = np.arange(counts[0])
    for number, name in enumerate(names, start=1):
        loss_columns = columns[CLASS_HEADS[name]]
        loss_columns[:] = first[-1]
        loss_columns[: counts[number]] = np.arange(first[number], first[number + 1])
    return torch.tensor(columns, device="cpu")


class TaskHead(nn.Module):
    """The head that fine-tuning adds: one linear layer, after a pooler where the model lacks one that it needs."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.parallel = parallel
        self.has_pooler, self.dropout = config.has_task_pooler, config.task_head.dropout
        self.pooled: Any = {"tanh": torch.tanh, "gelu": F.gelu}.get(config.task_head.pooler_kind)
        needs_pooler = config.has_task_pooler and not config.sentence_classes and self.pooled is not None
        self.pooler = Linear(config.hidden_size, config.hidden_size) if needs_pooler else None
        self.pool = Linear(3 * config.hidden_size, config.hidden_size) if config.task_head.has_pool else None
        self.mix = LayerMix(config) if config.task_head.mix else None
        self.classifier = Linear(config.hidden_size, config.task_head.outputs, 1 / config.width_ratio)

    def outputs(
        self,
        layers: Sequence[torch.Tensor],
        positions: torch.Tensor,
        final_layernorm: nn.Module,
        dropout: Dropout | None,
        groups: TaskInputs | None,
        pooler: Linear | Transform | None,
    ) -> torch.Tensor:
        """See `task_outputs`. Args: pooler: of another head, for a task head that has none."""
        if self.parallel.sequence_parallel:
            layers = [gather_tokens(hidden, self.parallel.group) for hidden in layers]
        chosen = [hidden.index_select(0, positions) for hidden in layers]
        x = final_layernorm(chosen[-1]) if self.mix is None else self.mix(torch.stack(chosen))
        if self.has_pooler:
            # The pretrained pooler where there is one: fine-tuning continues from its weights.
            pooler = self.pooler or pooler
            assert pooler is not None
            x = pooler(x) if self.pooled is None else self.pooled(pooler(x))
        if self.pool is not None:
            assert groups is not None
            x, positions = torch.relu(self.pool(group_pools(x, groups))), positions[first_positions(groups)]
        # Layer -1 is the embedding, which has no attention: the salt of this site is free.
        head_dropout = None if dropout is None else dropout.features(self.dropout, -1, "attended")
        if head_dropout is not None:
            x = fused.dropout_add(x, None, head_dropout.for_tokens(positions))
        return self.classifier(x)


def task_configs(config: ModelConfig) -> dict[str, ModelConfig]:
    """Task name -> the configuration with the head of this task alone, for all of `model.task_head.heads`."""
    heads = [head.split(":") for head in config.task_head.heads]
    return {
        name: replace_head(config, heads=(), type=kind, classes=int(classes)) for name, kind, classes in heads
    }


class TaskHeads(nn.Module):
    """A head for each of several tasks, by the task's name. A batch is of one task.

    Source: MT-DNN, arXiv:1901.11504, section 3.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        for name, task_config in task_configs(config).items():
            # `_modules` directly: a task may have the name of one of torch's methods.
            head = self._modules[name] = TaskHead(task_config, parallel)
        self.pooled: Any = head.pooled

    def outputs(self, *arguments: Any) -> torch.Tensor:
        """As `TaskHead.outputs`."""
        *_, groups, _ = arguments
        return cast(TaskHead, self._modules[groups.task]).outputs(*arguments)


def task_head(config: ModelConfig, parallel: TensorParallel) -> TaskHead | TaskHeads | None:
    """The head or heads that fine-tuning adds to a model."""
    if config.task_head.heads:
        return TaskHeads(config, parallel)
    return TaskHead(config, parallel) if config.task_head.outputs else None


class LayerMix(nn.Module):
    """gain * sum over layers of share * norm(h): [L + 1, N, D] -> [N, D], L blocks and the embeddings.

    Initially the mean. The norm has no parameters: what the head learns would hide them.
    Source: ELMo, arXiv:1802.05365, section 3.2.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.layer_bias = nn.Parameter(torch.empty(config.num_layers + 1))  # shares before the softmax
        self.gain_bias = nn.Parameter(torch.empty(1))  # gain - 1
        self.epsilon = config.layernorm_epsilon

    def forward(self, layers: torch.Tensor) -> torch.Tensor:
        # fp32: a sum over many layers, and the gradient of the shares is a sum over all tokens.
        normed = F.layer_norm(layers.float(), layers.shape[-1:], eps=self.epsilon)
        shares = self.layer_bias.float().softmax(0) * (1.0 + self.gain_bias.float())
        return (shares[:, None, None] * normed).sum(0).to(layers.dtype)


class SpanBoundaryHead(nn.Module):
    """SpanBERT's f(x before, x after, position in the span): two layers over their concatenation.

    Source: arXiv:1907.10529, section 3.2.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.place_embeddings = embedding_table(config.span_boundary_places, SPAN_POSITION_SIZE)
        self.inner = Transform(2 * config.hidden_size + SPAN_POSITION_SIZE, config.hidden_size, config)
        self.outer = Transform(config.hidden_size, config.embedding_size or config.hidden_size, config)

    def forward(self, before: torch.Tensor, after: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[P, D], [P, D], int64 [P] -> [P, E]. Args: positions: in the span."""
        return self.outer(self.inner(torch.cat([before, after, self.place_embeddings(positions)], dim=1)))
