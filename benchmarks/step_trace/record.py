"""A dispatch mode that keeps host tensors real and device tensors fake, and counts operations, waits, copies and bytes.

Operations on the host run. Operations on `cuda` have shapes and memory but no values, except small tensors that came
from the host: these keep their values, so that what a program reads back decides as on a GPU. A number that nobody
knows (a norm, a loss) reads as 1.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import collective_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.step_trace.counts import PHASES, Counts
from megatron_lite.estimate.sizes import RankGroup

ROOT = Path(__file__).resolve().parents[2]
KEPT_ELEMENTS = 1 << 18  # of the largest result that is computed on the host beside the device
COPIED_ELEMENTS = 1 << 23  # of the largest copy whose values are kept
ALLOCATION = 512  # bytes, to which torch's allocator rounds
aten = torch.ops.aten

_WITHOUT_KERNEL = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "detach", "alias"),
    *("_reshape_alias", "lift_fresh", "lift", "set_", "resize_", "record_stream", "is_pinned", "device"),
    *("_local_scalar_dense", "sym_size", "sym_stride", "sym_numel", "is_same_size"),
}  # fmt: skip
_FACTORIES = {"arange", "full", "zeros", "ones", "scalar_tensor", "zeros_like", "ones_like", "full_like"}
_EMPTY = {"empty", "new_empty", "empty_strided", "empty_like"}
_FACTORIES |= {"new_zeros", "new_ones", "new_full"} | _EMPTY
_WITHOUT_VALUES = {"record_stream", "device"}
_VALUES_DECIDE_SHAPES = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
    "bincount",
}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


def is_attention(name: str) -> bool:
    """Whether an operation is a kernel of attention, forward or backward."""
    return "attention" in name or name == "_varlen_attn_out"


def place() -> str:
    """file:line of the code of this project, or of DeepSpeed, that runs; "autograd" in the backward pass."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)) and "/step_trace/" not in path and "site-packages" not in path:
            return f"{path.removeprefix(str(ROOT)).lstrip('/')}:{frame.f_lineno}"
        if "/deepspeed/" in path and "/accelerator/" not in path:
            return f"deepspeed/{path.rpartition('/deepspeed/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


class Memory:
    """Bytes of the live storages of fake tensors; workspaces of libraries and fragmentation are left out."""

    def __init__(self) -> None:
        self.now = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self._seen[storage] = size
        self.now += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


