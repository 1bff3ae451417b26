"""Rates of GPUs and hosts, from which the roofline of a step is computed: gpus.yaml has each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml

CONSTANTS = Path(__file__).with_name("gpus.yaml")
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are in TFLOP/s of bf16, TB/s and GB/s; times in microseconds."""

    name: str
    peak_tflops: float  # dense bf16, the reference of MFU
    processors: int  # SMs
    issue_lanes: int  # instructions of a thread that a processor issues in a cycle
    clock_ghz: float
    memory_gib: float  # of the device; a process has 1 to 3 less
    matmul_tflops: float  # while every processor has a tile
    bandwidth_tbs: float  # of memory, reached by elementwise kernels
    capability: tuple[int, int]  # of CUDA
    flash_64: tuple[float, float]  # FlashAttention 2 with heads of 64 on long sequences, forward and backward
    flash_128: tuple[float, float]
    fa3_64: tuple[float, float]  # FlashAttention 3, where it runs
    fa3_128: tuple[float, float]
    fa4_64: tuple[float, float]  # FlashAttention 4, where it runs
    fa4_128: tuple[float, float]
    flash_start: float  # cost of starting a tile of queries, as a number of keys
    flash_causal: float  # share of the rate under a causal mask
    flash_dropout: float  # instructions per pair
    dense_share: float  # of the rate, with a bias or mask for each pair
    rule_share: float  # of the rate, in triton_attention.py
    unhidden: float  # share of the shorter of issue and memory time that the longer one does not hide
    least_us: float  # of any kernel
    round_us: float  # of an iteration of a program where too few programs hide memory latency
    link_gbs: float  # to GPUs of the same node, per direction
    network_gbs: float  # to other nodes, per GPU and direction, of a ring with few members in a node
    node_gbs: float  # of a ring over whole nodes
    link_us: float  # least time of a collective within a node
    network_us: float  # and between nodes

    def attention_tflops(self, implementation: str, head_size: int) -> tuple[float, float]:
        """Of full tiles on long sequences, forward and backward. Args: implementation: of `training.attention`."""
        rates = f"{implementation if implementation in ('fa3', 'fa4') else 'flash'}_{64 if head_size <= 64 else 128}"
        forward, backward = getattr(self, rates)
        # The memory-efficient kernel's share is that with a bias, the only one known.
        share = self.dense_share if implementation == "torch" else 1.0
        return share * forward, share * backward

    @property
    def issue_rate(self) -> float:
        """Instructions of threads in a microsecond."""
        return self.processors * self.issue_lanes * self.clock_ghz * 1e3

    def ring_gbs(self, members_of_a_node: int, has_other_nodes: bool) -> float:
        """GB/s of a ring of ranks. Each GPU has its own link to the network, so the ranks of a node share several."""
        if not has_other_nodes:
            return self.link_gbs
        is_whole = members_of_a_node >= GPUS_PER_NODE
        return min(self.link_gbs, self.node_gbs if is_whole else members_of_a_node * self.network_gbs)

    def describe(self, attention: str = "fa2") -> str:
        """The constants in a line, as every output states them. Args: attention: see `training.attention`."""
        forward, backward = self.attention_tflops(attention, 64)
        return (
            f"{self.name}: peak {self.peak_tflops:g} TFLOP/s, {self.memory_gib:g} GiB; data sheet values, not "
            f"measured (sources: megatron_lite/estimate/gpus.yaml): {self.processors} SMs, matrix products in "
            f"full waves {self.matmul_tflops:g} TFLOP/s, memory {self.bandwidth_tbs:g} TB/s, attention "
            f"{forward:g}/{backward:g} TFLOP/s forward/backward; bandwidth {self.link_gbs:g} "
            f"GB/s within a node, {self.network_gbs:g} GB/s per GPU between nodes, {self.node_gbs:g} GB/s "
            "between whole nodes"
        )


@dataclass(frozen=True)
class Host:
    """Microseconds of a rank's Python, which runs in parallel with the device."""

    operation_us: float  # to start a kernel: Python, torch, Triton and CUDA's launch
    public_call_us: (
        float  # that a forward launch of FlashAttention without dropout takes more than other operations
    )
    row_us: float  # to plan a sequence of 512 tokens

    def millis(self, operations: float, sequences: float, public_calls: float = 0.0) -> float:
        """Milliseconds of a step. Args: public_calls: how many of the operations are such launches."""
        launching = operations * self.operation_us + public_calls * self.public_call_us
        return (launching + sequences * self.row_us) / 1e3


def _table() -> dict[str, dict[str, Any]]:
    """Name -> constant -> value."""
    table: dict[str, dict[str, Any]] = {}
    for name, constants in load_yaml(CONSTANTS).items():
        values = {key: constant["value"] for key, constant in constants.items() if key != "like"}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        table[name] = {**table.get(constants.get("like"), {}), **values}
    return table


_TABLE = _table()
HOST = Host(**_TABLE.pop("host"))
GPUS = {name: Gpu(name, **constants) for name, constants in _TABLE.items()}


def named_by_device(device: str, gib: float) -> str | None:
    """The name in gpus.yaml of CUDA's device name with `gib` of memory; None for an unknown one."""
    candidates = [name for name in GPUS if name.partition("-")[0].upper() in re.split("[ -]", device.upper())]
    return min(candidates, key=lambda name: abs(GPUS[name].memory_gib - gib), default=None)


def calibrated(text: str, name: str, constants: dict[str, Any], source: str) -> str:
    """The text of gpus.yaml with measured constants of a GPU."""
    head, start, rest = text.partition(f"\n{name}:\n")
    section = re.match(r"(?:  .*\n)*", rest)
    assert start and section is not None
    lines = section[0]
    for key, value in constants.items():
        rounded = [float(f"{x:.3g}") for x in (value if isinstance(value, list) else [value])]
        line = (
            f'  {key}: {{value: {rounded if isinstance(value, list) else rounded[0]}, source: "{source}"}}\n'
        )
        lines = re.sub(rf"  {key}: .*\n", "", lines) + line
    return head + start + lines + rest[section.end() :]


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for one that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu is {name!r}; it must be one of {', '.join(GPUS)}.")
    return GPUS[name]
