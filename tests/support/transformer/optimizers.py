"""Optimizers in plain torch, on whole tensors in one process, and ours without engine: for comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.optim.buckets import Bucket, ParamGroup, allocate_moments
from megatron_lite.optim.factory import OPTIMIZERS, TensorIndex
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS
from megatron_lite.parallel.collectives import SINGLE
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import Partition, partition_of

ALL = tuple(OPTIMIZERS)
State = dict[str, Any]


def lamb(w: torch.Tensor, g: torch.Tensor, s: State, c: OptimizerConfig, lr: float, decays: bool) -> None:
    m, v, t = _moments(w, g, s, c.beta1, c.beta2)
    if c.bias_correction:
        m, v = m / (1 - c.beta1**t), v / (1 - c.beta2**t)
    u = m / (v.sqrt() + c.eps) + (c.weight_decay if decays else 0.0) * w
    norms = w.norm(), u.norm()
    w -= lr * (norms[0] / norms[1] if decays and all(norms) else 1.0) * u


def stable_adamw(
    w: torch.Tensor, g: torch.Tensor, s: State, c: OptimizerConfig, lr: float, decays: bool
) -> None:
    t = s.get("step", 0) + 1
    betas = [(beta**t - beta) / (beta**t - 1) for beta in (c.beta1, c.beta2)]
    m, v, _ = _moments(w, g, s, *betas)
    lr /= max(1.0, (g.square() / v.clamp(min=c.eps**2)).mean().sqrt().item())
    w -= lr * (c.weight_decay if decays else 0.0) * w
    w -= lr * m / (v.sqrt() + c.eps)


def adafactor(
    w: torch.Tensor, g: torch.Tensor, s: State, c: OptimizerConfig, lr: float, decays: bool
) -> None:
    t = s["step"] = s.get("step", 0) + 1
    beta, square = 1 - t**-0.8, g.square() + 1e-30
    if w.dim() == 1:
        s["v"] = beta * s.get("v", 0.0) + (1 - beta) * square
        u = g / s["v"].sqrt()
    else:
        s["R"] = beta * s.get("R", 0.0) + (1 - beta) * square.mean(1)
        s["C"] = beta * s.get("C", 0.0) + (1 - beta) * square.mean(0)
        u = g / (s["R"] / s["R"].mean()).sqrt()[:, None] / s["C"].sqrt()
    u /= max(1.0, u.square().mean().sqrt().item())
    lr *= max(s["least scale"], w.square().mean().sqrt().item())
    w -= lr * (u + (c.weight_decay if decays else 0.0) * w)


def muon(w: torch.Tensor, g: torch.Tensor, s: State, c: OptimizerConfig, lr: float, decays: bool) -> None:
    if not s["in a block"]:
        m, v, t = _moments(w, g, s, c.beta1, c.beta2)
        w *= 1 - lr * (c.weight_decay if decays else 0.0)
        w -= lr * m / (1 - c.beta1**t) / ((v / (1 - c.beta2**t)).sqrt() + c.eps)
        return
    mu = c.momentum
    s["B"] = mu * s.get("B", 0.0) + (1 - mu) * g
    u = (1 - mu) * g + mu * s["B"]
    w *= 1 - lr * c.weight_decay
    w -= lr * 0.2 * math.sqrt(max(w.shape)) * newton_schulz(u)


def newton_schulz(u: torch.Tensor) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        A = x @ x.T
        x = a * x + (b * A + c * A @ A) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def _moments(w: torch.Tensor, g: torch.Tensor, s: State, beta1: float, beta2: float) -> tuple[Any, Any, int]:
    s["m"] = beta1 * s.get("m", torch.zeros_like(w)) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
    s["step"] = s.get("step", 0) + 1
    return s["m"], s["v"], s["step"]


PLAIN: dict[str, Callable[..., None]] = {
    "lamb": lamb,
    "stable_adamw": stable_adamw,
    "adafactor": adafactor,
    "muon": muon,
}


def decays(name: str) -> bool:
    return not (name.endswith("bias") or "layernorm" in name)


def blocks(parameter: nn.Parameter, values: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of a fused parameter, without rows of padding."""
    partition = partition_of(parameter)
    yield from values[: partition.rows].split(partition.block_rows(len(values[: partition.rows])))


