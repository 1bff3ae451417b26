"""Cross entropy and its gradient by torch's operators, which convert chunks of rows to fp32.

Shapes: K rows, V columns of a rank's vocabulary.
"""

from __future__ import annotations

import torch

_CHUNK_BYTES = 1 << 20  # fp32 bytes per chunk: what a core's L2 cache holds


def log_sums(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    real = logits[:, :valid]
    sums = torch.cat([chunk.float().logsumexp(-1) for chunk in real.split(_rows_of_a_chunk(logits))])
    picked = torch.zeros_like(sums)
    if valid:  # the last ranks of a small vocabulary may hold nothing but padding
        local, is_here = local_columns(targets, first, valid)
        picked = real.gather(1, local[:, None]).squeeze(1).float().masked_fill(~is_here, 0.0)
    return sums, picked


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
) -> None:
    logits[:, valid:] = 0.0
    if not valid:
        return
    local, is_here = local_columns(targets, first, valid)
    rows = _rows_of_a_chunk(logits)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        probabilities = (logits[part, :valid].float() - log_sums[part, None]).exp_()
        probabilities.scatter_add_(1, local[part, None], -is_here[part, None].float())
        logits[part, :valid] = probabilities.mul_(grad[part, None]).to(logits.dtype)


def _rows_of_a_chunk(logits: torch.Tensor) -> int:
    return max(1, _CHUNK_BYTES // (4 * logits.shape[1]))


def local_columns(targets: torch.Tensor, first: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' columns, and whether they are here; column 0 stands for those that are not."""
    local = targets.long() - first
    is_here = (local >= 0) & (local < valid)
    return local.masked_fill(~is_here, 0), is_here
