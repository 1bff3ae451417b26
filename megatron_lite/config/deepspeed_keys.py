"""DeepSpeed's options, each with one policy, which says what happens to its value.

- SETTING: the value becomes a setting of this project (deepspeed_file.py).
- PASSED_ON: DeepSpeed, or this project's optimizer in its engine, reads the value; STAGE_3: the same at ZeRO 3 alone.
- NO_EFFECT: training computes the same numbers without it, so a start prints that it has no effect.
- REFUSED: training would compute other numbers.

Values that set nothing are accepted everywhere: null, "auto", DeepSpeed's default, sections with `enabled` false.
Types and names are those of DeepSpeed 0.19.8 and of the fields that it had before; tests/config/test_deepspeed_keys.py
compares them with the installed one. Nothing here imports deepspeed or torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from enum import Enum
from typing import Any, NamedTuple

from data_utils.common.settings import section, setting


class Policy(Enum):
    SETTING = "setting"
    PASSED_ON = "passed on"
    STAGE_3 = "stage 3"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Option(NamedTuple):
    type_name: str  # of OPTION_TYPES
    policy: Policy
    harmless: tuple[Any, ...] = ()  # values that set nothing
    reason: str = ""  # SETTING: which one; NO_EFFECT, STAGE_3: why it has none; REFUSED: the remedy


def _setting(type_name: str, setting: str) -> Option:
    return Option(type_name, Policy.SETTING, (), setting)


def _passed_on(type_name: str) -> Option:
    return Option(type_name, Policy.PASSED_ON)


def _stage_3(type_name: str, *harmless: Any, reason: str = "it applies to ZeRO 3 only") -> Option:
    return Option(type_name, Policy.STAGE_3, harmless, reason)


def _no_effect(type_name: str, *harmless: Any, reason: str) -> Option:
    return Option(type_name, Policy.NO_EFFECT, harmless, reason)


def _refused(type_name: str, *harmless: Any, remedy: str) -> Option:
    return Option(type_name, Policy.REFUSED, harmless, remedy)


# Types of options, with the ranges that make sense. "free" and "switch" are sections whose keys are not in the table;
# a "switch" does something only if its `enabled`, or that of a section inside it, is true.
OPTION_TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "flag": (bool, {}), "text": (str, {}), "names": (tuple[str, ...], {}), "count": (int, {"at_least": 0}),
    "size": (int, {"at_least": 1}), "depth": (int, {"at_least": -1}), "number": (float, {"at_least": 0}),
    "share": (float, {"at_least": 0, "at_most": 1}), "numbers": (tuple[float, ...], {}), "whole": (int, {}),
    "dtype": (str, {"one_of": ("fp32", "fp16", "bf16")}), "stage": (int, {"one_of": (0, 1, 2, 3)}),
    "device": (str, {"one_of": ("none", "cpu", "nvme")}), "free": (dict[str, Any], {}),
    "switch": (dict[str, Any], {}),
}  # fmt: skip

_BUCKETS = "at ZeRO 1 and 2 this project has its own buckets and communication order"
_UNREAD_AT_3 = "only ZeRO 1 and 2 of DeepSpeed read it, which are this project's own"
_PLACES = "it changes when gradients are averaged, which happens in fp32 here"
_CHECKPOINTS = "checkpoints are not DeepSpeed's, see the section checkpoint"
_RECOMPUTE = "use training.recompute"
_OFFLOAD = "parallel.offload_optimizer keeps the whole optimizer state in pinned CPU memory"
_WEIGHTS_STAY = "parameter offload is not supported; weights stay on the device"
_STAGES = "use parallel.pipeline_parallel_size and training.recompute"
_LAYERS = "the models have their own tensor-parallel layers"
_INFERENCE = "it is read by deepspeed.init_inference only"
_UNREAD = "DeepSpeed ignores it too"
_FP32_STATE = "weights, gradients and moments in the optimizer are always fp32: remove it"
_OTHER_TRAINING = "this feature is not supported: remove it, or set its enabled to false"
_LOSS_SCALE = "bf16 needs no loss scale"

KEYS = {
    # batch, optimizer, schedule
    "train_batch_size": _setting("size", "batch.global_batch_size"),
    "train_micro_batch_size_per_gpu": _setting("size", "batch.micro_batch_size"),
    "gradient_accumulation_steps": _setting("size", "batch"),
    "gradient_clipping": _setting("number", "optimizer.clip_grad_norm"),
    "optimizer": _setting("free", "the section optimizer"),
    "scheduler": _setting("free", "the section schedule"),
    "managed_gradient_accumulation": _no_effect("flag", True, reason="the training loop decides when a step ends"),
    # precision
    "fp16.enabled": _setting("flag", "training.precision"),
    "fp16.loss_scale": _passed_on("number"),
    "fp16.initial_scale_power": _passed_on("count"),
    "fp16.loss_scale_window": _passed_on("size"),
    "fp16.hysteresis": _passed_on("size"),
    "fp16.consecutive_hysteresis": _passed_on("flag"),
    "fp16.min_loss_scale": _passed_on("count"),
    "fp16.dynamic_loss_scale": _no_effect("flag", True, reason="it is dynamic if fp16.loss_scale is 0"),
    "fp16.auto_cast": _no_effect("flag", False, reason="model inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.enabled": _setting("flag", "training.precision"),
    "bf16.immediate_grad_update": _no_effect("flag", False, reason="gradients are applied at the end of a step"),
    "bf16.check_grad_overflow": _refused(
        "flag", True, remedy="steps with non-finite gradients are always skipped: remove it"
    ),
    "bf16.bf16_master_weights_and_grads": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.bf16_optimizer_states": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.loss_scale": _no_effect("number", 0, reason=_LOSS_SCALE),
    "bf16.initial_scale_power": _no_effect("count", reason=_LOSS_SCALE),
    "bf16.loss_scale_window": _no_effect("count", reason=_LOSS_SCALE),
    "bf16.hysteresis": _no_effect("count", reason=_LOSS_SCALE),
    "bf16.min_loss_scale": _no_effect("count", reason=_LOSS_SCALE),
    "bf16.auto_cast": _no_effect("flag", False, reason="model inputs are token ids"),
    "amp": _refused("switch", remedy="use training.precision=bf16 or fp16 instead, and remove it"),
    "torch_autocast": _refused(
        "switch", remedy="it keeps weights in fp32: use training.precision=bf16 or fp16 instead, and remove it"
    ),
    "data_types.grad_accum_dtype": _refused(
        "text", "fp32", "float32", remedy="gradients are always accumulated in fp32: remove it"
    ),
    "data_types.param_dtype": _no_effect("text", reason="use training.precision"),
    "data_types.buffer_dtype": _no_effect("text", reason="use training.precision"),
    "data_types.keep_in_fp32_modules": _no_effect("names", reason="the models have no such buffers"),
    "communication_data_type": _passed_on("dtype"),
    "seq_parallel_communication_data_type": _no_effect(
        "dtype", "fp32", reason="sequence-parallel communication uses the training precision"
    ),
    # ZeRO
    "zero_optimization.stage": _setting("stage", "parallel.zero_stage"),
    "zero_optimization.reduce_bucket_size": _passed_on("size"),
    "zero_optimization.contiguous_gradients": _stage_3("flag", True, reason=_BUCKETS),
    "zero_optimization.reduce_scatter": _stage_3("flag", True, reason=_BUCKETS),
    "zero_optimization.overlap_comm": _stage_3("flag", False, reason=_BUCKETS),
    "zero_optimization.allgather_partitions": _no_effect("flag", True, reason=_UNREAD_AT_3),
    "zero_optimization.allgather_bucket_size": _no_effect("count", 500_000_000, reason=_UNREAD_AT_3),
    "zero_optimization.use_multi_rank_bucket_allreduce": _no_effect("flag", True, reason=_UNREAD_AT_3),
    "zero_optimization.round_robin_gradients": _no_effect("flag", False, reason=_UNREAD_AT_3),
    "zero_optimization.parameter_alignment": _no_effect("flag", False, reason=_UNREAD_AT_3),
    "zero_optimization.ignore_unused_parameters": _no_effect(
        "flag", True, reason="unused parameters follow from the configuration"
    ),
    "zero_optimization.find_unused_parameters": _no_effect(
        "flag", False, reason="unused parameters follow from the configuration"
    ),
    "zero_optimization.legacy_stage1": _no_effect("flag", False, reason="DeepSpeed removed it"),
    "zero_optimization.compute_grad_norm": _no_effect(
        "flag", True, reason="the gradient norm is computed at every step"
    ),
    "zero_optimization.load_from_fp32_weights": _no_effect("flag", True, reason=_CHECKPOINTS),
    "zero_optimization.elastic_checkpoint": _no_effect("flag", False, reason=_CHECKPOINTS),
    "zero_optimization.pipeline_loading_checkpoint": _no_effect("flag", False, reason=_CHECKPOINTS),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _no_effect(
        "flag", False, reason="scripts/convert_checkpoint.py export writes full weights"
    ),
    "zero_optimization.offload_optimizer.device": _setting("device", "parallel.offload_optimizer"),
    "zero_optimization.offload_optimizer.pin_memory": _no_effect("flag", True, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.nvme_path": _no_effect("text", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.buffer_count": _no_effect("count", 4, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.buffer_size": _no_effect("count", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.max_in_cpu": _no_effect("count", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline_read": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline_write": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.fast_init": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.ratio": _no_effect("share", 1.0, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.super_offload": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _no_effect("share", 0.8, reason=_OFFLOAD),
    "zero_optimization.offload_param": _no_effect("free", reason=_WEIGHTS_STAY),
    "zero_optimization.cpu_offload_use_pin_memory": _no_effect("flag", True, reason=_OFFLOAD),
    "zero_optimization.zenflow": _refused("free", {}, remedy="it applies gradients late: remove it"),
    "zero_optimization.sub_group_size": _stage_3("count", 10**9),
    "zero_optimization.stage3_prefetch_bucket_size": _stage_3("count", 5 * 10**7),
    "zero_optimization.stage3_param_persistence_threshold": _stage_3("count", 10**5),
    "zero_optimization.stage3_model_persistence_threshold": _stage_3("count", sys.maxsize),
    "zero_optimization.stage3_max_live_parameters": _stage_3("count", 10**9),
    "zero_optimization.stage3_max_reuse_distance": _stage_3("count", 10**9),
    "zero_optimization.stage3_module_granularity_threshold": _stage_3("count", 0),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _stage_3("flag", False),
    "zero_optimization.stage3_allgather_sequential": _stage_3("flag", False),
    "zero_optimization.zero_hpz_partition_size": _stage_3("count", 0, 1),
    "zero_optimization.zero_quantized_weights": _stage_3("flag", False),
    "zero_optimization.zero_quantized_nontrainable_weights": _stage_3("flag", False),
    "zero_optimization.zero_quantized_gradients": _stage_3("flag", False),
    "zero_optimization.memory_efficient_linear": _stage_3("flag", True),
    "zero_optimization.override_module_apply": _stage_3("flag", True),
    "zero_optimization.log_trace_cache_warnings": _stage_3("flag", False),
    "zero_optimization.enable_sanity_checks": _stage_3("flag", False),
    "zero_optimization.leaf_module": _no_effect("free", {}, reason="the models have no such modules"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _no_effect("flag", False, reason=_OFFLOAD),
    "zero_optimization.mics_shard_size": _no_effect("whole", -1, reason="DeepSpeed removed it"),
    "zero_optimization.mics_hierarchical_params_gather": _no_effect(
        "flag", False, reason="DeepSpeed removed it"
    ),
    "zero_optimization.zeropp_loco_param": _refused(
        "free", {}, remedy="DeepSpeed removed it: remove it here too"
    ),
    "zero_allow_untested_optimizer": _no_effect("flag", True, False, reason="all optimizers here are tested"),
    "zero_force_ds_cpu_optimizer": _no_effect("flag", True, False, reason="PyTorch's AdamW runs on the CPU"),
    # exchange of gradients
    "prescale_gradients": _no_effect("flag", False, reason=_PLACES),
    "gradient_predivide_factor": _no_effect("number", 1.0, reason=_PLACES),
    "gradient_allreduce_op": _refused(
        "text",
        "mean",
        remedy="a sum would multiply gradients by the number of ranks: remove it, or raise optimizer.lr",
    ),
    "disable_allgather": _no_effect("flag", False, reason=_UNREAD_AT_3),
    "sparse_gradients": _no_effect("flag", False, reason="embedding gradients are dense"),
    # layout
    "tensor_parallel.autotp_size": _setting("count", "parallel.tensor_parallel_size"),
    "sequence_parallel_size": _setting("size", "parallel.tensor_parallel_size with parallel.sequence_parallel"),
    "tensor_parallel.tp_size": _no_effect("count", 1, reason=_INFERENCE),
    "tensor_parallel.tp_grain_size": _no_effect("count", 1, 64, reason=_INFERENCE),
    "tensor_parallel.tensor_parallel": _no_effect("free", {}, reason=_LAYERS),
    "tensor_parallel.tp": _no_effect("free", {}, reason=_LAYERS),
    "tensor_parallel.dtype": _no_effect("text", reason="use training.precision"),
    "tensor_parallel.tp_overlap_comm": _no_effect("flag", False, reason=_LAYERS),
    "tensor_parallel.vocab_parallel_lm_head": _no_effect("flag", reason=_LAYERS),
    "tensor_parallel.vocab_parallel_ce_backend": _no_effect("text", "torch", reason=_LAYERS),
    "tensor_parallel.injection_policy_tuple": _no_effect("names", reason=_LAYERS),
    "tensor_parallel.partition_config": _no_effect("free", {}, reason=_LAYERS),
    "tensor_parallel.preset_model": _no_effect("text", reason=_LAYERS),
    "tensor_parallel.keep_module_on_host": _no_effect("flag", False, reason=_LAYERS),
    "tensor_parallel.replace_with_kernel_inject": _no_effect("flag", False, reason=_INFERENCE),
    "tensor_parallel.kernel_inject": _no_effect("flag", False, reason=_INFERENCE),
    "pipeline": _no_effect("free", {}, reason=_STAGES),
    "expert_parallel": _no_effect("free", {}, reason="there are no MoE layers"),
    "use_data_before_expert_parallelism": _no_effect("flag", False, reason="there are no MoE layers"),
    "activation_checkpointing.partition_activations": _no_effect("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.partitioned_activations": _no_effect("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.cpu_checkpointing": _no_effect("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.contiguous_memory_optimization": _no_effect("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.number_checkpoints": _no_effect("count", 0, reason=_RECOMPUTE),
    "activation_checkpointing.synchronize_checkpoint_boundary": _no_effect("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.profile": _no_effect("flag", False, reason=_RECOMPUTE),
    "compile": _no_effect("free", {}, reason="DeepCompile is not used"),
    # what is observed
    "wall_clock_breakdown": _passed_on("flag"),
    "memory_breakdown": _passed_on("flag"),
    "dump_state": _passed_on("flag"),
    "flops_profiler.enabled": _passed_on("flag"),
    "flops_profiler.recompute_fwd_factor": _passed_on("number"),
    "flops_profiler.profile_step": _passed_on("size"),
    "flops_profiler.module_depth": _passed_on("depth"),
    "flops_profiler.top_modules": _passed_on("size"),
    "flops_profiler.detailed": _passed_on("flag"),
    # No path of a file that may be a stranger's is written to: all records are in run.directory.
    "flops_profiler.output_file": _no_effect("text", reason="the profile is printed"),
    "tensorboard": _no_effect("switch", reason="use run.tensorboard, whose files are in run.directory"),
    "csv_monitor": _no_effect("switch", reason="metrics.jsonl in run.directory has the values"),
    "wandb": _no_effect("switch", reason="use the section trackers"),
    "comet": _no_effect("switch", reason="use the section trackers"),
    "steps_per_print": _no_effect("size", reason="use run.log_interval"),
    "comms_logger": _no_effect(
        "switch", reason="collectives are called through torch; scripts/profile_step.py lists them"
    ),
    "timers": _no_effect("free", reason="every log line has the throughput"),
    "log_level": _no_effect("text", reason="DeepSpeed's own log lines are off"),
    "autotuning": _no_effect("switch", reason="--dry-run PROCESSES recommends a parallel layout"),
    "disable_python_gc": _no_effect("flag", False, reason="the training loop does not need it"),
    "vocabulary_size": _no_effect("count", reason="it is the tokenizer's"),
    "dataloader_drop_last": _no_effect("flag", False, reason="data is not read in epochs"),
    # files
    "checkpoint": _no_effect("free", {}, reason=_CHECKPOINTS),
    "nebula": _no_effect("switch", reason=_CHECKPOINTS),
    "datastates_ckpt": _no_effect("free", reason=_CHECKPOINTS),
    "aio": _no_effect("free", reason="NVMe is not used"),
    # another training
    "elasticity": _refused(
        "switch", remedy="use the section batch; any number of processes that divides the batch works"
    ),
    "compression_training": _refused("switch", {}, remedy=_OTHER_TRAINING),
    "curriculum_learning": _refused(
        "switch", remedy="use phases with a sequence_length each instead, and set its enabled to false"
    ),
    "data_efficiency": _refused("switch", {}, remedy=_OTHER_TRAINING),
    "progressive_layer_drop": _refused("switch", remedy=_OTHER_TRAINING),
    "quantize_training": _refused("switch", remedy=_OTHER_TRAINING),
    "weight_quantization": _refused("free", {}, remedy="this feature is not supported: remove it"),
    "sparse_attention": _refused("free", {}, remedy="this feature is not supported: remove it"),
    "eigenvalue": _no_effect("switch", reason="quantization is not supported"),
    "hybrid_engine": _no_effect("switch", reason="there is no generation during training"),
    "graph_harvesting": _no_effect("flag", False, reason="use training.cuda_graphs"),
    # written beside them in published files
    "comms_config": _no_effect("free", {}, reason=_UNREAD),
    "monitor_config": _no_effect("free", {}, reason=_UNREAD),
    "cuda_visible_devices": _no_effect("whole", reason=_UNREAD),
    **{
        name: _no_effect("flag", True, False, reason=_INFERENCE)
        for name in (
            "replace_with_kernel_inject", "kernel_inject", "enable_cuda_graph", "use_triton", "triton_autotune",
            "keep_module_on_host", "return_tuple", "transposed_mode", "triangular_masking", "tm", "set_empty_params",
        )
    },
    **{
        name: _no_effect("count", 1, reason=_INFERENCE)
        for name in (
            "mp_size", "ep_size", "training_mp_size", "max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens",
            "max_batch_size",
        )
    },
    **{
        name: _no_effect("text", reason=_INFERENCE)
        for name in ("dtype", "replace_method", "base_dir", "save_mp_checkpoint_path", "moe_type")
    },
    **{
        name: _no_effect("free", {}, reason=_INFERENCE)
        for name in ("tp", "zero", "moe", "quant", "checkpoint_config", "ckpt_config", "injection_policy")
    },
}  # fmt: skip

# Former names and other spellings -> the key of the table.
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "allgather_size": "zero_optimization.allgather_bucket_size",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
            "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
            "use_all_reduce_for_fetch_params", "allgather_sequential",
        )
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}  # fmt: skip
FORMER_FLAGS: dict[
    str, tuple[str, Any]
] = {  # former flag -> the key and value that true means; false sets nothing
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", "cpu"),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "fp32_allreduce": ("communication_data_type", "fp32"),
}


def option_class(name: str, type_names: Mapping[str, str]) -> Any:
    """A section class for `build`. Args: type_names: dotted key -> name of its type; each is None by default."""
    own: dict[str, str] = {}
    nested: dict[str, dict[str, str]] = {}
    for key, type_name in type_names.items():
        first, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(first, {})[rest] = type_name
        else:
            own[key] = type_name
    leaves = [
        (key, OPTION_TYPES[type_name][0] | None, setting(None, "", **OPTION_TYPES[type_name][1]))
        for key, type_name in own.items()
    ]
    sections = [
        (key, cls, section(cls)) for key, inner in nested.items() for cls in [option_class(key, inner)]
    ]
    return make_dataclass(name, [*leaves, *sections], frozen=True, kw_only=True, slots=True)


Options = option_class("Options", {key: option.type_name for key, option in KEYS.items()})
