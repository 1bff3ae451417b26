"""DeepSpeed's options, each with one policy: the table that says what becomes of a key.

- OURS: the value becomes a setting of this project (deepspeed_file.py says which).
- HANDED: DeepSpeed, or this project's optimizer under it, reads the value; STAGE_3: so at ZeRO 3 alone.
- IDLE: training computes the same numbers without it, so a start says that it has no effect.
- REFUSED: training would differ.

Values that set nothing are fine everywhere: null, "auto", DeepSpeed's default, and sections whose `enabled` is false.
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
    OURS = "ours"
    HANDED = "handed"
    STAGE_3 = "stage 3"
    IDLE = "idle"
    REFUSED = "refused"


class Key(NamedTuple):
    kind: str  # of KINDS
    policy: Policy
    fine: tuple[Any, ...] = ()  # values that set nothing
    reason: str = ""  # OURS: the setting; IDLE, STAGE_3: why it has no effect; REFUSED: the remedy


def _ours(kind: str, setting: str) -> Key:
    return Key(kind, Policy.OURS, (), setting)


def _handed(kind: str) -> Key:
    return Key(kind, Policy.HANDED)


def _stage_3(kind: str, *fine: Any, reason: str = "it concerns weights that are split, as at ZeRO 3") -> Key:
    return Key(kind, Policy.STAGE_3, fine, reason)


def _idle(kind: str, *fine: Any, reason: str) -> Key:
    return Key(kind, Policy.IDLE, fine, reason)


def _refused(kind: str, *fine: Any, remedy: str) -> Key:
    return Key(kind, Policy.REFUSED, fine, remedy)


# Types of options, with the ranges that make sense. "free" and "switch" are sections whose keys nobody here reads; a
# "switch" does something only if its `enabled`, or that of a part of it, is true.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "flag": (bool, {}), "text": (str, {}), "names": (tuple[str, ...], {}), "count": (int, {"at_least": 0}),
    "size": (int, {"at_least": 1}), "depth": (int, {"at_least": -1}), "number": (float, {"at_least": 0}),
    "share": (float, {"at_least": 0, "at_most": 1}), "numbers": (tuple[float, ...], {}), "whole": (int, {}),
    "dtype": (str, {"one_of": ("fp32", "fp16", "bf16")}), "stage": (int, {"one_of": (0, 1, 2, 3)}),
    "device": (str, {"one_of": ("none", "cpu", "nvme")}), "free": (dict[str, Any], {}),
    "switch": (dict[str, Any], {}),
}  # fmt: skip

_BUCKETS = "buckets, their memory and the order of exchanges are this project's own at ZeRO 1 and 2"
_PLACES = "it moves the division of gradient sums, which are fp32 here"
_CHECKPOINTS = "checkpoints are this project's own, see the section checkpoint"
_RECOMPUTE = "training.recompute says what the backward pass recomputes"
_OFFLOAD = "parallel.offload_optimizer keeps the whole optimizer in pinned CPU memory"
_WEIGHTS_STAY = "weights stay in the memory of the device"
_STAGES = "parallel.pipeline_parallel_size makes the stages, and training.recompute says what they recompute"
_LAYERS = "the layers of this project's models are split by design"
_INFERENCE = "deepspeed.init_inference alone reads it"
_UNREAD = "DeepSpeed does not read it either"
_FP32_STATE = "weights, gradients and moments of the optimizer are fp32 here: remove it"
_OTHER_TRAINING = "this project has no such training: remove it, or set its enabled to false"
_LOSS_SCALE = "bf16 needs no loss scale"

KEYS = {
    # batch, optimizer, schedule
    "train_batch_size": _ours("size", "batch.global_batch_size"),
    "train_micro_batch_size_per_gpu": _ours("size", "batch.micro_batch_size"),
    "gradient_accumulation_steps": _ours("size", "batch"),
    "gradient_clipping": _ours("number", "optimizer.clip_grad_norm"),
    "optimizer": _ours("free", "the section optimizer"),
    "scheduler": _ours("free", "the section schedule"),
    "managed_gradient_accumulation": _idle("flag", True, reason="the loop says where a step ends"),
    # precision
    "fp16.enabled": _ours("flag", "training.precision"),
    "fp16.loss_scale": _handed("number"),
    "fp16.initial_scale_power": _handed("count"),
    "fp16.loss_scale_window": _handed("size"),
    "fp16.hysteresis": _handed("size"),
    "fp16.consecutive_hysteresis": _handed("flag"),
    "fp16.min_loss_scale": _handed("count"),
    "fp16.auto_cast": _idle("flag", False, reason="inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.enabled": _ours("flag", "training.precision"),
    "bf16.immediate_grad_update": _idle("flag", False, reason="gradients are applied at the end of a step"),
    "bf16.check_grad_overflow": _refused(
        "flag", True, remedy="gradients that are not finite are never applied here: remove it"
    ),
    "bf16.bf16_master_weights_and_grads": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.bf16_optimizer_states": _refused("flag", False, remedy=_FP32_STATE),
    "bf16.loss_scale": _idle("number", 0, reason=_LOSS_SCALE),
    "bf16.initial_scale_power": _idle("count", reason=_LOSS_SCALE),
    "bf16.loss_scale_window": _idle("count", reason=_LOSS_SCALE),
    "bf16.hysteresis": _idle("count", reason=_LOSS_SCALE),
    "bf16.min_loss_scale": _idle("count", reason=_LOSS_SCALE),
    "bf16.auto_cast": _idle("flag", False, reason="inputs are token ids"),
    "amp": _refused("switch", remedy="set training.precision=bf16 or fp16 instead, and remove it"),
    "torch_autocast": _refused(
        "switch", remedy="it keeps weights in fp32: set training.precision=bf16 or fp16 instead, and remove it"
    ),
    "data_types.grad_accum_dtype": _refused(
        "text", "fp32", "float32", remedy="gradients are summed in fp32 here: remove it"
    ),
    "data_types.param_dtype": _idle("text", reason="training.precision says it"),
    "data_types.buffer_dtype": _idle("text", reason="training.precision says it"),
    "data_types.keep_in_fp32_modules": _idle("names", reason="the models have no such buffers"),
    "communication_data_type": _handed("dtype"),
    "seq_parallel_communication_data_type": _idle(
        "dtype", "fp32", reason="what sequence-parallel ranks exchange has the precision of the pass"
    ),
    # ZeRO
    "zero_optimization.stage": _ours("stage", "parallel.zero_stage"),
    "zero_optimization.reduce_bucket_size": _handed("size"),
    "zero_optimization.contiguous_gradients": _stage_3("flag", True, reason=_BUCKETS),
    "zero_optimization.reduce_scatter": _stage_3("flag", True, reason=_BUCKETS),
    "zero_optimization.overlap_comm": _stage_3("flag", True, False, reason=_BUCKETS),
    "zero_optimization.allgather_partitions": _idle("flag", True, reason=_BUCKETS),
    "zero_optimization.allgather_bucket_size": _idle("count", 500_000_000, reason=_BUCKETS),
    "zero_optimization.use_multi_rank_bucket_allreduce": _idle("flag", True, reason=_BUCKETS),
    "zero_optimization.round_robin_gradients": _idle("flag", False, reason=_BUCKETS),
    "zero_optimization.parameter_alignment": _idle("flag", False, reason=_BUCKETS),
    "zero_optimization.ignore_unused_parameters": _idle(
        "flag", True, reason="the configuration says which parameters have a part in the loss"
    ),
    "zero_optimization.legacy_stage1": _idle("flag", False, reason="DeepSpeed no longer has it"),
    "zero_optimization.compute_grad_norm": _idle("flag", True, reason="every step computes the norm"),
    "zero_optimization.load_from_fp32_weights": _idle("flag", True, reason=_CHECKPOINTS),
    "zero_optimization.elastic_checkpoint": _idle("flag", False, reason=_CHECKPOINTS),
    "zero_optimization.pipeline_loading_checkpoint": _idle("flag", False, reason=_CHECKPOINTS),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _idle(
        "flag", False, reason="scripts/convert_checkpoint.py export writes whole weights"
    ),
    "zero_optimization.offload_optimizer.device": _ours("device", "parallel.offload_optimizer"),
    "zero_optimization.offload_optimizer.pin_memory": _idle("flag", True, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.nvme_path": _idle("text", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.buffer_count": _idle("count", 4, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.buffer_size": _idle("count", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.max_in_cpu": _idle("count", reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline_read": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.pipeline_write": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.fast_init": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.ratio": _idle("share", 1.0, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.super_offload": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _idle("share", 0.8, reason=_OFFLOAD),
    "zero_optimization.offload_param": _idle("free", reason=_WEIGHTS_STAY),
    "zero_optimization.cpu_offload_use_pin_memory": _idle("flag", True, reason=_OFFLOAD),
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
    "zero_optimization.leaf_module": _idle("free", {}, reason="the models have no such modules"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _idle("flag", False, reason=_OFFLOAD),
    "zero_optimization.mics_shard_size": _idle("whole", -1, reason="DeepSpeed no longer has it"),
    "zero_optimization.mics_hierarchical_params_gather": _idle(
        "flag", False, reason="DeepSpeed no longer has it"
    ),
    "zero_optimization.zeropp_loco_param": _refused(
        "free", {}, remedy="DeepSpeed no longer has it: remove it"
    ),
    "zero_allow_untested_optimizer": _idle("flag", True, False, reason="every optimizer here is tested"),
    "zero_force_ds_cpu_optimizer": _idle("flag", True, False, reason="torch's AdamW steps on the CPU"),
    # exchange of gradients
    "prescale_gradients": _idle("flag", False, reason=_PLACES),
    "gradient_predivide_factor": _idle("number", 1.0, reason=_PLACES),
    "gradient_allreduce_op": _refused(
        "text",
        "mean",
        remedy="a sum would multiply gradients by the number of ranks: remove it, or raise optimizer.lr",
    ),
    "disable_allgather": _idle("flag", False, reason=_BUCKETS),
    "sparse_gradients": _idle("flag", False, reason="gradients of embeddings are dense"),
    # layout
    "tensor_parallel.autotp_size": _ours("count", "parallel.tensor_parallel_size"),
    "sequence_parallel_size": _ours("size", "parallel.tensor_parallel_size with parallel.sequence_parallel"),
    "tensor_parallel.tp_size": _idle("count", 1, reason=_INFERENCE),
    "tensor_parallel.tp_grain_size": _idle("count", 1, 64, reason=_INFERENCE),
    "tensor_parallel.tensor_parallel": _idle("free", {}, reason=_LAYERS),
    "tensor_parallel.tp": _idle("free", {}, reason=_LAYERS),
    "tensor_parallel.dtype": _idle("text", reason="training.precision says it"),
    "tensor_parallel.tp_overlap_comm": _idle("flag", False, reason=_LAYERS),
    "tensor_parallel.vocab_parallel_lm_head": _idle("flag", reason=_LAYERS),
    "tensor_parallel.vocab_parallel_ce_backend": _idle("text", "torch", reason=_LAYERS),
    "tensor_parallel.injection_policy_tuple": _idle("names", reason=_LAYERS),
    "tensor_parallel.partition_config": _idle("free", {}, reason=_LAYERS),
    "tensor_parallel.preset_model": _idle("text", reason=_LAYERS),
    "tensor_parallel.keep_module_on_host": _idle("flag", False, reason=_LAYERS),
    "tensor_parallel.replace_with_kernel_inject": _idle("flag", False, reason=_INFERENCE),
    "tensor_parallel.kernel_inject": _idle("flag", False, reason=_INFERENCE),
    "pipeline": _idle("free", {}, reason=_STAGES),
    "expert_parallel": _idle("free", {}, reason="the models have no experts"),
    "use_data_before_expert_parallelism": _idle("flag", False, reason="the models have no experts"),
    "activation_checkpointing.partition_activations": _idle("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.partitioned_activations": _idle("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.cpu_checkpointing": _idle("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.contiguous_memory_optimization": _idle("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.number_checkpoints": _idle("count", 0, reason=_RECOMPUTE),
    "activation_checkpointing.synchronize_checkpoint_boundary": _idle("flag", False, reason=_RECOMPUTE),
    "activation_checkpointing.profile": _idle("flag", False, reason=_RECOMPUTE),
    "compile": _idle("free", {}, reason="DeepCompile is not used"),
    # what is observed
    "wall_clock_breakdown": _handed("flag"),
    "memory_breakdown": _handed("flag"),
    "dump_state": _handed("flag"),
    "flops_profiler.enabled": _handed("flag"),
    "flops_profiler.recompute_fwd_factor": _handed("number"),
    "flops_profiler.profile_step": _handed("size"),
    "flops_profiler.module_depth": _handed("depth"),
    "flops_profiler.top_modules": _handed("size"),
    "flops_profiler.detailed": _handed("flag"),
    "flops_profiler.output_file": _handed("text"),
    "tensorboard.enabled": _handed("flag"),
    "tensorboard.output_path": _handed("text"),
    "tensorboard.job_name": _handed("text"),
    "csv_monitor.enabled": _handed("flag"),
    "csv_monitor.output_path": _handed("text"),
    "csv_monitor.job_name": _handed("text"),
    "wandb.enabled": _handed("flag"),
    "wandb.group": _handed("text"),
    "wandb.team": _handed("text"),
    "wandb.project": _handed("text"),
    "comet": _idle("switch", reason="the section trackers names those that are written to"),
    "steps_per_print": _idle("size", reason="run.log_interval says how often lines come"),
    "comms_logger": _idle("switch", reason="collectives are torch's; scripts/profile_step.py shows them"),
    "timers": _idle("free", reason="every line of the log has the throughput"),
    "log_level": _idle("text", reason="DeepSpeed's own lines are off"),
    "autotuning": _idle("switch", reason="--dry-run PROCESSES advises a layout"),
    "disable_python_gc": _idle("flag", False, reason="the loop does without it"),
    "vocabulary_size": _idle("count", reason="the tokenizer says it"),
    "dataloader_drop_last": _idle("flag", False, reason="samples are not read in epochs"),
    # files
    "checkpoint": _idle("free", {}, reason=_CHECKPOINTS),
    "nebula": _idle("switch", reason=_CHECKPOINTS),
    "datastates_ckpt": _idle("free", reason=_CHECKPOINTS),
    "aio": _idle("free", reason="nothing is read from or written to NVMe"),
    # another training
    "elasticity": _refused(
        "switch", remedy="set the section batch, which fits every number of processes that divides it"
    ),
    "compression_training": _refused("switch", {}, remedy=_OTHER_TRAINING),
    "curriculum_learning": _refused(
        "switch", remedy="phases with a sequence_length each do this: set them, and its enabled to false"
    ),
    "data_efficiency": _refused("switch", {}, remedy=_OTHER_TRAINING),
    "progressive_layer_drop": _refused("switch", remedy=_OTHER_TRAINING),
    "quantize_training": _refused("switch", remedy=_OTHER_TRAINING),
    "weight_quantization": _refused("free", {}, remedy=_OTHER_TRAINING),
    "sparse_attention": _refused("free", {}, remedy=_OTHER_TRAINING),
    "eigenvalue": _idle("switch", reason="nothing is quantized"),
    "hybrid_engine": _idle("switch", reason="nothing is generated between steps"),
    "graph_harvesting": _idle("flag", False, reason="training.cuda_graphs says it"),
    # written beside them in published files
    "comms_config": _idle("free", {}, reason=_UNREAD),
    "monitor_config": _idle("free", {}, reason=_UNREAD),
    "cuda_visible_devices": _idle("whole", reason=_UNREAD),
    **{
        name: _idle("flag", True, False, reason=_INFERENCE)
        for name in (
            "replace_with_kernel_inject", "kernel_inject", "enable_cuda_graph", "use_triton", "triton_autotune",
            "keep_module_on_host", "return_tuple", "transposed_mode", "triangular_masking", "tm", "set_empty_params",
        )
    },
    **{
        name: _idle("count", 1, reason=_INFERENCE)
        for name in (
            "mp_size", "ep_size", "training_mp_size", "max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens",
            "max_batch_size",
        )
    },
    **{
        name: _idle("text", reason=_INFERENCE)
        for name in ("dtype", "replace_method", "base_dir", "save_mp_checkpoint_path", "moe_type")
    },
    **{
        name: _idle("free", {}, reason=_INFERENCE)
        for name in ("tp", "zero", "moe", "quant", "checkpoint_config", "ckpt_config", "injection_policy")
    },
}  # fmt: skip

# Former names and other spellings -> the key of the table. Of the ones that say it in another way the value too.
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
FORMER_FLAGS: dict[str, tuple[str, Any]] = {  # true -> that key with that value; false sets nothing
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", "cpu"),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "fp32_allreduce": ("communication_data_type", "fp32"),
}


def option_class(name: str, kinds: Mapping[str, str]) -> Any:
    """A section class for `build`. Args: kinds: dotted key -> its kind; each is None by default."""
    own: dict[str, str] = {}
    nested: dict[str, dict[str, str]] = {}
    for key, kind in kinds.items():
        first, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(first, {})[rest] = kind
        else:
            own[key] = kind
    leaves = [(key, KINDS[kind][0] | None, setting(None, "", **KINDS[kind][1])) for key, kind in own.items()]
    sections = [
        (key, cls, section(cls)) for key, inner in nested.items() for cls in [option_class(key, inner)]
    ]
    return make_dataclass(name, [*leaves, *sections], frozen=True, kw_only=True, slots=True)


Options = option_class("Options", {key: row.kind for key, row in KEYS.items()})