class Plain:
    """An optimizer of named parameters."""

    def __init__(self, named: Mapping[str, nn.Parameter], settings: OptimizerConfig, m: float = 1.0):
        """Args: m: the width over that of muP's base."""
        self._named, self._settings, self._m = named, settings, m
        self._state: dict[tuple[str, int], State] = {}

    def of_width(self, name: str) -> tuple[OptimizerConfig, float]:
        """A parameter's settings, and the factor of its learning rate, by muP."""
        c, m = self._settings, self._m
        grows = name.startswith("layers.") and name.endswith("weight") and "layernorm" not in name
        if not grows and name != "heads.projection.dense.weight":
            return c, 1.0
        if c.kind == "adafactor":  # steps relative to the weights; it has no eps
            return dataclasses.replace(c, weight_decay=m * c.weight_decay), m**-0.5
        if c.kind == "muon" and grows:
            return dataclasses.replace(c, weight_decay=m**0.5 * c.weight_decay), m**-0.5
        scaled = dataclasses.replace(c, weight_decay=m * c.weight_decay, eps=c.eps / m)
        return scaled, m**-0.5 if c.kind == "lamb" else 1 / m

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for name, parameter in self._named.items():
            settings, factor = self.of_width(name)
            least = 1e-3 * (self._m**-0.5 if factor != 1.0 else 1.0)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pairs = zip(blocks(parameter, parameter), blocks(parameter, gradient), strict=True)
            in_a_block = name.startswith("layers.") and name.endswith(".weight") and parameter.dim() == 2
            for block, (weight, part) in enumerate(pairs):
                state = self._state.setdefault(
                    (name, block), {"in a block": in_a_block, "least scale": least}
                )
                PLAIN[settings.kind](weight, part, state, settings, lr * factor, decays(name))


class Ours:
    """One of our optimizers on parameters in buckets of one process."""

    def __init__(self, named: Mapping[str, nn.Parameter], settings: OptimizerConfig, precision: str = "fp32"):
        self.named, kind = named, OPTIMIZERS[settings.kind]
        shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        index = TensorIndex(shapes, ParallelContext.alone(), precision)
        by_parameter = {parameter: name for name, parameter in named.items()}
        self.buckets, groups = [], []
        for name, parameter in named.items():
            decay = settings.weight_decay if decays(name) else 0.0
            moments = kind.moments(name, parameter)
            group = ParamGroup(decay, True, moments=moments)
            bucket = Bucket([parameter], group, SINGLE, offload=False)
            index.add(bucket, by_parameter, decays)
            self.buckets.append(bucket)
            groups.append(
                {
                    "params": [bucket.master_shard],
                    "weight_decay": decay,
                    "multipliers": NO_MULTIPLIERS,
                    "moments": moments,
                }
            )
        self.optimizer = kind(groups, index, settings)
        for bucket in self.buckets:
            allocate_moments(self.optimizer, [bucket.master_shard], bucket.group.moments)

    def step(self, gradients: Mapping[str, torch.Tensor], lr: float, found_inf: float = 0.0) -> None:
        """Update the fp32 weights of the buckets."""
        for bucket, name in zip(self.buckets, self.named, strict=True):
            bucket.master_shard.grad = None
            if name not in gradients:  # frozen
                continue
            bucket.master_shard.grad = torch.zeros_like(bucket.master_shard)
            bucket.view(bucket.master_shard.grad, self.named[name]).copy_(gradients[name])
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.found_inf = torch.tensor(found_inf)
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: bucket.view(bucket.master_shard, self.named[name]).clone()
            for name, bucket in zip(self.named, self.buckets, strict=True)
        }

    def state(self) -> list[torch.Tensor]:
        """Weights and everything that the optimizer keeps."""
        kept = [values.clone() for state in self.optimizer.state.values() for values in state.values()]
        whole = [v.clone() for name in self.named for v in self.optimizer.whole_state(name).values()]
        return [*self.weights().values(), *kept, *whole]


def fused(parameter: nn.Parameter, parts: int | tuple[int, ...]) -> nn.Parameter:
    """Give a parameter blocks along its rows."""
    parameter.tensor_partition = Partition(dim=0, parts=parts)  # type: ignore[attr-defined]
    return parameter
