"""Compares our model with a reference, on the same inputs; one of the two models is in memory at a time.

`ask` functions (glm/proof.py, published/proof.py, models) compute the reference's outputs for a list of inputs; `prove`
computes ours and judges the differences.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.lora import merged_here
from megatron_lite.hf.files.weights import DTYPES, Weights
from megatron_lite.inference.open_run import OpenRun, filled, load_model
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.transformer import Transformer

TOLERANCE = 1e-5  # fp32: the same sums in another order
# Two computations in fp32 that are both right differ by the sum of their errors; the larger one is measured.
_ERRORS = 2.0
_SHARE_OF_MEMORY = 0.7  # of the machine's, for a reference in fp64


@dataclass(frozen=True)
class Proof:
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

    def joined(self, other: Proof) -> Proof:
        """Both comparisons as one."""
        rows = self.rows + other.rows
        agreeing = self.agreement * self.rows + other.agreement * other.rows
        return Proof(
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
) -> Proof:
    """Compare two fp32 logit tensors [..., V] of one shape. Args: rounding: as in `Proof`."""
    largest = expected.abs().max().item()
    limit = Proof(0.0, 1.0, 0, largest, rounding).limit(tolerance)
    # The reference's logit of the token that our model prefers: a tie within the limit is no disagreement.
    preferred = expected.gather(-1, actual.argmax(-1, keepdim=True)).squeeze(-1)
    agreeing = preferred >= expected.amax(-1) - limit
    difference = (actual - expected).abs().max().item()
    return Proof(difference, agreeing.float().mean().item(), agreeing.numel(), largest, rounding)


@dataclass(frozen=True)
class Question:
    """One comparison of a proof.

    Args:
        name: of the inputs, as in INPUTS of proof_report.py.
        expected: what the reference computes, [rows, V].
        compute: returns the same of our model, fp32.
    """

    name: str
    expected: torch.Tensor
    compute: Callable[[Any], torch.Tensor]


def prove(
    ask: Callable[[torch.dtype], Sequence[Question]],
    load: Callable[[], Any],
    tolerance: float,
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Proof]:
    """Compare two models, of which one is in memory at a time. Raises: CheckpointError unless they are equal.

    The reference computes in fp32. Only where the difference is beyond `tolerance`, both models compute again in fp64:
    if the rounding of one of them explains the difference, the limit follows from that. A wrong weight moves logits by
    far more. Our rounding counts too: classes of transformers compute their norms in fp32 whatever their type, so what
    fp64 shows of them is too little for weights with large activations (SmolLM2: 22,000 in the residual).

    Args:
        ask: returns what the reference computes in a type; it holds its model no longer than the call.
        load: returns our model.
        shapes: of its parameters; there is no fp64 where the machine's memory does not hold them.
    Returns: name of a comparison -> its result.
    """
    # The reference computes before our model is loaded, so that one of them is in memory.
    questions = list(ask(torch.float32))
    ours = _compute(load(), questions)
    comparisons = _compare_all(questions, ours, tolerance, [0.0] * len(questions))
    # fp64 takes twice the memory, so rounding is measured only where there is a difference. A fixed, larger
    # tolerance would hide errors in models that round little.
    if not _all_hold(comparisons, tolerance) and _fits_in_fp64(shapes):
        # XLNet's class computes in fp32 only: no more is allowed then.
        with contextlib.suppress(CheckpointError):
            exact = ask(torch.float64)
            roundings = [_difference(q.expected, e.expected) for q, e in zip(questions, exact, strict=True)]
            comparisons = _compare_all(questions, ours, tolerance, roundings)
            if not _all_hold(comparisons, tolerance) and isinstance(model := load(), Transformer):
                our_roundings = map(_difference, ours, _compute(model.double(), questions))
                larger = list(map(max, roundings, our_roundings))
                comparisons = _compare_all(questions, ours, tolerance, larger)
    for name, result in comparisons.items():
        result.require(tolerance, what if name == "logits" else f"{what} ({name})")
    return comparisons


def prove_import(
    ask: Callable[[torch.dtype], Sequence[Question]],
    checkpoint: Path,
    config: ModelConfig,
    source: Path,
    tolerance: float,
) -> Proof:
    """As `prove`, of a directory and the checkpoint of one Transformer that was imported from it."""
    saved = read_checkpoint(checkpoint)
    what = f"the import of {source}"
    return joined(prove(ask, lambda: load_model(saved, config), tolerance, what, saved.shapes))


def prove_export(
    ask: Callable[[torch.dtype], Sequence[Question]], run: OpenRun, dtype: str, tolerance: float
) -> dict[str, Proof]:
    """As `prove`, of a run of one Transformer and its export. Args: dtype: a key of DTYPES, of the export's weights."""
    return prove(
        ask,
        lambda: _exported_model(run, DTYPES[dtype]),
        tolerance,
        f"the export of {run.checkpoint.path}",
        run.checkpoint.shapes,
    )


def _exported_model(run: OpenRun, dtype: torch.dtype) -> Transformer:
    """Our model with the weights as the export has them: rounded to its type, updates of LoRA added before that.

    A proof compares two computations, not two precisions.
    """
    checkpoint, config = run.checkpoint, run.config.model
    if config.lora is None or dtype == torch.float32:
        return load_model(checkpoint, config, lambda weight: weight.to(dtype).float())
    with torch.device("meta"):
        adapted, model = Transformer(config), Transformer(replace(config, lora=None))
    read = merged_here(Weights(checkpoint.shapes, weight_reader(checkpoint)), adapted)
    return filled(model, parameter_shapes(model.config), lambda name: read(name).to(dtype).float())


def _all_hold(comparisons: Mapping[str, Proof], tolerance: float) -> bool:
    return all(result.holds(tolerance) for result in comparisons.values())


@torch.no_grad()
def _compute(model: Any, questions: Sequence[Question]) -> list[torch.Tensor]:
    return [question.compute(model) for question in questions]


def _compare_all(
    questions: Sequence[Question], ours: Sequence[torch.Tensor], tolerance: float, roundings: Sequence[float]
) -> dict[str, Proof]:
    """Results by name; several questions of one name are one comparison."""
    comparisons: dict[str, Proof] = {}
    for question, actual, rounding in zip(questions, ours, roundings, strict=True):
        result, name = compare(actual, question.expected, tolerance, rounding), question.name
        comparisons[name] = comparisons[name].joined(result) if name in comparisons else result
    return comparisons


def _difference(fp32: torch.Tensor, fp64: torch.Tensor) -> float:
    """The largest difference of two logits; 0 if their shapes differ, as generation may after a tie."""
    return (fp32 - fp64).abs().max().item() if fp32.shape == fp64.shape else 0.0


def _fits_in_fp64(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the machine's memory holds such parameters in fp64."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * sum(map(math.prod, shapes.values())) < _SHARE_OF_MEMORY * memory_bytes


def joined(comparisons: Mapping[str, Proof]) -> Proof:
    """All comparisons as one."""
    first, *others = comparisons.values()
    for other in others:
        first = first.joined(other)
    return first
