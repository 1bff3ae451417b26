"""LoRA: low-rank updates of the linear layers of a block, y + scale B A dropout(x), the only weights that are trained.

A column-parallel layer has B split as its own rows and A whole, a row-parallel one A split as its columns and B whole.
So the ranks of a tensor-parallel group exchange [T, rank] where the layer itself exchanges [T, D], and every gradient
is complete as it is: what is computed between the two factors is summed, not the factors' gradients. Under sequence
parallelism the whole factor is applied to each rank's own tokens, and is a replicated parameter like a norm's.

A layer that is several modules in the class of transformers (Q, K and V) has an update for each (config/lora.py).
Products of updates are left to autograd: they are small, and a layer that is used twice needs no exception.

Source: arXiv:2106.09685; initial values as peft 0.21: A uniform within 1 / sqrt(in), B zero (init.py).

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron_lite.config.lora import PARTS, WHOLE, LoraConfig, class_layers, updated_parts
from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import copy_to_group, gather_tokens
from megatron_lite.transformer.kernels.dropout import FeatureDropout, LayerDropout
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    Partition,
    RowParallelLinear,
    TensorParallel,
    is_partial,
    linear,
    partition_of,
    sharded,
)


class _Site(NamedTuple):
    """Which layer of the block an update belongs to, and its settings."""

    name: str
    settings: LoraConfig

    def dropped(self, x: torch.Tensor, dropout: LayerDropout | None, first: int = 0) -> torch.Tensor:
        """x [T, in] after dropout. Args: first: number of this rank's first feature."""
        kept: FeatureDropout | None = None
        if dropout is not None and self.settings.dropout:
            kept = dropout.named(self.settings.dropout, self.name).from_feature(first)
        return x if kept is None else dropout_add(x, None, kept)


class ColumnUpdate(nn.Module):
    """The update of (a part of) a column-parallel layer: a [rank, in], b [out/size, rank]."""

    def __init__(
        self, in_features: int, rows: int, partition: Partition, parallel: TensorParallel, site: _Site
    ):
        """Args: rows, partition: of the layer's weight on this rank, or of a part of it."""
        super().__init__()
        self.parallel, self.site = parallel, site
        self.a = nn.Parameter(torch.empty(site.settings.rank, in_features))
        self.b = sharded(nn.Parameter(torch.empty(rows, site.settings.rank)), partition)
        parallel.mark_replicated(self.a)

    def forward(self, x: torch.Tensor, dropout: LayerDropout | None, whole_rows: bool) -> torch.Tensor:
        """[T, in], or this rank's tokens of it -> [T, out/size]. Args: whole_rows: as for ColumnParallelLinear."""
        group, a = self.parallel.group, self.a
        if group.size > 1 and whole_rows:
            # The gradient of x is summed by the caller, so it has to stay one rank's term; that of `a` does not.
            inner = linear(x, a if is_partial(a) else copy_to_group(a, group))
            return linear(inner * self.site.settings.scale, self.b)
        inner = linear(self.site.dropped(x, dropout), self.parallel.replicated(a))
        if self.parallel.sequence_parallel:
            inner = gather_tokens(inner, group)
        # Backward: the sum of the ranks' gradients by their own rows of `b`.
        return linear(self.parallel.copy(inner) * self.site.settings.scale, self.b)


class RowUpdate(nn.Module):
    """The update of a row-parallel layer: a [rank, in/size], b [out, rank]."""

    def __init__(self, layer: RowParallelLinear, site: _Site):
        super().__init__()
        self.parallel, self.site = layer.parallel, site
        out_features, in_features = layer.weight.shape
        self.first_feature = in_features * self.parallel.group.rank
        self.a = sharded(nn.Parameter(torch.empty(site.settings.rank, in_features)), Partition(dim=1))
        self.b = nn.Parameter(torch.empty(out_features, site.settings.rank))
        self.parallel.mark_replicated(self.b)

    def forward(self, x: torch.Tensor, dropout: LayerDropout | None) -> torch.Tensor:
        """[T, in/size] -> [T, out], or this rank's tokens of it."""
        inner = linear(self.site.dropped(x, dropout, self.first_feature), self.a)
        if self.parallel.group.size > 1:
            inner = self.parallel.sum_partial(inner)
        return linear(inner * self.site.settings.scale, self.parallel.replicated(self.b))


class Updates(nn.ModuleDict):
    """The updates of the parts of a layer, side by side; zeros for parts without one."""

    def __init__(self, modules: Mapping[str, nn.Module], rows: Sequence[tuple[str, int]]):
        """Args: rows: name and rows on this rank of every part, in order."""
        super().__init__(modules)
        self.rows = rows

    def forward(self, x: torch.Tensor, *how: LayerDropout | bool | None) -> torch.Tensor:
        """[..., in] -> [..., out on this rank]. Args: how: the other arguments of each update."""
        found = {name: update(x, *how) for name, update in self.items()}
        like = next(iter(found.values()))
        parts = [
            found[name] if name in found else like.new_zeros(*like.shape[:-1], rows)
            for name, rows in self.rows
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def add_updates(block: nn.Module, config: ModelConfig) -> None:
    """Give the linear layers of a block that have none yet the updates that `model.lora` chooses."""
    settings = config.lora
    if settings is None:
        return
    classes = class_layers(config)
    for path, chosen in updated_parts(config).items():
        owner, _, name = path.partition(".")
        layer = getattr(getattr(block, owner, None), name, None)
        if isinstance(layer, RowParallelLinear) and layer.lora is None:
            layer.lora = Updates(
                {WHOLE: RowUpdate(layer, _Site(path, settings))}, [(WHOLE, len(layer.weight))]
            )
        elif isinstance(layer, ColumnParallelLinear) and layer.lora is None:
            layer.lora = _column_updates(layer, path, chosen, len(classes[path]), settings)


def _column_updates(
    layer: ColumnParallelLinear, path: str, chosen: Sequence[str], modules: int, settings: LoraConfig
) -> Updates:
    """Args: modules: number of modules of the class that are this layer."""
    rows, in_features = layer.weight.shape
    partition = partition_of(layer.weight)
    if modules == 1:
        update = ColumnUpdate(in_features, rows, partition, layer.parallel, _Site(path, settings))
        return Updates({WHOLE: update}, [(WHOLE, rows)])
    sizes = list(zip(PARTS[path], partition.block_rows(rows), strict=True))
    updates = {
        name: ColumnUpdate(
            in_features, size, Partition(dim=0), layer.parallel, _Site(f"{path}.{name}", settings)
        )
        for name, size in sizes
        if name in chosen
    }
    return Updates(updates, sizes)
