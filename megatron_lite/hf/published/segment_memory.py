"""XLNet's memory: a long text is read in segments, each of which also sees what the layers made of those before.

Each layer has its inputs on the last tokens before the segment as further keys (Transformer-XL, arXiv:1901.02860). Here
they are places at the beginning of each row, at the positions before the segment's, which all its tokens see; before
each block the remembered states are put there. So plans, kernels and relative positions know nothing of memory. The
price is that blocks compute these places too, and that what they make of them is dropped.

For inference. In training every sample is read alone, and the memory is the beginning of its own text
(data_utils/objectives/xlnet.py).

Shapes: B rows, S tokens of a segment, M remembered ones, C content tokens (no query stream), D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_utils.common.batch_fields import DOC, FIELDS, ORD, POSITION_IDS
from megatron_lite.model.batch import Batch
from megatron_lite.model.micro_batch import prepare
from megatron_lite.model.transformer import GLM

Memory = Sequence[torch.Tensor]  # of each block, [B, M, D]


@torch.no_grad()
def read_segment(
    model: GLM,
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
        fields: int32 [B, fields, S], as Batch: one text in each row, without padding. The query stream, if there is
            one, is of the same size in all rows.
        memory: of the segment before; None at the beginning.
        longest: tokens to remember (`mem_len` of transformers, where 0 is all); None: all.
        reused: the first tokens of the segment that may be remembered (`reuse_len`); None: all. XLNet's second half
            of a segment is read again as the first half of the next one.
    Returns: [B, S, D], and [B, M, D] of each block.
    Raises: ValueError for rows that a memory cannot serve.
    """
    if model.config.relative != "xlnet":
        raise ValueError(f"model.relative is {model.config.relative}; only xlnet has positions for a memory.")
    rows, _, size = fields.shape
    is_content = fields[:, ORD] >= 0
    if (fields[:, DOC] != 0).any() or len(set(is_content.sum(1).tolist())) > 1:
        raise ValueError("a segment needs one text in each row, all of the same length and without padding.")
    length = 0 if memory is None else memory[0].shape[1]
    prepared = prepare(Batch(_with_places(fields, length)), torch.device("cpu"), model.config, kernel=kernel)
    order = torch.from_numpy(prepared.plan.order)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order))).view(rows, length + size)
    content = place[:, length:][torch.from_numpy(is_content)].view(rows, -1)
    inputs: list[torch.Tensor] = []

    def recall(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        if memory is not None:
            hidden = hidden.index_copy(0, place[:, :length].flatten(), memory[layer].flatten(0, 1))
        inputs.append(hidden[content])
        return hidden

    ready = prepared.to(torch.device("cpu"))
    out = model.hidden_states(ready.tokens, ready.ids, ready.plan, before_block=recall)[place[:, length:]]
    earlier: Memory = [states[:, :0] for states in inputs] if memory is None else memory
    joined = [torch.cat([old, new[:, :reused]], dim=1) for old, new in zip(earlier, inputs, strict=True)]
    return out, [
        states if longest is None else states[:, max(0, states.shape[1] - longest) :] for states in joined
    ]


def _with_places(fields: np.ndarray, length: int) -> np.ndarray:
    """Rows with `length` places before their tokens, which all of them see: [B, fields, length + S]."""
    places = np.zeros((len(fields), len(FIELDS), length), np.int32)  # document, order and segment 0
    places[:, POSITION_IDS] = np.arange(length)
    moved = fields.copy()
    moved[:, POSITION_IDS] += length
    return np.concatenate([places, moved], axis=2)
