"""Tables of arguments of other training programs, and the settings that they are here.

docs/generate.py writes them to docs/coming_from.md; foreign_options.py answers a command line with them.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple


class Argument(NamedTuple):
    names: tuple[str, ...]  # with underscores, which also match dashes; `*` stands for any characters
    # All settings that train the same, with spaces between: `key={}` takes the value as it is, `key=VALUE` stands for a
    # flag, `key` alone needs the note; "" = no setting.
    setting: str
    note: str = ""

    @property
    def keys(self) -> list[str]:
        return [part.partition("=")[0] for part in self.settings("")]

    def settings(self, value: str) -> list[str]:
        """The settings with a value in them."""
        return [part.replace("{}", value) for part in re.split(r" (?=[a-z_]+\.)", self.setting) if part]


def _arguments(*rows: tuple[str, str] | tuple[str, str, str]) -> tuple[Argument, ...]:
    return tuple(Argument(tuple(row[0].split()), *row[1:]) for row in rows)


_RECOMPUTE = "training.recompute=full"
_LAUNCHER = "it is a launcher option: put it before the script's name"
_OPTIMIZER = "adam is adamw"
_DATA = (
    "a list of token datasets; scripts/preprocess_data.py builds them, scripts/dataset.py adopt "
    "converts Megatron's"
)
_EVALUATION = "in samples instead of batches"
_GLOBAL_BATCH = "micro-batch x gradient accumulation steps x data-parallel processes"
_BY_SAMPLES = "samples / batch.global_batch_size"
_BY_TOKENS = "tokens / (batch.global_batch_size x data.sequence_length)"
_POSITIONS = "the largest position id, which is one less"

SOURCES: dict[str, tuple[Argument, ...]] = {
    "Megatron-LM and Megatron-DeepSpeed": _arguments(
        ("num_layers encoder_num_layers", "model.num_layers={}"),
        ("hidden_size", "model.hidden_size={}"),
        ("ffn_hidden_size", "model.ffn_size={}"),
        ("num_attention_heads", "model.num_attention_heads={}"),
        ("kv_channels", "model.head_dim={}"),
        ("num_query_groups", "model.num_key_value_heads={}"),
        ("group_query_attention", "", "model.num_key_value_heads alone decides"),
        ("qk_layernorm", "model.query_key_norm=true", "an RMSNorm, whatever the others are"),
        ("embed_layernorm", "model.embedding_norm=true"),
        ("window_size", "model.attention_window", "tokens to each side"),
        ("decoder_num_layers", "model.decoder_layers={}"),
        ("max_position_embeddings", "model.max_position", _POSITIONS),
        ("seq_length encoder_seq_length", "data.sequence_length={}"),
        ("decoder_seq_length", "", "it follows from data.sequence_length and the objective"),
        ("position_embedding_type", "model.positions", "learned_absolute is learned, rope is rotary"),
        ("use_rotary_position_embeddings", "model.positions=rotary"),
        ("no_position_embedding", "model.positions", "rotary or none"),
        ("rotary_base", "model.rotary_base={}"),
        (
            "use_rope_scaling rope_scaling_factor",
            "model.rotary_scaling",
            "[factor, low frequency factor, high frequency factor, original length]",
        ),
        ("rotary_percent", "model.rotary_share={}"),
        ("normalization", "model.rms_norm", "true for RMSNorm"),
        ("layernorm_epsilon norm_epsilon", "model.layernorm_epsilon={}"),
        ("swiglu", "model.ffn=gated model.activation=silu"),
        (
            "glu_activation",
            "model.ffn model.activation",
            "gated, with silu for swiglu, gelu_erf for geglu and relu for reglu",
        ),
        ("squared_relu quick_geglu", "", "there is no such activation"),
        ("disable_bias_linear", "model.biases=none", "qkv with --add-qkv-bias"),
        ("add_qkv_bias", "model.biases", "qkv with --disable-bias-linear, all without it"),
        ("post_self_attn_layernorm post_mlp_layernorm", "model.sandwich_norm=true", "always both of them"),
        ("rotary_interleaved", "", "rotary positions always are: leave it out"),
        ("spec", "", "the section model describes the layers"),
        ("untie_embeddings_and_output_weights", "model.tie_word_embeddings=false"),
        ("init_method_std", "model.init_std={}"),
        ("hidden_dropout", "model.output_dropout={} model.embedding_dropout={}"),
        ("attention_dropout", "model.attention_dropout={}"),
        (
            "make_vocab_size_divisible_by pad_vocab_size_to padded_vocab_size",
            "",
            "the embedding is padded automatically",
        ),
        ("micro_batch_size", "batch.micro_batch_size={}"),
        ("global_batch_size", "batch.global_batch_size={}"),
        ("rampup_batch_size", "batch.ramp", "its three numbers are start, by and samples"),
        ("train_iters", "training.steps={}"),
        (
            "train_samples",
            "training.steps",
            "samples / batch.global_batch_size; with a ramp, phases count samples",
        ),
        ("train_tokens", "training.steps", _BY_TOKENS),
        ("optimizer", "optimizer.kind", _OPTIMIZER),
        ("lr", "optimizer.lr={}"),
        ("min_lr", "schedule.min_lr_ratio", "a fraction of optimizer.lr"),
        (
            "lr_decay_style",
            "schedule.kind={}",
            "inverse-square-root is inverse_sqrt, WSD is schedule.parts; without --min-lr it ends at 0: "
            "schedule.min_lr_ratio=0",
        ),
        ("lr_decay_iters", "schedule.decay_steps={}"),
        ("lr_warmup_iters", "schedule.warmup_steps={}"),
        ("lr_warmup_init", "", "the warm-up begins at 0"),
        ("lr_warmup_fraction", "schedule.warmup_steps", "in steps"),
        ("lr_warmup_samples", "schedule.warmup_steps", _BY_SAMPLES),
        ("lr_decay_samples", "schedule.decay_steps", _BY_SAMPLES),
        ("lr_warmup_tokens", "schedule.warmup_steps", _BY_TOKENS),
        ("lr_decay_tokens", "schedule.decay_steps", _BY_TOKENS),
        ("lr_wsd_decay_style lr_wsd_decay_iters", "schedule.parts", "a part with this kind or these steps"),
        ("weight_decay", "optimizer.weight_decay={}"),
        ("adam_beta1", "optimizer.beta1={}"),
        ("adam_beta2", "optimizer.beta2={}"),
        ("adam_eps", "optimizer.eps={}"),
        ("clip_grad", "optimizer.clip_grad_norm={}"),
        ("fp16", "training.precision=fp16"),
        ("bf16", "training.precision=bf16"),
        ("loss_scale", "deepspeed.fp16.loss_scale={}"),
        ("initial_loss_scale", "deepspeed.fp16.initial_scale_power", "as a power of 2"),
        ("loss_scale_window", "deepspeed.fp16.loss_scale_window={}"),
        ("min_loss_scale", "deepspeed.fp16.min_loss_scale={}"),
        ("hysteresis", "deepspeed.fp16.hysteresis={}"),
        ("fp8_*", "", "FP8 is not supported"),
        ("seed", "training.seed={}"),
        ("recompute_activations", "training.recompute=selective"),
        ("recompute_granularity", "training.recompute={}"),
        ("checkpoint_activations", _RECOMPUTE),
        (
            "recompute_method recompute_num_layers recompute_modules activations_checkpoint_method "
            "checkpoint_num_layers",
            "",
            "training.recompute applies to all blocks; selective recomputes attention",
        ),
        ("calculate_per_token_loss", "", "training.loss_normalization=global_tokens is the default"),
        (
            "attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32",
            "",
            "it is always so: leave it out",
        ),
        (
            "*_fusion abort_on_unmet_fused_kernel_constraints transformer_impl use_mcore_models use_te DDP_impl "
            "attention_backend overlap_grad_reduce overlap_param_gather no_async_tensor_model_parallel_allreduce "
            "no_create_attention_mask_in_dataloader use_flash_attn_triton use_flash_attn_v2 "
            "no_query_key_layer_scaling manual_gc manual_gc_interval empty_unused_memory_level",
            "",
            "kernels, memory and communication are this project's own: leave it out",
        ),
        ("tensor_model_parallel_size", "parallel.tensor_parallel_size={}"),
        ("pipeline_model_parallel_size", "parallel.pipeline_parallel_size={}"),
        ("sequence_parallel", "parallel.sequence_parallel=true"),
        (
            "ds_sequence_parallel_size",
            "parallel.sequence_parallel",
            "true: tensor-parallel ranks also shard the sequence",
        ),
        ("no_pipeline_parallel", "", "parallel.pipeline_parallel_size=1 is the default"),
        ("num_layers_per_virtual_pipeline_stage", "", "the schedule of stages is not interleaved"),
        ("context_parallel_size", "", "it is not implemented"),
        (
            "num_experts moe_* create_moe_param_group disable_moe_token_dropping expert_model_parallel_size "
            "expert_tensor_parallel_size",
            "",
            "there are no MoE layers",
        ),
        ("use_distributed_optimizer", "parallel.zero_stage=1"),
        ("zero_stage", "parallel.zero_stage={}"),
        ("cpu_optimizer", "parallel.offload_optimizer=true"),
        ("data_path train_data_path", "data.train=[{prefix: {}}]", _DATA),
        ("valid_data_path", "data.validation=[{prefix: {}}]", _DATA),
        ("train_weighted_split_paths train_weighted_split_paths_path", "data.train", _DATA),
        ("valid_weighted_split_paths valid_weighted_split_paths_path", "data.validation", _DATA),
        (
            "data_impl dataloader_type data_cache_path no_mmap_bin_files",
            "",
            "datasets have one format; scripts/dataset.py adopt converts Megatron's",
        ),
        ("reset_position_ids reset_attention_mask", "", "texts of a row never see each other: leave it out"),
        (
            "split",
            "data.validation",
            "a separate dataset; scripts/preprocess_data.py --split builds both",
        ),
        ("tokenizer_type", "tokenizer.kind", "BertWordPiece is bert_wordpiece, GPT2BPE gpt2_bpe"),
        ("tokenizer_model vocab_file", "tokenizer.path={}"),
        ("tokenizer_name_or_path", "tokenizer.kind=hf_json tokenizer.path={}"),
        ("merge_file", "tokenizer.path", "the directory that also has vocab.json"),
        ("vocab_extra_ids", "tokenizer.added_tokens", "t5 has 100 sentinels"),
        ("vocab_size", "model.vocab_size={}"),
        ("save", "run.directory={}"),
        ("load", "checkpoint.initialize_from={}", "a run resumes from its own directory automatically"),
        ("pretrained_checkpoint", "checkpoint.initialize_from={}"),
        ("finetune no_load_optim", "checkpoint.initialize=weights"),
        ("no_load_rng no_save_rng", "", "a checkpoint holds no random state"),
        (
            "override_opt_param_scheduler override_lr_scheduler use_checkpoint_opt_param_scheduler "
            "use_checkpoint_args",
            "",
            "the configuration always decides",
        ),
        (
            "universal_checkpoint ckpt_format auto_detect_ckpt_format use_dist_ckpt dist_ckpt_format",
            "",
            "every checkpoint loads in every layout",
        ),
        ("async_save", "checkpoint.asynchronous=true"),
        ("save_interval", "checkpoint.save_interval={}"),
        ("eval_interval", "training.eval_interval={}"),
        ("eval_iters", "training.eval_samples", _EVALUATION),
        ("log_interval", "run.log_interval={}"),
        ("tensorboard_dir", "run.tensorboard", "true; event files go to run.directory/tensorboard"),
        ("wandb_project", "trackers.wandb.project={}"),
        ("wandb_exp_name", "trackers.wandb.name={}"),
        ("wandb_entity", "trackers.wandb.entity={}"),
        (
            "log_*_to_tensorboard tensorboard_queue_size tensorboard_log_interval log_throughput log_progress "
            "log_params_norm log_num_zeros_in_grad timing_log_level timing_log_option",
            "",
            "what is logged is the same in all runs: leave it out",
        ),
        ("profile profile_step_start profile_step_end", "", "scripts/profile_step.py profiles a step"),
        ("mask_prob", "masked_lm.masked_ratio={}"),
        ("short_seq_prob", "data.short_prob={}"),
        ("exit_interval", "training.stop_after_step={}"),
        (
            "exit_duration_in_mins exit_signal_handler kill_switch_path",
            "",
            "SIGTERM, which schedulers send before the time limit, saves a checkpoint and stops the run",
        ),
        ("distributed_timeout_minutes", "timeouts.step_seconds", "in seconds"),
        ("deepspeed", "", "leave it out: the engine is DeepSpeed's"),
        ("deepspeed_config", "", "write it with an underscore: --deepspeed_config FILE"),
        ("task", "", "set in the section task, for scripts/finetune.py"),
        ("distributed_backend", "", "nccl on GPUs and gloo on CPUs, chosen automatically"),
        ("use_flash_attn", "", "attention is always fused; `training.attention` chooses the implementation"),
        ("num_workers", "", "a thread of each process prepares the next batch"),
    ),
    "Hugging Face's Trainer and its scripts": _arguments(
        ("learning_rate", "optimizer.lr={}"),
        ("per_device_train_batch_size per_gpu_train_batch_size", "batch.micro_batch_size={}"),
        ("gradient_accumulation_steps", "batch.global_batch_size", _GLOBAL_BATCH),
        ("max_steps", "training.steps={}"),
        ("num_train_epochs", "training.steps", "for fine-tuning finetune.epochs"),
        ("warmup_steps", "schedule.warmup_steps={}"),
        ("warmup_ratio", "schedule.warmup_steps", "in steps; for fine-tuning finetune.warmup_share"),
        (
            "lr_scheduler_type",
            "schedule.kind={} schedule.min_lr_ratio=0",
            "constant_with_warmup is constant",
        ),
        ("weight_decay", "optimizer.weight_decay={}"),
        ("adam_beta1", "optimizer.beta1={}"),
        ("adam_beta2", "optimizer.beta2={}"),
        ("adam_epsilon", "optimizer.eps={}"),
        ("max_grad_norm", "optimizer.clip_grad_norm={}"),
        ("optim", "optimizer.kind", "adamw_torch is adamw"),
        ("label_smoothing_factor", "training.label_smoothing={}"),
        ("fp16", "training.precision=fp16"),
        ("bf16", "training.precision=bf16"),
        ("tf32", "training.tf32=true"),
        ("gradient_checkpointing", _RECOMPUTE),
        ("seed", "training.seed={}"),
        ("output_dir", "run.directory={}"),
        (
            "overwrite_output_dir",
            "checkpoint.resume",
            "a run resumes; choose another run.directory to start over",
        ),
        ("resume_from_checkpoint", "checkpoint.resume", "a run resumes from its own directory automatically"),
        ("logging_steps", "run.log_interval={}"),
        ("save_steps", "checkpoint.save_interval={}"),
        ("save_total_limit", "checkpoint.keep_last={}"),
        ("eval_steps", "training.eval_interval={}"),
        (
            "report_to",
            "trackers",
            "trackers.wandb.project or trackers.mlflow.uri; TensorBoard is on by default",
        ),
        ("run_name", "trackers.wandb.name={}"),
        (
            "model_name_or_path",
            "checkpoint.initialize_from",
            "scripts/convert_checkpoint.py import converts it to a run",
        ),
        ("config_name model_type", "model.system", "or a file of configs/ with --config"),
        ("tokenizer_name", "tokenizer.path", "a directory with the tokenizer files"),
        ("train_file", "data.train", _DATA),
        ("validation_file", "data.validation", _DATA),
        ("max_seq_length block_size", "data.sequence_length={}"),
        ("mlm_probability", "masked_lm.masked_ratio={}"),
        ("local_rank", "", "the launcher sets it"),
        (
            "do_train do_eval evaluation_strategy eval_strategy save_strategy logging_strategy",
            "",
            "leave it out",
        ),
        (
            "dataloader_num_workers preprocessing_num_workers",
            "",
            "a thread of each process prepares the next batch",
        ),
        ("torch_compile", "", "the kernels are already fused; leave it out"),
    ),
    "THUDM/GLM": _arguments(
        ("num_layers", "model.num_layers={}"),
        ("hidden_size", "model.hidden_size={}"),
        ("num_attention_heads", "model.num_attention_heads={}"),
        ("max_position_embeddings", "model.max_position", _POSITIONS),
        ("seq_length", "data.sequence_length={}"),
        ("batch_size", "batch.micro_batch_size={}"),
        ("gradient_accumulation_steps", "batch.global_batch_size", _GLOBAL_BATCH),
        ("train_iters", "training.steps={}"),
        ("lr", "optimizer.lr={}"),
        ("lr_decay_style", "schedule.kind={}"),
        ("lr_decay_iters", "schedule.decay_steps={}"),
        ("lr_decay_ratio", "schedule.min_lr_ratio={}"),
        ("warmup", "schedule.warmup_steps", "in steps, not as a fraction"),
        ("weight_decay", "optimizer.weight_decay={}"),
        ("adam_beta1", "optimizer.beta1={}"),
        ("adam_beta2", "optimizer.beta2={}"),
        ("adam_eps", "optimizer.eps={}"),
        ("clip_grad", "optimizer.clip_grad_norm={}"),
        ("fp16", "training.precision=fp16"),
        ("checkpoint_activations deepspeed_activation_checkpointing", _RECOMPUTE),
        ("model_parallel_size", "parallel.tensor_parallel_size={}"),
        ("train_data", "data.train", _DATA),
        ("valid_data", "data.validation", _DATA),
        ("tokenizer_type", "tokenizer.kind", "BertWordPiece is bert_wordpiece, GPT2BPE gpt2_bpe"),
        ("tokenizer_model_type", "tokenizer.path", "the vocabulary file"),
        ("save", "run.directory={}"),
        ("load", "checkpoint.initialize_from={}", "a run resumes from its own directory automatically"),
        ("experiment_name", "run.directory={}"),
        ("save_interval", "checkpoint.save_interval={}"),
        ("eval_interval", "training.eval_interval={}"),
        ("eval_iters", "training.eval_samples", _EVALUATION),
        ("log_interval", "run.log_interval={}"),
        ("seed", "training.seed={}"),
        ("block_lm", "", "objectives={blank_infilling: 1} is the default"),
        ("masked_lm", "blank_infilling.masked_lm=true"),
        ("bert_prob", "blank_infilling.token_prob={}"),
        ("gap_sentence_prob", "blank_infilling.sentence_prob={}"),
        ("gap_sentence_ratio", "blank_infilling.sentence_ratio={}"),
        ("avg_block_length", "blank_infilling.mean_span_length={}"),
        ("gpt_infill_prob", "blank_infilling.document_tail_prob={}"),
        ("gpt_min_ratio", "blank_infilling.document_min_ratio={}"),
        ("single_span_prob", "blank_infilling.single_span_prob={}"),
        ("short_seq_prob", "data.short_prob={}"),
        ("block_mask_prob", "blank_infilling.block_mask_prob={}"),
        ("context_mask_ratio", "blank_infilling.context_mask_ratio={}"),
        ("context_mask_range", "blank_infilling.context_mask_range={}"),
        ("random_position", "blank_infilling.random_position=true"),
        ("no_shuffle_block", "blank_infilling.shuffle_spans=false"),
        ("no_block_position", "model.block_positions=none"),
        ("sentinel_token", "blank_infilling.sentinel_first", "the id of the first pair"),
        ("task_mask", "", "each objective has its own mask token"),
        ("cloze_eval pattern_id", "", "set in the section task, for scripts/finetune.py"),
        ("epochs", "finetune.epochs={}"),
        ("sandwich_ln", "model.sandwich_norm=true"),
        ("switch_linear", "schedule.parts", "a part of the kind linear behind one of the kind cosine"),
        ("num_workers no_lazy_loader resume_dataloader", "", "leave it out"),
    ),
    "LoRA of peft, TRL and LLaMA-Factory": _arguments(
        (
            "use_peft finetuning_type",
            "model.lora.rank",
            "a rank turns LoRA on; fine-tuning needs finetune.trained=lora too",
        ),
        ("r lora_r lora_rank", "model.lora.rank={}"),
        ("lora_alpha", "model.lora.alpha={}", "16 by default, in peft 8"),
        ("lora_dropout", "model.lora.dropout={}"),
        (
            "target_modules lora_target_modules lora_target",
            "model.lora.targets",
            "a list of the same names, such as [q_proj, v_proj]; [] is all-linear",
        ),
        ("use_rslora", "model.lora.rank_stabilized=true"),
        (
            "modules_to_save lora_modules_to_save additional_target",
            "",
            "a task's head is always trained and saved, all else stays frozen",
        ),
        ("task_type lora_task_type", "", "the section task says what is learnt"),
        ("bias lora_bias", "", "no biases are trained, as with none and false"),
        (
            "init_lora_weights",
            "",
            "as with true; PiSSA, OLoRA and others that change the base model are not implemented",
        ),
        ("use_dora", "", "DoRA is not implemented"),
        (
            "exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern",
            "",
            "all blocks have equal updates, of the layers in model.lora.targets",
        ),
        ("fan_in_fan_out", "", "leave it out"),
        (
            "adapter_name_or_path",
            "checkpoint.initialize_from",
            "scripts/convert_checkpoint.py import --base makes a run of an adapter",
        ),
        (
            "load_in_4bit load_in_8bit quantization_bit",
            "",
            "frozen weights have training.precision; QLoRA is not implemented",
        ),
    ),
    "LoRA of Megatron-Bridge": _arguments(
        ("dim", "model.lora.rank={}", "of LoRA"),
        ("alpha", "model.lora.alpha={}", "of LoRA: 16 by default, there 32"),
        ("dropout", "model.lora.dropout={}", "of LoRA"),
        ("dropout_position", "", "dropout is of the input of A, as with pre"),
        (
            "target_modules",
            "model.lora.targets",
            "linear_qkv is attention.query_key_value, linear_proj attention.dense, linear_fc1 mlp.dense_h_to_4h, "
            "linear_fc2 mlp.dense_4h_to_h",
        ),
        ("lora_A_init_method lora_B_init_method", "", "as with kaiming and zero"),
        ("a2a_experimental lora_dtype", "", "leave it out"),
    ),
    "Launchers": _arguments(
        (
            "num_gpus num_nodes nproc_per_node nnodes node_rank master_addr master_port hostfile rdzv_id rdzv_backend "
            "rdzv_endpoint max_restarts tee",
            "",
            _LAUNCHER,
        ),
    ),
}

# Where programs share a name, the first table has precedence.
BY_NAME = {
    name: argument
    for arguments in reversed(SOURCES.values())
    for argument in reversed(arguments)
    for name in argument.names
    if "*" not in name
}
_PATTERNS = [
    (name, argument)
    for arguments in SOURCES.values()
    for argument in arguments
    for name in argument.names
    if "*" in name
]


def find_argument(name: str) -> Argument | None:
    """The row of an option's name, which has underscores and no dashes."""
    if name in BY_NAME:
        return BY_NAME[name]
    return next((argument for pattern, argument in _PATTERNS if fnmatchcase(name, pattern)), None)
