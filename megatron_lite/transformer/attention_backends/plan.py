"""The one place that decides which kernels compute attention: by the device, the model's bias, and a batch's structure.

layout.py says which token may see which. A plan is made once per micro-batch and serves all layers. It says in which
order it wants the batch's tokens; the model runs all layers in this order, so no layer moves tokens. The plans:

  CpuPlan      CPU: a few kernel launches per document on disjoint queries, most of them without a mask; short documents
               of similar length share one launch (cpu_plan.py).
  VarlenPlan   CUDA: at most two launches of a fused kernel for the whole batch, without a mask (varlen.py): every
               structure but UniLMv2's.
  BlockPlan    CUDA, UniLMv2's structure, and a bias by distance: kernels that evaluate the rule (blocks.py, tables.py).
  DensePlan    the reference: one masked launch, B x S x S booleans (dense.py).
  LayeredPlan  two of these, for models with local layers (window.py).

Which library's kernel VarlenPlan launches is a setting of the run (`choose` in config/attention.py).
All but BlockPlan serve cross-attention too (cross_attention.py). A bias of the scores (position_bias.py) goes to
CpuPlan, which then writes attention out, and to DensePlan. Tokens that see nothing get zeros.
"""

from __future__ import annotations

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.cpu_plan import CpuPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.interface import BatchPlan
from megatron_lite.transformer.attention_backends.layout import (
    MASKED,
    DocumentGroup,
    Layout,
    make_document_groups,
    padded_order,
)
from megatron_lite.transformer.attention_backends.tables import has_distinct_positions
from megatron_lite.transformer.attention_backends.varlen import VarlenPlan, varlen_plan
from megatron_lite.transformer.attention_backends.window import (
    LayeredPlan,
    keys_are_at_positions,
    window_groups,
)
from megatron_lite.transformer.kernels.fused import kernels_are_wanted

# CUDA: keys that the launches of VarlenPlan may gather, for each token. GLM takes 2, XLNet 5 to 6; UniLMv2 would
# take 35.
_MOST_KEYS = 8


def plan_stack(
    layout: Layout,
    device: torch.device,
    config: ModelConfig,
    kernel: str = "auto",
    multiple: int = 1,
    has_graphs: bool = False,
) -> BatchPlan:
    """The plan for all layers of a stack of blocks.

    Args:
        kernel, multiple: as for `plan_attention`; with "auto" the model's bias decides first.
        has_graphs: the plan has fixed shapes, if it can.
    """
    if kernel == "auto":
        kernel = kernel_of(config, device)
    if not config.attention_window:
        plan = plan_attention(layout, device, kernel, multiple)
        if has_graphs and isinstance(plan, VarlenPlan):
            return plan.with_fixed_shapes(layout.shape[1])
        return plan
    return plan_layers(layout, device, kernel, multiple, config.attention_window, config.global_every)


def kernel_of(config: ModelConfig, device: torch.device) -> str:
    """The `kernel` of `plan_attention` that a model needs; "auto" = each batch's layout decides."""
    if dense_reason(config, device) is not None:
        return "dense"
    by_relative = {"none": "auto", "buckets": "blocks", "disentangled": "tables"}
    return by_relative.get(config.relative, "query tables") if device.type != "cpu" else "auto"


def dense_reason(config: ModelConfig, device: torch.device) -> str | None:
    """Why a model's attention computes all pairs of tokens with a mask, for a warning; None if it does not."""
    if config.relative == "none" or kernels_are_wanted() or device.type == "cpu":
        return None
    return (
        f"model.relative is {config.relative} and training.kernels torch: on GPUs attention computes and stores all "
        "pairs of tokens of a sequence; fused stores none."
    )


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


def plan_layers(
    layout: Layout, device: torch.device, kernel: str, multiple: int, window: int, global_every: int
) -> LayeredPlan:
    """The plan of a model with local layers. Args: device, kernel, multiple: as for `plan_attention`."""
    global_plan = plan_attention(layout, device, kernel, multiple)
    local_plan: BatchPlan
    if isinstance(global_plan, CpuPlan):
        # Both plans have the same groups in the same order, so one `order` serves both.
        groups = window_groups(layout, global_plan.groups, window)
        local_plan = CpuPlan(layout, groups, global_plan.order, window=window)
    elif isinstance(global_plan, DensePlan):
        local_plan = DensePlan(layout, window=window)
    elif isinstance(global_plan, VarlenPlan) and keys_are_at_positions(layout):
        local_plan = global_plan.within(window)
    else:
        # Both by the kernels that evaluate the rule, since the two plans must agree on the order and length of tokens.
        global_plan, local_plan = (block_plan(layout, len(global_plan.order), each) for each in (0, window))
    return LayeredPlan(global_plan, local_plan, global_every)
