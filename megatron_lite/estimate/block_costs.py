"""What a block saves, needs and sends, from the real block's passes on the device "meta", which computes shapes alone.

One micro-batch of random documents goes through one and through two blocks of a rank; what the second one adds is a
block's. Collectives are counted and do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.config.lora import LORA
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.parallel import collectives
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.encoder_decoder import encoder_decoder_contexts
from megatron_lite.transformer.experts import Experts
from megatron_lite.transformer.forward_context import local_lengths
from megatron_lite.transformer.kernels.fused import choose_kernels, kernels_are_wanted
from megatron_lite.transformer.kernels.varlen_kernels import attention_in_use, use_attention
from megatron_lite.transformer.lengths import few_lengths
from megatron_lite.transformer.micro_batch import MicroBatch, prepare
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    accumulate_in_backward,
)
from megatron_lite.transformer.transformer import Transformer

META = torch.device("meta")
ALLOCATION = 512  # bytes, to which torch's allocator rounds
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BlockCosts:
    """Bytes of a pass through one block, for a token of its stack."""

    saved: float  # for the backward pass
    backward: float  # at the peak of the backward pass, beyond what blocks have saved
    sent: dict[tuple[str, str], float]  # (kind, group) of collectives -> of their largest tensors


def tensor_parallel(
    size: int, is_split: bool = False, sums_at_once: bool = False, experts: int = 1
) -> TensorParallel:
    """That of the first of so many ranks. Args: as for TensorParallel. experts: ranks that split the experts."""
    group, expert_group = (
        Group(name, 0, ranks, tuple(range(ranks)))  # type: ignore[arg-type]  # there is no process group
        for name, ranks in (("tp", size), ("dp", experts))
    )
    return TensorParallel(group, is_split, sums_at_once, expert_group)


class _Pass(NamedTuple):
    """Bytes of a forward and a backward pass."""

    tokens: int
    saved: int  # after the forward pass
    backward: int  # at the peak of the backward pass, beyond that
    sent: Counter[tuple[str, str]]


class _Setup(NamedTuple):
    """The settings on which a block depends."""

    model: ModelConfig
    precision: str
    recompute: str
    kernels: str
    attention: str
    zero_3: bool
    tp: int
    is_split: bool
    ep: int


def block_costs(config: Config, batch: Batch, is_decoder: bool) -> BlockCosts:
    """Of the last blocks, which are alike, of the only stack or the encoder, or of the decoder."""
    training, parallel = config.training, config.parallel
    setup = _Setup(
        config.model, training.precision, training.recompute, training.kernels, training.attention,
        parallel.zero_stage == 3, parallel.tensor_parallel_size, parallel.sequence_parallel,
        parallel.expert_parallel_size,
    )  # fmt: skip
    return _measured(setup, batch, is_decoder)


@functools.lru_cache(maxsize=64)
def _measured(setup: _Setup, batch: Batch, is_decoder: bool) -> BlockCosts:
    # The first block may lack a norm, or experts.
    before = 0 if setup.model.experts is None else setup.model.experts.dense_layers
    with _without_ranks(setup) as sent:
        less, more = (_run(setup, batch, is_decoder, before + blocks, sent) for blocks in (1, 2))
    added = {key: (size - less.sent[key]) / more.tokens for key, size in more.sent.items()}
    return BlockCosts((more.saved - less.saved) / more.tokens, more.backward / more.tokens, added)


def _run(setup: _Setup, batch: Batch, is_decoder: bool, blocks: int, sent: Counter[tuple[str, str]]) -> _Pass:
    decoders = blocks if setup.model.decoder_layers else 0
    model = _model(setup, replace(setup.model, num_layers=blocks, decoder_layers=decoders))
    slots = batch.fields[:, 0].size
    multiple = math.lcm(few_lengths(slots, torch.device("cuda"), torch.bfloat16), setup.tp)
    micro_batch = prepare(batch, META, model.config, dropout_seed=0, multiple=multiple)
    sent.clear()
    with _Memory() as memory:
        memory.add((list(model.parameters()), list(model.buffers())))
        weights = memory.now
        hidden, tokens = _forward(model, micro_batch.to(META), is_decoder)
        gradient = torch.empty_like(hidden)
        saved = memory.peak = memory.now
        hidden.backward(gradient)
    return _Pass(tokens, saved - weights, memory.peak - saved, sent.copy())


def _model(setup: _Setup, settings: ModelConfig) -> Transformer:
    ranks = tensor_parallel(setup.tp, setup.is_split, setup.zero_3, setup.ep)
    default = torch.get_default_dtype()
    torch.set_default_dtype(PRECISIONS[setup.precision])
    try:
        with META:
            model = Transformer(settings, recompute=setup.recompute, parallel=ranks)
    finally:
        torch.set_default_dtype(default)
    for name, parameter in model.named_parameters():
        # At ZeRO 3 DeepSpeed's product keeps its input for a frozen weight too.
        if settings.lora is not None and not setup.zero_3:
            parameter.requires_grad_(LORA in name)
        if parameter.requires_grad:  # gradients are the optimizer's, which are counted there
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    if not setup.zero_3 and settings.share_layers == "none":  # as the engine does
        for layer in model.modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                accumulate_in_backward(layer.weight, lambda grad, x: None)
        for layer in model.modules():
            if isinstance(layer, Block):
                layer.accumulate_gradients(lambda parameter, grad: None)
    return model


def _drop_gradient(parameter: nn.Parameter | torch.Tensor) -> None:
    parameter.grad = None


def _forward(model: Transformer, batch: MicroBatch, is_decoder: bool) -> tuple[torch.Tensor, int]:
    """The output of the stack's blocks, and the number of its tokens on all ranks."""
    hidden, context = model._embed(batch.tokens, batch.ids, batch.plan, batch.dropout, None, batch.routed)
    positions = batch.ids[0]
    if not model.config.decoder_layers:
        return model.run_blocks(_leaf(hidden), context, positions), len(positions)
    encoder, decoder = encoder_decoder_contexts(context, model.parallel)
    encoded, decoded = map(_leaf, hidden.split(local_lengths(batch.plan, model.parallel)))
    encoder_positions, decoder_positions = positions.split(batch.plan.lengths)
    if not is_decoder:
        return model.run_blocks(encoded, encoder, encoder_positions), len(encoder_positions)
    return model.run_decoder(decoded, encoded, decoder, decoder_positions), len(decoder_positions)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, requires_grad=True)


