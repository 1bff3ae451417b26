"""One DeepSpeed dictionary from this project's configuration and the user's further DeepSpeed options.

Most options follow from our own settings. A user's file may repeat those (many files do) or say "auto", but
a contradiction is an error, so that there is one truth. Nothing here imports deepspeed or torch: a
configuration is checked before either is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_lite.errors import ConfigError
from megatron_lite.settings import merge, nest, shown

if TYPE_CHECKING:
    from megatron_lite.config import Config

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


def deepspeed_options(config: Config, dp_size: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize` on `dp_size` data-parallel ranks.

    Raises: ConfigError if the batch does not divide over the ranks, or a user's option contradicts ours.
    """
    check_agreement(config, dp_size)
    options = merge(DEFAULTS, config.deepspeed)
    for key, (value, _) in _derived(config, dp_size).items():
        options = merge(options, nest(key, value))
    return options


def check_agreement(config: Config, dp_size: int | None = None) -> None:
    """Raise ConfigError where `config.deepspeed` is refused or contradicts what the configuration decides.

    Args:
        dp_size: data-parallel ranks; None = not known yet, what depends on it is not checked.
    """
    for key, remedy in REFUSED.items():
        if _lookup(config.deepspeed, key) is not None:
            raise ConfigError(f"deepspeed.{key} is not taken from DeepSpeed options; remove it, {remedy}.")
    for key, (value, source) in _derived(config, dp_size).items():
        given = _lookup(config.deepspeed, key)
        if given not in (None, "auto", value):
            raise ConfigError(
                f"deepspeed.{key} is {shown(given)}, but {source} makes it {value!r}; make them agree, or remove "
                "the DeepSpeed key: it is derived."
            )


def _derived(config: Config, dp_size: int | None) -> dict[str, tuple[Any, str]]:
    """Dotted DeepSpeed key -> the value this project decides, and what decides it."""
    precision = f"training.precision ({config.training.precision})"
    derived = {
        "train_batch_size": (config.batch.global_batch_size, "batch.global_batch_size"),
        "train_micro_batch_size_per_gpu": (config.batch.micro_batch_size, "batch.micro_batch_size"),
        "gradient_clipping": (config.optimizer.clip_grad_norm, "optimizer.clip_grad_norm"),
        "zero_optimization.stage": (config.parallel.zero_stage, "parallel.zero_stage"),
        # torch's AdamW, which needs no compile step
        "zero_allow_untested_optimizer": (True, "this project's optimizer"),
        "data_types.grad_accum_dtype": ("fp32", "this project's fp32 accumulation"),
        "bf16.enabled": (config.training.precision == "bf16", precision),
        "fp16.enabled": (config.training.precision == "fp16", precision),
    }
    if config.parallel.offload_optimizer:
        # torch's AdamW steps on the CPU as well; DeepSpeed's own would have to be compiled at the start.
        offload = "parallel.offload_optimizer"
        derived["zero_force_ds_cpu_optimizer"] = (False, offload)
        derived["zero_optimization.offload_optimizer.device"] = ("cpu", offload)
        derived["zero_optimization.offload_optimizer.pin_memory"] = (True, offload)
    if config.parallel.pipeline_parallel_size > 1:
        # Splitting what stages send over tensor-parallel ranks contradicts sequence parallelism, which did it already.
        for key in ("pipe_partitioned", "grad_partitioned"):
            derived[f"pipeline.{key}"] = (False, "this project's pipeline")
    if dp_size is not None:
        steps = config.batch.accumulation_steps(dp_size)
        derived["gradient_accumulation_steps"] = (
            steps,
            f"the section batch on {dp_size} data-parallel ranks",
        )
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
