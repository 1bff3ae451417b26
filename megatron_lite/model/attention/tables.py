"""A bias of scores that depends on the distance of two tokens and on one of them, for the kernels that evaluate the rule.

A token's queries meet vectors of distances, and its keys too: their products are tables, of which the kernels read a
number for each pair, and whose gradients they write. Tables are made again in the backward pass, so that no layer keeps
one. Shapes: T tokens, H heads of this rank, D head size, N vectors, S the longest distance of two tokens.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_lite.model.attention.layout import NEVER, Layout
from megatron_lite.model.kernels.rule_attention import (
    rule_attention_kernel,
    rule_attention_keys_kernel,
    rule_attention_queries_kernel,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableBias:
    """A query's product with a vector of the distance, and, where there are two, a key's with another."""

    vectors: torch.Tensor  # [1 or 2, N, H, D]: of queries, of keys
    places: torch.Tensor  # int32 [2 S + 1]: `table_places` of each distance, key less query

    def attend(self, qkv: torch.Tensor, plan: Any, drawn: tuple[Any, ...]) -> torch.Tensor:
        """Args: qkv: [T, 3, H, D]. plan: a BlockPlan. drawn: keys, salt, probability and first head of dropout."""
        return _Attend.apply(qkv, self.vectors, self.places, plan, drawn)


def has_places_apart(layout: Layout, tables: int) -> bool:
    """Whether tokens that a query sees, and with two tables those that see a key, have positions that all differ.

    The kernels need it, which write a number of a table's gradient for each of them. If not, it is said once.
    """
    seen = slice(None) if tables == 2 else layout.key_time < NEVER
    document, position = layout.document[seen], layout.position[seen]
    order = np.lexsort((position, document))
    is_same = (np.diff(document[order]) == 0) & (np.diff(position[order]) == 0)
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
        d_tables = [torch.zeros_like(table) for table in tables]
        d_qkv, products = rule_attention_queries_kernel(
            d_tables, grad, qkv, out, log_sums, plan.columns, plan.lists, *rest
        )
        rule_attention_keys_kernel(
            d_qkv, d_tables, grad, qkv, log_sums, products, plan.columns, plan.key_lists, *rest
        )
        del tables, rest
        d_vectors = torch.empty_like(vectors)
        for i, d_table in enumerate(d_tables):
            d_qkv[:, i] += (d_table @ vectors[i].transpose(0, 1)).transpose(0, 1)
            d_vectors[i] = (d_table.mT @ qkv[:, i].transpose(0, 1)).transpose(0, 1)
        return d_qkv, d_vectors, None, None, None
