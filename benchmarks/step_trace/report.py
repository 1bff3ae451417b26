"""The profile of a step as text: the numbers, their sources, and their assumptions."""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.step_trace.request import CUDA_LAUNCH_US, Profile
from data_utils.common.errors import ConfigError
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
        f"device    {gpu.describe(attention.name)}",
        f"attention {describe(config, attention)}",
        f"host      {details.launch_us:.1f} us an operation: measured on this CPU with small layers, and of that "
        f"{CUDA_LAUNCH_US:g} us assumed for a CUDA launch",
        "",
    ]
    lines += [f"{name:28} {_shown(value)}" for name, value in asdict(profile.expected).items()]
    lines += [
        "",
        f"launches of a step           {details.launches:,.0f}",
        f"launches for gradients       {details.sums_per_layer:.4g} a layer, by the optimizer during the backward pass",
        f"GPU time by kind, ms         {_shown(details.kinds)}",
        f"collectives of a step        {_shown(details.collectives)}",
        f"communication, ms            {_shown(details.communication_ms)} (not part of the times above)",
        f"parameters of a rank         {details.rank_parameters:,.0f}",
    ]
    if (host_ms := _host_with_graphs(config, dp, profile)) is not None:
        lines.append(
            f"host with CUDA graphs, ms     {host_ms:.4g} (training.cuda_graphs: two launches a block)"
        )
    if details.bubble > 1:
        stages = ", ".join(f"{gib:.4g}" for gib in details.stage_gib)
        lines.append(f"pipeline                     times are x {details.bubble:.3g} for its fill and drain")
        lines.append(f"GiB of the traced stages     {stages}")
    for kind, title in _TITLES.items():
        lines += _listed(title, details.places[kind])
    lines += _listed("waits for the device beside micro-batches, a step", details.step_places)
    return "\n".join(lines)


def _host_with_graphs(config: Config, dp: int, profile: Profile) -> float | None:
    """Milliseconds of a step: replays, and what is outside of the blocks; None where there are no graphs."""
    try:
        replace(config, training=replace(config.training, cuda_graphs=True))
    except ConfigError:
        return None
    expected = profile.expected
    saved = max(0.0, expected.launches_per_layer_forward + expected.launches_per_layer_backward - 2)
    passes = config.model.num_layers * config.batch.accumulation_steps(dp)
    return expected.host_ms - passes * saved * profile.details.launch_us / 1e3


def _listed(title: str, places: dict[str, float]) -> list[str]:
    most = sorted(places.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_PLACES]
    return ["", title, *(f"  {times:6.4g}  {place}" for place, times in most)] if places else []


def _shown(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items()) or "none"
    return f"{value:.4g}"
