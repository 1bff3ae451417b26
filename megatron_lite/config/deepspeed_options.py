"""The dictionary for DeepSpeed, from this project's settings and the user's other DeepSpeed options.

Most options follow from settings. Those of a user's file became settings when it was read (deepspeed_file.py); here the
section `deepspeed` may repeat them, and a contradiction is an error.
Nothing here imports deepspeed or torch: a configuration is checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_utils.common.setting_files import shown
from data_utils.common.settings import merge, nest
from megatron_lite.config.deepspeed_table import sort_options, table
from megatron_lite.config.sections import BatchConfig, OptimizerConfig, ParallelConfig, TrainingConfig

# Defaults that a user may change: the type in which gradients are summed over ranks (DeepSpeed would take that of the
# weights and round sums made in fp32), fp16 loss scaling as in the reference, and DeepSpeed's own log lines (off).
DEFAULTS: dict[str, Any] = {
    "communication_data_type": "fp32",
    "fp16": {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "steps_per_print": 2**31 - 1,
    "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per micro-batch
}


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
        wrong type, or contradicts a setting.
    """
    sorted_options = sort_options(given)
    derived = _derived(batch, optimizer, parallel, training, dp_size)
    for key, value in sorted_options.settings.items():
        expected, source = derived.get(key, (None, table().options[key].reason))
        if key not in derived:
            sorted_options.problems.append(
                f"deepspeed.{key} corresponds to {source}; set that instead, or set the option in a file or as an "
                "override."
            )
        elif expected is not None and value != expected:
            sorted_options.problems.append(
                f"deepspeed.{key} is {shown(value)}, but {source} makes it {expected!r}; make them equal, or remove "
                "the DeepSpeed option, which is derived."
            )
    sorted_options.refuse()
    options = merge(DEFAULTS, sorted_options.for_deepspeed(parallel.zero_stage))
    for key, (value, _) in derived.items():
        if value is not None:
            options = merge(options, nest(key, value))
    return options


def default_bucket_size(dp_size: int) -> int:
    """Elements reduced at once at ZeRO 1 and 2, if zero_optimization.reduce_bucket_size is not set.

    Large enough that a ring over all ranks is not bound by latency. Source: Megatron-LM's distributed optimizer.
    """
    return max(40_000_000, 1_000_000 * dp_size)


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
        "zero_allow_untested_optimizer": (True, "the optimizer used here"),
        "data_types.grad_accum_dtype": ("fp32", "fp32 gradient accumulation"),
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
            derived[f"pipeline.{key}"] = (False, "the pipeline engine used here")
    return derived
