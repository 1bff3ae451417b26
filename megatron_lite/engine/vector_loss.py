"""The loss of a step whose samples are pairs of texts, from the vectors of all micro-batches of all ranks.

A softmax over a global batch needs all its vectors at once. So a step computes them first, without a graph, then the
loss and its gradient for each vector, then each micro-batch again with this gradient (arXiv:2101.06983, GradCache). The
result is that of one batch, in the memory of one micro-batch: dropout is a function of step, sample and position, so
both passes drop the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_lite.parallel.collectives import Group, all_gather, all_reduce
from megatron_lite.transformer.pair_losses import PairLoss, Records, loss_and_gradient
from megatron_lite.transformer.pairs import PairInputs, PairRecords


def on_device(records: PairRecords, is_there: torch.Tensor, device: torch.device) -> Records:
    """Args: is_there: bool [N], records that some rank has computed."""

    def sent(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return Records(
        sent(records.texts.view(np.int64)),
        sent(records.is_text) & is_there[:, None],
        sent(records.is_counted) & is_there,
        sent(records.scores),
    )


def vector_loss(
    vectors: Sequence[torch.Tensor],
    inputs: Sequence[PairInputs],
    group: Group,
    loss: PairLoss,
    sizes: Sequence[tuple[int, float]] = (),
) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
    """The loss of this rank's records among those of all ranks, and the gradient of the whole loss for its vectors.

    Args: vectors: [G, D] of each micro-batch; equally many sequences on all ranks. group: of the ranks with the other
        records of the batch.
    Returns: sum of the losses, fp64; what it is divided by, summed over ranks; the gradients, fp32 [G, D] each.
    """
    records, own = inputs[0].records, np.concatenate([each.numbers for each in inputs])
    count, texts = records.texts.shape
    joined = torch.cat(
        [
            each.new_zeros(len(of.numbers) * texts, each.shape[1], dtype=torch.float32).index_copy(
                0, of.slots.long(), each.detach().float()
            )
            for each, of in zip(vectors, inputs, strict=True)
        ]
    ).view(len(own), texts, -1)
    numbers = torch.from_numpy(own).to(joined.device)
    gathered, all_numbers = joined, numbers
    if group.size > 1:
        gathered, all_numbers = all_gather(joined, group), all_gather(numbers, group)
    # Padding goes to a record after the last, which is cut off.
    whole = joined.new_zeros(count + 1, *joined.shape[1:])
    whole[torch.where(all_numbers < 0, count, all_numbers)] = gathered
    is_there = torch.zeros(count + 1, dtype=torch.bool, device=joined.device)
    is_there[torch.where(all_numbers < 0, count, all_numbers)] = True
    rows = own[own >= 0]
    on_rank = on_device(records, is_there[:count], joined.device)
    total, gradient = loss_and_gradient(whole[:count], rows, on_rank, loss, sizes)
    if group.size > 1:
        # Rows of other ranks have this rank's texts as negatives.
        all_reduce(gradient, group)
    own_gradient = torch.cat([gradient, torch.zeros_like(gradient[:1])])[numbers]  # -1: padding
    parts = own_gradient.flatten(0, 1).split([len(of.numbers) * texts for of in inputs])
    gradients = [part[of.slots.long()] for part, of in zip(parts, inputs, strict=True)]
    return total, float(loss.weight(rows, records.is_counted)), gradients
