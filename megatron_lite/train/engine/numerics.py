"""How a process computes: what torch may round, whether sums have one order, whose kernels: from the settings, once."""

from __future__ import annotations

import torch

from megatron_lite.config.sections import TrainingConfig
from megatron_lite.model.kernels.fused import choose_kernels


def set_numerics(training: TrainingConfig, device: torch.device) -> None:
    """Apply `training.tf32`, `deterministic` and `kernels`. `launch.prepare_environment` has prepared cuBLAS."""
    choose_kernels(training.kernels)
    if device.type == "cuda":
        # Said either way: NVIDIA's containers switch TF32 on by an environment variable.
        torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    if training.deterministic:
        # Without warn_only: the attention kernels then keep their changing order, and only warn.
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written, and filling it costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
