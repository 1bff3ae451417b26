"""The losses of tasks: from the scores of a sample's parts, or the head's outputs on rows, to one number.

What a part is says data_utils/tasks/base.py. Each loss is a cross entropy (or squared error) in fp32; all of them are
sums, which the trainer divides once, by the step's `weight`.

Shapes: N rows, P parts, S samples, K classes, D features of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_lite.model.task_batch import TaskInputs

CHOICE_LOSSES = ("cross_entropy", "hinge", "generative", "mix")


def choice_scores(losses: torch.Tensor, parts: TaskInputs) -> torch.Tensor:
    """Log probability of each part over its divisor, fp32 [P]. Args: losses: cross entropies of the rows, [N]."""
    return -part_sums(losses, parts) / parts.divisor


def part_sums(of_rows: torch.Tensor, parts: TaskInputs) -> torch.Tensor:
    """Sums over the rows of each part, fp32 [N] -> [P]."""
    none = torch.zeros(len(parts.sample), device=of_rows.device)
    return none.index_add(0, parts.position_group, of_rows.float())


def first_places(parts: TaskInputs) -> torch.Tensor:
    """The first row of each part among all rows, int64 [P]; every part has one."""
    # Rows of a part follow each other, so a running sum gives where each begins.
    counts = part_sums(torch.ones_like(parts.position_group), parts).long()
    return counts.cumsum(0) - counts


def part_pools(of_rows: torch.Tensor, parts: TaskInputs) -> torch.Tensor:
    """First row, maximum and mean of the rows of each part, concatenated: [N or more, D] -> [P, 3 D].

    Source: concat pooling, ULMFiT, arXiv:1801.06146, section 3.3.
    """
    rows, owner = of_rows[: len(parts.position_group)].float(), parts.position_group.long()
    first = rows[first_places(parts)]
    none = torch.full_like(first, float("-inf"))
    most = none.scatter_reduce(0, owner[:, None].expand_as(rows), rows, "amax")
    counts = part_sums(torch.ones_like(owner), parts)
    mean = torch.zeros_like(first).index_add(0, owner, rows) / counts[:, None]
    return torch.cat([first, most, mean], dim=1).to(of_rows.dtype)


def task_loss(outputs: torch.Tensor, parts: TaskInputs) -> torch.Tensor:
    """Sum of the losses, fp32 scalar.

    Args: outputs: choices: scores [P]; classes, sets: [P, K]; values: [P, 1]; tags: [N, K]; spans: [N, 2].
    """
    outputs = outputs.float()
    if parts.head == "choices":
        return _choice_loss(outputs, parts)
    if parts.head == "values":
        return F.mse_loss(outputs[:, 0], parts.value, reduction="sum")
    if parts.head == "sets":  # the mean over the classes
        targets = parts.targets.view_as(outputs).float()
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / outputs.shape[1]
    if parts.head == "spans":
        first, last = parts.targets.view(-1, 2).long().unbind(1)
        ends = zip(outputs.unbind(1), (first, last), strict=True)
        sums = [(_log_sums(x, parts.position_group, len(first)) - x[target]).sum() for x, target in ends]
        return 0.5 * (sums[0] + sums[1])
    return F.cross_entropy(outputs, parts.targets.long(), reduction="sum")


def _log_sums(values: torch.Tensor, owner: torch.Tensor, owners: int) -> torch.Tensor:
    """log sum exp of the values of each owner: [N], int [N] -> [owners]."""
    owner = owner.long()
    # The maximum is a constant for the gradient (`detach`): it cancels in the result.
    most = values.new_full((owners,), float("-inf")).scatter_reduce(0, owner, values.detach(), "amax")
    sums = torch.zeros_like(most).index_add(0, owner, (values - most[owner]).exp())
    return sums.log() + most


# A sample with one choice has nothing to choose: its loss is generative (WSC without candidates, LAMBADA).
def _choice_loss(scores: torch.Tensor, parts: TaskInputs) -> torch.Tensor:
    right = parts.right.long()
    chosen = scores[right]
    if parts.loss == "generative":
        return -chosen.sum()
    if parts.loss == "hinge":
        # The right choice has the margin 1 against itself, which the next line takes out of the sum.
        margins = (1.0 + scores - chosen[parts.sample.long()]).clamp(min=0.0)
        return margins.sum() - margins[right].sum()
    entropy = (_log_sums(scores, parts.sample, len(right)) - chosen).sum()
    if parts.loss == "mix":
        return entropy - chosen.sum()
    choices = torch.zeros(len(right), device=scores.device).index_add(
        0, parts.sample, torch.ones_like(scores)
    )
    return entropy - chosen.masked_fill(choices > 1, 0.0).sum()


def sums_of_task(loss: torch.Tensor, parts: TaskInputs, num_losses: int) -> torch.Tensor:
    """fp32 [objectives, 2] without gradient: the task's row holds its loss and weight, the others are 0."""
    sums = torch.zeros(num_losses, 2, device=loss.device)
    sums[parts.loss_number] = torch.stack([loss.detach(), parts.weight[0]])
    return sums
