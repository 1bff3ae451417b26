"""The peak FLOP/s that MFU is computed against: of a GPU's data sheet, given by the user, or measured on this machine.

Without the first two, above all on CPUs, matrix products of the project's linear layer are timed; the ratio is then not
called MFU. Virtual CPUs change their speed by a factor of three within seconds, so one short measurement means little.
Small products find an undisturbed moment: the best time of many counts, in CPU time, which leaves out other programs.
All ranks multiply at once, as they do in training, and the first log lines of a start measure again. Checkpoints keep
the rate, so that a resumed run is compared with the same number.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import linear

START_SECONDS, LATER_SECONDS, LATER_TIMES = 0.5, 0.02, 50  # of a start: a second at most
CPU_SIZE, GPU_SIZE = 512, 8192  # of the square matrices: a CPU's product takes less than a time slice

# Dense bf16 peak of one device in TFLOP/s, from the vendor's data sheets, by words of torch's device name. The first
# entry whose words all occur counts: cards of the same chip with less power come before the usual form.
GPU_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "V100": 125.0,  # fp16: it has no bf16
}


def known_peak_tflops(device_name: str) -> float | None:
    """The data sheet's peak of a GPU by torch's name of it; None if it is unknown, or a part of a GPU (MIG)."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:
        return None
    known = (peak for name, peak in GPU_PEAK_TFLOPS.items() if words.issuperset(name.split()))
    return next(known, None)


def device_name(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The GPU's name, or that of the CPU with the threads that this process uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        match = re.search(
            r"^model name\s*: (.+)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.M
        )
    except OSError:
        match = None
    threads = torch.get_num_threads()
    return f"{match[1].strip() if match else 'CPU'}, {threads} thread{'s' if threads > 1 else ''}"


def best_seconds(product: Callable[[], None], seconds: float, clock: Callable[[], float]) -> float:
    """The shortest time of a product among those of `seconds`, at least one."""
    best, deadline = float("inf"), clock() + seconds
    while best == float("inf") or clock() < deadline:
        start = clock()
        product()
        best = min(best, clock() - start)
    return best


def matmul_tflops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """The best measured rate of a product of matrices on this device, in TFLOP/s."""
    is_gpu = device.type == "cuda"
    size = GPU_SIZE if is_gpu else CPU_SIZE
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def product() -> None:
        linear(x, weight)
        if is_gpu:
            torch.cuda.synchronize()

    product()  # loads or compiles the kernel
    # On a CPU that of the main thread, which takes part in every product.
    clock = time.perf_counter if is_gpu else time.thread_time
    return 2 * size**3 / best_seconds(product, seconds, clock) / 1e12


class PeakFlops:
    """The peak FLOP/s of one device.

    Attributes:
        tflops: TFLOP/s of one device, on average over the ranks.
        is_measured: it was measured on this machine, and is neither a data sheet's nor the user's.
        rates: the measured ones by machine, as checkpoints keep them.
    """

    def __init__(
        self,
        configured: float | None,
        dtype: torch.dtype,
        context: ParallelContext,
        rates: Mapping[str, float] | None = None,
    ):
        """All ranks call this together. Args: configured: run.peak_tflops; rates: of the checkpoint."""
        self.rates = dict(rates or {})
        self.name = device_name(context.device)
        self._dtype, self._context = dtype, context
        self._key = f"{context.world_size} x {self.name}, {str(dtype).removeprefix('torch.')}"
        known = configured
        if known is None and context.device.type == "cuda":
            known = known_peak_tflops(self.name)
        self.is_measured = context.sum_on_hosts([float(known is None)])[0] > 0
        self.tflops = self.rates.get(self._key, 0.0) if self.is_measured else known or 0.0
        self._left = LATER_TIMES
        if self.is_measured:
            self._measure(START_SECONDS)

    def measure_again(self) -> None:
        """All ranks at once, a limited number of times, on CPUs: a GPU would have to finish its work first."""
        if self.is_measured and self._context.device.type == "cpu" and self._left > 0:
            self._left -= 1
            self._measure(LATER_SECONDS)

    def _measure(self, seconds: float) -> None:
        """Measure and keep the higher rate."""
        self._context.barrier()
        own = matmul_tflops(self._dtype, self._context.device, seconds)
        mean = self._context.sum_on_hosts([own])[0] / self._context.world_size
        self.tflops = self.rates[self._key] = max(self.tflops, mean)

    def utilisation(self, tflops: float) -> dict[str, float]:
        """A rate over the peak, for the records: `mfu`, or `machine_share` and the measured peak."""
        ratio = tflops / self.tflops
        return {"machine_share": ratio, "machine_tflops": self.tflops} if self.is_measured else {"mfu": ratio}

    def __str__(self) -> str:
        if self.is_measured:
            return f"machine = {self.tflops:.3g} TFLOP/s per rank, measured on {self.name}"
        return f"MFU = share of {self.tflops:g} TFLOP/s per rank"
