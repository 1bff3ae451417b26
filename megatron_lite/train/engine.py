"""The interface of trainer and checkpoint to DeepSpeed; config/deepspeed_options.py derives its dictionary.

An `Engine` makes training steps and evaluations, and gives the fragments of fp32 weights and Adam moments that this
rank owns under ZeRO. plain.py and pipeline.py hold the two kinds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data_utils.base.errors import DeviceMemoryError
from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.config.tree import Config, OptimizerConfig
from megatron_lite.model.batch import Batch
from megatron_lite.model.glm import PositionEmbeddings
from megatron_lite.model.model_input import HostInput, MicroBatch, prepare
from megatron_lite.model.tensor_parallel import partition_of
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train import nvidia_apex

log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def parameter_groups(named: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; LayerNorm and biases without."""
    decay = [p for name, p in named.items() if not _without_decay(name)]
    plain = [p for name, p in named.items() if _without_decay(name)]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _without_decay(name: str) -> bool:
    return name.endswith("bias") or "layernorm" in name


def make_adamw(named: Mapping[str, nn.Parameter], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW of torch or apex."""
    groups = parameter_groups(named, settings.weight_decay)
    common: dict[str, Any] = {
        "lr": 0.0,  # set at every step; DeepSpeed makes one of its own to allocate state at ZeRO 3
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    if settings.kernel == "apex":
        return nvidia_apex.make_adamw(groups, **common)
    return torch.optim.AdamW(groups, fused=True, **common)


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """DeepSpeed prints topologies and memory tables at no log level; they go to the log, at level debug."""
    with contextlib.redirect_stdout(io.StringIO()) as chatter:
        yield
    log.debug("%s", chatter.getvalue())


@contextlib.contextmanager
def memory_advice(config: Config) -> Iterator[None]:
    """Turn a device's out-of-memory error into a DeviceMemoryError that names the settings that need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        batch, recompute, layout = config.batch, config.training.recompute, config.parallel
        advised = DeviceMemoryError(
            f"out of memory: {' '.join(str(error).split()[:20])} ... Lower batch.micro_batch_size "
            f"({batch.micro_batch_size}), set training.recompute ({recompute}) to full, or raise parallel.zero_stage "
            f"({layout.zero_stage}) or tensor_parallel_size ({layout.tensor_parallel_size}); --dry-run PROCESSES "
            "estimates what a layout needs."
        )
        advised.only_here = True
        raise advised from error


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step."""

    objective_sums: (
        torch.Tensor
    )  # fp64 [objectives, 2] of this rank's samples; zeros without the model's last layer
    grad_norm: float  # global norm before clipping; inf when skipped
    skipped: bool  # non-finite gradients: all ranks left their weights unchanged
    loss_scale: float


GradientObserver = Callable[[Fragment, torch.Tensor], None]


class Engine(ABC):
    """A model under DeepSpeed in any layout."""

    def __init__(
        self,
        module: nn.Module,
        named: dict[str, nn.Parameter],
        config: Config,
        context: ParallelContext,
        mpu: Any,
    ):
        """Args: named: the parameters of this rank under their global names."""
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed 0.19.8 calls a name that torch 2.13 deprecates, at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if context.device.type == "cpu":
            # DeepSpeed asks for fp16 matrix instructions; without them our layers multiply in fp32 (`linear`).
            get_accelerator().is_fp16_supported = lambda: True
        if config.training.layernorm == "apex":
            nvidia_apex.use_layernorm(module, context.device)
        optimizer = make_adamw(named, config.optimizer)
        options = config.deepspeed_options(context.dp.size)
        with without_chatter():
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=options, mpu=mpu, dist_init_required=False
            )
        self.context = context
        self._config = config
        self.named_parameters = named
        self._clip_grad_norm = config.optimizer.clip_grad_norm
        self.before_update: Callable[[], None] = lambda: None  # called before each change of the fragments
        self._announce_updates()
        self._allocate_moments()

    @abstractmethod
    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Forward and backward of the micro-batches, then one optimizer step with learning rate `lr`."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """fp64 [objectives, 2] as in StepResult, of batches of the training shape, without dropout."""

    def prepared(self, batch: Batch, dropout_seed: int | None) -> HostInput:
        """A batch as the model takes it in this layout."""
        parallel = self._config.parallel
        multiple = 1
        if self.context.pp.size > 1:
            multiple = batch.layout.shape[0] * batch.layout.shape[1]  # what stages send has one shape
        elif parallel.sequence_parallel:
            multiple = self.context.tp.size  # the tokens are split evenly
        return prepare(
            batch,
            self.context.device,
            self._config.model,
            dropout_seed=dropout_seed,
            multiple=multiple,
            tensor_parallel_rank=self.context.tp.rank,
            tensor_parallel_size=self.context.tp.size,
        )

    def _allocate_moments(self) -> None:
        """Allocate Adam's moments before the first step, so that saving and loading always find them."""
        optimizer = self._zero.optimizer
        flats = [flat for group in optimizer.param_groups for flat in group["params"]]
        if self._is_stage_3:
            flats = self._zero.fp32_partitioned_groups_flat
        for flat in flats:
            state = optimizer.state[flat]
            state["step"] = torch.tensor(0.0, device=flat.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(flat)
        if not self._is_stage_3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _announce_updates(self) -> None:
        """Call `before_update` before each optimizer step: until then the fragments do not change and can be copied."""
        step = self._zero.step

        def announced_step(*args: Any, **kwargs: Any) -> Any:
            self.before_update()
            return step(*args, **kwargs)

        self._zero.step = announced_step

    @property
    def loss_scale(self) -> float:
        scaler = self._loss_scaler
        return 1.0 if scaler is None else float(scaler.cur_scale)

    @property
    def _loss_scaler(self) -> Any:
        """None under DeepSpeed's BF16_Optimizer, its choice for bf16 with fp32 accumulation at ZeRO 1."""
        return getattr(self._zero, "loss_scaler", None)

    def set_embedding_gradient_shrink(self, factor: float) -> None:
        """Scale the embeddings' gradients by `factor` from the next step on."""
        for module in self._engine.module.modules():
            if isinstance(module, PositionEmbeddings):
                module.gradient_shrink = factor

    def _set_lr(self, lr: float) -> None:
        for group in self._zero.param_groups:
            group["lr"] = lr

    def _result(self, objective_sums: torch.Tensor) -> StepResult:
        norm = self._engine.get_global_grad_norm()
        norm = math.inf if norm is None else float(norm)
        skipped = bool(self._zero.overflow)
        if skipped and getattr(self._zero, "cpu_offload", False):
            # DeepSpeed 0.19.8 does not clear these when it offloads: later steps would inherit the bad gradients.
            self._zero.averaged_gradients.update(dict.fromkeys(self._zero.averaged_gradients))
        return StepResult(objective_sums, norm, skipped, self.loss_scale)

    # Gradients

    @contextlib.contextmanager
    def observed_gradients(self, observer: GradientObserver) -> Iterator[None]:
        """Within the context, every optimizer step gives `observer` each owned fragment and its gradient fp32 [numel].

        The gradient is that of the step's loss over all samples as AdamW takes it: reduced, unscaled and clipped
        (`clip_divisor` undoes the clipping). A skipped step calls nothing.
        """

        def show(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            flats = [flat for group in optimizer.param_groups for flat in group["params"]]
            for fragment in self.fragments():
                gradient = _gradient_of(fragment.tensors["weight"], flats)
                if gradient is not None:
                    observer(fragment, gradient)

        # Every stage of ZeRO ends in a step of this optimizer on flat fp32 partitions, of one group or of all.
        hook = self._zero.optimizer.register_step_pre_hook(show)
        try:
            yield
        finally:
            hook.remove()

    def clip_divisor(self, grad_norm: float) -> float:
        """The number by which clipping divided a step's gradients, from their norm before clipping."""
        if self._clip_grad_norm == 0:
            return 1.0
        return max(1.0, (grad_norm + 1e-6) / self._clip_grad_norm)  # DeepSpeed's formula

    # State for checkpoints

    def fragments(self) -> Iterator[Fragment]:
        """The fragments this rank owns. Together the ranks own every element, some elements several times."""
        tp = self.context.tp
        for name, parameter in self.named_parameters.items():
            owned = self._owned(parameter)
            if owned is None:
                continue
            shape, start, tensors = owned
            partition = partition_of(parameter)
            is_copy = (partition.dim is None and tp.rank > 0) or self._is_tied_copy(name)
            yield Fragment(name, shape, partition, tp, start, tensors, is_copy)

    def _owned(self, parameter: Any) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]] | None:
        """Shape of the shard; first element and state of the range that this rank owns; None if it owns nothing."""
        keys = {"weight": None, **{key: key for key in MOMENTS}}
        if self._is_stage_3:
            # Each rank has an equal range of every parameter, the last ones padded.
            length = parameter.ds_tensor.numel()
            start = self.context.dp.rank * length
            count = min(length, parameter.ds_numel - start)
            if count <= 0:
                return None
            read = self._zero._get_fp32_opt_state_partition
            tensors = {kind: read(parameter, True, key)[0][:count] for kind, key in keys.items()}
            return tuple(parameter.ds_shape), start, tensors
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        tensors = {kind: mapping.get_hp_fragment(optim_state_key=key) for kind, key in keys.items()}
        return tuple(parameter.shape), mapping.lp_fragment_address.start, tensors

    @property
    def _is_stage_3(self) -> bool:
        return self._engine.zero_optimization_stage() == 3

    def count_parameters(self) -> int:
        """Parameter tensors of the whole model, over all pipeline stages."""
        context = self.context
        mine = [name for name in self.named_parameters if not self._is_tied_copy(name)]
        counts = context.dp.rank == 0 and context.tp.rank == 0
        return int(context.sum(torch.tensor([len(mine) * counts], device=context.device)).item())

    def _is_tied_copy(self, name: str) -> bool:
        """True for the last pipeline stage's copy of the word embedding."""
        return name.startswith("embedding.") and self.context.pp.rank > 0

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
        """Copy the fp32 masters to the model weights, on every rank; called after fragments were changed."""
        if not self._is_stage_3:
            self._zero.update_lp_params()
            return
        for group in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        if self._zero.persistent_parameters:  # small ones, whole on every rank
            self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)


def _gradient_of(weight: torch.Tensor, flats: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The gradient of a fragment's fp32 weight, which is a view of one of the optimizer's flat partitions."""
    for flat in flats:
        start, byte = divmod(weight.data_ptr() - flat.data_ptr(), flat.element_size())
        if flat.grad is not None and byte == 0 and 0 <= start < flat.numel():
            return flat.grad[start : start + weight.numel()]
    return None
