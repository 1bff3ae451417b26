"""Compares the outputs of our model with those of a reference on the same inputs, one model in memory at a time.

A format's `Checks` compute the reference's outputs (published/verify.py, glm/verify.py, models); `compare_outputs`
computes ours and judges the differences.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.hf.common.lora import merged_here
from megatron_lite.hf.common.weights import Weights
from megatron_lite.inference.open_run import OpenRun, filled, load_model
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.transformer import Transformer

TOLERANCE = 1e-5  # fp32: the same sums in another order
# Two computations in fp32 that are both right differ by the sum of their errors; the larger one is measured.
_ERRORS = 2.0
_SHARE_OF_MEMORY = 0.7  # of the machine's, for a reference in fp64


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    largest_difference: float
    agreement: float  # share of rows with the same argmax, ties within the limit counted as the same
    rows: int
    largest_logit: float  # magnitude; fp32 rounding grows with it
    rounding: float = 0.0  # largest difference of a model in fp32 and in fp64; 0 = it was not needed

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest_difference:.2e}, argmax agreement {self.agreement:.2%} "
            f"of {self.rows} rows"
        )

    def joined(self, other: Comparison) -> Comparison:
        """Both comparisons as one."""
        rows = self.rows + other.rows
        agreeing = self.agreement * self.rows + other.agreement * other.rows
        return Comparison(
            max(self.largest_difference, other.largest_difference),
            agreeing / rows,
            rows,
            max(self.largest_logit, other.largest_logit),
            max(self.rounding, other.rounding),
        )

    def limit(self, tolerance: float) -> float:
        """The largest difference that passes: `tolerance` times the largest logit beyond 1, or what fp32 explains."""
        return max(tolerance * max(1.0, self.largest_logit), _ERRORS * self.rounding)

    def holds(self, tolerance: float) -> bool:
        """Whether both models compute the same. NaN does not pass."""
        return self.largest_difference <= self.limit(tolerance) and self.agreement == 1.0

    def require(self, tolerance: float, what: str) -> None:
        """Raise CheckpointError unless the comparison holds."""
        if not self.holds(tolerance):
            raise CheckpointError(
                f"{what} does not compute what its source computes: {self} (tolerance {self.limit(tolerance):.1e}); "
                "nothing was kept."
            )


def compare(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE, rounding: float = 0.0
) -> Comparison:
    """Compare two fp32 logit tensors [..., V] of one shape. Args: rounding: as in `Comparison`."""
    largest = expected.abs().max().item()
    limit = Comparison(0.0, 1.0, 0, largest, rounding).limit(tolerance)
    # The reference's logit of the token that our model prefers: a tie within the limit is no disagreement.
    preferred = expected.gather(-1, actual.argmax(-1, keepdim=True)).squeeze(-1)
    agreeing = preferred >= expected.amax(-1) - limit
    difference = (actual - expected).abs().max().item()
    return Comparison(difference, agreeing.float().mean().item(), agreeing.numel(), largest, rounding)


@dataclass(frozen=True)
class Check:
    """The reference's outputs on some inputs, and what computes ours.

    Args:
        name: of the inputs, as in INPUTS of verify_report.py.
        expected: what the reference computes, [rows, V].
        compute: returns the same of our model, fp32.
    """

    name: str
    expected: torch.Tensor
    compute: Callable[[Any], torch.Tensor]


# The reference's outputs, computed in a type. It holds its model no longer than the call.
Checks = Callable[[torch.dtype], Sequence[Check]]


def compare_outputs(
    checks: Checks,
    load: Callable[[], Any],
    tolerance: float,
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Comparison]:
    """Compare two models, of which one is in memory at a time. Raises: CheckpointError unless they are equal.

    The reference computes in fp32. Only where the difference is beyond `tolerance`, both models compute again in fp64:
    if the rounding of one of them explains the difference, the limit follows from that. A wrong weight moves logits by
    far more. Our rounding counts too: classes of transformers compute their norms in fp32 whatever their type, so what
    fp64 shows of them is too little for weights with large activations (SmolLM2: 22,000 in the residual).

    Args:
        load: returns our model.
        shapes: of its parameters; there is no fp64 where the machine's memory does not hold them.
    Returns: name of the inputs -> the result.
    """
    # The reference computes before our model is loaded, so that one of them is in memory.
    expected = list(checks(torch.float32))
    ours = _compute(load(), expected)
    comparisons = _compare_all(expected, ours, tolerance, [0.0] * len(expected))
    # fp64 takes twice the memory, so rounding is measured only where there is a difference. A fixed, larger
    # tolerance would hide errors in models that round little.
    if not _all_hold(comparisons, tolerance) and _fits_in_fp64(shapes):
        # XLNet's class computes in fp32 only: no more is allowed then.
        with contextlib.suppress(CheckpointError):
            exact = checks(torch.float64)
            roundings = [_difference(q.expected, e.expected) for q, e in zip(expected, exact, strict=True)]
            comparisons = _compare_all(expected, ours, tolerance, roundings)
            if not _all_hold(comparisons, tolerance) and isinstance(model := load(), Transformer):
                our_roundings = map(_difference, ours, _compute(model.double(), expected))
                larger = list(map(max, roundings, our_roundings))
                comparisons = _compare_all(expected, ours, tolerance, larger)
    for name, result in comparisons.items():
        result.require(tolerance, what if name == "logits" else f"{what} ({name})")
    return comparisons


def load_transformer(run: OpenRun, dtype: torch.dtype) -> Transformer:
    """The model of a run with weights as a file of `dtype` has them: rounded to it, with updates of LoRA added before.

    A comparison is of two computations, not of two precisions.
    """
    checkpoint, config = run.checkpoint, run.config.model
    if config.lora is None or dtype == torch.float32:
        return load_model(checkpoint, config, lambda weight: weight.to(dtype).float())
    with torch.device("meta"):
        adapted, model = Transformer(config), Transformer(replace(config, lora=None))
    read = merged_here(Weights(checkpoint.shapes, weight_reader(checkpoint)), adapted)
    return filled(model, parameter_shapes(model.config), lambda name: read(name).to(dtype).float())


def _all_hold(comparisons: Mapping[str, Comparison], tolerance: float) -> bool:
    return all(result.holds(tolerance) for result in comparisons.values())


@torch.no_grad()
def _compute(model: Any, checks: Sequence[Check]) -> list[torch.Tensor]:
    return [check.compute(model) for check in checks]


def _compare_all(
    checks: Sequence[Check], ours: Sequence[torch.Tensor], tolerance: float, roundings: Sequence[float]
) -> dict[str, Comparison]:
    """Results by name; several checks of one name are one comparison."""
    comparisons: dict[str, Comparison] = {}
    for check, actual, rounding in zip(checks, ours, roundings, strict=True):
        result, name = compare(actual, check.expected, tolerance, rounding), check.name
        comparisons[name] = comparisons[name].joined(result) if name in comparisons else result
    return comparisons


def _difference(fp32: torch.Tensor, fp64: torch.Tensor) -> float:
    """The largest difference of two logits; 0 if their shapes differ, as generation may after a tie."""
    return (fp32 - fp64).abs().max().item() if fp32.shape == fp64.shape else 0.0


def _fits_in_fp64(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the machine's memory holds such parameters in fp64."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * sum(map(math.prod, shapes.values())) < _SHARE_OF_MEMORY * memory_bytes


def joined(comparisons: Mapping[str, Comparison]) -> Comparison:
    """All comparisons as one."""
    first, *others = comparisons.values()
    for other in others:
        first = first.joined(other)
    return first
