"""The engine: a model and its optimizer in any parallel configuration, as trainer and checkpoints use them.

An `Engine` computes training steps and evaluations, and yields the fragments of fp32 weights and Adam moments that this
rank owns under ZeRO. Its two subclasses are in plain.py (all layers in every process) and pipeline.py (stages).
DeepSpeed runs the passes, with the options that config/deepspeed_options.py derives; the optimizer is
`ShardedOptimizer` at ZeRO 1 and 2, and DeepSpeed's own at ZeRO 3 (zero3.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from data_utils.common.errors import DeviceMemoryError
from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.config.deepspeed_options import default_bucket_size
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.engine import nvidia_apex
from megatron_lite.engine.deepspeed_engines import deepspeed_engine, quiet_deepspeed
from megatron_lite.engine.parameter_groups import (
    GroupRules,
    decays,
    is_tied_copy,
    make_adamw,
    parameter_groups,
)
from megatron_lite.engine.vector_loss import vector_sums
from megatron_lite.engine.zero3 import Zero3
from megatron_lite.optim.buckets import Bucket
from megatron_lite.optim.ema import Averages
from megatron_lite.optim.factory import make_optimizer
from megatron_lite.optim.lr_multipliers import (
    NO_MULTIPLIERS,
    LrMultipliers,
    lora_multipliers,
)
from megatron_lite.optim.sharded import Outcome, ShardedOptimizer
from megatron_lite.parallel.collectives import SINGLE
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.attention_backends.plan import dense_reason
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.cuda_graphs import BlockGraphs
from megatron_lite.transformer.embedding import PositionEmbeddings
from megatron_lite.transformer.flops import EXPERTS
from megatron_lite.transformer.length_table import length_table
from megatron_lite.transformer.lengths import builds_kernels, few_lengths
from megatron_lite.transformer.micro_batch import MicroBatch, prepare
from megatron_lite.transformer.router import MEASURES, Router
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    Partition,
    RowParallelLinear,
    accumulate_in_backward,
    partition_of,
)
from megatron_lite.transformer.trained_model import loss_measures
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@contextlib.contextmanager
def memory_advice(config: Config) -> Iterator[None]:
    """Turn a device's out-of-memory error into a DeviceMemoryError that names the settings that need less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        batch, recompute, parallel = config.batch, config.training.recompute, config.parallel
        advised = DeviceMemoryError(
            f"out of memory: {' '.join(str(error).split()[:20])} ... Lower batch.micro_batch_size "
            f"({batch.micro_batch_size}), set training.recompute ({recompute}) to full, or raise parallel.zero_stage "
            f"({parallel.zero_stage}) or tensor_parallel_size ({parallel.tensor_parallel_size}); --dry-run PROCESSES "
            "estimates what a layout needs."
        )
        advised.only_here = True
        raise advised from error


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Its outcome may still be computed by the device: reading it waits, once."""

    # fp64 [objectives, 3] of this rank's samples: loss, weight, z-loss; zeros without the model's last layer.
    objective_sums: torch.Tensor
    outcome: Callable[[], Outcome]

    @property
    def grad_norm(self) -> float:
        return self.outcome().grad_norm

    @property
    def skipped(self) -> bool:
        return self.outcome().skipped

    @property
    def loss_scale(self) -> float:
        return self.outcome().loss_scale


GradientObserver = Callable[[Fragment, torch.Tensor], None]


def warn_of_slow_attention(config: Config, context: ParallelContext) -> None:
    """Warn of attention under a mask of all pairs, once for each start."""
    reason = dense_reason(config.model, context.device)
    if reason is not None and context.is_main:
        log.warning("%s", reason)


class Engine(ABC):
    """A model and its optimizer under DeepSpeed, in any parallel configuration."""

    def __init__(
        self,
        module: nn.Module,
        named: dict[str, nn.Parameter],
        config: Config,
        context: ParallelContext,
        mpu: Any,
        multipliers: Mapping[str, LrMultipliers] | None = None,
    ):
        """Args:
        named: the parameters of this rank under their global names.
        multipliers: of the parameters that are frozen in some steps or have another learning rate; None: as
            pretraining has them.
        """
        # Heavy: a refused configuration must not pay for this import.
        from deepspeed.accelerator import get_accelerator

        # DeepSpeed 0.19.8 calls a name that torch 2.13 deprecates, at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        if context.device.type == "cpu":
            # DeepSpeed asks for fp16 matrix instructions; without them our layers multiply in fp32 (`linear`).
            get_accelerator().is_fp16_supported = lambda: True
        if config.training.layernorm == "apex":
            nvidia_apex.use_layernorm(module, context.device)
        warn_of_slow_attention(config, context)
        self.context = context
        self._config = config
        self._has_graphs = config.training.cuda_graphs and context.device.type == "cuda"
        routers = [each for each in module.modules() if isinstance(each, Router)]
        self._routers = {
            name: router for name, p in named.items() for router in routers if p is router.weight
        }
        self._router_sums: dict[str, torch.Tensor] = {}  # of the last step, see `Router.end_step`
        # Moved by counts and not by gradients, and whole on every rank: the optimizer does not know them.
        self._biases = {name: p for name, p in named.items() for router in routers if p is router.bias}
        named = {name: p for name, p in named.items() if name not in self._biases}
        self._named = named
        self._multipliers = lora_multipliers(named, config) if multipliers is None else multipliers
        if config.model.mup is not None:
            # muP gives every parameter multipliers, not only the frozen ones.
            rules = GroupRules(config, context, self._multipliers)
            self._multipliers = {name: rules.by_width(name, parameter) for name, parameter in named.items()}
        self._step = 1
        self._options = config.model  # that the modules have
        options = config.deepspeed_options(context.dp.size)
        with quiet_deepspeed():
            # Stage 3 shards the weights inside DeepSpeed's hooks, so its optimizer stays DeepSpeed's. At stages 1 and 2
            # its engine only runs the passes, and the optimizer is ours (sharded.py says why).
            if config.parallel.zero_stage == 3:
                self._engine = self._zero3_engine(module, options, mpu)
                self._zero: ShardedOptimizer | Zero3 = Zero3(
                    self._engine.optimizer,
                    context.dp,
                    {named[name]: factors for name, factors in self._multipliers.items()},
                )
            else:
                self._engine = deepspeed_engine(module, options, mpu, self._sharded_optimizer)
                self._zero = self._engine.optimizer
                self._accumulate_in_backward(module, self._engine.optimizer)
        # At the lowest scale DeepSpeed would raise a bare Exception: training.max_nonfinite_steps decides instead.
        self._zero.loss_scaler.raise_error_at_min_scale = False
        self._averages: Averages | None = None
        if config.ema.decay is not None:
            assert isinstance(self._zero, ShardedOptimizer), "configuration checks the stage"
            self._averages = Averages(self._zero, config.ema)
        # The background save copies fragments while the passes run, and finishes its copy here (saver.py).
        self.before_update: Callable[[], None] = lambda: None  # called before each change of the fragments
        self._wrap_optimizer_step()

    def _zero3_engine(self, module: nn.Module, options: dict[str, Any], mpu: Any) -> Any:
        import deepspeed

        settings, named = self._config.optimizer, {}
        for name, parameter in self._named.items():
            if self._multipliers.get(name, NO_MULTIPLIERS).is_never_trained:
                parameter.requires_grad_(False)  # so that DeepSpeed keeps neither state nor gradients
            else:
                named[name] = parameter
        optimizer = make_adamw(parameter_groups(named, self._config, self._multipliers), settings)
        return deepspeed.initialize(
            model=module, optimizer=optimizer, config=options, mpu=mpu, dist_init_required=False
        )[0]

    def _sharded_optimizer(self, options: dict[str, Any], loss_scaler: Any) -> ShardedOptimizer:
        # The backward pass finishes gradients about in the reverse order of the layers.
        rules = GroupRules(self._config, self.context, self._multipliers)
        groups = {p: rules.group(name, p) for name, p in reversed(self._named.items())}
        return ShardedOptimizer(
            groups,
            self.context,
            stage=self._config.parallel.zero_stage,
            bucket_size=options["zero_optimization"].get(
                "reduce_bucket_size", default_bucket_size(self.context.dp.size)
            ),
            clip_grad_norm=self._config.optimizer.clip_grad_norm,
            communication_type=TYPES[options["communication_data_type"]],
            loss_scaler=loss_scaler,
            make_optimizer=self._make_optimizer,
            offload=self._config.parallel.offload_optimizer,
        )

    def _make_optimizer(self, groups: list[dict[str, Any]], buckets: list[Bucket]) -> torch.optim.Optimizer:
        # torch's optimizers know tensors, not names; which matrices Muon updates and which tensors LAMB adapts follows
        # from the name.
        config, names = self._config, {parameter: name for name, parameter in self._named.items()}
        if config.optimizer.kind == "adamw":
            return make_adamw(groups, config.optimizer)
        return make_optimizer(
            groups, buckets, names, functools.partial(decays, config=config), config, self.context
        )

    def _accumulate_in_backward(self, module: nn.Module, optimizer: ShardedOptimizer) -> None:
        """Accumulate the gradients of the blocks' parameters inside backward instead of in `.grad`.

        This needs parameters that a backward pass uses once, so blocks that share their layers are left out.
        """
        if self._config.model.share_layers != "none":
            return
        graphs = BlockGraphs(optimizer) if self._has_graphs else None
        for layer in module.modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                accumulate_in_backward(
                    layer.weight, functools.partial(optimizer.accumulate_weight_grad, layer.weight)
                )
        for layer in module.modules():
            if isinstance(layer, Block):
                layer.accumulate_gradients(optimizer.add_gradient)
                if graphs is not None:
                    layer.fused = graphs.add_to(layer.fused)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank under their global names, with the values of the last step."""
        self._zero.wait_for_weights()
        return {**self._named, **self._biases}

    @abstractmethod
    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Forward and backward of the micro-batches, then one optimizer step with learning rate `lr`."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """fp64 [objectives, 3] as in StepResult, of batches of the training shape, without dropout."""

    def prepared(
        self, batch: Batch, dropout_seed: int | None, loss_factor: float = 1.0, step_share: float = 1.0
    ) -> MicroBatch:
        """The micro-batch of a batch for this model and parallel configuration, on the host.

        Args: loss_factor, step_share: see MicroBatch.
        """
        sequences, length = batch.layout.shape
        slots = sequences * length
        has_stages, has_decoder = self.context.pp.size > 1, self._config.model.decoder_layers > 0
        device, dtype = self.context.device, TYPES[self._config.training.precision]
        # The number of tokens is rounded up to a multiple, so that memory is reused and few kernels are built. Pipeline
        # stages exchange one shape, so there all padding stays and nothing is rounded.
        multiple = few_lengths(slots, device, dtype) if not has_stages or has_decoder else 1
        if device.type == "cuda" and not (has_stages or has_decoder or self._config.decoder):
            # On a GPU the lengths come from a table of about 32: the allocator's blocks and CUDA graphs are reused.
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            table = length_table(
                slots, self._config.model, processors, self.context.tp.size, self._has_graphs
            )
            multiple = int(table[np.searchsorted(table, batch.tokens)])
        elif self._config.parallel.sequence_parallel:
            multiple = math.lcm(multiple, self.context.tp.size)  # the tokens are split evenly
        micro_batch = prepare(
            batch,
            device,
            self._config.model,
            decoder_config=self._config.decoder,
            dropout_seed=dropout_seed,
            multiple=multiple,
            few_counts=builds_kernels(device, dtype),
            has_one_length=has_stages,  # what stages send
            has_graphs=self._has_graphs,
            tensor_parallel_rank=self.context.tp.rank,
            tensor_parallel_size=self.context.tp.size,
        )
        return replace(micro_batch, loss_factor=loss_factor, step_share=step_share)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Within the context the model computes with the averages of its weights, if `ema.use` says so."""
        if self._averages is None or not self._config.ema.use:
            return contextlib.nullcontext()
        return self._averages.swapped_in()

    def _wrap_optimizer_step(self) -> None:
        """Call `before_update` before each optimizer step: until then the fragments do not change and can be copied."""
        optimizer = self._engine.optimizer
        step = optimizer.step

        # DeepSpeed's engine calls `optimizer.step` itself, so the bound method is replaced. The averages follow each
        # update.
        def announced_step(*args: Any, **kwargs: Any) -> None:
            self.before_update()
            step(*args, **kwargs)
            if self._routers:
                assert isinstance(self._zero, ShardedOptimizer), "configuration checks the stage"
                for name, router in self._routers.items():
                    self._router_sums[name] = router.end_step(self.context.dp, self._zero.skipped)
            if self._averages is not None:
                self._averages.update(self._step)

        optimizer.step = announced_step

    def set_step(self, step: int) -> None:
        """The number of the next step, from 1, or of the last: its phase has options of the model.

        It also decides which parameters are trained.
        """
        self._step = step
        if self._multipliers:
            self._zero.set_step(step)
        model = self._phase_plan.model(step)
        if model != self._options:
            self._options = model
            self._set_options(model)

    def _set_options(self, model: ModelConfig) -> None:
        """Make the modules compute as these options say, in what a phase may change."""
        for module in self._engine.module.modules():
            if isinstance(module, PositionEmbeddings):
                module.gradient_shrink = model.embedding_gradient_shrink
            elif isinstance(module, Transformer):
                module.config = replace(module.config, rotary_base=model.rotary_base)

    def more_measures(self, loss: float) -> dict[str, float]:
        """Measures of the last evaluation other than its losses. Args: loss: mean over predicted tokens, nats."""
        return loss_measures(loss)

    @property
    def annealed(self) -> dict[str, float]:
        """Weights that the loss of the last step had, by name, for the records."""
        return {}

    def expert_measures(self) -> dict[str, float]:
        """How the routers of all stages divided the tokens of the last step. A collective; {} without experts.

        Loads are tokens of an expert over the mean of its block, 1 if balanced: the highest and lowest of all blocks.
        Losses, without coefficients, and entropies (nats) are means over the blocks.
        """
        model, context = self._config.model, self.context
        settings = model.experts
        if settings is None:
            return {}
        columns = settings.count + len(MEASURES)
        table = torch.zeros(
            model.total_layers + model.mtp_layers, columns + 2, dtype=torch.float64, device=context.device
        )
        for name, sums in self._router_sums.items() if context.counts_stages else ():
            bias = self._routers[name].bias
            spread = sums.new_zeros(1) if bias is None else (bias.max() - bias.min()).double()[None]
            table[int(name.split(".")[1])] = torch.cat([sums, spread, sums.new_ones(1)])
        table = context.sum(table)
        rows = table[table[:, -1] > 0].cpu()
        loads = rows[:, : settings.count] / rows[:, : settings.count].mean(1, keepdim=True)
        measures = dict(zip(MEASURES, rows[:, settings.count : columns].mean(0).tolist(), strict=True))
        measures |= {"expert_load_highest": loads.max().item(), "expert_load_lowest": loads.min().item()}
        if settings.biased:
            measures["expert_bias_range"] = rows[:, columns].max().item()
        return measures

    def _vector_sums(
        self, vectors: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], num_losses: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`vector_sums` with the settings of the step's phase."""
        config = self._phase_plan.config(max(self._step - 1, 0))
        return vector_sums(vectors, micro_batches, config, self.context.dp, num_losses)

    @functools.cached_property
    def _phase_plan(self) -> PhasePlan:
        return self._config.phase_plan  # builds the configuration of each phase: once, not in each step

    def _begin_step(self, micro_batches: int, lr: float) -> None:
        self._zero.begin(micro_batches)
        for group in self._zero.param_groups:
            multipliers: LrMultipliers = group["multipliers"]
            # At stages 1 and 2 a frozen parameter has no gradient, and torch skips it. At stage 3 its gradient is zero,
            # and only the rate 0 keeps AdamW's moments and weight decay from changing it.
            group["lr"] = lr * multipliers.lr_factor if multipliers.is_trained(self._step) else 0.0

    def _scaled(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a step that has begun, with its loss scale."""
        return [replace(each, loss_scale=self._zero.loss_factor) for each in micro_batches]

    def _result(self, objective_sums: torch.Tensor) -> StepResult:
        return StepResult(objective_sums, self._zero.outcome)

    # Gradients

    @contextlib.contextmanager
    def observed_gradients(self, observer: GradientObserver) -> Iterator[None]:
        """Within the context, every optimizer step gives `observer` each owned fragment and its gradient fp32 [numel].

        The gradient is that of the step's loss over all samples as AdamW takes it: reduced, unscaled and clipped
        (`clip_divisor` undoes the clipping). A skipped step calls nothing.
        """

        def observe(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._zero.is_skipping():
                return
            # Gradients exist only as flat partitions here; `.grad` of the parameters is gone after the reduction.
            flats = [flat for group in optimizer.param_groups for flat in group["params"]]
            for fragment in self.fragments():
                weight = fragment.tensors.get("weight")
                gradient = None if weight is None else _gradient_of(weight, flats)
                if gradient is not None:
                    observer(fragment, gradient)

        # Every stage of ZeRO ends in a step of this optimizer on flat fp32 partitions, of one group or of all.
        hook = self._zero.optimizer.register_step_pre_hook(observe)
        try:
            yield
        finally:
            hook.remove()

    def clip_divisor(self, grad_norm: float) -> float:
        """The number by which clipping divided a step's gradients, from their norm before clipping."""
        clip_grad_norm = self._config.optimizer.clip_grad_norm
        if clip_grad_norm == 0:
            return 1.0
        return max(1.0, (grad_norm + 1e-6) / clip_grad_norm)  # DeepSpeed's formula

    # State for checkpoints

    def fragments(self) -> Iterator[Fragment]:
        """The fragments this rank owns. Together the ranks own every element, some elements several times."""
        tp = self.context.tp
        for name, parameter in self._named.items():
            owned = self._zero.owned(parameter)
            if owned is None:
                continue
            shape, start, tensors = owned
            partition = partition_of(parameter)
            is_copy = (partition.dim is None and tp.rank > 0) or is_tied_copy(name, self.context)
            if self._averages is not None:
                tensors["ema"] = self._averages.owned(parameter)
            yield Fragment(name, shape, partition, tp, start, tensors, is_copy)
            for state_name, values in self._zero.whole_state(name).items():
                # State of the whole tensor (factored moments) is equal on all ranks that own a shard of it: the owner
                # of the first element writes it.
                is_copy |= start > 0 or tp.rank > 0
                yield Fragment(
                    name, tuple(values.shape), Partition(), SINGLE, 0, {state_name: values.flatten()}, is_copy
                )
        for name, bias in self._biases.items():
            states = (
                ("weight",) if self._averages is None else ("weight", "ema")
            )  # of an average it is the last
            tensors = {state: bias.data for state in states}
            is_copy = tp.rank > 0 or self.context.dp.rank > 0
            yield Fragment(name, tuple(bias.shape), Partition(), SINGLE, 0, tensors, is_copy)

    def count_parameters(self) -> int:
        """Parameter tensors of the whole model, over all pipeline stages."""
        context = self.context
        # Each on one rank of those that hold it: of a stage the first one, of experts the first that has them.
        is_first, has_experts = context.dp.rank == 0, context.edp.rank == 0
        names = [
            name
            for name in (*self._named, *self._biases)
            if not is_tied_copy(name, context) and (has_experts if EXPERTS in name else is_first)
        ]
        counted = len(names) * (context.tp.rank == 0)
        return int(context.sum(torch.tensor([counted], device=context.device)).item())

    def scalar_state(self) -> dict[str, Any]:
        """Kind and step count of the optimizer, other counts by parameter, and the loss scaler; JSON values."""
        self._zero.outcome()  # it adapts the loss scale
        counts = {name: self._zero.step_count(parameter) for name, parameter in self._named.items()}
        # Parameters of a bucket share one count tensor; by its identity each is read once.
        read = {id(count): float(count) for count in counts.values()}  # few: each read waits for the device
        most = max(read.values())
        others = {name: read[id(count)] for name, count in counts.items() if read[id(count)] != most}
        scaler = self._zero.loss_scaler
        values = {key: getattr(scaler, key) for key in SCALER_STATE if hasattr(scaler, key)}
        return {
            "kind": self._config.optimizer.kind,
            "adam_step": most,
            "adam_steps": others,
            "loss_scaler": values,
        }

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        others = state.get("adam_steps", {})
        for name, parameter in self._named.items():
            self._zero.step_count(parameter).fill_(others.get(name, state["adam_step"]))
        scaler = self._zero.loss_scaler
        for key, value in state["loss_scaler"].items():
            if key in SCALER_STATE and hasattr(scaler, key):
                setattr(scaler, key, value)

    def gather_weights(self) -> None:
        """Copy the fp32 weights of all ranks to the model on every rank, after fragments were changed."""
        self._zero.gather_weights()


def _gradient_of(weight: torch.Tensor, flats: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The gradient of a fragment's fp32 weight, which is a view of one of the optimizer's flat partitions."""
    for flat in flats:
        start, byte = divmod(weight.data_ptr() - flat.data_ptr(), flat.element_size())
        if flat.grad is not None and byte == 0 and 0 <= start < flat.numel():
            return flat.grad[start : start + weight.numel()]
    return None
