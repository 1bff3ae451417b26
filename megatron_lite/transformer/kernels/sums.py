"""How many programs of a kernel sum over tokens, each over some of them."""

from __future__ import annotations

import functools

import torch


def sum_programs(width: int, processors: int) -> int:
    """Most programs for rows of a width: enough to hide the time of their loads, few enough to add up soon."""
    return processors * min(8, max(2, 4096 // width))


@functools.cache
def most_programs(width: int, device: torch.device) -> int:
    """`sum_programs` of a device; in Triton's interpreter few."""
    if device.type != "cuda":
        return sum_programs(width, 4)
    return sum_programs(width, torch.cuda.get_device_properties(device).multi_processor_count)


def empty_sums(like: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Memory for `count` partial sums of each program that passes over the rows of `like`: fp32 [P, count * width]."""
    programs = min(most_programs(width, like.device), len(like))
    return like.new_empty(programs, count * width, dtype=torch.float32)
