"""What a plan is to the model, and the function of autograd that runs its kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch

from megatron_lite.transformer.kernels.dropout import AttentionDropout

Packed = Sequence[torch.Tensor]  # packed inputs, see the package's docstring


class ScoreBias(Protocol):
    """A layer's bias of attention scores, added after scaling."""

    def __call__(self, index: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[..., H, Q, K] for one of `BiasedPlan.query_key_pairs`. Args: index: its index among these."""
        ...


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """Packed inputs -> [..., H, D], scores scaled by D^-1/2. Args: bias: for a BiasedPlan."""
        ...


class BiasedPlan(AttentionPlan, Protocol):
    """A plan that adds a bias to the scores."""

    row_length: int  # S of the batch

    def query_key_pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries [..., Q] and keys [..., K] that are computed together: int64, tokens in the order of the plan."""
        ...


class HostPlan(Protocol):
    """A plan on the host: NumPy arrays, made ahead of the step."""

    # int64 [T], indices into the flattened batch; -1 = padding, of which the batch may have less.
    order: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """int32 arrays that the plan needs on the device."""
        ...

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> Self:
        """The plan, from its arrays on the device."""
        ...


class BatchPlan(HostPlan, AttentionPlan, Protocol):
    """A plan of one stack of blocks: made on the host, used on the device."""


@dataclass(frozen=True)
class EncoderDecoderPlan:
    """The plans of a batch whose tokens are the encoder's and then the decoder's."""

    encoder: Any  # BatchPlan; AttentionPlan where a decoder continues from its cache
    decoder: Any
    cross: Any  # the decoder's queries over the encoder's keys; None = neither stack has cross-attention
    lengths: tuple[int, int]  # Te, Td
    order: np.ndarray  # int64 [Te + Td], as for HostPlan

    @property
    def _plans(self) -> dict[str, BatchPlan]:
        plans = {"encoder": self.encoder, "decoder": self.decoder, "cross": self.cross}
        return {name: plan for name, plan in plans.items() if plan is not None}

    def arrays(self) -> list[np.ndarray]:
        return [array for plan in self._plans.values() for array in plan.arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> EncoderDecoderPlan:
        rest = iter(arrays)
        # In the order of `arrays`: each plan takes as many arrays as it has given.
        plans = {
            name: plan.on_device(list(itertools.islice(rest, len(plan.arrays()))), device)
            for name, plan in self._plans.items()
        }
        return replace(self, **plans)  # type: ignore[arg-type]


class AttentionKernels(Protocol):
    """The kernels of one layer's attention, called by `AttentionFunction`."""

    def forward(self, inputs: Packed) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        """The output [T, H, D], and lists of tensors that the backward pass needs."""
        ...

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        """The gradient of each input. Args: grad: of `out`, the output. saved: as `forward` has returned it."""
        ...


class AttentionFunction(torch.autograd.Function):
    """All kernels of one layer's attention as one node of autograd: inputs -> [T, H, D].

    The inputs are the packed ones, and after them the tensors from which the kernels make a bias of the scores.
    """

    @staticmethod
    def forward(ctx: Any, kernels: AttentionKernels, *inputs: torch.Tensor) -> torch.Tensor:
        out, saved = kernels.forward(inputs)
        ctx.kernels, ctx.counts = kernels, [len(tensors) for tensors in saved]
        # As one flat list: autograd checks saved tensors for changes in place, and frees them as soon as it can.
        ctx.save_for_backward(out, *itertools.chain(*saved))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        out, *flat = ctx.saved_tensors
        rest = iter(flat)
        saved = [list(itertools.islice(rest, count)) for count in ctx.counts]
        return None, *ctx.kernels.backward(grad, out, saved)


def query_and_key_dropout(dropout: AttentionDropout, inputs: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """The dropout keys of the queries and of the keys, int32 [Tq] and [Tk]."""
    if len(inputs) == 1:
        return dropout.keys, dropout.keys
    # Encoder first: the keys of the hash follow the order of the tokens, [encoder | decoder].
    keys, queries = dropout.keys.split([len(inputs[1]), len(inputs[0])])
    return queries, keys
