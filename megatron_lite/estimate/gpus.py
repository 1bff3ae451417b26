"""The GPUs that `--dry-run` knows: gpus.yaml."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are in TFLOP/s of bf16 and GB/s."""

    name: str
    peak_tflops: float  # the reference of MFU
    processors: int  # SMs
    capability: tuple[int, int]  # of CUDA
    memory_gib: float
    link_gbs: float  # to GPUs of the same node, per direction
    network_gbs: float  # to other nodes, per GPU and direction

    def ring_gbs(self, ranks: tuple[int, ...]) -> float:
        """GB/s of a ring of global ranks. Each GPU has a link to the network, so ranks of a node share several."""
        ranks_by_node = Counter(rank // GPUS_PER_NODE for rank in ranks)
        if len(ranks_by_node) == 1:
            return self.link_gbs
        return min(self.link_gbs, self.network_gbs * min(ranks_by_node.values()))


GPUS = {
    name: Gpu(name, **{**values, "capability": tuple(values["capability"])})
    for name, values in load_yaml(Path(__file__).with_name("gpus.yaml")).items()
}


def named_by_device(device: str, gib: float) -> str | None:
    """The name in gpus.yaml of CUDA's device name with `gib` of memory; None for an unknown one."""
    candidates = [name for name in GPUS if name.partition("-")[0].upper() in re.split("[ -]", device.upper())]
    return min(candidates, key=lambda name: abs(GPUS[name].memory_gib - gib), default=None)


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for one that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu is {name!r}; it must be one of {', '.join(GPUS)}.")
    return GPUS[name]