class Recorder(TorchDispatchMode):
    """Counts by phase; to be entered after the fake mode.

    Args: group_of: the group of a collective call, None for one without other ranks.
    """

    def __init__(self, group_of: Callable[[Any, Any], RankGroup | None]):
        super().__init__()
        self.group_of = group_of
        self.memory = Memory()
        self.phase = "input"
        self.counts: dict[str, Counts] = {}
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()  # storages of page-locked memory
        self._addresses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_address = itertools.count()
        self.watch: Callable[[str, Any], None] | None = None  # told of each launch: its name and arguments
        self.reset()

    def reset(self) -> None:
        self.counts = {phase: Counts() for phase in PHASES}

    @property
    def now(self) -> Counts:
        return self.counts[self.phase]

    def wait(self, what: str) -> None:
        """The host waits until the device has done all work so far."""
        self.now.waits[f"{place()} {what}"] += 1

    def address(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Number of a tensor's memory, and where it begins there."""
        storage = tensor.untyped_storage()
        return self._addresses.setdefault(storage, next(self._next_address)), tensor.storage_offset()

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """As graphs.capture: a replay is one launch of the host."""
        before, self.counts = self.counts, {phase: Counts() for phase in PHASES}
        results = run()
        found, self.counts = self.now, before
        if found.waits or found.pinned or found.pageable or found.collectives:
            raise NotImplementedError(f"a graph cannot wait or communicate: {found}")

        def replay() -> None:
            self.now.launches += 1
            for name in ("attention", "unaligned"):
                getattr(self.now, name).update(getattr(found, name))
            self._peak()

        return replay, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        to = None if device is None else torch.device(device).type
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not on_device and to != "cuda":
            return self._on_host(func, args, kwargs)
        name = func.overloadpacket.__name__
        if func is aten._to_copy.default and not on_device:
            return self._to_device(args[0], kwargs)
        if func is aten.copy_.default and args[0].device != args[1].device:
            return self._copied(
                args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        if on_device and to == "cpu":
            return self._to_host(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            self.wait("item()")
            with unset_fake_temporarily():
                return _value(args[0]).item()
        if name in _VALUES_DECIDE_SHAPES or (name == "index" and _has_mask(args)):
            self.wait(f"{name}()")
            values = self._values(func, name, args, kwargs, tensors)
            if values is None:
                raise NotImplementedError(f"{place()}: {name} of values that only a device knows")
            out = tree_map_only(torch.Tensor, self._fake, values)
        else:
            out = func(*args, **kwargs)
            is_small = max((t.numel() for t in _tensors(out)), default=0) <= KEPT_ELEMENTS
            values = self._values(func, name, args, kwargs, tensors) if is_small or func.is_view else None
            _keep(func, args, out, values)
        self._count(func, name, args, kwargs, out)
        return out

    # Values

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if pinned:
            self.pinned.add(out.untyped_storage())
        return out

    def _values(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """The operation's results on the host, where all its inputs are known there and they are small."""
        if func.namespace in ("c10d", "_c10d_functional"):
            return None
        if any(isinstance(t, FakeTensor) and _known(t) is None for t in tensors):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not func.is_view and max((t.numel() for t in tensors), default=0) > KEPT_ELEMENTS:
            return None
        if not (tensors or name in _FACTORIES) or name in _WITHOUT_VALUES:
            return None
        host_args, host_kwargs = tree_map_only(FakeTensor, _known, (args, kwargs))
        if "device" in host_kwargs:
            host_kwargs = host_kwargs | {"device": torch.device("cpu")}
        with unset_fake_temporarily():
            out = func(*host_args, **host_kwargs)
            if name not in _EMPTY:
                return out
            # Known, so that its parts can be written one by one; of numbers that decide nothing the host keeps none.
            return None if out.dtype.is_floating_point else out.zero_()

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        """A device tensor of the same shape that knows its values."""
        out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda:0")
        self.memory.add(out)
        if real.numel() <= COPIED_ELEMENTS:
            out.host_values = real  # type: ignore[attr-defined]
        return out

    # Copies between host and device

    def _to_device(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        self._count_copy(source, kwargs.get("non_blocking", False))
        with unset_fake_temporarily():
            real = source.detach().to(kwargs.get("dtype") or source.dtype, copy=True)
        out = self._fake(real)
        self._peak()
        return out

    def _count_copy(self, source: torch.Tensor, non_blocking: bool) -> None:
        if non_blocking and source.untyped_storage() in self.pinned:
            self.now.pinned[place()] += 1
            return
        self.now.pageable[place()] += 1
        self.wait("copy to the device")

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copy results to the host as real tensors; unknown values are 1."""
        source = args[0]
        if func is aten._to_copy.default:
            self.wait("copy to the host")
            values = _value(source)
            with unset_fake_temporarily():
                return values.to(kwargs.get("dtype") or source.dtype, copy=True)
        out = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        with unset_fake_temporarily():
            real = torch.zeros(out.shape, dtype=out.dtype)
        if kwargs.get("pin_memory"):
            self.pinned.add(real.untyped_storage())
        return real

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if isinstance(target, FakeTensor):
            self._count_copy(source, non_blocking)
            with unset_fake_temporarily():
                real = source.detach().to(target.dtype, copy=True).expand(target.shape)
            if _known(target) is not None:
                with unset_fake_temporarily():
                    _known(target).copy_(real)  # type: ignore[union-attr]
            elif real.numel() <= COPIED_ELEMENTS:
                target.host_values = real  # type: ignore[attr-defined]
            return target
        if not (non_blocking and target.untyped_storage() in self.pinned):
            self.wait("copy to the host")
        with unset_fake_temporarily():
            return target.copy_(_value(source))

    # Counting

    def _peak(self) -> None:
        self.now.peak = max(self.now.peak, self.memory.now)

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor):
                self.memory.add(leaf)
        self._peak()
        if func in collective_ops:
            self._count_collective(func, args, kwargs)
            return
        if func.is_view or name in _WITHOUT_KERNEL or func.namespace == "prim":
            return
        if self.watch is not None:
            self.watch(name, (args, kwargs, out))
        now = self.now
        now.launches += 1
        now.sums += self.phase.endswith("backward") and place().startswith("megatron_lite/optim/")
        if name in _MATMULS:
            rows = [max(t.stride()) for t in (*_tensors(args), out) if t.dim() > 1 and not _aligned(t)]
            if rows:
                now.unaligned[f"{place()} {name}, rows of {rows[0]}"] += 1
        if is_attention(name) and "backward" not in name and self.phase == "forward":
            now.attention[place()] += 1

    def _count_collective(self, func: Any, args: Any, kwargs: Any) -> None:
        group = self.group_of(func, args)
        if group is None:
            return
        size = max((t.nbytes for t in _tensors((args, kwargs))), default=0)
        self.now.collectives[group.name] += 1
        self.now.collective_bytes[group.name] += size


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a device tensor, where the host knows them."""
    values = getattr(tensor, "host_values", None)
    if values is None or values.shape != tensor.shape:  # `tensor.data` was set to another one
        return None
    return values


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """Value of a fake device tensor as a host tensor; ones where the value is unknown."""
    known = _known(tensor)
    if known is not None:
        return known
    with unset_fake_temporarily():
        return torch.ones(tensor.shape, dtype=tensor.dtype)


def _keep(func: Any, args: Any, out: Any, values: Any) -> None:
    """Give results the values that they have on the host; a tensor that was written with unknown ones loses its own."""
    if func.namespace in ("c10d", "_c10d_functional"):  # as if all ranks had equal values
        return
    if values is not None:
        for fake, real in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(fake, FakeTensor):
                fake.host_values = real  # type: ignore[attr-defined]
        return
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in _tensors(value):
                if _known(tensor) is not None:
                    del tensor.host_values  # type: ignore[attr-defined]
    if isinstance(out, FakeTensor) and out.numel() == 1 and out.dtype.is_floating_point and not func.is_view:
        with unset_fake_temporarily():
            out.host_values = torch.ones(out.shape, dtype=out.dtype)  # type: ignore[attr-defined]


def _has_mask(args: Any) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _aligned(tensor: torch.Tensor) -> bool:
    return max(tensor.stride()) * tensor.element_size() % 16 == 0
