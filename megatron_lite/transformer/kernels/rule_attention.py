"""Operators of attention under the rule, with a bias by distance, on a GPU, see fused.py.

The bias is a number for each distance, or, where it depends on the tokens, it comes from tables. A table has for each
token N numbers, one for each of N vectors; a distance selects one of them (`table_slots`). Block lists are described in
attention_backends/blocks.py.

Shapes: T tokens, H heads, D head size, S the longest distance of two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_lite.transformer.kernels.fused import operator

BLOCK = 128  # tokens of a block of the lists
_BUCKETS = 32
MOST_VECTORS = 1 << 16  # of a table
SUMMED = 255  # the turn of vectors with many distances, see `table_slots`
_MOST_TURNS = 16


def key_tile(dtype: torch.dtype, tables: Sequence[torch.Tensor] = ()) -> int:
    """Keys of a program, which sums their gradients. Larger tiles would spill registers."""
    return BLOCK // 4 if dtype == torch.float32 or tables else BLOCK // 2


def rule_attention(
    qkv: torch.Tensor, columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None,
    buckets: torch.Tensor | None, tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None,
    p: float, first_head: int, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output [T, H, D] of [T, 3, H, D], and the log of the sum of exponentials, fp32 [H, T].

    Args:
        columns: int32 [5, T], what `may_see` compares.
        lists: the tensors of a BlockLists: for each block of queries its blocks of keys.
        line: fp32 [H, 2 S + 1], added to the scores by distance, key less query, from -S on.
        buckets: int32 [2 S + 1], of each distance: with `line` its bucket, with tables `table_slots`.
        tables: of queries and of keys, of queries alone, or none, [H, T, N]: added to the scores before scaling.
        keys, salt, p: of dropout.
        first_head: number of this rank's first head, for dropout.
    """
    tokens, _, heads, size = qkv.shape
    return qkv.new_empty(tokens, heads, size), qkv.new_empty(heads, tokens, dtype=torch.float32)


def rule_attention_queries(
    d_tables: list[torch.Tensor], grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, log_sums: torch.Tensor,
    columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None, buckets: torch.Tensor | None,
    tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None, p: float, first_head: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of qkv, in which only that of queries is written, and sum(output * gradient), fp32 [H, T].

    Args: d_tables: zeros like the tables; the table of queries is written.
    """
    return torch.empty_like(qkv), torch.empty_like(log_sums)


def rule_attention_keys(
    d_qkv: torch.Tensor, d_tables: list[torch.Tensor], grad: torch.Tensor, qkv: torch.Tensor, log_sums: torch.Tensor,
    products: torch.Tensor, columns: torch.Tensor, lists: list[torch.Tensor], line: torch.Tensor | None,
    buckets: torch.Tensor | None, tables: list[torch.Tensor], keys: torch.Tensor | None, salt: torch.Tensor | None,
    p: float, first_head: int, window: int,
) -> torch.Tensor:  # fmt: skip
    """Writes the gradients of keys, values and the keys' table.

    Args: lists: for each block of keys its blocks of queries.
    Returns: partial sums of the gradient of `line` by bucket, fp32 [programs, H, 32].
    """
    tokens, _, heads, _ = qkv.shape
    programs = 0 if line is None else -(-tokens // key_tile(qkv.dtype))
    return log_sums.new_empty(programs, heads, _BUCKETS)


def table_slots(vectors: torch.Tensor) -> torch.Tensor:
    """The slot of each distance, int32 [2 S + 1]: the index of its vector, and its turn times MOST_VECTORS.

    Distances that share a vector add their gradients to the same number of a table, so each has a turn, from 1; 0 = the
    vector has no other distance. Where a vector has more distances than there are turns, all of them are SUMMED: summed
    within a tile first.

    Args: vectors: int [2 S + 1], the index of each distance's vector.
    """
    order = vectors.argsort(stable=True)
    ordered, rank = vectors[order], torch.arange(len(vectors), device=vectors.device)
    first, after = (torch.searchsorted(ordered, ordered, right=right) for right in (False, True))
    turn = torch.where(after - first == 1, 0, rank - first + 1)
    turn = turn.masked_fill(after - first > _MOST_TURNS, SUMMED)
    return torch.empty_like(vectors).index_copy_(0, order, ordered + turn * MOST_VECTORS).int()


rule_attention_kernel = operator(rule_attention, module="triton_attention")
rule_attention_queries_kernel = operator(rule_attention_queries, ("d_tables",), "triton_attention")
rule_attention_keys_kernel = operator(rule_attention_keys, ("d_qkv", "d_tables"), "triton_attention")
