"""One DeepSpeed dictionary from this project's configuration and the user's further DeepSpeed options.

Most options follow from our own settings. A user's file may repeat those (many files do) or say "auto", but
a contradiction is an error, so that there is one truth. Nothing here imports deepspeed or torch: a
configuration is checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.base.settings import build, merge, nest, section, setting, shown, to_tree
from megatron_lite.config.sections import BatchConfig, OptimizerConfig, ParallelConfig, TrainingConfig

# What a user may change: the type in which gradients are summed over ranks (DeepSpeed would take that of the weights
# and round what was accumulated in fp32), the reference's fp16 loss scaling, and DeepSpeed's own log lines, off.
DEFAULTS: dict[str, Any] = {
    "communication_data_type": "fp32",
    "fp16": {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "steps_per_print": 2**31 - 1,
}

# What has no place in a DeepSpeed file here, and what to use.
REFUSED = {
    "optimizer": "use the section optimizer",
    "scheduler": "use the section schedule",
    "activation_checkpointing": "use training.recompute",
    "amp": "use training.precision",
    "torch_autocast": "use training.precision",
    "elasticity": "use the section batch; it fits every number of processes that divides it",
    "pipeline": "use parallel.pipeline_parallel_size",
    "tensor_parallel": "use parallel.tensor_parallel_size",
    "sequence_parallel_size": "use parallel.sequence_parallel",
    "bf16.check_grad_overflow": "gradients that are not finite are never applied",
    "bf16.bf16_master_weights_and_grads": "optimizer state is fp32",
    "fp16.fp16_master_weights_and_grads": "optimizer state is fp32",
    "zero_optimization.compute_grad_norm": "without the norm nothing is clipped or skipped",
    "zero_optimization.mics_shard_size": "checkpoints need every stage's usual shards",
    "zero_optimization.round_robin_gradients": "DeepSpeed then misplaces weights, so that checkpoints would be wrong",
    "zero_optimization.zenflow": "it applies gradients late",
    "zero_optimization.offload_optimizer": "use parallel.offload_optimizer",
    "zero_optimization.offload_param": "offloading weights is not supported",
}


def _option(**limits: Any) -> Any:
    return setting(None, "", **limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bf16:
    enabled: bool | None = None
    immediate_grad_update: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fp16:
    enabled: bool | None = None
    auto_cast: bool | None = None
    loss_scale: float | None = _option(at_least=0)
    initial_scale_power: int | None = _option(at_least=0)
    loss_scale_window: int | None = _option(at_least=1)
    hysteresis: int | None = _option(at_least=1)
    consecutive_hysteresis: bool | None = None
    min_loss_scale: int | None = _option(at_least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Zero:
    stage: int | None = None
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: int | None = _option(at_least=1)
    use_multi_rank_bucket_allreduce: bool | None = None
    allgather_partitions: bool | None = None
    allgather_bucket_size: int | None = _option(at_least=0)
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool | None = None
    elastic_checkpoint: bool | None = None
    sub_group_size: int | None = _option(at_least=0)
    stage3_prefetch_bucket_size: int | None = _option(at_least=0)
    stage3_param_persistence_threshold: int | None = _option(at_least=0)
    stage3_model_persistence_threshold: int | None = _option(at_least=0)
    stage3_max_live_parameters: int | None = _option(at_least=0)
    stage3_max_reuse_distance: int | None = _option(at_least=0)
    stage3_gather_16bit_weights_on_model_save: bool | None = None
    stage3_module_granularity_threshold: int | None = _option(at_least=0)
    stage3_use_all_reduce_for_fetch_params: bool | None = None
    stage3_allgather_sequential: bool | None = None
    ignore_unused_parameters: bool | None = None
    zero_hpz_partition_size: int | None = _option(at_least=1)
    zero_quantized_weights: bool | None = None
    zero_quantized_nontrainable_weights: bool | None = None
    zero_quantized_gradients: bool | None = None
    memory_efficient_linear: bool | None = None
    log_trace_cache_warnings: bool | None = None
    enable_sanity_checks: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataTypes:
    grad_accum_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    load_universal: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CommsLogger:
    enabled: bool | None = None
    prof_all: bool | None = None
    prof_ops: tuple[str, ...] | None = None
    verbose: bool | None = None
    debug: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FlopsProfiler:
    enabled: bool | None = None
    recompute_fwd_factor: float | None = _option(at_least=0)
    profile_step: int | None = _option(at_least=1)
    module_depth: int | None = _option(at_least=-1)
    top_modules: int | None = _option(at_least=1)
    detailed: bool | None = None
    output_file: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileMonitor:
    enabled: bool | None = None
    output_path: str | None = None
    job_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wandb:
    enabled: bool | None = None
    group: str | None = None
    team: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The DeepSpeed options that are taken, with DeepSpeed's names and types; None = its default.

    tests/config/test_deepspeed_options.py compares them with the installed DeepSpeed.
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    steps_per_print: int | None = _option(at_least=1)
    communication_data_type: str | None = _option(one_of=("fp32", "fp16", "bf16"))
    prescale_gradients: bool | None = None
    gradient_predivide_factor: float | None = _option(above=0)
    disable_allgather: bool | None = None
    zero_allow_untested_optimizer: bool | None = None
    zero_force_ds_cpu_optimizer: bool | None = None
    wall_clock_breakdown: bool | None = None
    memory_breakdown: bool | None = None
    dump_state: bool | None = None
    bf16: _Bf16 = section(_Bf16)
    fp16: _Fp16 = section(_Fp16)
    zero_optimization: _Zero = section(_Zero)
    data_types: _DataTypes = section(_DataTypes)
    checkpoint: _Checkpoint = section(_Checkpoint)
    comms_logger: _CommsLogger = section(_CommsLogger)
    flops_profiler: _FlopsProfiler = section(_FlopsProfiler)
    tensorboard: _FileMonitor = section(_FileMonitor)
    csv_monitor: _FileMonitor = section(_FileMonitor)
    wandb: _Wandb = section(_Wandb)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tree:
    deepspeed: Options = section(Options)  # so that messages name keys as the user writes them


def deepspeed_options(
    given: Mapping[str, Any],
    batch: BatchConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    dp_size: int | None = None,
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize` on `dp_size` data-parallel ranks.

    Args:
        given: the user's options, the section `deepspeed`.
        dp_size: None = not known yet; what depends on it is neither checked nor part of the result.
    Raises: ConfigError if the batch does not divide over the ranks, or a user's option is refused, unknown, of the
        wrong type, or contradicts ours.
    """
    for key, remedy in REFUSED.items():
        if _lookup(given, key) is not None:
            raise ConfigError(f"deepspeed.{key} is not taken from DeepSpeed options; remove it, {remedy}.")
    derived = _derived(batch, optimizer, parallel, training, dp_size)
    stated = _without_auto(given, derived)
    options = merge(DEFAULTS, _without_none(to_tree(build(_Tree, {"deepspeed": stated}).deepspeed)))
    for key, (value, source) in derived.items():
        found = _lookup(stated, key)
        if value is None:
            continue
        if found not in (None, value):
            raise ConfigError(
                f"deepspeed.{key} is {shown(found)}, but {source} makes it {value!r}; make them agree, or remove "
                "the DeepSpeed key: it is derived."
            )
        options = merge(options, nest(key, value))
    return options


