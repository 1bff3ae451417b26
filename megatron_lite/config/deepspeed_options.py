"""The dictionary for DeepSpeed, from this project's configuration and the user's further DeepSpeed options.

Most options follow from our own settings. A user's file may repeat those or say "auto"; a contradiction is an error.
Nothing here imports deepspeed or torch: a configuration is checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.base.setting_files import shown
from data_utils.base.settings import build, merge, nest, section, setting, to_tree
from megatron_lite.config.sections import BatchConfig, OptimizerConfig, ParallelConfig, TrainingConfig

# Defaults that a user may change: the type in which gradients are summed over ranks (DeepSpeed would take that of the
# weights and round sums made in fp32), fp16 loss scaling as in the reference, and DeepSpeed's own log lines (off).
DEFAULTS: dict[str, Any] = {
    "communication_data_type": "fp32",
    "fp16": {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "steps_per_print": 2**31 - 1,
    "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per micro-batch
}

# Options that are not taken, and what to use instead, or why.
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

# At ZeRO 1 and 2 engine/sharded.py exchanges gradients and weights. What it always does, and DeepSpeed options that it
# does not have.
ALWAYS_AT_STAGES_1_AND_2 = (
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.overlap_comm",
    "zero_optimization.allgather_partitions",
)
ONLY_AT_STAGE_3 = (
    "bf16.immediate_grad_update", "checkpoint.load_universal", "disable_allgather", "gradient_predivide_factor",
    "prescale_gradients", "zero_optimization.allgather_bucket_size", "zero_optimization.elastic_checkpoint",
    "zero_optimization.load_from_fp32_weights", "zero_optimization.use_multi_rank_bucket_allreduce",
)  # fmt: skip

# Types of options, with the ranges that make sense.
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "flag": (bool, {}), "text": (str, {}), "names": (tuple[str, ...], {}), "count": (int, {"at_least": 0}),
    "size": (int, {"at_least": 1}), "depth": (int, {"at_least": -1}), "number": (float, {"at_least": 0}),
    "factor": (float, {"above": 0}), "dtype": (str, {"one_of": ("fp32", "fp16", "bf16")}),
}  # fmt: skip


def _options(sections: Mapping[str, type] | None = None, **keys: str) -> Any:
    """A section class. Args: keys: kind -> the names of its options, each None by default: DeepSpeed's default."""
    fields = [
        (name, _KINDS[kind][0] | None, setting(None, "", **_KINDS[kind][1]))
        for kind, names in keys.items()
        for name in names.split()
    ]
    nested = [(name, cls, section(cls)) for name, cls in (sections or {}).items()]
    return make_dataclass("Options", [*fields, *nested], frozen=True, kw_only=True, slots=True)


_FILE_MONITOR = _options(flag="enabled", text="output_path job_name")
_SECTIONS = {
    "bf16": _options(flag="enabled immediate_grad_update"),
    "fp16": _options(
        flag="enabled auto_cast consecutive_hysteresis",
        number="loss_scale",
        count="initial_scale_power min_loss_scale",
        size="loss_scale_window hysteresis",
    ),
    "zero_optimization": _options(
        flag="""contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
            load_from_fp32_weights elastic_checkpoint stage3_gather_16bit_weights_on_model_save
            stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
            zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
            memory_efficient_linear log_trace_cache_warnings enable_sanity_checks""",
        count="""stage allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
            stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
            stage3_max_reuse_distance stage3_module_granularity_threshold""",
        size="reduce_bucket_size zero_hpz_partition_size",
    ),
    "data_types": _options(text="grad_accum_dtype"),
    "checkpoint": _options(flag="load_universal"),
    "comms_logger": _options(flag="enabled prof_all verbose debug", names="prof_ops"),
    "flops_profiler": _options(
        flag="enabled detailed",
        number="recompute_fwd_factor",
        size="profile_step top_modules",
        depth="module_depth",
        text="output_file",
    ),
    "tensorboard": _FILE_MONITOR,
    "csv_monitor": _FILE_MONITOR,
    "wandb": _options(flag="enabled", text="group team project"),
}
# The DeepSpeed options that are taken. tests/config/test_deepspeed_options.py compares names, types and ranges with the
# installed DeepSpeed.
Options = _options(
    _SECTIONS,
    size="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
    number="gradient_clipping",
    dtype="communication_data_type",
    factor="gradient_predivide_factor",
    flag="""prescale_gradients disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        wall_clock_breakdown memory_breakdown dump_state""",
)
_TREE = _options({"deepspeed": Options})  # so that messages name keys as the user writes them


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
    if parallel.zero_stage < 3:
        _check_stages_1_and_2(stated)
    options = merge(DEFAULTS, _without_none(to_tree(build(_TREE, {"deepspeed": stated}).deepspeed)))
    for key, (value, source) in derived.items():
        given_value = _lookup(stated, key)
        if value is None:
            continue
        if given_value not in (None, value):
            raise ConfigError(
                f"deepspeed.{key} is {shown(given_value)}, but {source} makes it {value!r}; make them agree, or remove "
                "the DeepSpeed key: it is derived."
            )
        options = merge(options, nest(key, value))
    return options


def default_bucket_size(dp_size: int) -> int:
    """Elements reduced at once at ZeRO 1 and 2, if zero_optimization.reduce_bucket_size is not set.

    Large enough that a ring over all ranks is not bound by latency. Source: Megatron-LM's distributed optimizer.
    """
    return max(40_000_000, 1_000_000 * dp_size)


def _check_stages_1_and_2(stated: Mapping[str, Any]) -> None:
    for key in ONLY_AT_STAGE_3:
        if _lookup(stated, key) is not None:
            raise ConfigError(f"deepspeed.{key} has an effect at parallel.zero_stage 3 only; remove it.")
    for key in ALWAYS_AT_STAGES_1_AND_2:
        if _lookup(stated, key) is False:
            raise ConfigError(
                f"deepspeed.{key} is False, but at parallel.zero_stage 1 and 2 it is always done; remove it."
            )


def _without_auto(tree: Mapping[str, Any], derived: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The tree without keys that set nothing: null anywhere, "auto" where we derive the value."""
    stated = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            stated[key] = _without_auto(value, derived, f"{path}{key}.")
        elif value is not None and not (value == "auto" and f"{path}{key}" in derived):
            stated[key] = value
    return stated


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree without null and empty sections."""
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
    passes = None if dp_size is None else batch.accumulation_steps(dp_size)
    derived: dict[str, tuple[Any, str]] = {
        "train_batch_size": (batch.global_batch_size, "batch.global_batch_size"),
        "train_micro_batch_size_per_gpu": (batch.micro_batch_size, "batch.micro_batch_size"),
        "gradient_accumulation_steps": (passes, f"the section batch on {dp_size} data-parallel ranks"),
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
