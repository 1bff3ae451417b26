"""What a rank's device computes, compared with the CPU. Ranks on GPUs and on CPUs run the same functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_lite.config.attention import IMPLEMENTATIONS
from megatron_lite.config.sections import ParallelConfig, TrainingConfig
from megatron_lite.config.tree import Config
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.process import set_numerics
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.kernels.varlen_kernels import use_attention
from support import parity
from support.data.recipes import RECIPES
from support.distributed import run_ranks
from support.training.parity_cases import KINDS, Case
from support.transformer.attention import attend, draw, dropout_of, recipe_arrays, reference_attention

HEADS, HEAD_DIM = 4, 64


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest element."""
    return ((got.detach().cpu().double() - expected).abs().max() / expected.abs().max()).item()


def attention_differences(
    context: ParallelContext, dtype: torch.dtype, recipes: list[str], sequence_length: int
) -> dict[str, float]:
    """By recipe and kernel, how far output and gradients are from softmax over the rule, in fp64 on the CPU."""
    found = {}
    for name in recipes:
        arrays, inputs, grad = attention_inputs(name, dtype, sequence_length)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = reference_attention(arrays, *wide)
        expected_gradients = torch.autograd.grad(expected, wide, grad.double())
        for kernel in ("auto", "dense"):
            out = attend(
                plan_attention(make_layout(*arrays), context.device, kernel), inputs, device=context.device
            )
            gradients = torch.autograd.grad(out, inputs, grad)
            pairs = [(out, expected.detach()), *zip(gradients, expected_gradients, strict=True)]
            found[f"{name}, {kernel}"] = max(difference(got, right) for got, right in pairs)
    return found


def attention(
    context: ParallelContext, dtype: torch.dtype, recipes: list[str], sequence_length: int
) -> tuple[dict[str, float], dict[str, tuple[float, float, bool]]]:
    """`attention_differences` and `dropout_faults`."""
    arguments = (context, dtype, recipes, sequence_length)
    return attention_differences(*arguments), dropout_faults(*arguments)


def attention_of(
    context: ParallelContext, implementation: str, recipes: list[str], sequence_length: int
) -> dict[str, float] | None:
    """`attention_differences` in bf16 with an implementation; None where the GPU does not run it, or it is missing."""
    wanted = IMPLEMENTATIONS[implementation]
    if not wanted.is_here or not wanted.runs_on(torch.cuda.get_device_capability(context.device)):
        return None
    use_attention(implementation)
    return attention_differences(context, torch.bfloat16, recipes, sequence_length)


def attention_inputs(
    recipe: str, dtype: torch.dtype, sequence_length: int
) -> tuple[tuple[np.ndarray, ...], list[torch.Tensor], torch.Tensor]:
    arrays = recipe_arrays(RECIPES[recipe], sequence_length, rows=2, seed=1)
    *inputs, grad = (x.to(dtype) for x in draw((*arrays[0].shape, HEADS, HEAD_DIM)))
    return arrays, [x.requires_grad_() for x in inputs], grad


def dropout_faults(
    context: ParallelContext, dtype: torch.dtype, recipes: list[str], sequence_length: int
) -> dict[str, tuple[float, float, bool]]:
    """By recipe: how far the backward pass of dropout is from its forward pass, the change by dropout, and repetition.

    The output is linear in the values: its product with a gradient equals the product of the values with their
    gradient, if both passes drop the same weights.
    """
    found = {}
    for name in recipes:
        arrays, inputs, grad = attention_inputs(name, dtype, sequence_length)
        plan = plan_attention(make_layout(*arrays), context.device)
        plain = attend(plan, inputs, device=context.device)
        outs = [
            attend(
                plan,
                inputs,
                dropout_of(arrays, 0.3, seed=5, plan=plan, device=context.device),
                context.device,
            )
            for _ in range(2)
        ]
        (of_values,) = torch.autograd.grad(outs[0], inputs[2], grad)
        sums = [(a.double() * b.double()).sum() for a, b in ((outs[0], grad), (inputs[2], of_values))]
        scale = outs[0].double().norm() * grad.double().norm()
        error = ((sums[0] - sums[1]).abs() / scale).item()
        found[name] = (error, difference(outs[0], plain.double()), torch.equal(*outs))
    return found


@dataclass(frozen=True)
class GpuCase(Case):
    """A parity case whose heads are as wide as kernels for GPUs need them."""

    def config(self) -> Config:
        config = super().config()
        return replace(
            config,
            model=replace(config.model, hidden_size=8 * 16),
        )


# fp32 on a GPU: other kernels than the CPU's, so other orders of sums. Half precision as between layouts.
TOLERANCES = {**parity.TOLERANCES, "fp32": dict.fromkeys(KINDS, 1e-4)}


def outcomes_of(cases: list[GpuCase]) -> list[parity.Outcome]:
    """The training of cases of one layout, on as many devices as it has ranks, beside plain torch on the CPU.

    One outcome for each case and rank.
    """
    first, records = cases[0], [parity.reference_of(case) for case in cases]
    parallel = ParallelConfig(tensor_parallel_size=first.tensor, pipeline_parallel_size=first.pipeline)
    limit = 120.0 + 10.0 * len(cases)
    ranks = (first.ranks, cases, records)
    by_rank = run_ranks(parity.run_cases, *ranks, parallel=parallel, limit_seconds=limit, fresh=True)
    return [outcome for outcomes in by_rank for outcome in outcomes]


def beyond(outcomes: list[parity.Outcome], tolerances: dict[str, dict[str, float]]) -> list[str]:
    """What differs by more than the tolerance of its precision."""
    return [
        f"{outcome.case}: {kind} differ by {value:.1e} at {outcome.where[kind]}"
        for outcome in outcomes
        for kind, value in outcome.largest.items()
        if not value <= tolerances[outcome.case.precision][kind]
    ]


def cases(devices: int) -> list[GpuCase]:
    """ZeRO 1 to 3 on one device; on two or more, all kinds of layouts on the largest power of two up to eight."""
    one = [GpuCase(zero_stage=zero, precision=p) for zero in (1, 2, 3) for p in ("fp32", "bf16", "fp16")]
    one += [GpuCase(zero_stage=2, offload=True), GpuCase(recompute="full"), GpuCase(recompute="selective")]
    if devices < 2:
        return one
    ranks = min(8, 1 << (devices.bit_length() - 1))
    many = [GpuCase(data=ranks, zero_stage=zero, precision=p) for zero in (1, 2, 3) for p in ("fp32", "bf16")]
    many += [GpuCase(tensor=2, sequence_parallel=sp, data=ranks // 2) for sp in (False, True)]
    many += [GpuCase(pipeline=2, data=ranks // 2, accumulation=4)]
    if ranks >= 4:
        many += [GpuCase(tensor=2, pipeline=2, data=ranks // 4, accumulation=4, sequence_parallel=True)]
    return one + many


def product_errors(context: ParallelContext) -> list[float]:
    """How far an fp32 product on the device is from fp64, without and with TF32."""
    a, b = (x.float() for x in draw((512, 512), count=2))
    errors = []
    for tf32 in (False, True):
        set_numerics(TrainingConfig(steps=1, tf32=tf32), context.device)
        errors.append(difference(a.to(context.device) @ b.to(context.device), a.double() @ b.double()))
    return errors
