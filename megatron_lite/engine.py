"""The only file that meets DeepSpeed: its optimizer is wrapped here (its dictionary: deepspeed_options.py).

Trainer and checkpoint see `Engine`: forward/backward of a micro-batch, an optimizer step with its outcome, and the
fragments of fp32 weights and Adam moments that this rank owns under ZeRO.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_lite.config import Config
from megatron_lite.deepspeed_options import deepspeed_options
from megatron_lite.parallel_context import ParallelContext

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; LayerNorm and biases without."""
    decay = [p for name, p in model.named_parameters() if not _without_decay(name)]
    plain = [p for name, p in model.named_parameters() if _without_decay(name)]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _without_decay(name: str) -> bool:
    return name.endswith("bias") or "layernorm" in name


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step."""

    grad_norm: float  # global norm before clipping; inf when skipped
    skipped: bool  # non-finite gradients: all ranks left their weights unchanged
    loss_scale: float


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's flattened elements owned by this rank: fp32 master weights and Adam moments."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # first element, in the flattened parameter
    tensors: dict[
        str, torch.Tensor
    ]  # "weight", "exp_avg", "exp_avg_sq": fp32 [numel] views of the live state


class Engine:
    """A model under DeepSpeed's ZeRO optimizer."""

    def __init__(self, model: nn.Module, config: Config, context: ParallelContext):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed 0.19.8 calls a name that torch 2.13 deprecates, at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if context.device.type == "cpu":
            # DeepSpeed asks for fp16 matrix instructions; without them our layers multiply in fp32 (linear.py).
            get_accelerator().is_fp16_supported = lambda: True
        optimizer = torch.optim.AdamW(
            parameter_groups(model, config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            fused=True,
        )
        options = deepspeed_options(config, context.dp_size)
        with contextlib.redirect_stdout(io.StringIO()) as chatter:  # it prints memory tables, at no log level
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=options, dist_init_required=False
            )
        log.debug("%s", chatter.getvalue())
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.module = model
        self.device = context.device
        self._allocate_moments()

    def _allocate_moments(self) -> None:
        """Adam's moments exist from the start, so that saving and loading do not depend on whether a step was made."""
        for group in self._zero.optimizer.param_groups:
            for flat in group["params"]:
                state = self._zero.optimizer.state[flat]
                state["step"] = torch.tensor(0.0, device=flat.device)
                for key in MOMENTS:
                    state[key] = torch.zeros_like(flat)
        self._zero._lazy_init_hp_params_optimizer_state()

    @property
    def loss_scale(self) -> float:
        scaler = self._loss_scaler
        return 1.0 if scaler is None else float(scaler.cur_scale)

    @property
    def _loss_scaler(self) -> Any:
        """None under DeepSpeed's BF16_Optimizer, its choice for bf16 with fp32 accumulation at ZeRO 1."""
        return getattr(self._zero, "loss_scaler", None)

    def train(self, mode: bool = True) -> None:
        self._engine.train(mode)

    def forward(self, *args: Any) -> Any:
        return self._engine(*args)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss`, scaled for fp16; DeepSpeed divides by accumulation steps and averages over DP ranks."""
        self._engine.backward(loss)

    def micro_step(self, lr: float) -> StepResult | None:
        """End a micro-batch; on the last one of the step update the weights with learning rate `lr`."""
        is_last = self._engine.is_gradient_accumulation_boundary()
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        if not is_last:
            return None
        norm = self._engine.get_global_grad_norm()
        norm = math.inf if norm is None else float(norm)
        return StepResult(norm, bool(self._zero.overflow), self.loss_scale)

    # State for checkpoints

    def fragments(self) -> Iterator[Fragment]:
        """The fragments this rank owns, in parameter order; together the ranks own every element exactly once."""
        for name, parameter in self.module.named_parameters():
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # set by DeepSpeed
            if mapping is None:
                continue
            tensors = {"weight": mapping.get_hp_fragment()}
            tensors.update({key: mapping.get_hp_fragment(optim_state_key=key) for key in MOMENTS})
            yield Fragment(name, tuple(parameter.shape), mapping.lp_fragment_address.start, tensors)

    def scalar_state(self) -> dict[str, Any]:
        """Adam's step count and the loss scaler, as JSON values."""
        optimizer = self._zero.optimizer
        first = next(iter(optimizer.state.values()))
        scaler = {
            key: getattr(self._loss_scaler, key) for key in SCALER_STATE if hasattr(self._loss_scaler, key)
        }
        return {"adam_step": float(first["step"]), "loss_scaler": scaler}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        for values in self._zero.optimizer.state.values():
            values["step"].fill_(state["adam_step"])
        for key, value in state["loss_scaler"].items():
            if key in SCALER_STATE and hasattr(self._loss_scaler, key):
                setattr(self._loss_scaler, key, value)

    def publish_weights(self) -> None:
        """After fragments were written to: model weights from the fp32 masters, on every rank."""
        self._zero.update_lp_params()
