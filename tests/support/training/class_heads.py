"""Small models with two layers that learn the classes of an objective's texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from data_utils.common.losses import CLASS_HEADS
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

RATE = 2e-3


def learnt_classes(
    objective: Any,
    config: ModelConfig,
    draw: Callable[[np.random.Generator], tuple[Any, list[int]]],
    size: int,
    steps: int,
    further: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train a model for `steps`, then yield logits and labels of `further` batches.

    Args: draw: the tokens of a batch of `size` samples, and the lengths of their chunks, equally many for each.
    """
    torch.manual_seed(1)
    model, rng = Transformer(config, num_losses=len(LOSS_NAMES)), np.random.default_rng(2)
    for key, parameter in model.named_parameters():
        fill = torch.nn.init.ones_ if "layernorm.weight" in key else torch.nn.init.zeros_
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else fill(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(steps + further):
        tokens, lengths = draw(rng)
        counts = np.full(size, len(lengths) // size)
        fields = collate(objective, tokens, np.array(lengths), counts, np.arange(size) + size * step)
        batch = MicroBatch.from_batch(Batch(fields), torch.device("cpu"), config)
        if step < steps:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / 50) * (1 - step / steps)
            optimizer.zero_grad()
            (model(batch)[0] / batch.weights.sum()).backward()
            optimizer.step()
            continue
        with torch.no_grad():
            _, classes = model._logits_and_classes(model._hidden(batch), batch)
        count = len(classes)
        assert (batch.loss_positions.objectives[-count:] == CLASS_HEADS[objective.name]).all()
        yield classes, batch.targets[-count:]
