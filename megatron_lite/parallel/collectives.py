"""Communication under autograd: each forward collective with its backward one.

Activations are token matrices [T tokens, D]. Outside tensor-parallel regions they are either equal on all ranks of the
group, or (sequence parallelism) split along the tokens. The functions on them are for groups of two or more.

Source: Megatron-LM, arXiv:1909.08053 section 3; sequence parallelism, arXiv:2205.05198 section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A process group and this process's rank in it. `handle` is None for a group of one."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int
    ranks: tuple[int, ...]  # global ranks of the members


SINGLE = Group(None, 0, 1, (0,))


def all_reduce(
    x: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce in place over the group, outside autograd. Half precision is summed in fp32 on CPU (gloo)."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        # gloo adds in the tensor's type: half precision would round after each rank.
        wide = x.float()
        dist.all_reduce(wide, op=op, group=group.handle)
        return x.copy_(wide)
    dist.all_reduce(x, op=op, group=group.handle)
    return x


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group.handle) == "gloo"


def local_shard(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's shard: an equal part of the first dimension."""
    length = len(flat) // group.size
    return flat[group.rank * length : (group.rank + 1) * length]


def reduce_scatter_in_place(flat: torch.Tensor, group: Group) -> dist.Work | None:
    """Start a reduce-scatter in place: each rank's `local_shard` becomes the sum. None: nothing to wait for."""
    if group.size == 1:
        return None
    if _is_gloo(group):
        # gloo's reduce-scatter takes three times as long as its all-reduce (2 ranks, torch 2.13).
        return dist.all_reduce(flat, group=group.handle, async_op=True)
    # In place: NCCL defines it for an output at this offset of the input (ncclReduceScatter), so no second buffer.
    return dist.reduce_scatter_tensor(local_shard(flat, group), flat, group=group.handle, async_op=True)


def all_gather_in_place(flat: torch.Tensor, group: Group) -> dist.Work | None:
    """Start an all-gather in place: `flat` gets every rank's `local_shard`. None: nothing to wait for."""
    if group.size == 1:
        return None
    # In place: NCCL defines it for an input at this offset of the output (ncclAllGather).
    return dist.all_gather_into_tensor(flat, local_shard(flat, group), group=group.handle, async_op=True)


def start_all_reduce(x: torch.Tensor, group: Group) -> dist.Work | None:
    """Start an all-reduce in place. None: nothing to wait for."""
    if _is_gloo(group):
        all_reduce(x, group)
        return None
    return dist.all_reduce(x, group=group.handle, async_op=True)


def start_all_gather(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, dist.Work]:
    """Start an all-gather of [T/size, ...] -> [T, ...], complete after `wait`."""
    out = x.new_empty(len(x) * group.size, *x.shape[1:])
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group.handle, async_op=True)
    return out, work


def start_reduce_scatter(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, dist.Work | None]:
    """Start a reduce-scatter of [T, ...] -> [T/size, ...]. Keep `x` alive until `wait`; it may be overwritten."""
    assert len(x) % group.size == 0, "configuration checks that tokens divide"
    x = x.contiguous()
    if _is_gloo(group):
        return local_shard(all_reduce(x, group), group).clone(), None
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    return out, dist.reduce_scatter_tensor(out, x, group=group.handle, async_op=True)


def finish(work: dist.Work | None) -> None:
    """Make the result of a collective available to later operations; on CUDA only the stream waits, not the host."""
    if work is not None:
        work.wait()


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[T/size, ...] of each rank -> [T, ...], outside autograd."""
    out, work = start_all_gather(x, group)
    finish(work)
    return out


def _reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks and keep this rank's shard. Overwrites `x`."""
    out, work = start_reduce_scatter(x, group)
    finish(work)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # Cloned: a custom function must not change its incoming gradient in place (torch, "Extending PyTorch").
        return all_reduce(grad.clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # No sum: the operations that follow are equal on all ranks, so each has the whole gradient already.
        return local_shard(grad, ctx.group).contiguous(), None


class _GatherTokensToSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _reduce_scatter(grad.clone(), ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return all_gather(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):  # type: ignore[no-untyped-def]
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(x, sent, received, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.handle)
    return out


def exchange(x: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
    """Rows of x to every rank, in their order; the rows that each sends here. Backward: the gradients go back.

    Args: sent, received: number of rows to and from each rank.
    """
    return x if group.size == 1 else _Exchange.apply(x, sent, received, group)


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: x. Backward: the sum of the ranks' gradients.

    For the input of a column-parallel product, and for parameters that each rank applies to its own tokens only.
    """
    return _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: the sum over ranks, written over x. Backward: the gradient. For the output of a row-parallel product."""
    return _Reduce.apply(x, group)


def gather_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[T/size, D] on each rank -> [T, D] on all, for equal operations on all. Backward: the rank's own shard."""
    return _GatherTokens.apply(x, group)


def gather_tokens_to_split(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[T/size, D] on each rank -> [T, D] on all, for products of which each computes a part.

    Backward: the sum of the ranks' gradients of the rank's own tokens.
    """
    return _GatherTokensToSplit.apply(x, group)


def reduce_scatter_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Partial sums [T, D], overwritten -> this rank's tokens [T/size, D] of their sum. Backward: all-gather."""
    return _ReduceScatterTokens.apply(x, group)
