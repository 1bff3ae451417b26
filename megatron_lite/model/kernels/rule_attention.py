"""Operators of attention under the rule, with a bias by distance, on a GPU, see fused.py.

The bias is a number for each distance, or, where it depends on the tokens, of tables: for each token a number for each
row, of which a distance has one. Shapes: T tokens, H heads, D head size, S the longest distance of two tokens, N rows
of a table. Lists are those of blocks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lite.model.kernels.fused import operator

BLOCK = 128  # tokens of a block of the lists
_BUCKETS = 32
MOST_ROWS, SUMMED = 1 << 16, 255  # of a table; the turn of rows with many distances, see `table_places`
_MOST_TURNS = 16


def key_tile(dtype: torch.dtype, tables: Sequence[torch.Tensor] = ()) -> int:
    """Keys of a program, which has sums of its own. Larger tiles would spill registers."""
    return BLOCK // 4 if dtype == torch.float32 or tables else BLOCK // 2


def rule_attention(
    qkv: torch.Tensor, columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None,
    buckets: torch.Tensor | None, tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None,
    p: float, first_head: int, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output [T, H, D] of [T, 3, H, D], and the log of the sum of exponentials, fp32 [H, T].

    Args:
        columns: int32 [5, T], those that `may_see` compares.
        lists: for each block of queries.
        line: fp32 [H, 2 S + 1], added to the scores by distance, key less query, from -S on.
        buckets: int32 [2 S + 1], of each distance: with `line` its bucket, with tables `table_places`.
        tables: of queries and of keys, of queries alone, or none, [H, T, N]: added to the scores before scaling.
        keys, salt, p: of dropout. first_head: number of this rank's first head.
    """
    tokens, _, heads, size = qkv.shape
    return qkv.new_empty(tokens, heads, size), qkv.new_empty(heads, tokens, dtype=torch.float32)


def rule_attention_queries(
    d_tables: list[torch.Tensor], grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, log_sums: torch.Tensor,
    columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None, buckets: torch.Tensor | None,
    tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None, p: float, first_head: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradient [T, 3, H, D], whose queries are written, and output times gradient, fp32 [H, T].

    Args: d_tables: zeros like the tables, of which that of queries is written.
    """
    return torch.empty_like(qkv), torch.empty_like(log_sums)


def rule_attention_keys(
    d_qkv: torch.Tensor, d_tables: list[torch.Tensor], grad: torch.Tensor, qkv: torch.Tensor, log_sums: torch.Tensor,
    products: torch.Tensor, columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None,
    buckets: torch.Tensor | None, tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None,
    p: float, first_head: int, window: int,
) -> torch.Tensor:  # fmt: skip
    """Writes the gradients of keys, of values and of the keys' table. Returns sums of the line's, [programs, H, 32].

    Args: lists: for each block of keys.
    """
    tokens, _, heads, _ = qkv.shape
    programs = 0 if line is None else -(-tokens // key_tile(qkv.dtype))
    return log_sums.new_empty(programs, heads, _BUCKETS)


def table_places(rows: torch.Tensor) -> torch.Tensor:
    """The row of a table that each distance has, and its turn times MOST_ROWS. Args: rows: int [2 S + 1].

    Gradients are added in turns, one for each distance of a row: 0 = the only one. Those of rows with more distances
    than there are turns are summed within a tile first.
    """
    order = rows.argsort(stable=True)
    ordered, place = rows[order], torch.arange(len(rows), device=rows.device)
    first, after = (torch.searchsorted(ordered, ordered, right=right) for right in (False, True))
    turn = torch.where(after - first == 1, 0, place - first + 1).masked_fill(
        after - first > _MOST_TURNS, SUMMED
    )
    return torch.empty_like(rows).index_copy_(0, order, ordered + turn * MOST_ROWS).int()


rule_attention_kernel = operator(rule_attention, module="triton_attention")
rule_attention_queries_kernel = operator(rule_attention_queries, ("d_tables",), "triton_attention")
rule_attention_keys_kernel = operator(rule_attention_keys, ("d_qkv", "d_tables"), "triton_attention")
