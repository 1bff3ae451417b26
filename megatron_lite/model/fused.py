"""Formulas that are one or two kernels on a GPU: work which torch's own operators would spread over many.

A formula is a function on tensors, for torch's compiler. On CUDA it is compiled when it is first used. On CPU a
function of our own computes the same without a compiler; tests compare the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def fused(
    formula: Callable[..., Any], on_cpu: Callable[..., Any], *, overwrites: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """`formula` as an operator of its name.

    Args:
        formula: annotated as torch's operators are; its first argument is a tensor, whose device decides.
        on_cpu: with the same arguments.
        overwrites: names of arguments that are written. Such a formula returns nothing.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(formula, dynamic=True)

    operator = torch.library.custom_op(
        f"megatron_lite::{formula.__name__}",
        lambda *arguments: compiled()(*arguments),
        mutates_args=overwrites,
        device_types="cuda",
        schema=torch.library.infer_schema(formula, mutates_args=overwrites),
    )
    operator.register_kernel("cpu")(on_cpu)
    if not overwrites:
        operator.register_fake(formula)

    def run(first: torch.Tensor, *others: Any) -> Any:
        # The operator's way to the CPU takes tens of microseconds.
        return (on_cpu if first.device.type == "cpu" else operator)(first, *others)

    return run
