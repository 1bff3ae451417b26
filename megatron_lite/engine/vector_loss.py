"""The loss of a step whose samples are pairs of texts, from the vectors of all micro-batches of all ranks.

A softmax over a global batch needs all its vectors at once. So a step computes them first, without a graph, then the
loss and its gradient for each vector, then each micro-batch again with this gradient (arXiv:2101.06983, GradCache). The
result equals one batch, with the activations of one micro-batch in memory: dropout is a function of step, sample and
position, so both passes drop the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_utils.common.losses import CONTRASTIVE
from data_utils.objectives.contrastive import ContrastiveConfig
from data_utils.objectives.own_corpora import TEXT_PAIRS
from megatron_lite.config.tree import Config
from megatron_lite.parallel.collectives import Group, all_gather, all_reduce
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.pair_losses import (
    CoSent,
    InfoNce,
    PairLoss,
    Records,
    loss_and_gradient,
    teacher_loss,
)
from megatron_lite.transformer.pair_records import PairInputs, PairRecords


def pair_section(config: Config) -> ContrastiveConfig:
    """The section of the objective that reads pairs."""
    return next(
        choice.section for choice in config.objective_choices if choice.section.own_corpora == TEXT_PAIRS
    )


def vector_groups(micro_batches: Sequence[MicroBatch]) -> list[Sequence[MicroBatch]]:
    """Micro-batches whose loss is of each other's vectors: all, or each alone where a teacher's vectors are the aim."""
    if all(micro_batch.extra_inputs.targets is not None for micro_batch in micro_batches):
        return [[micro_batch] for micro_batch in micro_batches]
    return [micro_batches]


def pair_loss(section: ContrastiveConfig) -> PairLoss:
    if section.loss == "cosent":
        return CoSent(section.temperature)
    return InfoNce(section.temperature, section.directions, section.false_negative_margin)


def matryoshka(section: ContrastiveConfig) -> list[tuple[int, float]]:
    """Sizes and weights, for `loss_and_gradient`."""
    sizes = section.matryoshka_sizes
    return list(zip(sizes, section.matryoshka_weights or [1.0] * len(sizes), strict=True))


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


def vector_sums(
    vectors: Sequence[torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    config: Config,
    group: Group,
    num_losses: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of this rank's records, and the gradients of its vectors, both times the weight of the loss.

    Args: vectors: of each micro-batch, see `vector_loss`. config: of the step's phase.
    Returns: fp64 [losses, 2], sum and weight of each loss; fp32 [G, D] of each micro-batch.
    """
    section, inputs = pair_section(config), [micro_batch.extra_inputs for micro_batch in micro_batches]
    if section.needs_vectors:
        total, weight, gradients = distances(vectors, inputs, config.embedding.normalize)
    else:
        total, weight, gradients = vector_loss(
            vectors, inputs, group, pair_loss(section), matryoshka(section)
        )
    scale = float(micro_batches[0].extra_weights)  # on the host; of a loss that is a mean, equal for all
    sums = torch.zeros(num_losses, 2, dtype=torch.float64, device=total.device)
    sums[CONTRASTIVE.number] = scale * torch.stack([total, torch.full_like(total, weight)])
    return sums, [scale * gradient for gradient in gradients]


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


def distances(
    vectors: Sequence[torch.Tensor], inputs: Sequence[PairInputs], normalize: bool
) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
    """As `vector_loss`, of the distances from a teacher's vectors, which no other rank has a part in.

    The loss of a record is the mean over its texts. Args: normalize: see `teacher_loss`.
    """
    totals, gradients = [], []
    for each, of in zip(vectors, inputs, strict=True):
        assert of.targets is not None
        texts = of.records.texts.shape[1]
        targets = torch.from_numpy(of.targets).to(each.device)[of.slots.long() // texts]
        total, gradient = teacher_loss(each, targets, normalize)
        totals.append(total / texts)
        gradients.append(gradient / texts)
    weight = sum(int((of.numbers >= 0).sum()) for of in inputs)
    return torch.stack(totals).sum(), float(weight), gradients
