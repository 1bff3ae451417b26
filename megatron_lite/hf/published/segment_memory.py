"""XLNet's memory: a long text is read in segments, and each segment also attends to hidden states of earlier ones.

The further keys of each layer are its own inputs at the last tokens before the segment (Transformer-XL,
arXiv:1901.02860). Here they are slots at the beginning of each sequence, visible to all its tokens, and before each
block the remembered states are copied into them. So attention plans, kernels and relative positions need no code for
memory. The price is that blocks also compute outputs of these slots, which are dropped.

For inference. In training every sample is a sequence without other ones, and its memory is the beginning of its text
(data_utils/objectives/xlnet.py).

Shapes: B batch, S tokens of a segment, M remembered tokens, C content tokens (without the query stream), D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, FIELDS, ORD, POSITION_IDS
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.transformer import Transformer

Memory = Sequence[torch.Tensor]  # of each block, [B, M, D]


@torch.no_grad()
def read_segment(
    model: Transformer,
    fields: np.ndarray,
    memory: Memory | None = None,
    *,
    longest: int | None = None,
    reused: int | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The last block's output on a segment, and the memory for the segment after it.

    Args:
        model: with XLNet's relative positions, in one process on CPU.
        fields: int32 [B, fields, S], as in Batch: one text in each sequence, without padding. The query stream, if
            any, has the same size in all sequences.
        memory: of the segment before; None at the beginning.
        longest: number of tokens to remember (`mem_len` of transformers, where 0 is all); None: all.
        reused: number of first tokens of the segment that may be remembered (`reuse_len`); None: all. XLNet reads the
            second half of a segment again as the first half of the next one.
    Returns: [B, S, D], and [B, M, D] of each block.
    Raises: ValueError for sequences that cannot have a memory.
    """
    if model.config.relative != "xlnet":
        raise ValueError(f"model.relative is {model.config.relative}; only xlnet has positions for a memory.")
    batch_size, _, size = fields.shape
    is_content = fields[:, ORD] >= 0
    if (fields[:, DOC] != 0).any() or len(set(is_content.sum(1).tolist())) > 1:
        raise ValueError("a segment needs one text in each sequence, all of one length and without padding.")
    length = 0 if memory is None else memory[0].shape[1]
    prepared = prepare(Batch(_with_slots(fields, length)), torch.device("cpu"), model.config, kernel=kernel)
    order = torch.from_numpy(prepared.plan.order)
    # Where the plan's order puts each token of each sequence: [B, M + S].
    index = (
        torch.empty_like(order)
        .index_copy_(0, order, torch.arange(len(order)))
        .view(batch_size, length + size)
    )
    content = index[:, length:][torch.from_numpy(is_content)].view(batch_size, -1)
    inputs: list[torch.Tensor] = []

    def recall(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        if memory is not None:
            hidden = hidden.index_copy(0, index[:, :length].flatten(), memory[layer].flatten(0, 1))
        inputs.append(hidden[content])
        return hidden

    ready = prepared.to(torch.device("cpu"))
    out = model.hidden_states(ready.tokens, ready.ids, ready.plan, before_block=recall)[index[:, length:]]
    earlier: Memory = [states[:, :0] for states in inputs] if memory is None else memory
    joined = [torch.cat([old, new[:, :reused]], dim=1) for old, new in zip(earlier, inputs, strict=True)]
    return out, [
        states if longest is None else states[:, max(0, states.shape[1] - longest) :] for states in joined
    ]


def _with_slots(fields: np.ndarray, length: int) -> np.ndarray:
    """The sequences with `length` slots before their tokens, visible to all of them: [B, fields, length + S]."""
    slots = np.zeros((len(fields), len(FIELDS), length), np.int32)  # document, order and segment 0
    slots[:, POSITION_IDS] = np.arange(length)
    moved = fields.copy()
    moved[:, POSITION_IDS] += length
    return np.concatenate([slots, moved], axis=2)
