"""Fine-tuning of a class of transformers in a plain torch loop: the reference for `scripts/finetune.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, SEGMENT_IDS, TOKENS
from data_utils.tasks.base import TaskSample
from data_utils.tasks.templates.collate import collate
from megatron_lite.config.learning_rates import learning_rate
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.setup import Task
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.task_heads import TaskHead
from megatron_lite.transformer.transformer import Transformer


def tuned_losses(
    model: Any, task: Task, steps: int, loss_of: Callable[[Any, Sequence[TaskSample]], torch.Tensor]
) -> list[float]:
    """The losses of a model under torch's AdamW with the optimizer, schedule, batch size and samples of a task."""
    config = task.config
    chosen, schedule, size = config.optimizer, config.schedule, config.batch.global_batch_size
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if name.endswith(".bias") or "norm" in name.lower()]
    decay = [p for p in named.values() if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": chosen.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)
    data, losses = TaskData(task.train, task.renderer, config.training.seed), []
    for step in range(1, steps + 1):
        samples = [data.sample(number) for number in range((step - 1) * size, step * size)]
        loss = loss_of(model, samples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step,
                peak=chosen.lr,
                kind=schedule.kind,
                warmup_steps=schedule.warmup_steps,
                decay_steps=steps,
                min_lr_ratio=schedule.min_lr_ratio,
            )
        optimizer.step()
        losses.append(loss.item())
    return losses


def classification_loss(model: Any, samples: Sequence[TaskSample]) -> torch.Tensor:
    """The loss that a class of sequence classification computes itself."""
    fields, parts = collate(samples)
    tokens = torch.from_numpy(fields[:, TOKENS].astype(np.int64))
    inputs = {"input_ids": tokens, "attention_mask": torch.from_numpy((fields[:, DOC] >= 0).astype(np.int64))}
    if type(model).__name__.startswith(("Bert", "Electra")):
        inputs["token_type_ids"] = torch.from_numpy(fields[:, SEGMENT_IDS].astype(np.int64))
    return model(**inputs, labels=torch.from_numpy(parts.targets)).loss


def initial_head(task: Task) -> TaskHead:
    """The weights with which our head of a task begins."""
    model = Transformer(task.config.model)
    initialize_parameters(model.named_parameters(), task.config.model, task.config.training.seed)
    assert model.heads.task is not None
    return model.heads.task
