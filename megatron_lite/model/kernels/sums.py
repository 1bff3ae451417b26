"""How many programs of a kernel sum over tokens, a part of them each."""

from __future__ import annotations

import functools

import torch


def sum_programs(width: int, processors: int) -> int:
    """Most programs for rows of a width: enough for their loads to hide each other, few to add up soon."""
    return processors * min(8, max(2, 4096 // width))


@functools.cache
def programs_of(width: int, device: torch.device) -> int:
    """The same for a GPU. In Triton's interpreter few."""
    if device.type != "cuda":
        return sum_programs(width, 4)
    return sum_programs(width, torch.cuda.get_device_properties(device).multi_processor_count)


def sums_of(like: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Where programs that pass over the rows of `like` leave `count` sums each: fp32 [P, count * width], empty."""
    programs = min(programs_of(width, like.device), len(like))
    return like.new_empty(programs, count * width, dtype=torch.float32)
