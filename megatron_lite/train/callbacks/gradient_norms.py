"""Gradient norms of single layers, which show the layer that makes the global norm grow.

Each rank adds up the squares of the elements that it owns under ZeRO, each element on one rank only; one reduction adds
these few numbers up over the ranks. No gradient is copied or gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine, StepResult
from megatron_lite.optim.square_sums import square_sums
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Requests
from megatron_lite.telemetry.writer import Metrics
from megatron_lite.train.callbacks.callback import Callback, is_multiple
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.trained_model import DECODER, ENCODER


def layer_of(parameter: str) -> str:
    """The layer of a parameter: an embedding table or projection, a block, the final LayerNorm, a head."""
    depth = 3 if parameter.startswith((ENCODER, DECODER)) else 2
    return ".".join(parameter.split(".")[:depth]).removesuffix(".weight").removesuffix(".bias")


def layer_names(config: Config) -> list[str]:
    """The layers of the whole model, in the same order on every rank."""
    return list(dict.fromkeys(map(layer_of, model_spec(config).shapes(config))))


def norms_line(step: int, norms: Mapping[str, float]) -> str:
    """The console line of a step's norms."""
    largest = max(norms, key=norms.__getitem__)
    return f"gradient norms at step {step} | largest: {largest} {norms[largest]:.4g}"


class GradientNorms:
    """Norms of one step's gradients: `add` is the observer of `Engine.observed_gradients`."""

    def __init__(self, config: Config, context: ParallelContext):
        self._context = context
        self._names = layer_names(config)
        self._squares = torch.zeros(len(self._names), dtype=torch.float64, device=context.device)

    def add(self, fragment: Fragment, gradient: torch.Tensor) -> None:
        if fragment.is_copy:
            return
        (square_sum,) = square_sums([gradient]).to(self._squares.device)
        self._squares[self._names.index(layer_of(fragment.name))] += square_sum

    def norms(self, clip_divisor: float) -> dict[str, float]:
        """Layer -> norm before clipping, over all ranks; called by every rank."""
        norms = self._context.sum(self._squares.clone()).sqrt() * clip_divisor
        return dict(zip(self._names, norms.tolist(), strict=True))


@dataclass
class GradientNormRecords(Callback):
    """A record of the norms every `training.gradient_norm_interval` steps, unless the step is skipped."""

    config: Config
    context: ParallelContext
    engine: Engine
    metrics: Metrics
    _norms: GradientNorms | None = None  # of the step under way, if it is observed
    _observed: ExitStack = field(default_factory=ExitStack)

    def on_step_begin(self, step: int) -> None:
        if is_multiple(step, self.config.training.gradient_norm_interval):
            self._norms = GradientNorms(self.config, self.context)
            self._observed.enter_context(self.engine.observed_gradients(self._norms.add))

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if self._norms is None:
            return
        self._observed.close()
        norms, self._norms = self._norms, None
        if not result.skipped:  # waits for the device
            by_layer = norms.norms(self.engine.clip_divisor(result.grad_norm))
            self.metrics.write("gradient_norms", step, by_layer, norms_line(step, by_layer))

    def close(self) -> None:
        self._observed.close()
