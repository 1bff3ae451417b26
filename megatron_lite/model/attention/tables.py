"""A bias of scores by the distance of two tokens that depends on the query and on the key, on CUDA.

Both meet vectors of distances: their products are tables, of which the kernels that evaluate the rule read two numbers
for each pair, and whose gradients they write. Tables are made again in the backward pass, so that no layer keeps
one. Shapes: T tokens, H heads of this rank, D head size, N vectors, S the longest distance of two tokens.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_lite.model.attention.layout import Layout
from megatron_lite.model.kernels.rule_attention import (
    rule_attention_kernel,
    rule_attention_keys_kernel,
    rule_attention_queries_kernel,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableBias:
    """A query's product with a vector of the distance, and a key's with another."""

    vectors: torch.Tensor  # [2, N, H, D]: those that queries meet, and those that keys meet
    places: torch.Tensor  # int32 [2 S + 1]: `table_places` of each distance, key less query

    def attend(self, qkv: torch.Tensor, plan: Any, drawn: tuple[Any, ...]) -> torch.Tensor:
        """Args: qkv: [T, 3, H, D]. plan: a BlockPlan. drawn: keys, salt, probability and first head of dropout."""
        return _Attend.apply(qkv, self.vectors, self.places, plan, drawn)


def has_positions_apart(layout: Layout) -> bool:
    """Whether no two tokens of a document have one position; if some have, it is said once.

    The kernels need it: each token that a query sees gives its own part of a table's gradient.
    """
    order = np.lexsort((layout.position, layout.document))
    is_same = (np.diff(layout.document[order]) == 0) & (np.diff(layout.position[order]) == 0)
    if is_same.any():
        _say_slow()
    return not is_same.any()


@functools.cache
def _say_slow() -> None:
    log.warning(
        "a document has two tokens of one position: attention computes all pairs of tokens of such a batch's rows, and "
        "keeps a number for each, since the kernel of relative positions needs positions that differ."
    )


def _tables(qkv: torch.Tensor, vectors: torch.Tensor) -> list[torch.Tensor]:
    """[H, T, N] each."""
    heads = qkv.permute(1, 2, 0, 3)  # [3, H, T, D]
    return [heads[i] @ of_heads.permute(1, 2, 0) for i, of_heads in enumerate(vectors)]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, vectors, places, plan, drawn):  # type: ignore[no-untyped-def]
        tables = _tables(qkv, vectors)
        out, log_sums = rule_attention_kernel(qkv, plan.columns, plan.lists, None, places, tables, *drawn, 0)
        ctx.save_for_backward(qkv, vectors, places, out, log_sums)
        ctx.plan, ctx.drawn = plan, drawn
        return out

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        qkv, vectors, places, out, log_sums = ctx.saved_tensors
        plan, grad, tables = ctx.plan, grad.contiguous(), _tables(qkv, vectors)
        rest = None, places, tables, *ctx.drawn, 0
        d_tables = [torch.zeros(table.shape, dtype=table.dtype, device=table.device) for table in tables]
        d_qkv, products = rule_attention_queries_kernel(
            d_tables, grad, qkv, out, log_sums, plan.columns, plan.lists, *rest
        )
        rule_attention_keys_kernel(
            d_qkv, d_tables, grad, qkv, log_sums, products, plan.columns, plan.key_lists, *rest
        )
        del tables, rest
        d_vectors = torch.empty_like(vectors)
        for i, d_table in enumerate(d_tables):
            d_qkv[:, i].add_((d_table @ vectors[i].transpose(0, 1)).transpose(0, 1))
            d_vectors[i] = (d_table.mT @ qkv[:, i].transpose(0, 1)).transpose(0, 1)
        return d_qkv, d_vectors, None, None, None
