"""The bytes, FLOPs and pairs of an operation of torch, and what the roofline gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from megatron_lite.profile.gpus import Gpu
from megatron_lite.profile.roofline import Members, attention_micros, kernel_micros, ring_micros

_GATHERS = {"embedding", "index_select", "gather", "index"}


def collective_micros(func: Any, size: int, members: Members, gpu: Gpu) -> float:
    """Microseconds of a collective of c10d. Args: size: as in `ring_micros`."""
    name = func.overloadpacket.__name__
    kind = "send" if name in ("send", "recv_", "broadcast_") else "gather"
    kind = "all_reduce" if "allreduce" in name or "all_reduce" in name else kind
    return ring_micros(kind, size, members, gpu)


def cost_of(
    func: Any, name: str, args: Any, kwargs: Any, out: Any, gpu: Gpu, phase: str
) -> tuple[str, float]:
    """Kind of kernel and microseconds on a device."""
    micros = kernel_micros(_bytes(func, name, args, kwargs, out), 0.0, gpu)
    if "attention" in name:
        return "attention", max(_attention_micros(name, args, gpu), 0.0 if _pairs(name, args) else micros)
    flops = _matmul_flops(name, args)
    if flops:
        return "matmul", max(micros, flops / gpu.matmul_tflops / 1e6)
    if phase == "step":
        return "optimizer", micros
    return "elementwise", micros


def _bytes(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name in _GATHERS:
        return sum(2 * t.nbytes for t in _on_device(out)) + sum(t.nbytes for t in _on_device(args[1:]))
    read = sum(map(_size, _on_device((args, kwargs))))
    written = sum(map(_size, _on_device(out)))
    if name in ("zero_", "fill_"):
        return written
    if not written:  # for example the fused optimizer, which returns nothing
        written = sum(
            sum(map(_size, _on_device(value)))
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return read + written


def _size(tensor: torch.Tensor) -> int:
    """Bytes, of an expanded tensor those that exist."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _on_device(tree: Any) -> Iterator[torch.Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.device.type == "cuda")


def _matmul_flops(name: str, args: Any) -> float:
    if name == "mm":
        return 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
    if name == "addmm":
        return 2.0 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
    if name in ("bmm", "baddbmm"):
        a, b = args[-2:] if name == "bmm" else args[1:3]
        return 2.0 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
    return 0.0


def _attention_micros(name: str, args: Any, gpu: Gpu) -> float:
    pairs, heads, head_dim = _pairs(name, args) or 0.0, 0, 0
    query = args[1] if "backward" in name else args[0]
    if query.dim() == 4:  # [B, H, S, D]
        heads, head_dim = query.shape[1], query.shape[3]
    else:  # variable lengths: [T, H, D]
        heads, head_dim = query.shape[1], query.shape[2]
    flops = 4.0 * heads * head_dim * pairs
    return attention_micros(flops, "backward" in name, gpu)


def _pairs(name: str, args: Any) -> float:
    """Pairs of query and key that a call computes."""
    if name.startswith("flex_attention"):
        return float(args[-1])
    first = 1 if "backward" in name else 0
    query, key = args[first], args[first + 1]
    if query.dim() == 4:
        return float(query.shape[0] * query.shape[2] * key.shape[2])
    # aten::_flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, ..)
    # aten::_flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, ..)
    place = 6 if first else 3
    starts: list[Any] = [getattr(args[place + i], "host_values", None) for i in range(2)]
    is_causal = bool(args[11] if first else args[8])
    if starts[0] is None or starts[1] is None:
        return float(query.shape[0] * args[place + 3])
    with unset_fake_temporarily():
        queries, keys = (s.diff().double() for s in starts)
        pairs = queries * keys - (queries * (queries - 1) / 2 if is_causal else 0)
        return float(pairs.clamp(min=0).sum())
