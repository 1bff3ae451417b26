"""Tables of arguments of other training programs, and the settings that they are here.

docs/generate.py writes them to docs/coming_from.md; foreign_options.py answers a command line with them.
"""

from __future__ import annotations

from typing import NamedTuple


class Argument(NamedTuple):
    names: tuple[str, ...]  # with underscores, which also match dashes
    # `key={}` takes the value as it is, `key=VALUE` stands for a flag, `key` alone needs the note; "" = no setting.
    setting: str
    note: str = ""

    @property
    def key(self) -> str:
        return self.setting.partition("=")[0]


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
_PASSES = "derived: batch.global_batch_size / (micro-batch x data-parallel ranks)"
_POSITIONS = "the largest position id, which is one less"

SOURCES: dict[str, tuple[Argument, ...]] = {
    "Megatron-LM and Megatron-DeepSpeed": _arguments(
        ("num_layers encoder_num_layers", "model.num_layers={}"),
        ("hidden_size", "model.hidden_size={}"),
        ("ffn_hidden_size", "model.ffn_size={}"),
        ("num_attention_heads", "model.num_attention_heads={}"),
        ("kv_channels", "model.head_dim={}"),
        ("num_query_groups", "model.num_key_value_heads={}"),
        ("max_position_embeddings", "model.max_position", _POSITIONS),
        ("seq_length encoder_seq_length", "data.sequence_length={}"),
        ("position_embedding_type", "model.positions", "learned_absolute is learned, rope is rotary"),
        ("use_rotary_position_embeddings", "model.positions=rotary"),
        ("rotary_base", "model.rotary_base={}"),
        ("rotary_percent", "model.rotary_share={}"),
        ("normalization", "model.rms_norm", "true for RMSNorm"),
        ("layernorm_epsilon norm_epsilon", "model.layernorm_epsilon={}"),
        ("swiglu", "model.ffn=gated", "with model.activation=silu"),
        ("disable_bias_linear", "model.biases=none"),
        ("untie_embeddings_and_output_weights", "model.tie_word_embeddings=false"),
        ("init_method_std", "model.init_std={}"),
        ("hidden_dropout", "model.output_dropout={}", "model.embedding_dropout too"),
        ("attention_dropout", "model.attention_dropout={}"),
        ("make_vocab_size_divisible_by", "", "the embedding is padded automatically"),
        ("micro_batch_size", "batch.micro_batch_size={}"),
        ("global_batch_size", "batch.global_batch_size={}"),
        ("rampup_batch_size", "batch.ramp", "its three numbers are start, by and samples"),
        ("train_iters", "training.steps={}"),
        (
            "train_samples",
            "training.steps",
            "samples / batch.global_batch_size; with a ramp, phases count samples",
        ),
        ("optimizer", "optimizer.kind", _OPTIMIZER),
        ("lr", "optimizer.lr={}"),
        ("min_lr", "schedule.min_lr_ratio", "a fraction of optimizer.lr"),
        ("lr_decay_style", "schedule.kind={}", "inverse-square-root is inverse_sqrt, WSD is schedule.parts"),
        ("lr_decay_iters", "schedule.decay_steps={}"),
        ("lr_warmup_iters", "schedule.warmup_steps={}"),
        ("lr_warmup_fraction", "schedule.warmup_steps", "in steps"),
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
        ("seed", "training.seed={}"),
        ("recompute_activations", "training.recompute=selective"),
        ("recompute_granularity", "training.recompute={}"),
        ("checkpoint_activations", _RECOMPUTE),
        ("tensor_model_parallel_size", "parallel.tensor_parallel_size={}"),
        ("pipeline_model_parallel_size", "parallel.pipeline_parallel_size={}"),
        ("sequence_parallel", "parallel.sequence_parallel=true"),
        ("use_distributed_optimizer", "parallel.zero_stage=1"),
        ("zero_stage", "parallel.zero_stage={}"),
        ("cpu_optimizer", "parallel.offload_optimizer=true"),
        ("data_path train_data_path", "data.train=[{{prefix: {}}}]", _DATA),
        ("valid_data_path", "data.validation=[{{prefix: {}}}]", _DATA),
        (
            "split",
            "data.validation",
            "a separate dataset; scripts/preprocess_data.py --split builds both",
        ),
        ("tokenizer_type", "tokenizer.kind", "BertWordPiece is bert_wordpiece, GPT2BPE gpt2_bpe"),
        ("tokenizer_model vocab_file", "tokenizer.path={}"),
        ("vocab_size", "model.vocab_size={}"),
        ("save", "run.directory={}"),
        ("load", "checkpoint.initialize_from={}", "a run resumes from its own directory automatically"),
        ("finetune", "checkpoint.initialize=weights"),
        ("save_interval", "checkpoint.save_interval={}"),
        ("eval_interval", "training.eval_interval={}"),
        ("eval_iters", "training.eval_samples", _EVALUATION),
        ("log_interval", "run.log_interval={}"),
        ("tensorboard_dir", "run.tensorboard", "true; event files go to run.directory/tensorboard"),
        ("wandb_project", "trackers.wandb.project={}"),
        ("wandb_exp_name", "trackers.wandb.name={}"),
        ("mask_prob", "masked_lm.masked_ratio={}"),
        ("short_seq_prob", "data.short_prob={}"),
        ("exit_interval", "training.stop_after_step={}"),
        ("distributed_backend", "", "nccl on GPUs and gloo on CPUs, chosen automatically"),
        ("use_flash_attn", "", "attention is always fused; `training.attention` chooses the implementation"),
        ("num_workers", "", "a thread of each process prepares the next batch"),
    ),
    "Hugging Face's Trainer and its scripts": _arguments(
        ("learning_rate", "optimizer.lr={}"),
        ("per_device_train_batch_size per_gpu_train_batch_size", "batch.micro_batch_size={}"),
        ("gradient_accumulation_steps", "batch.global_batch_size", "micro-batch x passes x processes"),
        ("max_steps", "training.steps={}"),
        ("num_train_epochs", "training.steps", "for fine-tuning finetune.epochs"),
        ("warmup_steps", "schedule.warmup_steps={}"),
        ("warmup_ratio", "schedule.warmup_steps", "in steps; for fine-tuning finetune.warmup_share"),
        (
            "lr_scheduler_type",
            "schedule.kind={}",
            "its linear and cosine schedules end at 0: schedule.min_lr_ratio=0",
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
        ("max_position_embeddings", "model.max_position", "the largest position id, which is one less"),
        ("seq_length", "data.sequence_length={}"),
        ("batch_size", "batch.micro_batch_size={}"),
        ("gradient_accumulation_steps", "batch.global_batch_size", "micro-batch x passes x processes"),
        ("train_iters", "training.steps={}"),
        ("lr", "optimizer.lr={}"),
        ("lr_decay_style", "schedule.kind={}", "inverse-square-root is inverse_sqrt, WSD is schedule.parts"),
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
        ("switch_linear num_workers no_lazy_loader resume_dataloader sandwich_ln", "", "leave it out"),
    ),
    "Launchers": _arguments(
        (
            "num_gpus num_nodes nproc_per_node nnodes node_rank master_addr master_port hostfile",
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
}
