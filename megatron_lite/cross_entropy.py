"""Cross entropy per row in fp32, from half-precision logits, with the gradient written over the logits.

The head's logits are the largest tensor of a step ([loss rows, vocabulary]). torch's cross entropy would make an fp32
copy, a log-softmax of it and a gradient: 12 bytes per logit on top of the logits. Here rows are widened in
chunks, only the log-sum-exp is kept, and the backward pass turns the saved logits into their gradient in place.
"""

from __future__ import annotations

import torch

# fp32 bytes widened at a time. CPU: what a core's L2 cache holds; GPU: enough to outweigh the kernels' start.
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_KV, targets_K):  # type: ignore[no-untyped-def]
        rows = max(1, _CHUNK_BYTES[logits_KV.device.type] // (4 * logits_KV.shape[1]))
        lse_K = torch.cat([chunk.float().logsumexp(-1) for chunk in logits_KV.split(rows)])
        picked_K = logits_KV.gather(1, targets_K[:, None]).squeeze(1).float()
        ctx.save_for_backward(logits_KV, targets_K, lse_K)
        ctx.rows = rows
        return lse_K - picked_K

    @staticmethod
    def backward(ctx, grad_K):  # type: ignore[no-untyped-def]
        logits_KV, targets_K, lse_K = ctx.saved_tensors
        for start in range(0, len(logits_KV), ctx.rows):
            part = slice(start, start + ctx.rows)
            probabilities = (logits_KV[part].float() - lse_K[part, None]).exp_()
            probabilities[torch.arange(len(probabilities), device=grad_K.device), targets_K[part]] -= 1.0
            logits_KV[part] = probabilities.mul_(grad_K[part, None]).to(logits_KV.dtype)
        return logits_KV, None


def cross_entropy(logits_KV: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """Per-row cross entropy in nats.

    Args:
        logits_KV: [K rows, V vocabulary], any float dtype. Overwritten by the backward pass: use it nowhere else.
        targets_K: int64 labels in [0, V).
    Returns: fp32 loss_K.
    """
    return _CrossEntropy.apply(logits_KV, targets_K)
