"""AdamW and LayerNorm of NVIDIA apex, for runs that ask for them.

PyPI's package apex is another one, for web servers; what is in it tells them apart. `require_apex` runs before torch is
imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import one_line
from megatron_lite.config.tree import Config

if TYPE_CHECKING:
    import torch
    from torch import nn

INSTALL = "install https://github.com/NVIDIA/apex with its C++ and CUDA extensions, as its README says"


def require_apex(config: Config) -> None:
    """Raise ConfigError if a setting asks for apex, and none or another package of that name is installed."""
    asked = config.settings_for_apex
    if not asked:
        return
    # Found, not imported: its import loads torch and CUDA, and a wrong package may do anything.
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise ConfigError(f"{asked[0]} is apex, which is not installed; {INSTALL}, or set it to torch.")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        raise ConfigError(
            f"{asked[0]} is apex, but the installed package apex{_version()} is not NVIDIA's; pip uninstall apex, then "
            f"{INSTALL}, or set it to torch."
        )


def _version() -> str:
    try:
        return f" {importlib.metadata.version('apex')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unusable(setting: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{setting} is apex, which does not work here ({one_line(error)}); it needs an NVIDIA GPU, and an "
        f"apex built for this torch: {INSTALL}, or set it to torch."
    )


def make_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """apex's FusedAdam, which keeps its state as torch's AdamW does: checkpoints of both are the same.

    Args: groups, settings: as for torch.optim.AdamW (lr, betas, eps).
    Raises: ConfigError if apex has no CUDA kernels, or there is no GPU.
    """
    try:
        return _adamw_class()(groups, **settings)
    except (ImportError, RuntimeError, TypeError) as error:  # its kernels are missing; its buffer needs a GPU
        raise _unusable("optimizer.kernel", error) from error


def _adamw_class() -> type[torch.optim.Optimizer]:
    import torch

    fused_adam: Any = importlib.import_module("apex.optimizers").FusedAdam

    class AdamW(fused_adam):
        """FusedAdam with a step count for each parameter.

        apex counts the steps of a group. ZeRO 3 steps with a part of a group's parameters at a time, the other groups
        empty, so that a group's count would be too high.
        """

        param_groups: list[dict[str, Any]]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            groups = self.param_groups
            # A group has a gradient for all of its parameters, or, while they are frozen, for none.
            self.param_groups = [
                group for group in groups if any(p.grad is not None for p in group["params"])
            ]
            try:
                for group in self.param_groups:
                    counts = [self._count(parameter) for parameter in group["params"]]
                    # All parameters of a group are trained in the same steps, so the first one's count is that of all.
                    group["step"] = counts[0]
                return super().step(closure)
            finally:
                self.param_groups = groups

        def _count(self, parameter: torch.Tensor) -> int:
            """Count a step of the parameter, and return the steps before it: apex adds one itself."""
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["step"] = state["step"].cpu()  # copied once: reading it must not wait for the GPU
            before = int(state["step"])
            state["step"] += 1
            return before

    return AdamW


def use_layernorm(module: nn.Module, device: torch.device) -> None:
    """Let every LayerNorm of a model run apex's kernel. Raises ConfigError if it does not run on `device`."""
    import torch
    import torch.nn.functional as F

    from megatron_lite.transformer.norms import LayerNorm

    try:
        kernel: Any = importlib.import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
        row = torch.ones(1, 8, device=device)
        # A trial launch: apex imports without its kernels and fails at the first call.
        kernel(row, row[0], row[0], (8,), 1e-5)
    except (ImportError, RuntimeError, NotImplementedError) as error:
        raise _unusable("training.layernorm", error) from error

    def normalize(
        x: torch.Tensor, shape: torch.Size, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        if not x.numel() or bias is None:  # a head without rows: CUDA refuses a launch of no blocks
            return F.layer_norm(x, shape, weight, bias, epsilon)
        return kernel(x, weight, bias, shape, epsilon)

    for layer in module.modules():
        if isinstance(layer, LayerNorm):
            layer.normalize = normalize
