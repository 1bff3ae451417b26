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
    """A process group with this process's place in it. `handle` is None for a group of one."""

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
        wide = x.float()
        dist.all_reduce(wide, op=op, group=group.handle)
        return x.copy_(wide)
    dist.all_reduce(x, op=op, group=group.handle)
    return x


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(parts, x.contiguous(), group=group.handle)
    return torch.cat(parts)


def _split(x: torch.Tensor, group: Group) -> torch.Tensor:
    assert len(x) % group.size == 0, "configuration checks that tokens divide"
    return x.chunk(group.size)[group.rank]


def _reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    if x.device.type == "cpu":  # gloo has no efficient reduce-scatter
        return _split(all_reduce(x.clone(), group), group).contiguous()
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group.handle)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
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
    def forward(ctx, x, group, reduce_backward):  # type: ignore[no-untyped-def]
        ctx.group, ctx.reduce_backward = group, reduce_backward
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = (
            _reduce_scatter(grad, ctx.group) if ctx.reduce_backward else _split(grad, ctx.group).contiguous()
        )
        return grad, None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _all_gather(grad, ctx.group), None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: x. Backward: the sum of the ranks' gradients.

    For the input of a column-parallel product, and for parameters of which each rank sees only a part of the tokens.
    """
    return _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: the sum over ranks. Backward: the gradient. For the output of a row-parallel product."""
    return _Reduce.apply(x, group)


def gather_tokens(x: torch.Tensor, group: Group, *, reduce_backward: bool) -> torch.Tensor:
    """[T/size, D] on each rank -> [T, D] on all.

    Args:
        reduce_backward: True where what follows differs per rank (a column-parallel product): the gradients are summed
            and scattered. False where it is the same on all ranks: each keeps its own part of the gradient.
    """
    return _GatherTokens.apply(x, group, reduce_backward)


def reduce_scatter_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Partial sums [T, D] -> this rank's tokens [T/size, D] of their sum. Backward: gather."""
    return _ReduceScatterTokens.apply(x, group)
