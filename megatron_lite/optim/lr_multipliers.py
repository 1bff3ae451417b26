"""Rates of parameters under muP: factors of the optimizer's settings by the width."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.tree import Config
from megatron_lite.model.mup import is_hidden
from megatron_lite.optim.buckets import Rate


def by_width(rate: Rate, name: str, config: Config, is_orthogonal: bool) -> Rate:
    """A parameter's rate under muP, with m the ratio of the widths.

    AdamW takes lr / m, eps / m and weight_decay m for matrices between widths (microsoft/mup, MuAdam; eps as in
    Megatron-LM). Steps relative to the weights, which shrink with 1 / sqrt(m), and orthogonal ones, whose singular
    values grow with sqrt(m), need lr / sqrt(m). In all of them a step's decay of the weights stays what it was.

    Args: is_orthogonal: whether Muon makes the steps of the parameter.
    """
    m, kind = config.model.width_ratio, config.optimizer.kind
    if not is_hidden(name):
        return rate
    is_relative = kind in ("lamb", "adafactor")
    return replace(
        rate,
        lr_factor=rate.lr_factor * (m**-0.5 if is_relative or is_orthogonal else 1 / m),
        decay_factor=m**0.5 if is_orthogonal else m,
        eps_factor=m**-0.5 if kind == "adafactor" else 1 / m,
    )
