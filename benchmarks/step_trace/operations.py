"""The bytes, FLOPs and pairs of an operation of torch, and what the roofline gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.roofline import (
    FINISH_ROWS,
    ISSUE,
    SORT_KERNELS,
    RankGroup,
    Work,
    activation_issue,
    attention_micros,
    kernel_micros,
    product_micros,
    ring_micros,
)
from megatron_lite.model.kernels.rule_attention import BLOCK
from megatron_lite.model.kernels.varlen_kernels import attention_in_use

# Names of torch's arguments that hold where sequences begin: those of queries, and of keys.
_ENDS = (
    ("cum_seq_q", "cu_seq_q", "cu_seqlens_q"),
    ("cum_seq_k", "cu_seq_k", "cu_seqlens_k"),
)
_GATHERS = {"embedding", "index_select", "gather", "index"}


def collective_micros(func: Any, size: int, members: RankGroup, gpu: Gpu) -> float:
    """Microseconds of a collective of c10d. Args: size: as in `ring_micros`."""
    name = func.overloadpacket.__name__
    kind = "send" if name in ("send", "recv_", "broadcast_") else "gather"
    kind = "all_reduce" if "allreduce" in name or "all_reduce" in name else kind
    return ring_micros(kind, size, members, gpu)


def cost_of(
    func: Any, name: str, args: Any, kwargs: Any, out: Any, gpu: Gpu, phase: str
) -> tuple[str, float]:
    """Kind of kernel and microseconds on a device."""
    size = _bytes(func, name, args, kwargs, out)
    if is_attention(name):
        return "attention", _attention_micros(func, name, args, kwargs, gpu)
    product = _product(name, args)
    if product:
        return "matmul", product_micros(*product[:3], size, gpu, product[3])
    micros = kernel_micros(size, gpu, _issued(name, args, out), _rounds(name, args, out))
    micros += (name == "embedding_dense_backward") * SORT_KERNELS * gpu.least_us
    if phase == "step":
        return "optimizer", micros
    return "elementwise", micros


def _bytes(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name in _GATHERS:
        return sum(2 * t.nbytes for t in _on_device(out)) + sum(t.nbytes for t in _on_device(args[1:]))
    if name == "rotate_heads":  # values stay
        return sum(map(_size, _on_device(args[1:]))) + 4 / 3 * _size(args[0])
    read = sum(map(_size, _on_device((args, kwargs))))
    written = sum(map(_size, _on_device(out)))
    if name == "gather_heads" and args[4] is not None:  # of the product values are not read
        read -= _size(args[4]) * args[10] / args[4].shape[1]
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


def _product(name: str, args: Any) -> tuple[int, int, int, int] | None:
    """Rows, inner size, columns and number of the products of an operation, if it is one."""
    if name in ("mm", "addmm"):
        a, b = args[:2] if name == "mm" else args[1:3]
        return a.shape[0], a.shape[1], b.shape[1], 1
    if name in ("bmm", "baddbmm"):
        a, b = args[:2] if name == "bmm" else args[1:3]
        return a.shape[1], a.shape[2], b.shape[2], a.shape[0]
    return None


def _issued(name: str, args: Any, out: Any) -> float:
    """Instructions of a kernel of this project."""
    each = ISSUE.get(name, 0.0)
    if name == "rotate_heads":  # the kernel of `expand_heads`, without values
        each = ISSUE["expand_heads"] * 2 / 3
    elif name.startswith("activate"):
        kind, gated, _, _, p = args[-5:]
        each = activation_issue(name, kind, gated, p)
    elif name in ("expand_heads", "gather_heads") and args[3 if name == "expand_heads" else 7] is not None:
        each = ISSUE[f"{name}_normed"]
    elif name.startswith("add_norm"):
        weight, centered = (args[3], args[6]) if "backward" in name else (args[6], args[9])
        each = each if weight is None or centered else ISSUE[name.replace("add", "add_rms")]
    return each and each * max(tensor.numel() for tensor in _on_device((args, out)))


def _rounds(name: str, args: Any, out: Any) -> float:
    """Rows that each program of a kernel takes, where they are few programs."""
    if name == "finish_sums":
        return math.ceil(max(sums.shape[0] for sums in args[0]) / FINISH_ROWS)
    if name not in ("add_norm_backward", "join_pair"):
        return 0.0
    *found, sums = out
    return max(tensor.shape[0] for tensor in found) / sums.shape[0]


def _rule_micros(name: str, args: Any, gpu: Gpu) -> float:
    """Microseconds of a kernel that evaluates the rule; both of the backward pass share its time."""
    tensors = [part for part in args if isinstance(part, torch.Tensor)]
    qkv = next(tensor for tensor in tensors if tensor.dim() == 4 and tensor.shape[1] == 3)
    lists = next(part for part in args if isinstance(part, list) and len(part) == 4)
    counts = [getattr(part, "host_values", None) for part in lists[::2]]
    with unset_fake_temporarily():
        blocks = sum(int(part.sum()) for part in counts if part is not None)
    p, keys = next((part for part in args if isinstance(part, float)), 0.0), name.endswith("keys")
    line, _, tables = args[[part is lists for part in args].index(True) + 1 :][:3]
    kind = ("rule" if line is None else "biased", "query tables", "tables")[len(tables)]
    work = Work(float(blocks * BLOCK**2), 0.0, kind)
    share = 0.7 if keys else 0.3 if name.endswith("queries") else 1.0
    if kind == "tables" and share < 1:
        share = 0.5  # as much in both
    backward, moved = share < 1, 0.0
    if kind == "tables":
        moved = (6 if backward else 2) * tables[0].nbytes
    elif tables:  # a number of each pair
        moved = (3 if backward else 1) * work.pairs * qkv.shape[2] * tables[0].element_size()
    return share * attention_micros(work, qkv.shape[2], qkv.shape[3], p, backward, gpu, 0.0, moved)


def is_attention(name: str) -> bool:
    """Whether an operation is a kernel of attention, forward or backward."""
    return "attention" in name or name == "_varlen_attn_out"


def _attention_micros(func: Any, name: str, args: Any, kwargs: Any, gpu: Gpu) -> float:
    if name.startswith("rule_attention"):
        return _rule_micros(name, args, gpu)
    backward = "backward" in name
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    query, key, p = named["query"], named["key"], float(named.get("dropout_p") or 0.0)
    starts = [next((named[one] for one in names if named.get(one) is not None), None) for names in _ENDS]
    if starts[0] is None:  # [B, H, S, D]
        rows, pairs = query.shape[0] * query.shape[2], query.shape[0] * query.shape[2] * key.shape[2]
        along = key.shape[2] if backward else query.shape[2]
        work = Work(float(pairs), float(query.shape[0] * along), "dense" if "efficient" in name else "full")
        return attention_micros(work, query.shape[1], query.shape[-1], p, backward, gpu, rows)
    work = _varlen(named, [getattr(one, "host_values", None) for one in starts], p, backward)
    tokens, heads, size = query.shape[-3:]  # [T, H, D], of the memory-efficient kernel [1, T, H, D]
    return attention_micros(work, heads, size, p, backward, gpu, tokens)


def _varlen(named: dict[str, Any], starts: list[Any], p: float, backward: bool) -> Work:
    """The work of sequences of different lengths. Args: named: arguments. starts: of queries and of keys, if known."""
    query, implementation = named["query"], attention_in_use()
    if starts[0] is None or starts[1] is None:
        longest = named.get("max_k") or named["max_seqlen_k"]
        return Work(float(query.shape[-3] * longest), float(query.shape[-3]), "full", implementation)
    with unset_fake_temporarily():
        queries, keys = (one.diff().double().numpy() for one in starts)
    is_causal = bool(named["is_causal"] if "is_causal" in named else named["custom_mask_type"])
    left, right = named.get("window_size") or (named.get("window_size_left"), named.get("window_size_right"))
    is_local = left is not None and left >= 0
    return Work.flash(
        queries, keys, is_causal or (is_local and right == 0), query.shape[-1], p, backward,
        left if is_local else 0, implementation,
    )  # fmt: skip
