"""Cross entropy in fp32, from half-precision logits, with the gradient written over the logits.

The logits are the largest tensor of a step ([loss rows, vocabulary]). torch's cross entropy would make an fp32 copy, a
log-softmax of it and a gradient: 12 bytes per logit beside the logits. Here only the log-sum-exp is kept, and the
backward pass turns the saved logits into their gradient in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_lite.model.kernels import fused
from megatron_lite.parallel.collectives import SINGLE, Group, all_reduce

if TYPE_CHECKING:
    from megatron_lite.model.trunk.loss_terms import Terms


def _functions(logits):  # type: ignore[no-untyped-def]
    """Those that sum, and that write the gradient."""
    if not fused.has_kernels(logits):
        from megatron_lite.model.kernels.torch_cross_entropy import log_sums, write_gradient

        return log_sums, write_gradient
    from megatron_lite.model.kernels.cross_entropy import log_sums_kernel, write_gradient_kernel

    return log_sums_kernel, write_gradient_kernel


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, first, valid, terms):  # type: ignore[no-untyped-def]
        found = sums_of_rows(logits, targets, first, valid, terms)
        losses, log_sums = finish_losses(*found, group, terms)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.columns, ctx.terms = (first, valid), terms
        return losses

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (logits, targets, log_sums), (first, valid) = ctx.saved_tensors, ctx.columns
        # Detached: autograd would watch a saved tensor for changes, and this one is used up.
        turn_into_gradient(logits.detach(), targets, log_sums, grad, first, valid, ctx.terms)
        return logits, None, None, None, None, None


def sums_of_rows(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int, terms: Terms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """fp32 [K] of this rank's columns: log-sum-exps, targets' logits or 0, and sums for smoothing."""
    sums = logits[:, :valid].sum(-1, dtype=torch.float32) if terms is not None and terms.smoothing else None
    return *_functions(logits)[0](logits, targets, first, valid), sums


def finish_losses(
    log_sums: torch.Tensor, picked: torch.Tensor, sums: torch.Tensor | None, group: Group, terms: Terms | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and log-sum-exps of the whole vocabulary, fp32 [K], from `sums_of_rows` of each rank."""
    if group.size > 1:
        most = all_reduce(log_sums.clone(), group, dist.ReduceOp.MAX)
        log_sums = all_reduce((log_sums - most).exp(), group).log() + most
        for summed in (picked, sums):
            if summed is not None:
                all_reduce(summed, group)
    losses = log_sums - picked
    if terms is not None:
        if sums is not None:
            losses += terms.smoothing * picked - terms.share * sums
        terms.of_z = terms.z_loss * log_sums.square()
        losses += terms.of_z
    return losses, log_sums


def turn_into_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
    terms: Terms | None,
) -> None:
    """Overwrites logits [K, columns of this rank] by the gradient of sum(grad * losses)."""
    of_sums = grad if terms is None else grad * (1 + terms.growth(log_sums))
    _functions(logits)[1](logits, targets, log_sums, of_sums.contiguous(), first, valid)
    if terms is not None and valid:
        terms.add_gradient(logits[:, :valid], targets, first, grad, log_sums)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = SINGLE,
    first: int = 0,
    valid: int | None = None,
    terms: Terms | None = None,
) -> torch.Tensor:
    """Per-row cross entropy in nats, without gathering the vocabulary.

    Args:
        logits: [K rows, columns of this rank's vocabulary], any float dtype. Overwritten by the backward pass: use it
            nowhere else.
        targets: int labels [K], global ids, equal on all ranks of the group.
        group: the ranks whose shards make up the vocabulary.
        first: global id of this rank's first column.
        valid: columns that are no padding; None = all.
    Returns: fp32 [K], equal on all ranks of the group.
    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    valid = logits.shape[1] if valid is None else valid
    return _CrossEntropy.apply(logits, targets, group, first, valid, terms)
