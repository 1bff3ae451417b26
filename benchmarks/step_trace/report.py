"""The profile of a step as text: the numbers, and the source lines that they come from."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.step_trace.request import Profile
from megatron_lite.config.attention import choose, describe
from megatron_lite.config.tree import Config
from megatron_lite.estimate.gpus import Gpu

SHOWN_PLACES = 12  # of each kind
_TITLES = {
    "attention": "attention calls of all layers, forward, a micro-batch",
    "waits": "waits for the device, a micro-batch",
    "pageable": "copies to the device that wait, a micro-batch",
    "pinned": "copies to the device that do not wait, a micro-batch",
    "unaligned": "matmuls whose rows do not begin at 16 bytes, a micro-batch",
}


def report(config: Config, processes: int, gpu: Gpu, profile: Profile) -> str:
    """A table, and the source lines at which the host waits or copies."""
    parallel, details, attention = config.parallel, profile.details, choose(config, gpu.capability)
    dp = parallel.data_parallel_size(processes)
    lines = [
        f"layout    pipeline {parallel.pipeline_parallel_size} x data {dp} x tensor {parallel.tensor_parallel_size}, "
        f"ZeRO {parallel.zero_stage}, {config.batch.accumulation_steps(dp)} micro-batches of "
        f"{config.batch.micro_batch_size} x {config.row_length} tokens a step",
        f"device    {gpu.name}",
        f"attention {describe(config, attention)}",
        "",
        *(f"{name:28} {_shown(value)}" for name, value in asdict(profile.expected).items()),
        "",
        f"launches for gradients       {details.sums_per_layer:.4g} a layer, by the optimizer during the backward pass",
        f"parameters of a rank         {details.rank_parameters:,.0f}",
    ]
    if len(details.stage_gib) > 1:
        stages = ", ".join(f"{gib:.4g}" for gib in details.stage_gib)
        lines.append(f"GiB of the traced stages     {stages}")
    for kind, title in _TITLES.items():
        lines += _listed(title, details.places[kind])
    lines += _listed("waits for the device beside micro-batches, a step", details.step_places)
    return "\n".join(lines)


def _listed(title: str, places: dict[str, float]) -> list[str]:
    most = sorted(places.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_PLACES]
    return ["", title, *(f"  {times:6.4g}  {place}" for place, times in most)] if places else []


def _shown(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items()) or "none"
    return f"{value:.4g}"
