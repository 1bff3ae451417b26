"""Multipliers of learning rate, weight decay and epsilon for each parameter, and the steps in which it is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_lite.config.lora import LORA
from megatron_lite.config.tree import Config
from megatron_lite.transformer.mup import is_hidden

NEVER = sys.maxsize


@dataclass(frozen=True)
class LrMultipliers:
    """Factors of a parameter's learning rate, weight decay and epsilon, and the steps in which it is trained."""

    lr_factor: float = 1.0
    first_step: int = 1  # the parameter is frozen before it; NEVER: it stays frozen
    decay_factor: float = 1.0
    eps_factor: float = 1.0  # of AdaFactor: the factor of the smallest scale of the weights
    has_turn: Callable[[int], bool] | None = None  # step -> whether it is trained there; None: in all

    def is_trained(self, step: int) -> bool:
        return step >= self.first_step and (self.has_turn is None or self.has_turn(step))

    @property
    def is_never_trained(self) -> bool:
        """Whether it needs no optimizer state."""
        return self.first_step == NEVER


NO_MULTIPLIERS = LrMultipliers()


def lora_multipliers(names: Iterable[str], config: Config) -> dict[str, LrMultipliers]:
    """The multipliers of pretraining: with `model.lora` the updates alone are trained, otherwise {}."""
    if config.model.lora is None:
        return {}
    return {name: NO_MULTIPLIERS if LORA in name else LrMultipliers(first_step=NEVER) for name in names}


def by_width(multipliers: LrMultipliers, name: str, config: Config, is_orthogonal: bool) -> LrMultipliers:
    """A parameter's multipliers under muP, where m is the model's width over the base width.

    AdamW takes lr / m, eps / m and weight_decay m for matrices between widths (microsoft/mup, MuAdam; eps as in
    Megatron-LM). Steps relative to the weights, which shrink with 1 / sqrt(m), and orthogonal ones, whose singular
    values grow with sqrt(m), need lr / sqrt(m). The decay of the weights in one step does not change with m.

    Args: is_orthogonal: whether Muon makes the steps of the parameter.
    """
    m, kind = config.model.width_ratio, config.optimizer.kind
    if not is_hidden(name):
        return multipliers
    is_relative = kind in ("lamb", "adafactor")
    return replace(
        multipliers,
        lr_factor=multipliers.lr_factor * (m**-0.5 if is_relative or is_orthogonal else 1 / m),
        decay_factor=m**0.5 if is_orthogonal else m,
        eps_factor=m**-0.5 if kind == "adafactor" else 1 / m,
    )
