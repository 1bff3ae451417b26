"""Cross entropy per row in fp32, from half-precision logits, with the gradient written over the logits.

The head's logits are the largest tensor of a step ([loss rows, vocabulary]). torch's cross entropy would make
an fp32 copy, a log-softmax of it and a gradient: 12 bytes per logit on top of the logits. Here rows are
widened in chunks, only the log-sum-exp is kept, and the backward pass turns the saved logits into their
gradient in place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_lite.collectives import SINGLE, Group, all_reduce

# fp32 bytes widened at a time. CPU: what a core's L2 cache holds; GPU: enough to outweigh the kernels' start.
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_KV, targets_K, group, first):  # type: ignore[no-untyped-def]
        rows = max(1, _CHUNK_BYTES[logits_KV.device.type] // (4 * max(1, logits_KV.shape[1])))
        lse_K = torch.cat([chunk.float().logsumexp(-1) for chunk in logits_KV.split(rows)])
        local_K = targets_K - first
        is_here_K = (local_K >= 0) & (local_K < logits_KV.shape[1])
        local_K = local_K.masked_fill(~is_here_K, 0)
        picked_K = torch.zeros_like(lse_K)
        if logits_KV.shape[1]:  # the last ranks of a small vocabulary may hold nothing but padding
            picked_K = logits_KV.gather(1, local_K[:, None]).squeeze(1).float().masked_fill(~is_here_K, 0.0)
        if group.size > 1:
            most_K = all_reduce(lse_K.clone(), group, dist.ReduceOp.MAX)
            lse_K = all_reduce((lse_K - most_K).exp(), group).log() + most_K
            all_reduce(picked_K, group)
        ctx.save_for_backward(logits_KV, local_K, is_here_K, lse_K)
        ctx.rows = rows
        return lse_K - picked_K

    @staticmethod
    def backward(ctx, grad_K):  # type: ignore[no-untyped-def]
        logits_KV, local_K, is_here_K, lse_K = ctx.saved_tensors
        if not logits_KV.shape[1]:
            return logits_KV, None, None, None
        for start in range(0, len(logits_KV), ctx.rows):
            part = slice(start, start + ctx.rows)
            probabilities = (logits_KV[part].float() - lse_K[part, None]).exp_()
            rows = torch.arange(len(probabilities), device=grad_K.device)
            probabilities[rows, local_K[part]] -= is_here_K[part].float()
            logits_KV[part] = probabilities.mul_(grad_K[part, None]).to(logits_KV.dtype)
        return logits_KV, None, None, None


def cross_entropy(
    logits_KV: torch.Tensor, targets_K: torch.Tensor, group: Group = SINGLE, first: int = 0
) -> torch.Tensor:
    """Per-row cross entropy in nats, without gathering the vocabulary.

    Args:
        logits_KV: [K rows, V of this rank's vocabulary], any float dtype. Overwritten by the backward pass: use it
            nowhere else.
        targets_K: int64 labels, global ids, equal on all ranks of the group.
        group: the ranks whose shards make up the vocabulary.
        first: global id of this rank's first column.
    Returns: fp32 loss_K, equal on all ranks of the group.
    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    return _CrossEntropy.apply(logits_KV, targets_K, group, first)
