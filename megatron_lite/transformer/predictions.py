"""Predictions of a fine-tuned model: scores of tokens, and the outputs of a task's head.

Shapes: K scored tokens, G target groups with N positions in all, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.parallel.collectives import all_reduce
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.lm_head import Heads
from megatron_lite.transformer.loss import cross_entropy, find_local_targets
from megatron_lite.transformer.task_batch import TaskInputs
from megatron_lite.transformer.tensor_parallel import VocabParallelEmbedding


def token_scores(
    logits: torch.Tensor, targets: torch.Tensor, embedding: VocabParallelEmbedding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probability of each target, fp32 [K], and whether no token is likelier, bool [K]; on all ranks.

    Args: logits: [K, local V with padding]. targets: int [K].
    """
    group, first, valid = embedding.parallel.group, embedding.first, embedding.local_vocab
    log_p = -cross_entropy(logits, targets, group, first, valid)
    # A rank that holds only padding contributes the neutral values of the reductions.
    largest, target_logits = torch.full_like(log_p, float("-inf")), torch.zeros_like(log_p)
    if valid:
        local_targets, is_local = find_local_targets(targets, first, valid)
        largest = logits[:, :valid].amax(-1).float()
        target_logits = (
            logits.gather(1, local_targets[:, None]).squeeze(1).float().masked_fill(~is_local, 0.0)
        )
    if group.size > 1:
        # Two numbers for each token are exchanged instead of the logits of the vocabulary.
        all_reduce(largest, group, dist.ReduceOp.MAX)
        all_reduce(target_logits, group)
    return log_p, target_logits >= largest


def task_outputs(
    heads: Heads,
    layers: Sequence[torch.Tensor],
    positions: torch.Tensor,
    final_layernorm: nn.Module,
    dropout: Dropout | None,
    groups: TaskInputs | None = None,
) -> torch.Tensor:
    """Outputs of the task's head at positions int [N]: [N, outputs]; with task_head.pool, of groups: [G, outputs].

    Args:
        layers: [T, D] of the last block; with model.task_head.mix, of the embeddings and of all blocks.
        dropout: of all T tokens.
        groups: of the positions, which only model.task_head.pool and several heads need.
    """
    assert heads.task is not None
    pooler: Any = heads.projection if heads.task.pooled is None else getattr(heads.sentence, "dense", None)
    return heads.task.outputs(layers, positions, final_layernorm, dropout, groups, pooler)