class _Memory(TorchDispatchMode):
    """Bytes of the live storages of tensors on "meta"; workspaces of libraries and fragmentation are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which would import torch's compiler
        return False

    def add(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.device == META:
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
                    self._seen.add(storage)
                    self.now += size
                    weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.add(out)
        return out


def equal_shares(experts: Experts, rows: torch.Tensor, counts: torch.Tensor) -> list[list[list[int]]]:
    """For `Experts._table`, which reads a device: each expert has about equally many tokens, from each rank."""
    ranks, (share, rest) = experts.parallel.expert_group.size, divmod(len(rows), len(counts))
    of_experts = [share + (number < rest) for number in range(len(counts))]
    each = len(counts) // ranks
    return [[of_experts[to * each : (to + 1) * each] for to in range(ranks)] for _ in range(ranks)]


@contextlib.contextmanager
def _without_ranks(setup: _Setup) -> Iterator[Counter[tuple[str, str]]]:
    """Collectives, counted by kind and group; kernels as the configuration has them."""
    sent: Counter[tuple[str, str]] = Counter()
    done = SimpleNamespace(wait=lambda: None)

    def counted(kind: str, *tensors: torch.Tensor, group: str, **_: Any) -> Any:
        sent[kind, group] += max(tensor.nbytes for tensor in tensors)
        return done

    def exchange(out: torch.Tensor, x: torch.Tensor, *_: Any, group: str) -> None:
        sent["send", group] += x.nbytes * (setup.ep - 1) / setup.ep  # type: ignore[assignment]

    kinds = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "scatter",
    }
    stand_in = SimpleNamespace(
        get_backend=lambda group: "none", all_to_all_single=lambda out, x, *_, group: exchange(out, x, group=group),
        **{name: functools.partial(counted, kind) for name, kind in kinds.items()},
    )  # fmt: skip
    library, kernels, attention = collectives.dist, kernels_are_wanted(), attention_in_use()
    read = Experts._table
    collectives.dist = stand_in  # type: ignore[assignment]
    Experts._table = equal_shares  # type: ignore[assignment, method-assign]
    choose_kernels(setup.kernels)
    use_attention("fa2" if setup.attention == "auto" else setup.attention, activate=False)
    try:
        yield sent
    finally:
        collectives.dist = library
        Experts._table = read  # type: ignore[method-assign]
        choose_kernels("fused" if kernels else "torch")
        use_attention(attention, activate=False)
