"""Upcycling: experts that begin as copies of the FFN of a dense checkpoint. Source: arXiv:2212.05055."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.transformer.flops import EXPERTS


def upcycled(checkpoint: Checkpoint, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """The checkpoint with its FFN under the names of the experts in its place, each to be added to the expert's noise.

    The checkpoint itself if it has experts, or the model none. Args: shapes: of the model.
    Raises: CheckpointError if the model would not compute what the checkpoint's does.
    """
    copies: dict[str, list[str]] = {}
    for name in shapes:
        before, is_expert, after = name.partition(EXPERTS)
        if is_expert:  # after: its number, and the name within an FFN
            copies.setdefault(f"{before}.mlp.{after.partition('.')[2]}", []).append(name)
    dense = copies.keys() & checkpoint.shapes.keys()
    experts, noise = config.model.experts, config.checkpoint.upcycling_noise
    if experts is None or not dense:
        if noise:
            raise CheckpointError(
                f"checkpoint.upcycling_noise is {noise}, but the experts of this run do not begin as copies of an FFN "
                f"of checkpoint {checkpoint.path}; set it to 0."
            )
        return checkpoint
    width = next(checkpoint.shapes[name][1] for name in sorted(dense) if name.endswith("4h_to_h.weight"))
    # Each copy computes what the FFN does, so any choice does whose weights sum to 1, and nothing else is added.
    for setting, kept in (("width", width), ("shared", 0), ("normalized", True), ("factor", 1.0)):
        value = getattr(experts, setting)
        if value != kept:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has no experts; those of the model begin as copies of its FFN, which "
                f"computes the same only with model.experts.{setting} {kept}, not {value}: set it to {kept}."
            )
    new_names = {name: copies.get(name, [name]) for name in checkpoint.shapes}
    return dataclasses.replace(
        checkpoint,
        shapes={new: shape for name, shape in checkpoint.shapes.items() for new in new_names[name]},
        slices=tuple(
            dataclasses.replace(stored, name=new, is_added=stored.is_added or stored.name in dense)
            for stored in checkpoint.slices
            for new in new_names[stored.name]
        ),
    )