def _without_auto(tree: Mapping[str, Any], derived: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Without keys that say nothing: null anywhere, "auto" where we know the value."""
    stated = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            stated[key] = _without_auto(value, derived, f"{path}{key}.")
        elif value is not None and not (value == "auto" and f"{path}{key}" in derived):
            stated[key] = value
    return stated


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Only what has a value; sections without any are left out."""
    stated = {key: _without_none(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in stated.items() if value is not None and value != {}}


def _derived(
    batch: BatchConfig,
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    dp_size: int | None,
) -> dict[str, tuple[Any, str]]:
    """Dotted DeepSpeed key -> the value this project decides (None = not known yet), and what decides it."""
    precision = f"training.precision ({training.precision})"
    ranks = "?" if dp_size is None else dp_size
    derived: dict[str, tuple[Any, str]] = {
        "train_batch_size": (batch.global_batch_size, "batch.global_batch_size"),
        "train_micro_batch_size_per_gpu": (batch.micro_batch_size, "batch.micro_batch_size"),
        "gradient_accumulation_steps": (
            None if dp_size is None else batch.accumulation_steps(dp_size),
            f"the section batch on {ranks} data-parallel ranks",
        ),
        "gradient_clipping": (optimizer.clip_grad_norm, "optimizer.clip_grad_norm"),
        "zero_optimization.stage": (parallel.zero_stage, "parallel.zero_stage"),
        # torch's AdamW, which needs no compile step
        "zero_allow_untested_optimizer": (True, "this project's optimizer"),
        "data_types.grad_accum_dtype": ("fp32", "this project's fp32 accumulation"),
        "bf16.enabled": (training.precision == "bf16", precision),
        "fp16.enabled": (training.precision == "fp16", precision),
    }
    if parallel.offload_optimizer:
        # torch's AdamW steps on the CPU as well; DeepSpeed's own would have to be compiled at the start.
        offload = "parallel.offload_optimizer"
        derived["zero_force_ds_cpu_optimizer"] = (False, offload)
        derived["zero_optimization.offload_optimizer.device"] = ("cpu", offload)
        derived["zero_optimization.offload_optimizer.pin_memory"] = (True, offload)
    if parallel.pipeline_parallel_size > 1:
        # Splitting what stages send over tensor-parallel ranks contradicts sequence parallelism, which did it already.
        for key in ("pipe_partitioned", "grad_partitioned"):
            derived[f"pipeline.{key}"] = (False, "this project's pipeline")
    return derived


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None if there is none."""
    section, dot, rest = key.partition(".")
    value = tree.get(section)
    if not dot or value is None:
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"deepspeed.{section} is {shown(value)}, but it must be a mapping; write its keys.")
    return _lookup(value, rest)
