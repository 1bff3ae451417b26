"""Layers whose weights are split over the tensor-parallel ranks, how each parameter is split, and `linear`.

A block needs two collectives in each direction: its column-parallel layers (Q|K|V, first MLP layer) take equal inputs
and give each rank its own outputs, its row-parallel layers (attention output, second MLP layer) sum the products.
With sequence parallelism the tokens between these regions are split over the ranks: the same bytes move as a gather
before and a reduce-scatter after, and norms, dropout and residuals hold 1/size of the activations.

At degree 1 every layer runs the same arithmetic as the plain one.

All layers multiply with `linear`. CPUs without bf16/fp16 matrix instructions (before Sapphire Rapids: no AMX, no
AVX512-BF16) run torch's half-precision matmul 4 to 5 times slower than fp32. On those, half-precision operands are
converted to fp32 and the product is rounded once, as the native instructions do.

Source: Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.parallel.collectives import (
    SINGLE,
    Group,
    copy_to_group,
    finish,
    gather_tokens_to_split,
    reduce_from_group,
    reduce_scatter_tokens,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_lite.transformer.kernels.compat import widens
from megatron_lite.transformer.kernels.dropout import LayerDropout

AccumulateWeightGrad = Callable[[torch.Tensor, torch.Tensor], None]


def accumulate_in_backward(weight: nn.Parameter, accumulate: AccumulateWeightGrad) -> None:
    """Let `accumulate(grad [T, out], x [T, in])` compute the gradient of a weight that is used once: grad^T x.

    So it is summed in fp32 without being rounded, or passing through memory, in the weight's own type. A weight that a
    pass uses twice is left to autograd, which knows when both gradients are there.
    """
    if not getattr(weight, "is_used_twice", False):
        weight.accumulate_weight_grad = accumulate  # type: ignore[attr-defined]


def _accumulate_function(weight: torch.Tensor) -> AccumulateWeightGrad | None:
    return getattr(weight, "accumulate_weight_grad", None)


def add_product(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, begun: bool) -> None:
    """total = grad^T x or, if `begun`, total + grad^T x: fp32 [out, in] from [T, out] and [T, in]."""
    if widens(grad):
        grad, x = grad.float(), x.float()
    if grad.dtype == torch.float32:
        torch.addmm(total, grad.T, x, out=total) if begun else torch.mm(grad.T, x, out=total)
    # `out_dtype`: half-precision operands with an fp32 sum, which only CUDA's product offers.
    elif total.is_cuda and begun:
        torch.addmm(total, grad.T, x, out_dtype=torch.float32, out=total)
    elif total.is_cuda:
        torch.mm(grad.T, x, out_dtype=torch.float32, out=total)
    else:
        product = (x.T @ grad).T  # AMX: see `_Linear`
        total.add_(product) if begun else total.copy_(product)


class _Linear(torch.autograd.Function):
    """Saves half-precision operands (not their fp32 copies) for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        ctx.accumulate = _accumulate_function(
            weight
        )  # a block that is computed again gives the backward pass another tensor
        ctx.dtype = torch.float32 if widens(x) else x.dtype
        bias = None if bias is None else bias.to(ctx.dtype)
        return F.linear(x.to(ctx.dtype), weight.to(ctx.dtype), bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.to(ctx.dtype)).to(x.dtype)
        flat = grad.flatten(0, -2)
        if ctx.needs_input_grad[1] and ctx.accumulate is not None:
            ctx.accumulate(flat, x.flatten(0, -2).to(ctx.dtype))
        elif ctx.needs_input_grad[1]:
            flat_x = x.flatten(0, -2).to(ctx.dtype)
            # AMX: 270 GFLOP/s for flat.T @ flat_x, 522 for the transposed product, from which fp32 does not gain.
            product = flat.T @ flat_x if ctx.dtype == torch.float32 else (flat_x.T @ flat).T
            # Rounded to the weight's type, as autograd wants a gradient of it; `accumulate` above avoids this.
            grad_weight = product.to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [..., in] -> [..., out]` with `weight [out, in]`; rounds once to x's dtype."""
    # Everything else gains nothing from a function of our own, and torch's can be compiled and traced.
    if _accumulate_function(weight) is not None or (
        x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    ):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism as layers see it: the group, and the collectives at the ends of a split region."""

    group: Group = SINGLE
    sequence_parallel: bool = False  # tokens are split over the group outside the layers below
    # Under sequence parallelism: sum the gradients of parameters outside these layers in every backward pass. Otherwise
    # whoever updates `is_partial` parameters sums them once per step.
    sums_at_once: bool = False
    expert_group: Group = SINGLE  # the ranks that split the experts of a layer; each has other tokens

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Before a product of which each rank computes some columns: x, equal on all ranks; its gradient is summed."""
        return x if self.group.size == 1 else copy_to_group(x, self.group)

    def sum_partial(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of [T, D] of a row-parallel layer; under sequence parallelism this rank's tokens of it."""
        if self.sequence_parallel:
            return reduce_scatter_tokens(partial, self.group)
        return reduce_from_group(partial, self.group)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Before several products of which each rank computes some columns: all tokens, from this rank's of [T, D]."""
        return gather_tokens_to_split(x, self.group) if self.sequence_parallel else self.copy(x)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """After them: `sum_partial`, or x itself where one rank computes all."""
        return partial if self.group.size == 1 else self.sum_partial(partial)

    def mark_replicated(self, *parameters: nn.Parameter) -> None:
        """Parameters used between regions: under sequence parallelism each rank has one term of their gradients."""
        for parameter in parameters:
            parameter.is_partial = self.sequence_parallel and not self.sums_at_once  # type: ignore[attr-defined]

    def replicated(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter used between regions, with its whole gradient if `sums_at_once`."""
        return (
            copy_to_group(parameter, self.group)
            if self.sequence_parallel and self.sums_at_once
            else parameter
        )


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, rounded once to a's dtype."""
    return (a.float() @ b.float()).to(a.dtype) if widens(a) else a @ b


class _ColumnParallel(torch.autograd.Function):
    """A product whose input is equal on all ranks, or split along the tokens and gathered here.

    Only this rank's tokens are kept for the backward pass. There, gathering them overlaps with the gradient of the
    input, and summing that gradient with the gradient of the weight (arXiv:2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, parallel):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight)
        ctx.parallel, ctx.accumulate = parallel, _accumulate_function(weight)
        whole = hidden
        if parallel.sequence_parallel:
            whole, gathering = start_all_gather(hidden, parallel.group)
            finish(gathering)
        return linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight = ctx.saved_tensors
        group, is_split = ctx.parallel.group, ctx.parallel.sequence_parallel
        # The gather runs while the input's gradient is computed, and its reduction while the weight's is.
        whole, gathering = start_all_gather(hidden, group) if is_split else (hidden, None)
        grad_whole = _product(grad, weight)
        if is_split:
            grad_hidden, summing = start_reduce_scatter(grad_whole, group)
        else:
            grad_hidden, summing = grad_whole, start_all_reduce(grad_whole, group)
        finish(gathering)
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.accumulate is not None:
            ctx.accumulate(grad, whole)
        elif ctx.needs_input_grad[1]:
            grad_weight = _product(grad.T, whole)
        # Complete without a sum over ranks: each rank has all tokens of its own outputs.
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        finish(summing)
        return grad_hidden, grad_weight, grad_bias, None


@dataclass(frozen=True)
class Partition:
    """How a parameter is split over the tensor-parallel ranks; initial values and checkpoints follow it."""

    dim: int | None = None  # the split dimension; None: the same on all ranks
    # Blocks along dim 0, each split by itself: how many equal ones, or their relative sizes (Q|K|V).
    parts: int | tuple[int, ...] = 1
    rows: int | None = None  # along dim 0; those beyond are padding (vocabulary)

    def block_rows(self, rows: int) -> list[int]:
        """Rows of each block of a parameter, or of a shard of it, that has `rows` rows in all."""
        shares = (1,) * self.parts if isinstance(self.parts, int) else self.parts
        return [rows // sum(shares) * share for share in shares]


def partition_of(parameter: nn.Parameter) -> Partition:
    """The partition a layer gave its parameter; a parameter without one is the same on all ranks."""
    return getattr(parameter, "tensor_partition", Partition())


def is_partial(parameter: nn.Parameter) -> bool:
    """True if the gradient is a sum over the tensor-parallel ranks, of which each holds one term."""
    return getattr(parameter, "is_partial", False)


def whole_shape(shape: tuple[int, ...], partition: Partition, size: int) -> tuple[int, ...]:
    """Shape of the whole parameter, without padding rows, from that of one of `size` shards."""
    whole = list(shape)
    if partition.dim is not None:
        whole[partition.dim] *= size
    if partition.rows is not None:
        whole[0] = partition.rows
    return tuple(whole)


def sharded(parameter: nn.Parameter, partition: Partition) -> nn.Parameter:
    """Give a parameter its partition."""
    # Not "partition": at ZeRO 3 DeepSpeed gives parameters a method of this name.
    parameter.tensor_partition = partition  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # else DeepSpeed's gradient norm is wrong
    return parameter


class DeferredBias(NamedTuple):
    """x [T, D] + bias [D], not added yet: the kernel that reads x adds it, at no extra pass through memory.

    A tuple, so that DeepSpeed finds the tensors in it.
    """

    x: torch.Tensor
    bias: torch.Tensor | None = None

    def added(self) -> torch.Tensor:
        return self.x if self.bias is None else self.x + self.bias


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features split: weight [out/size, in]; x [T, in], or this rank's tokens of it.

    Args:
        parts: blocks of the output, as for Partition.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: TensorParallel,
        *,
        parts: int | tuple[int, ...] = 1,
        has_bias: bool = True,
    ):
        super().__init__()
        size = parallel.group.size
        partition = Partition(dim=0, parts=parts)
        rows = sum(partition.block_rows(out_features // size)) * size
        assert rows == out_features, "configuration checks that features divide"
        self.parallel = parallel
        self.weight = sharded(nn.Parameter(torch.empty(out_features // size, in_features)), partition)
        self.bias = sharded(nn.Parameter(torch.empty(out_features // size)), partition) if has_bias else None
        self.lora: nn.Module | None = None  # set by `add_updates` of lora.py

    def forward(
        self,
        x: torch.Tensor,
        *,
        skip_bias_add: bool = False,
        whole_rows: bool = False,
        lora_dropout: LayerDropout | None = None,
    ) -> torch.Tensor | DeferredBias:
        """[T, in] -> [T, out/size].

        Args:
            skip_bias_add: return the product and the bias apart, for a kernel that adds it.
            whole_rows: x is no token's but the same on all ranks, which sum its gradient elsewhere.
            lora_dropout: of the tokens of x.
        """
        bias = None if skip_bias_add else self.bias
        if self.parallel.group.size == 1 or whole_rows:
            # At size 1 the arithmetic is the plain layer's, so that a run of one process is the reference of all
            # others.
            product = linear(x, self.weight, bias)
        else:
            product = _ColumnParallel.apply(x, self.weight, bias, self.parallel)
        if self.lora is not None:
            product = product + self.lora(x, lora_dropout, whole_rows)
        return DeferredBias(product, self.bias) if skip_bias_add else product


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features split: weight [out, in/size], bias [out] added once, after the sum."""

    def __init__(
        self, in_features: int, out_features: int, parallel: TensorParallel, *, has_bias: bool = True
    ):
        super().__init__()
        size = parallel.group.size
        assert in_features % size == 0, "configuration checks that features divide"
        self.parallel = parallel
        self.weight = sharded(nn.Parameter(torch.empty(out_features, in_features // size)), Partition(dim=1))
        self.bias = nn.Parameter(torch.empty(out_features)) if has_bias else None
        if self.bias is not None:
            parallel.mark_replicated(self.bias)
        self.lora: nn.Module | None = None  # set by `add_updates` of lora.py

    def forward(
        self, x: torch.Tensor, *, skip_bias_add: bool = False, lora_dropout: LayerDropout | None = None
    ) -> torch.Tensor | DeferredBias:
        """[T, in/size] -> [T, out]. Args: skip_bias_add, lora_dropout: as for ColumnParallelLinear."""
        if self.parallel.group.size == 1 and not skip_bias_add and self.lora is None:
            return linear(x, self.weight, self.bias)
        deferred = DeferredBias(linear(x, self.weight), self.bias)
        if self.parallel.group.size > 1:
            # The bias is added after the sum over the ranks, once.
            bias = None if self.bias is None else self.parallel.replicated(self.bias)
            deferred = DeferredBias(self.parallel.sum_partial(deferred.x), bias)
        if self.lora is not None:
            deferred = DeferredBias(deferred.x + self.lora(x, lora_dropout), deferred.bias)
        return deferred if skip_bias_add else deferred.added()


class VocabParallelEmbedding(nn.Module):
    """Word embedding with the padded vocabulary split: weight [padded/size, E]. Ranks sum their partial look-ups."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        assert config.vocab_size is not None
        rows = padded_vocab_size(config.vocab_size, parallel.group.size) // parallel.group.size
        self.parallel = parallel
        self.vocab_size = config.vocab_size
        self.first = parallel.group.rank * rows
        self.local_vocab = max(0, min(config.vocab_size - self.first, rows))  # rows that are no padding
        partition = Partition(dim=0, rows=config.vocab_size)
        self.weight = sharded(
            nn.Parameter(torch.empty(rows, config.embedding_size or config.hidden_size)), partition
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int [T] -> [T, E], or this rank's tokens of it under sequence parallelism."""
        if self.parallel.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        # Row 0 stands in for words of other ranks and is zeroed after the look-up, so that shapes do not depend on the
        # data.
        words = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.sum_partial(words.masked_fill(elsewhere[:, None], 0.0))


def local_shard(whole: torch.Tensor, partition: Partition, rank: int, size: int, rows: int) -> torch.Tensor:
    """This rank's shard of a whole parameter; `rows` is its number of rows, missing ones (padding) are 0."""
    if partition.rows is not None:
        shard = whole[rank * rows : (rank + 1) * rows]
        return F.pad(shard, (*[0] * (2 * shard.dim() - 1), rows - len(shard)))
    if partition.dim is None or size == 1:
        return whole
    if partition.dim == 0:
        # Each block (Q, K, V) by itself: a plain chunk would give one rank all queries and another all values.
        blocks = whole.split(partition.block_rows(len(whole)))
        return torch.cat([block.chunk(size)[rank] for block in blocks])
    return whole.chunk(size, dim=partition.dim)[rank]
