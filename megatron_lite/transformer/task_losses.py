"""The losses of tasks, from the scores of target groups or the outputs of the task's head.

data_utils/tasks/base.py defines target groups. Each loss is a cross entropy (or squared error) in fp32; all of them are
sums, which the trainer divides once, by the step's `weight`.

Shapes: G target groups with N positions in all, S samples, K classes, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_lite.transformer.task_batch import TaskInputs

CHOICE_LOSSES = ("cross_entropy", "hinge", "generative", "mix")


def choice_scores(losses: torch.Tensor, groups: TaskInputs) -> torch.Tensor:
    """Log probability of each group over its divisor, fp32 [G]. Args: losses: cross entropies of the positions, [N]."""
    return -group_sums(losses, groups) / groups.divisor


def group_sums(values: torch.Tensor, groups: TaskInputs) -> torch.Tensor:
    """Sums over the positions of each group, fp32 [N] -> [G]."""
    zeros = torch.zeros(len(groups.sample), device=values.device)
    return zeros.index_add(0, groups.position_group, values.float())


def first_positions(groups: TaskInputs) -> torch.Tensor:
    """The index in [N] of the first position of each group, int64 [G]; every group has one."""
    # Positions of a group follow each other, so a running sum gives where each begins.
    counts = group_sums(torch.ones_like(groups.position_group), groups).long()
    return counts.cumsum(0) - counts


def group_pools(hidden: torch.Tensor, groups: TaskInputs) -> torch.Tensor:
    """First position, maximum and mean over the positions of each group, concatenated: [N or more, D] -> [G, 3 D].

    Source: concat pooling, ULMFiT, arXiv:1801.06146, section 3.3.
    """
    x, group = hidden[: len(groups.position_group)].float(), groups.position_group.long()
    first = x[first_positions(groups)]
    lowest = torch.full_like(first, float("-inf"))
    largest = lowest.scatter_reduce(0, group[:, None].expand_as(x), x, "amax")
    counts = group_sums(torch.ones_like(group), groups)
    mean = torch.zeros_like(first).index_add(0, group, x) / counts[:, None]
    return torch.cat([first, largest, mean], dim=1).to(hidden.dtype)


def task_loss(outputs: torch.Tensor, groups: TaskInputs) -> torch.Tensor:
    """Sum of the losses, fp32 scalar.

    Args: outputs: choices: scores [G]; classes, sets: [G, K]; values: [G, 1]; tags: [N, K]; spans: [N, 2].
    """
    outputs = outputs.float()
    if groups.head == "choices":
        return _choice_loss(outputs, groups)
    if groups.head == "values":
        return F.mse_loss(outputs[:, 0], groups.value, reduction="sum")
    if groups.head == "sets":  # the mean over the classes
        targets = groups.targets.view_as(outputs).float()
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / outputs.shape[1]
    if groups.head == "spans":
        # Two softmaxes over the positions of each group, for the first and the last token of the span.
        first, last = groups.targets.view(-1, 2).long().unbind(1)
        ends = zip(outputs.unbind(1), (first, last), strict=True)
        sums = [(_log_sums(x, groups.position_group, len(first)) - x[target]).sum() for x, target in ends]
        return 0.5 * (sums[0] + sums[1])
    return F.cross_entropy(outputs, groups.targets.long(), reduction="sum")


def _choice_loss(scores: torch.Tensor, groups: TaskInputs) -> torch.Tensor:
    """Sum of the losses of choices. Args: scores: [G]."""
    right = groups.right.long()
    right_scores = scores[right]
    if groups.loss == "generative":
        return -right_scores.sum()
    if groups.loss == "hinge":
        # The right choice has the margin 1 against itself, which the next line subtracts again.
        margins = (1.0 + scores - right_scores[groups.sample.long()]).clamp(min=0.0)
        return margins.sum() - margins[right].sum()
    entropy = (_log_sums(scores, groups.sample, len(right)) - right_scores).sum()
    if groups.loss == "mix":
        return entropy - right_scores.sum()
    # With one choice there is nothing to choose: the loss of the sample is generative (WSC without
    # candidates).
    choices = torch.zeros(len(right), device=scores.device).index_add(
        0, groups.sample, torch.ones_like(scores)
    )
    return entropy - right_scores.masked_fill(choices > 1, 0.0).sum()


def _log_sums(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """log sum exp of the values with each index: [N], int [N] -> [size]."""
    index = index.long()
    # The maximum is a constant for the gradient (`detach`): it cancels in the result.
    largest = values.new_full((size,), float("-inf")).scatter_reduce(0, index, values.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, index, (values - largest[index]).exp())
    return sums.log() + largest


def task_sums(loss: torch.Tensor, groups: TaskInputs, num_losses: int) -> torch.Tensor:
    """fp32 [losses, 2] without gradient: loss and weight of the task at its number, 0 for all other losses."""
    sums = torch.zeros(num_losses, 2, device=loss.device)
    sums[groups.loss_number] = torch.stack([loss.detach(), groups.weight[0]])
    return sums
