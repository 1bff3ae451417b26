"""The attention kernel that fits the structure of a batch (layout.py says which token may see which).

A plan is made once per micro-batch and serves all layers. It says in which order it wants the batch's tokens; the model
runs all layers in this order, so no layer moves tokens. The plans:

  CpuPlan      CPU: a few kernel launches per document on disjoint queries, most of them without a mask; short documents
               of similar length share one launch (cpu_plan.py).
  VarlenPlan   CUDA: at most two launches of a fused kernel for the whole batch, without a mask (varlen.py): every
               structure but UniLMv2's.
  BlockPlan    CUDA, UniLMv2's structure, and a bias by distance: kernels that evaluate the rule (blocks.py, tables.py).
  DensePlan    the reference: one masked launch, B x S x S booleans (dense.py).
  LayeredPlan  two of these, for models with local layers (window.py).

All but BlockPlan serve cross-attention too (cross_attention.py). A bias of the scores (position_bias.py) goes to
CpuPlan, which then writes attention out, and to DensePlan. Tokens that see nothing get zeros.
"""

from __future__ import annotations

import torch

from megatron_lite.model.attention_backends.blocks import BlockPlan
from megatron_lite.model.attention_backends.cpu_plan import CpuPlan
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.interface import BatchPlan
from megatron_lite.model.attention_backends.layout import (
    MASKED,
    DocumentGroup,
    Layout,
    make_document_groups,
    padded_order,
)
from megatron_lite.model.attention_backends.tables import has_distinct_positions
from megatron_lite.model.attention_backends.varlen import varlen_plan
from megatron_lite.model.kernels.fused import kernels_are_wanted

# CUDA: keys that the launches of VarlenPlan may gather, for each token. GLM takes 2, XLNet 5 to 6; UniLMv2 would
# take 35.
_MOST_KEYS = 8


def plan_attention(
    layout: Layout, device: torch.device, kernel: str = "auto", multiple: int = 1
) -> BatchPlan:
    """Choose the kernel for a batch, and lay out its tokens.

    Args:
        kernel: "auto", or one of "cpu", "varlen", "blocks", "tables" (blocks, with a TableBias), "query tables" (a
            QueryBias) and "dense".
        multiple: of the number of tokens, padding included.
    """
    assert kernel in ("auto", "cpu", "varlen", "blocks", "tables", "query tables", "dense"), kernel
    if kernel == "dense":
        return DensePlan(layout)
    on_cpu = kernel == "cpu" or (kernel == "auto" and device.type == "cpu")
    # torch's CPU kernel is causal for as many keys as queries only; the CUDA kernel aligns both at their ends.
    groups = make_document_groups(layout, square_causal_only=on_cpu)
    # At least one token: a rank whose batch is empty still takes part in every collective.
    length = max(1, -(-len(layout.batch_index) // multiple)) * multiple
    if on_cpu:
        return CpuPlan(layout, groups, padded_order(layout, length))
    if kernel == "varlen" or (kernel == "auto" and _suits_varlen(groups, len(layout.batch_index))):
        return varlen_plan(layout, groups, length)
    # What is left needs a mask or a bias: kernels that evaluate the rule.
    return block_plan(layout, length, kernel=kernel)


def _suits_varlen(groups: list[DocumentGroup], tokens: int) -> bool:
    query_ranges = [each for group in groups for each in group.query_ranges]
    # Gathered keys are copies of K and V. With many copies for each token the masked kernel is cheaper in memory and
    # time.
    keys = sum(stop - start for each in query_ranges for start, stop in each.keys)
    return all(each.mask != MASKED for each in query_ranges) and keys <= _MOST_KEYS * tokens


def block_plan(layout: Layout, length: int, window: int = 0, *, kernel: str = "blocks") -> BatchPlan:
    """A BlockPlan, or the dense one where no kernels are wanted, or cannot be.

    Args: length, window: as for BlockPlan. kernel: as for `plan_attention`.
    """
    # `training.kernels=torch`: a mask of all pairs, without Triton.
    if not kernels_are_wanted():
        return DensePlan(layout, window=window)
    if kernel in ("tables", "query tables") and not has_distinct_positions(layout, kernel == "query tables"):
        return DensePlan(layout)
    return BlockPlan(layout, length, window=window)
