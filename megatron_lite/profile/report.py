"""The profile of a step in words: the numbers, where they come from, and what they assume."""

from __future__ import annotations

from megatron_lite.config.tree import Config
from megatron_lite.profile.expected import Details, Expected
from megatron_lite.profile.gpus import Gpu
from megatron_lite.profile.host import CUDA_LAUNCH_US

SHOWN_PLACES = 12  # of each kind


def report(config: Config, processes: int, gpu: Gpu, expected: Expected, details: Details) -> str:
    """A table, and the places in the source of what waits and copies."""
    parallel = config.parallel
    dp = parallel.data_parallel_size(processes)
    lines = [
        f"layout    pipeline {parallel.pipeline_parallel_size} x data {dp} x tensor {parallel.tensor_parallel_size}, "
        f"ZeRO {parallel.zero_stage}, {config.batch.accumulation_steps(dp)} micro-batches of "
        f"{config.batch.micro_batch_size} x {config.row_length} tokens a step",
        f"device    {gpu.describe()}",
        f"host      {details.launch_us:.1f} us an operation: measured on this CPU with small layers, of which "
        f"{CUDA_LAUNCH_US:g} us are assumed for a CUDA launch",
        "",
    ]
    lines += [f"{name:28} {_shown(value)}" for name, value in expected.tree().items()]
    lines += [
        "",
        f"launches of a step           {details.launches:,.0f}",
        f"pageable copies              {details.pageable_per_micro_batch:g} of the copies of a micro-batch",
        f"waits beside micro-batches   {details.waits_per_step:g} a step",
        f"GPU time by kind, ms         {_shown(details.kinds)}",
        f"collectives of a step        {_shown(details.collectives)}",
    ]
    for kind, places in details.places.items():
        if places:
            lines += ["", f"{kind}, a micro-batch"]
            most = sorted(places.items(), key=lambda item: -item[1])[:SHOWN_PLACES]
            lines += [f"  {times:6.4g}  {place}" for place, times in most]
    return "\n".join(lines)


def _shown(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items()) or "none"
    return f"{value:.4g}"
