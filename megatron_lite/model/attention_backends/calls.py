"""The node of autograd that walks the calls of a plan, and on CPU the three ways to compute a call.

  flash        torch's fused kernel in the type of its operands
  flash fp32   the same on operands that are cast to fp32
  plain        matrix products and a softmax, whose weights are kept for the backward pass

The choice depends on nothing but the type of the operands and the size of the call, so all ranks make the same one.
Operands are bf16 or fp16 only where the CPU multiplies them natively (AMX); elsewhere they have been cast to fp32, for
which the fused kernel is the fastest, or a draw. `benchmarks/attention.py` measures all three. With dropout, or with a
bias of the scores, attention is written out.

Operands come packed: queries, keys and values of the same tokens as one tensor [T, 3, H, D], or, in cross-attention,
queries [T, 1, H, D] and then keys and values [K, 2, H, D]. H heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from megatron_lite.model.attention_backends.layout import FULL, Call, Unit
from megatron_lite.model.kernels.compat import Gradients, flash_backward_on_cpu, flash_forward_on_cpu, widens
from megatron_lite.model.kernels.dropout import AttentionDropout

# Half precision: pairs of query and key, for each head, up to which flash fp32 and plain are faster than flash.
# Measured with AMX, ms forward and backward of [batch, heads, tokens, head size] for flash, flash fp32 and plain:
#     [32, 4, 136, 32]    111   19   23     the backward pass of the fused kernel is slow on short rows
#     [1, 16, 568, 64]     84   50   51
#     [4, 16, 512, 64]    196  161  146     products are large enough for AMX
#     [1, 16, 2048, 64]   457  742  615     the fused kernel keeps the weights in its cache
_SMALL, _LARGE = 1 << 18, 1 << 20

Packed = Sequence[torch.Tensor]


class ScoreBias(Protocol):
    """A layer's bias of attention scores, added after scaling."""

    def __call__(self, call: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[..., H, Q, K] for the tokens of the plan's call of this number."""
        ...


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        """Packed operands -> [..., H, D], scores scaled by D^-1/2. Args: bias: of each call, for a BiasedPlan."""
        ...


class BiasedPlan(AttentionPlan, Protocol):
    """A plan that adds a bias to the scores."""

    row_length: int  # S of the batch

    def pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The calls: queries [..., Q] and keys [..., K] of each, int64, in the order of the plan."""
        ...


class HostPlan(Protocol):
    """A plan on the host: NumPy arrays, made ahead of the step."""

    # int64 [T], indices into the flattened batch; -1 = padding, of which the batch may have less.
    order: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """int32 arrays that the plan needs on the device."""
        ...

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> AttentionPlan:
        """The plan, from its arrays on the device."""
        ...


@dataclass(frozen=True)
class PartsPlan:
    """The plans of both parts of a batch, whose tokens are the encoder's rows and then the decoder's."""

    encoder: Any  # HostPlan, on the device AttentionPlan
    decoder: Any
    cross: Any  # the decoder's queries over the encoder's keys; None = neither stack has cross-attention
    lengths: tuple[int, int]  # Te, Td
    order: np.ndarray  # int64 [Te + Td], as for HostPlan

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"encoder": self.encoder, "decoder": self.decoder, "cross": self.cross}
        return {name: part for name, part in parts.items() if part is not None}

    def arrays(self) -> list[np.ndarray]:
        return [array for part in self._parts.values() for array in part.arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> PartsPlan:
        rest = iter(arrays)
        # In the order of `arrays`: each plan takes as many arrays as it gave.
        sent = {
            name: part.on_device(list(itertools.islice(rest, len(part.arrays()))), device)
            for name, part in self._parts.items()
        }
        return replace(self, **sent)


class Attend(torch.autograd.Function):
    """All calls of a plan as one node of autograd: packed operands -> [T, H, D].

    `plan.forward(inputs, p)` returns the output and what each call keeps; `plan.backward(grad, out, kept, p)` the
    gradient of each input. p: probability of dropout within the kernels.
    """

    @staticmethod
    def forward(ctx: Any, plan: Any, p: float, *inputs: torch.Tensor) -> torch.Tensor:
        out, kept = plan.forward(inputs, p)
        ctx.plan, ctx.p, ctx.lengths = plan, p, [len(tensors) for tensors in kept]
        # As one flat list: autograd checks saved tensors for changes in place, and frees them as soon as it can.
        ctx.save_for_backward(out, *itertools.chain(*kept))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        out, *saved = ctx.saved_tensors
        rest = iter(saved)
        kept = [list(itertools.islice(rest, length)) for length in ctx.lengths]
        return None, None, *ctx.plan.backward(grad, out, kept, ctx.p)


def token_keys(dropout: AttentionDropout, inputs: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """The dropout keys of queries and of keys. In cross-attention `dropout` has those of keys and then of queries."""
    if len(inputs) == 1:
        return dropout.keys, dropout.keys
    # Encoder first: the keys of the hash follow the order of the tokens, [encoder | decoder].
    of_keys, of_queries = dropout.keys.split([len(inputs[1]), len(inputs[0])])
    return of_queries, of_keys


class Kernel(Protocol):
    """Softmax over keys. q [B, H, Q, D], k and v [B, H, K, D]; bias [B or 1, 1, Q, K] or [Q, K] is added to the scores.

    `causal` calls have as many queries as keys and no bias.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, Q, D], and what the backward pass needs of it besides."""
        ...

    @staticmethod
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        state: torch.Tensor, causal: bool, bias: torch.Tensor | None,
    ) -> Gradients:  # fmt: skip
        ...


class Flash(Kernel):
    """Its state is the log of the sum of exponentials of each query and head."""

    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        return flash_forward_on_cpu(q, k, v, 0.0, causal, attn_mask=bias)

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        return flash_backward_on_cpu(grad, q, k, v, out, state, 0.0, causal, attn_mask=bias)


class FlashInFp32(Kernel):
    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        wide = [_wide(x) for x in (q, k, v)]
        out, state = Flash.forward(wide[0], wide[1], wide[2], causal, None if bias is None else _wide(bias))
        return out.to(q.dtype), state

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        given, *wide, out = (_wide(x) for x in (grad, q, k, v, out))
        # The gradients stay in fp32: the caller sums them over calls.
        return Flash.backward(
            given, wide[0], wide[1], wide[2], out, state, causal, None if bias is None else _wide(bias)
        )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Plain(Kernel):
    """Saves the attention weights for the backward pass; for calls of a bounded size only."""

    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if causal:
            bias = scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        # In place: the scores are needed no more, and are the largest tensor of the call.
        weights = (scores if bias is None else scores.add_(bias)).softmax(-1)
        return weights @ v, weights

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        of_weights = grad @ v.transpose(-2, -1)
        # torch's own backward pass of a softmax, one kernel; written out it would be three passes over the weights.
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, state, -1, state.dtype)
        of_scores = of_scores.mul_(q.shape[-1] ** -0.5)
        return of_scores @ k, of_scores.transpose(-2, -1) @ q, state.transpose(-2, -1) @ grad


KERNELS: dict[str, type[Kernel]] = {"flash": Flash, "flash fp32": FlashInFp32, "plain": Plain}


def choose(dtype: torch.dtype, queries: int, keys: int, *, is_full: bool) -> str:
    """The name of the kernel for a call on operands of a type. Args: is_full: every query sees every key."""
    pairs = queries * keys
    if torch.promote_types(dtype, torch.float32) == dtype or pairs >= _LARGE:
        return "flash"
    # Under a mask plain computes hidden pairs too, and its weights of many blocks of queries would need much memory.
    return "plain" if is_full and pairs >= _SMALL else "flash fp32"


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[..., S, H, D] -> [..., H, S, D]; on CPU a copy, in fp32 where half-precision matmuls are slow."""
    x = x.transpose(-3, -2)
    if x.device.type != "cpu":
        return x
    # torch's CPU kernel is up to 1.3 times faster when the rows of a head lie side by side.
    if widens(x):
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return x.contiguous()


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """[B, Sq, H, D] queries over [B, Sk, H, D] keys and values.

    Args:
        mask: bool [B, 1, Sq, Sk], which keys; or what is added to the scores, [B, H, Sq, Sk]. None: all keys.
        p: of dropout, drawn by the kernel.
    """
    dtype = q.dtype
    q, k, v = (heads_first(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    return out.transpose(1, 2).to(dtype)


def attend_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    stays: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """[..., H, Q, D] queries, keys, values; `bias` [..., H, Q, K]; `stays` bool [..., H, Q, K], None = all."""
    dtype = q.dtype
    if (
        q.device.type == "cpu"
        and choose(dtype, q.shape[-2], k.shape[-2], is_full=bias is None) == "flash fp32"
    ):
        # As without dropout. In half precision each new shape of a call would cost a kernel besides.
        q, k, v = q.float(), k.float(), v.float()
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    # The factor on the output [Q, D] instead of on the weights [Q, K].
    out = weights @ v if stays is None else torch.where(stays, weights, 0.0) @ v * (1.0 / (1.0 - p))
    return out.to(dtype)


def spans_of(unit: Unit) -> tuple[tuple[int, int], ...]:
    """Start and stop of a unit in each tensor of packed operands: of queries first, of keys last."""
    own = (unit.start, unit.stop)
    return (own,) if unit.keys is None else (own, unit.keys)


def rows_of(unit: Unit, inputs: Packed) -> list[torch.Tensor]:
    """Views of a unit's queries, keys and values, [n, H, D] each."""
    spans = zip(inputs, spans_of(unit), strict=True)
    return [part for x, (start, stop) in spans for part in x[start:stop].unbind(1)]


def part_of(x: torch.Tensor, call: Call, dim: int) -> torch.Tensor:
    """The keys of a call out of those of its unit, which lie along `dim`."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in call.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def operands(heads: Sequence[torch.Tensor], call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a call out of those of its unit, [1, H, unit, D]."""
    q, k, v = heads
    return q[:, :, call.start : call.stop], part_of(k, call, 2), part_of(v, call, 2)


def kernel_of(q: torch.Tensor, k: torch.Tensor, call: Call) -> type[Kernel]:
    return KERNELS[choose(q.dtype, q.shape[2], k.shape[2], is_full=call.kind == FULL)]


def add_part(total: torch.Tensor, part: torch.Tensor, call: Call, is_first: bool) -> None:
    """Add the gradients of a call's keys, [keys, H, D], to those of its unit; the first call writes them."""
    at = 0
    for start, stop in call.keys:
        place = total[start:stop]
        if is_first:
            place.copy_(part[at : at + stop - start])
        else:
            place.add_(part[at : at + stop - start])
        at += stop - start
