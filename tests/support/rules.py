"""Every rule of the configuration: what breaks it, and what the message must hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_lite.config.model import ModelConfig, require_class, require_rotary
from megatron_lite.config.sections import BatchConfig, ParallelConfig
from megatron_lite.config.tree import load_config, require_objectives, require_validation
from support.configs import tiny
from support.project import ROOT

TINY = ROOT / "configs/tiny.yaml"
TASK = "task={name: one, kind: classification, reader: jsonl}"


EXPERTS = "count: 8, width: 16"
MIXTURE = ("model.experts={count: 8, width: 16, per_token: 2}", "model.biases=none")


def over(*overrides: str) -> partial[Any]:
    return partial(tiny, *overrides)


RULES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "num_layers": (over("model.num_layers=0"), ("model.num_layers is 0", "at least 1")),
    "max_position": (over("model.max_position=-1"), ("model.max_position is -1", "at least 1")),
    "phases of a task": (
        over("phases=[{}]", "task={name: x, kind: classification, reader: jsonl, train: a, labels: [a, b]}"),
        (
            (
                "phases is set",
                "set it to []",
            )
        ),
    ),
    "weights of no corpus": (
        over("data.train=[{prefix: a, weight: 0}]"),
        ("all corpora of data.train have weight 0", "above 0"),
    ),
    "weights of no corpus in a phase": (
        over("data.train=[{prefix: a}]", "phases=[{steps: 2}, {weights: {a: 0}}]"),
        ("phases[1]: all corpora of data.train have weight 0",),
    ),
    "parts beside a schedule": (
        over(
            "schedule={kind: constant, warmup_steps: 9}",
            "schedule.parts=[{kind: linear, steps: 3, start: 0, end: 1}]",
        ),
        (
            (
                "kind constant, warmup_steps 9",
                "schedule={} before schedule.parts",
            )
        ),
    ),
    "uneven ramp": (
        over("batch.ramp={start: 1, by: 1, samples: 9}"),
        ("batch.ramp has start 1 and by 1", "multiples of batch.micro_batch_size", "batch.global_batch_size"),
    ),
    "ramp beside phases": (
        over("phases=[{}]", "batch.ramp={start: 8, by: 8, samples: 9}"),
        (
            (
                "batch.ramp is set",
                "in the batch of a phase",
            )
        ),
    ),
    "heads": (
        over("model.num_attention_heads=5"),
        ("num_attention_heads (5)", "divide", "choose a divisor of 64"),
    ),
    "dropout": (over("model.output_dropout=1"), ("model.output_dropout is 1", "at least 0 and below 1")),
    "negative dropout": (
        over("model.attention_dropout=-.1"),
        ("model.attention_dropout is -0.1", "at least 0 and below 1"),
    ),
    "shrink": (
        over("model.embedding_gradient_shrink=0"),
        ("embedding_gradient_shrink is 0", "above 0 and at most 1"),
    ),
    "init": (over("model.init_std=0"), ("model.init_std is 0", "above 0", "default is 0.02")),
    "epsilon": (over("model.layernorm_epsilon=-1e-5"), ("model.layernorm_epsilon is -1e-05", "above 0")),
    "vocab": (over("model.vocab_size=0"), ("model.vocab_size is 0", "at least 1, or null")),
    "activation": (
        over("model.activation=gelu"),
        ("model.activation is 'gelu'", "one of gelu_tanh, gelu_erf, relu"),
    ),
    "heads that do not divide": (
        over("model.num_attention_heads=7"),
        ("model.num_attention_heads (7) must divide model.hidden_size", "or set model.head_dim"),
    ),
    "shared keys": (
        over("model.num_key_value_heads=3"),
        ("num_key_value_heads (3)", "must divide", "choose a divisor of 4"),
    ),
    "keys on no rank": (
        over("model.num_key_value_heads=2", "parallel.tensor_parallel_size=4"),
        ("num_key_value_heads (2)", "tensor_parallel_size (4)", "choose a divisor of 2"),
    ),
    "a decoder with rotary positions": (
        over("model.decoder_layers=2", "model.positions=rotary"),
        ("model.positions is rotary", "decoder_layers (2)", "set decoder_layers to 0"),
    ),
    "a decoder with XLNet's distances": (
        over("model.decoder_layers=2", "model.relative=xlnet"),
        ("model.relative is xlnet", "decoder_layers (2)", "set decoder_layers to 0"),
    ),
    "an odd part of a head": (
        over("model.positions=rotary", "model.rotary_share=0.19"),
        ("rotary_share (0.19)", "an even number"),
    ),
    "a part of a head without halves of pairs": (
        over("model.positions=rotary", "model.block_positions=halves", "model.rotary_share=0.4"),
        ("rotary_share (0.4)", "a multiple of 4"),
    ),
    "block positions without rotary positions": (
        over("model.block_positions=table"),
        (
            "model.block_positions is table",
            "model.positions learned_blocks",
        ),
    ),
    "initial words": (over("model.init_words_std=0"), ("model.init_words_std is 0", "above 0", "or null")),
    "initial positions": (
        over("model.init_positions_std=-1"),
        ("model.init_positions_std is -1", "above 0", "or null"),
    ),
    "one class": (over("model.sentence_classes=1"), ("model.sentence_classes is 1", "at least 2 classes")),
    "inner width": (
        over("model.ffn_size=101", "parallel.tensor_parallel_size=2"),
        (
            "model.ffn_size (101)",
            "divisible by parallel.tensor_parallel_size (2)",
        ),
    ),
    "few task types": (
        over(
            "model.task_types=1", "objectives={blank_infilling: 1, masked_lm: 1}", "data.sequence_length=100"
        ),
        (
            "model.task_types is 1",
            "2 objectives",
            "at least 2",
        ),
    ),
    "task rows without a table": (
        over("model.task_rows=[3]"),
        (
            "model.task_rows is [3]",
            "0 rows",
        ),
    ),
    "no block positions": (
        over("model.positions=learned"),
        ("model.positions is learned", "blank_infilling", "set it to learned_blocks or rotary"),
    ),
    "micro": (over("batch.micro_batch_size=0"), ("batch.micro_batch_size is 0", "at least 1")),
    "global": (
        over("batch.global_batch_size=10"),
        ("(10)", "multiple of batch.micro_batch_size (8)", "change one"),
    ),
    "world": (
        lambda: BatchConfig(micro_batch_size=4, global_batch_size=24).accumulation_steps(4),
        (
            "global_batch_size (24)",
            "(4) x data-parallel ranks (4) = 16",
            "number of processes that divides 6",
        ),
    ),
    "profiler after the end": (
        over("profiler.first_step=901", "training.steps=900"),
        (
            "profiler.first_step is 901",
            "training.steps is 900",
        ),
    ),
    "zero": (over("parallel.zero_stage=0"), ("parallel.zero_stage is 0", "one of 1, 2, 3")),
    "tensor": (over("parallel.tensor_parallel_size=0"), ("tensor_parallel_size is 0", "at least 1")),
    "zero under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "parallel.zero_stage=2"),
        ("zero_stage is 2", "pipeline_parallel_size 2", "set zero_stage to 1"),
    ),
    "offloading under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "parallel.offload_optimizer=true"),
        (
            "offload_optimizer is true",
            "pipeline_parallel_size 2",
        ),
    ),
    "sequence parallelism alone": (
        over("parallel.sequence_parallel=true"),
        (
            "sequence_parallel is true",
            "tensor_parallel_size 1",
            "to false",
        ),
    ),
    "processes": (
        lambda: ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2).data_parallel_size(6),
        (
            "6 processes",
            "(2) x pipeline_parallel_size (2) = 4",
        ),
    ),
    "heads over ranks": (
        over("parallel.tensor_parallel_size=8"),
        ("num_attention_heads (4)", "tensor_parallel_size (8)", "choose a divisor of 4"),
    ),
    "stages": (
        over("parallel.pipeline_parallel_size=8"),
        (
            "pipeline_parallel_size (8)",
            "num_layers (2)",
        ),
    ),
    "fp16 under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "training.precision=fp16"),
        ("precision is fp16", "use bf16"),
    ),
    "tokens over ranks": (
        over(
            "parallel.tensor_parallel_size=4",
            "parallel.sequence_parallel=true",
            "data.row_length=585",
            "batch.micro_batch_size=1",
        ),
        ("= 585 tokens", "tensor_parallel_size (4)", "change data.row_length"),
    ),
    "settings of another objective": (
        lambda: load_config([TINY], ["masked_lm.masked_ratio=0.2"]),
        ("masked_lm is set", "trains blank_infilling", "objectives.masked_lm=1"),
    ),
    "evaluations without a validation set": (
        lambda: require_validation(["training.eval_samples=5"], tiny("data.validation=[]")),
        (
            "training.eval_samples is set",
            "data.validation is not",
        ),
    ),
    "steps": (over("training.steps=0"), ("training.steps is 0", "at least 1")),
    "eval_interval": (over("training.eval_interval=-1"), ("training.eval_interval is -1", "at least 0")),
    "eval_samples": (over("training.eval_samples=0"), ("training.eval_samples is 0", "at least 1")),
    "nonfinite": (
        over("training.max_nonfinite_steps=0"),
        ("training.max_nonfinite_steps is 0", "at least 1"),
    ),
    "seed": (over("training.seed=-1"), ("training.seed is -1", f"at least 0 and below {2**63}")),
    "large seed": (
        over(f"training.seed={2**63}"),
        (f"training.seed is {2**63}", f"at least 0 and below {2**63}"),
    ),
    "precision": (over("training.precision=fp8"), ("training.precision is 'fp8'", "one of bf16, fp16, fp32")),
    "recompute": (
        over("training.recompute=some"),
        ("training.recompute is 'some'", "one of none, selective, full"),
    ),
    "layernorm": (
        over("training.layernorm=triton"),
        ("training.layernorm is 'triton'", "one of torch, apex"),
    ),
    "kernel on GPUs only": (
        over("optimizer.kernel=apex", "parallel.offload_optimizer=true"),
        (
            "optimizer.kernel is apex",
            "GPUs only",
        ),
    ),
    "normalization": (
        over("training.loss_normalization=mean"),
        ("training.loss_normalization is 'mean'", "one of global_tokens, per_objective, mean_of_means"),
    ),
    "loss weights without their mode": (
        over("training.loss_weights={token: 2}"),
        (
            "loss_normalization is global_tokens",
            "per_objective",
        ),
    ),
    "loss weight of an unknown loss": (
        over("training.loss_weights={words: 2}", "training.loss_normalization=per_objective"),
        ("'words'", "one of token, sentence"),
    ),
    "loss weight": (
        over("training.loss_weights={token: -2}", "training.loss_normalization=per_objective"),
        ("training.loss_weights.token is -2", "0 or more"),
    ),
    "segments": (over("model.segments=-1"), ("model.segments is -1", "at least 0")),
    "embedding_size": (over("model.embedding_size=0"), ("embedding_size is 0", "at least 1, or null")),
    "labels without a head": (
        over("objectives={albert: 1}", "model.max_position=600"),
        (
            "model.sentence_classes is 0",
            "albert",
            "set it to 2",
        ),
    ),
    "objective of another body": (
        over("model.system=modernbert", "objectives={t5: 1}"),
        ("objectives has t5", "model.system modernbert", "set objectives.t5=0 objectives.masked_lm=1"),
    ),
    "objective of a writer": (
        over("model.system=gpt2", "objectives={masked_lm: 1}", "masked_lm.next_sentence=false"),
        ("objectives has masked_lm", "set objectives.masked_lm=0 objectives.causal=1"),
    ),
    "decoder that is missing": (
        over("model.system=t5", "objectives={t5: 1}"),
        ("model.decoder_layers is 0", "model.system t5 has a decoder", "model.decoder_layers=2"),
    ),
    "system": (over("model.system=glmm"), ("model.system is 'glmm'; it must be one of glm, ",)),
    "system of LSTMs": (
        over("model.system=elmo"),
        (
            (
                "'elmo'",
                "docs/objectives",
            )
        ),
    ),
    "system by name": (
        over("model.system=pkd"),
        (
            (
                "'pkd'",
                "one of glm, ",
            )
        ),
    ),
    "boundary head without spans": (
        over("model.span_boundary_places=20"),
        (
            (
                "span_boundary_places is 20",
                "spanbert",
                "set it to 0",
            )
        ),
    ),
    "too few segments": (
        over(
            "model.segments=2", "objectives={unilm: 1}", "model.sentence_classes=2", "model.max_position=600"
        ),
        ("model.segments is 2", "the objectives use 6", "set it to 6, to 1"),
    ),
    "averages at ZeRO 3": (
        over("ema.decay=0.9", "parallel.zero_stage=3"),
        ("ema.decay is 0.9 with parallel.zero_stage 3", "set zero_stage to 1 or 2"),
    ),
    "averages that there are not": (
        over("ema.use=true"),
        ("ema.use is true, but ema.decay is null",),
    ),
    "muon at ZeRO 3": (
        over("optimizer.kind=muon", "parallel.zero_stage=3"),
        ("optimizer.kind is muon with parallel.zero_stage 3", "set zero_stage to 1 or 2"),
    ),
    "muP without a base": (over("model.mup={}"), ("model.mup.base_hidden_size",)),
    "muP of no width": (
        over("model.mup={base_hidden_size: 0}"),
        ("model.mup.base_hidden_size is 0", "at least 1"),
    ),
    "rotary scaling": (
        over("model.rotary_scaling=[8, 4, 1, 8192]"),
        ("rotary_scaling is [8.0, 4.0, 1.0, 8192.0]",),
    ),
    "class head of no objective": (
        over("model.class_heads=[mine:2]", "model.sentence_classes=2"),
        ("model.class_heads is ['mine:2']", "at least 2 classes", "sentence_reordering"),
    ),
    "class heads without a pooler": (
        over("model.class_heads=[sentence_reordering:9]"),
        ("model.class_heads is ['sentence_reordering:9']", "set sentence_classes to 2"),
    ),
    "no first norm": (
        over("model.first_norm=false", "model.norm=post"),
        ("model.first_norm is false", "norm post"),
    ),
    "RMSNorm without a bias": (
        over("model.norm_bias=false", "model.rms_norm=true"),
        ("model.norm_bias is false", "model.rms_norm"),
    ),
    "window without global layers": (
        over("model.attention_window=64"),
        ("model.attention_window is 64", "model.global_every 1"),
    ),
    "local base without local layers": (
        over("model.rotary_base_local=10"),
        ("model.rotary_base_local is 10", "attention_window"),
    ),
    "window and relative positions": (
        over("model.attention_window=64", "model.global_every=2", "model.relative=buckets"),
        ("model.relative is buckets", "model.attention_window (64)"),
    ),
    "odd buckets": (
        over("model.relative=disentangled", "model.position_buckets=7"),
        ("model.position_buckets is 7", "model.max_position (512)", "even"),
    ),
    "buckets without relative positions": (
        over("model.position_buckets=8"),
        ("model.position_buckets is 8", "model.relative none", "disentangled"),
    ),
    "disentangled and rotary positions": (
        over("model.relative=disentangled", "model.positions=rotary"),
        ("model.positions is rotary", "model.relative disentangled"),
    ),
    "option that a class does not have": (
        lambda: require_class(
            ModelConfig(system="roberta", num_layers=1, hidden_size=8, num_attention_heads=2)
        ),
        ("model.activation is gelu_tanh", "model.system roberta", "gelu_erf"),
    ),
    "rotary base without rotary positions": (
        lambda: require_rotary(tiny("model.rotary_base=500").model),
        ("model.rotary_base is 500.0 with model.positions learned_blocks", "remove rotary_base"),
    ),
    "rotary share without rotary positions": (
        lambda: require_rotary(
            tiny(
                "model.system=qwen2",
                "model.positions=none",
                "model.rotary_share=0.5",
                "objectives.blank_infilling=0",
                "objectives.causal=1",
            ).model
        ),
        ("model.rotary_share is 0.5 with model.positions none",),
    ),
    "muP and T5's scales": (
        over("model.mup={base_hidden_size: 8}", "model.init=t5"),
        (
            "model.init is t5",
            "model.mup",
        ),
    ),
    "muP and ALBERT's embedding": (
        over("model.mup={base_hidden_size: 8}", "model.embedding_size=16"),
        ("model.embedding_size is 16 with model.mup",),
    ),
    "lamb on the CPU": (
        over("optimizer.kind=lamb", "parallel.offload_optimizer=true"),
        ("optimizer.kind is lamb with parallel.offload_optimizer",),
    ),
    "adafactor of apex": (
        over("optimizer.kind=adafactor", "optimizer.kernel=apex"),
        (
            (
                "optimizer.kernel is apex",
                "adafactor",
                "set it to torch",
            )
        ),
    ),
    "momentum of AdamW": (
        over("optimizer.momentum=0.9"),
        (
            "optimizer.momentum is 0.9",
            "optimizer.kind adamw",
            "remove it",
        ),
    ),
    "moments of adafactor": (
        over("optimizer.kind=adafactor", "optimizer.beta2=0.95"),
        (
            "optimizer.beta2 is 0.95",
            "optimizer.kind adafactor",
            "remove it",
        ),
    ),
    "memory longer than half of a text": (
        over("objectives={xlnet: 1}", "model.system=xlnet", "xlnet.memory_length=300"),
        (
            "xlnet.memory_length is 300",
            "only texts of twice that length",
            "sequence_length is 512",
            "set that to 600",
        ),
    ),
    "memory of another model": (
        over("objectives={xlnet: 1}", "model.max_position=600", "xlnet.memory_length=8"),
        ("xlnet.memory_length is 8 with model.relative none", "learned_blocks", "set model.system to xlnet"),
    ),
    "memory beside GLM's positions": (
        over(
            "objectives={xlnet: 1}", "model.max_position=600", "xlnet.memory_length=8", "model.relative=xlnet"
        ),
        ("model.relative xlnet and model.positions learned_blocks", "or memory_length to 0"),
    ),
    "a second stack without its objective": (
        over("decoder_tokenizer={kind: bert_wordpiece, path: vocab.txt}"),
        (
            "decoder_tokenizer is set",
            "optimus",
            "set decoder_tokenizer=null, or objectives.optimus=1",
        ),
    ),
    "shared layers in stages": (
        over("model.share_layers=attention", "parallel.pipeline_parallel_size=2"),
        ("size is 2 with model.share_layers attention", "size to 1, or share_layers to none"),
    ),
    "stop": (
        over("training.stop_after_step=101"),
        ("stop_after_step is 101", "at most training.steps (100)"),
    ),
    "lr": (over("optimizer.lr=0"), ("optimizer.lr is 0", "above 0")),
    "beta": (over("optimizer.beta2=1"), ("optimizer.beta2 is 1", "at least 0 and below 1")),
    "decay": (over("optimizer.weight_decay=-1"), ("optimizer.weight_decay is -1", "at least 0")),
    "schedule": (over("schedule.kind=step"), ("schedule.kind is 'step'", "one of cosine, linear, constant")),
    "warmup": (over("schedule.warmup_steps=-1"), ("schedule.warmup_steps is -1", "at least 0")),
    "floor": (
        over("schedule.min_lr_ratio=1.5"),
        ("schedule.min_lr_ratio is 1.5", "at least 0 and at most 1"),
    ),
    "decay_steps": (
        over("schedule.decay_steps=10", "schedule.warmup_steps=10"),
        ("schedule.decay_steps (10)", "larger than schedule.warmup_steps (10)"),
    ),
    "warmup beyond the run": (
        over("schedule.warmup_steps=100"),
        (
            "schedule.warmup_steps (100)",
            "smaller than",
        ),
    ),
    "fewer steps than a plan": (
        lambda: load_config([ROOT / "configs/t5-base.yaml"], ["training.steps=30"]),
        (
            (
                "1,000,000 steps",
                "set training.stop_after_step=30 instead",
            )
        ),
    ),
    "decoder's texts": (
        over("data.train=[{prefix: a, decoder_prefix: b}]"),
        ("data.train[0].decoder_prefix is b", "but decoder_tokenizer is null", "or the prefix to null"),
    ),
    "weight": (over("data.train=[{prefix: a, weight: -1}]"), ("data.train[0].weight is -1", "at least 0")),
    "two units of shares": (
        over("data.train=[{prefix: a, tokens: 0.3}, {prefix: b, weight: 1}]"),
        ("data.train[0] sets tokens and data.train[1] weight", "tokens in all of the list", "weight alone"),
    ),
    "two units of one share": (
        over("data.validation=[{prefix: a, tokens: 0.3, weight: 1}]"),
        ("data.validation[0] sets tokens and data.validation[0] weight",),
    ),
    "a share beside one that is left out": (
        over("data.train=[{prefix: a, tokens: 0.3}, {prefix: b}]"),
        ("data.train[0] sets tokens and data.train[1] weight (1 where nothing is set)",),
    ),
    "shares of nothing": (
        over("data.train=[{prefix: a, tokens: 0}]"),
        ("all corpora of data.train have tokens 0",),
    ),
    "no epochs": (
        over("data.train=[{prefix: a, max_epochs: 0}]"),
        ("data.train[0].max_epochs is 0", "above 0"),
    ),
    "epochs of validation": (
        over("data.validation=[{prefix: a, max_epochs: 2}, {prefix: b}]"),
        ("data.validation[0].max_epochs is 2", "remove it"),
    ),
    "sequence": (over("data.sequence_length=8"), ("data.sequence_length is 8", "at least 16")),
    "positions": (
        over("data.sequence_length=513"),
        ("data.sequence_length (513)", "up to 513", "max_position is 512", "set model.max_position=513, or"),
    ),
    "row": (
        over("data.row_length=512"),
        (
            "data.row_length (512)",
            "at least 518",
            "568",
        ),
    ),
    "keep": (over("checkpoint.keep_last=-1"), ("checkpoint.keep_last is -1", "at least 0")),
    "keep_every": (
        over("checkpoint.keep_every=2500"),
        ("checkpoint.keep_every (2500)", "multiple of checkpoint.save_interval (1000)", "change one"),
    ),
    "resume": (over("checkpoint.resume=no"), ("checkpoint.resume is 'no'", "one of auto, never")),
    "resume choice": (
        over("checkpoint.resume=always"),
        ("checkpoint.resume is 'always'", "one of auto, never"),
    ),
    "failed saves": (
        over("checkpoint.max_failed_saves=0"),
        ("checkpoint.max_failed_saves is 0", "at least 1"),
    ),
    "initialize choice": (
        over("checkpoint.initialize=some"),
        ("checkpoint.initialize is 'some'", "one of weights, all"),
    ),
    "initialize from nothing": (
        over("checkpoint.initialize=all"),
        (
            "checkpoint.initialize is all",
            "initialize_from is null",
        ),
    ),
    "noise on nothing": (
        over("checkpoint.upcycling_noise=0.1"),
        ("upcycling_noise is 0.1", "initialize_from to one"),
    ),
    "timeouts": (over("timeouts.step_seconds=0"), ("timeouts.step_seconds is 0", "at least 1")),
    "log": (over("run.log_interval=0"), ("run.log_interval is 0", "at least 1")),
    "fillings in this layout": (
        over("training.eval_fillings=2", "parallel.tensor_parallel_size=2"),
        ("training.eval_fillings is 2", "no rank holds the whole model", "set it to 0"),
    ),
    "fillings without stage 3": (
        over("training.eval_fillings=2", "parallel.zero_stage=3"),
        ("training.eval_fillings is 2", "zero_stage to 1 or 2"),
    ),
    "fillings of blanks": (
        over("training.eval_fillings=2", "objectives.causal=1"),
        (
            "training.eval_fillings is 2",
            "blank_infilling",
        ),
    ),
    "fillings with a decoder": (
        over("training.eval_fillings=2", "model.decoder_layers=3"),
        ("training.eval_fillings is 2 with model.decoder_layers (3)", "set it to 0"),
    ),
    "decoder of shared layers": (
        over("model.decoder_layers=3", "model.share_layers=ffn"),
        (
            (
                "model.share_layers is ffn",
                "model.decoder_layers (3)",
                "set share_layers to none",
            )
        ),
    ),
    "decoder without targets": (
        over("model.decoder_layers=3", "objectives={causal: 1, t5: 1}"),
        (
            "model.decoder_layers is 3",
            "causal",
            "set it to 0",
            "t5, bart, mass",
        ),
    ),
    "decoder for masked tokens": (
        over("model.decoder_layers=3", "blank_infilling.masked_lm=true"),
        (
            (
                "model.decoder_layers is 3",
                "blank_infilling",
                "set it to 0",
            )
        ),
    ),
    "peak": (over("run.peak_tflops=0"), ("run.peak_tflops is 0", "above 0, or null")),
    "sentinels": (
        over("blank_infilling.sentinel_first=200"),
        ("sentinel_first (200)", "below 400", "model.vocab_size is 300", "lower one of them"),
    ),
    "sentinels of t5": (
        over("objectives={t5: 1}", "t5.sentinel_first=300"),
        ("sentinel_first (300)", "below model.vocab_size (300)", "lower it"),
    ),
    "unknown objective": (over("objectives.bert=1"), ("'bert'", "one of blank_infilling, causal")),
    "objective weight": (over("objectives.causal=-1"), ("objectives.causal is -1", "0 or more")),
    "tokenizer": (
        lambda: tiny().with_vocab_size(301),
        (
            "model.vocab_size is 300",
            "tokenizer has 301",
            "null",
        ),
    ),
    "deepspeed contradiction": (
        over("deepspeed.train_batch_size=17"),
        (
            "deepspeed.train_batch_size is 17",
            "batch.global_batch_size makes it 16",
        ),
    ),
    "profiler without first step": (
        over("profiler.last_step=3"),
        (
            "profiler.last_step or profiler.memory is set",
            "first_step is null",
        ),
    ),
    "profiler order": (
        over("profiler={first_step: 3, last_step: 2}"),
        ("profiler.first_step is 3 and profiler.last_step 2",),
    ),
    "profiler ranks": (
        over("profiler={first_step: 3, ranks: []}"),
        ("profiler.ranks is []",),
    ),
    "profiler ranks of the run": (
        lambda: tiny("profiler={first_step: 3, ranks: [2]}").profiler.require_ranks(2),
        (
            "profiler.ranks is [2]",
            "2 processes",
        ),
    ),
    "password of MLflow": (
        over("trackers.mlflow.uri=https://me:secret@example.org"),
        (
            (
                "trackers.mlflow.uri",
                "set MLFLOW_TRACKING_USERNAME",
            )
        ),
    ),
    "a token in an address": (
        over("trackers.mlflow.uri=https://example.org/store?sslmode=require&access_token=abc"),
        (
            (
                "trackers.mlflow.uri",
                "'access_token'",
                "set MLFLOW_TRACKING_TOKEN",
            )
        ),
    ),
    "deepspeed section": (
        over("deepspeed.fp16=true"),
        ("deepspeed.fp16 is True; it must be a section", "write its keys"),
    ),
    "deepspeed refused": (
        over("deepspeed.bf16.bf16_optimizer_states=true"),
        ("deepspeed.bf16.bf16_optimizer_states is True", "remove it"),
    ),
    "warmup of DeepSpeed's schedules": (
        over("schedule.warmup_kind=log"),
        ("warmup_kind is log", "deepspeed_linear"),
    ),
    "head without classes": (
        over(TASK, "model.task_head.type=tags"),
        ("task_head.classes is 0", "2 or more"),
    ),
    "classes without head": (
        over(TASK, "model.task_head.classes=3"),
        ("task_head.classes is 3", "set it to 0"),
    ),
    "task head of an encoder": (
        over("model.task_head.type=spans", "model.decoder_layers=2", TASK),
        (
            "model.task_head.type is spans",
            "model.decoder_layers (2)",
        ),
    ),
    "head without task": (
        over("model.task_head.type=spans"),
        (
            (
                "task_head.type is spans",
                "to none",
            )
        ),
    ),
    "norms of all heads without norms": (
        over("model.query_key_norm_over=all"),
        ("model.query_key_norm_over is all", "query_key_norm is false"),
    ),
    "norms of all heads on several ranks": (
        over("model.query_key_norm=true", "model.query_key_norm_over=all", "parallel.tensor_parallel_size=2"),
        ("tensor_parallel_size is 2", "needs all heads on a rank", "set tensor_parallel_size to 1"),
    ),
    "more experts of a token than there are": (
        over(f"model.experts={{{EXPERTS}, per_token: 9}}"),
        ("per_token (9) exceeds model.experts.count (8)", "lower it"),
    ),
    "groups that do not divide the experts": (
        over(f"model.experts={{{EXPERTS}, per_token: 2, groups: 3}}"),
        ("groups is 3 with count 8", "must divide count"),
    ),
    "groups kept of one": (
        over(f"model.experts={{{EXPERTS}, per_token: 2, kept_groups: 2}}"),
        ("kept_groups is 2 with groups 1", "set it to 1"),
    ),
    "biases of softmax": (
        over(f"model.experts={{{EXPERTS}, per_token: 2, scores: softmax, biased: true}}"),
        ("biased is true with scores softmax", "set biased to false"),
    ),
    "a rate of no biases": (
        over(f"model.experts={{{EXPERTS}, per_token: 2, bias_rate: 0.1}}"),
        ("bias_rate is 0.1, but biased is false",),
    ),
    "dense layers alone": (
        over(f"model.experts={{{EXPERTS}, per_token: 2, dense_layers: 99}}"),
        ("dense_layers (99) leaves no block with experts", "lower it"),
    ),
    "experts with biases": (
        over(f"model.experts={{{EXPERTS}, per_token: 2}}", "model.biases=all"),
        ("model.biases is all with model.experts", "set it to qkv or none"),
    ),
    "experts of a second stack": (
        over(
            "decoder={num_layers: 2, hidden_size: 64, num_attention_heads: 4, biases: none, "
            f"experts: {{{EXPERTS}, per_token: 2}}}}"
        ),
        ("decoder.experts is set", "set it to null"),
    ),
    "experts on ranks without experts": (
        over("parallel.expert_parallel_size=2"),
        ("expert_parallel_size is 2 without model.experts", "set it to 1"),
    ),
    "experts that do not divide over the ranks": (
        over(*MIXTURE, "parallel.expert_parallel_size=3"),
        ("count (8) must be divisible by parallel.expert_parallel_size (3)",),
    ),
    "experts at ZeRO 3": (
        over(*MIXTURE, "parallel.zero_stage=3"),
        ("zero_stage is 3 with model.experts", "set it to 1 or 2"),
    ),
    "experts that do not divide by width": (
        over(*MIXTURE, "model.experts.width=9", "parallel.tensor_parallel_size=2"),
        ("width (9) must be divisible by parallel.tensor_parallel_size (2)",),
    ),
    "experts of another model": (
        over(*MIXTURE, "objectives={electra: 1}", "model.system=electra", "data.sequence_length=64"),
        ("objectives has electra with model.experts", "set model.experts to null"),
    ),
    "experts on ranks that do not divide": (
        lambda: tiny(*MIXTURE, "parallel.expert_parallel_size=2").parallel.data_parallel_size(3),
        ("expert_parallel_size is 2", "must divide the 3 data-parallel ranks"),
    ),
    "lora without a rank": (
        over(TASK, "finetune.trained=lora"),
        ("finetune.trained is lora", "model.lora is null", "model.lora.rank"),
    ),
    "lora and all weights": (
        over(TASK, "model.lora.rank=2"),
        ("finetune.trained is all with model.lora", "set it to lora"),
    ),
    "lora that unfreezes": (
        over(TASK, "model.lora.rank=2", "finetune.trained=lora", "finetune.unfreeze=gradual"),
        ("finetune.unfreeze is gradual with model.lora", "set it to all"),
    ),
    "lora of no rank": (over("model.lora={}"), ("model.lora.rank", "required")),
    "lora of rank 0": (over("model.lora.rank=0"), ("model.lora.rank is 0", "at least 1")),
    "lora of embeddings": (
        over("model.lora={rank: 2, targets: [word_embeddings]}"),
        ("'word_embeddings'", "not of embeddings", "attention.query_key_value", "mlp.dense_4h_to_h"),
    ),
    "lora of another system": (
        over("model.lora={rank: 2, targets: [query_key_value, q_proj, all-linear]}"),
        ("'q_proj', 'all-linear'", "set it to []", "choose from attention.query_key_value"),
    ),
    "lora of a part of what is whole in the class": (
        over("model.lora={rank: 2, targets: [attention.query]}"),
        ("'attention.query'", "choose from attention.query_key_value"),
    ),
    "lora of heads": (
        over("model.system=bert", "model.lora={rank: 2, targets: [dense]}"),
        ("contains dense", "in its heads", "attention.output.dense"),
    ),
    "lora and muP": (
        over("model.lora.rank=2", "model.mup={base_hidden_size: 8}"),
        ("model.lora is set with model.mup", "remove one"),
    ),
    "lora and adapters": (
        over("model.lora.rank=2", "model.adapter_size=4"),
        ("model.adapter_size (4)", "remove one"),
    ),
    "lora and muon": (
        over("model.lora.rank=2", "optimizer.kind=muon"),
        ("optimizer.kind is muon with model.lora", "set it to adamw"),
    ),
    "lora and averages": (
        over("model.lora.rank=2", "ema.decay=0.9"),
        ("ema.decay is 0.9 with model.lora", "set it to null"),
    ),
    "lora of two Transformers": (
        over(
            "model.lora.rank=2", "objectives={electra: 1}", "model.system=electra", "data.sequence_length=64"
        ),
        ("objectives is electra with model.lora", "set model.lora to null"),
    ),
    "lora of a second stack": (
        over("decoder={num_layers: 2, hidden_size: 64, num_attention_heads: 4, lora: {rank: 2}}"),
        ("decoder.lora is set", "set it to null"),
    ),
    "lora and graphs": (
        over("model.lora.rank=2", "training.cuda_graphs=true", "training.precision=bf16"),
        ("training.cuda_graphs is true", "set cuda_graphs to false"),
    ),
    "lora of no stage": (
        over(
            "model={decoder_layers: 2, lora: {rank: 2, targets: [cross_attention.query]}}",
            "parallel.pipeline_parallel_size=2",
        ),
        ("['cross_attention.query']", "pipeline_parallel_size 2", "add a target"),
    ),
    "head alone": (over("finetune.lm_weight=0.2", "finetune.trained=head"), ("lm_weight is 0.2", "to 0")),
    "heads without tasks": (
        over("model.task_head.heads=['a:values:0']"),
        ("model.task_head.heads is", "remove it"),
    ),
    "pool without head": (
        over("model.task_head.pool=concat"),
        (
            (
                "task_head.pool is concat",
                "the run has no task",
                "to token",
            )
        ),
    ),
    "pooler": (
        over("model.task_head.pool=concat", "model.task_head.pooler=true"),
        (
            "task_head.pool is concat",
            "remove pooler",
        ),
    ),
    "transform": (
        over("model.task_head.pooler_kind=transform"),
        (
            (
                "task_head.pooler_kind is transform",
                "to tanh or gelu",
            )
        ),
    ),
    "mix without head": (
        over("model.task_head.mix=true"),
        (
            (
                "task_head.mix is true",
                "the run has no task",
                "false",
            )
        ),
    ),
    "adapters of no width": (over(TASK, "finetune.trained=adapters"), ("adapter_size is 0", "such as 64")),
    "averages in fine-tuning": (
        over(TASK, "ema.decay=0.9"),
        (
            (
                "ema.decay is 0.9",
                "set it to null",
            )
        ),
    ),
    "task in stages": (
        over(TASK, "parallel.pipeline_parallel_size=2"),
        (
            (
                "pipeline_parallel_size is 2",
                "set it to 1",
            )
        ),
    ),
    "task with means": (
        over(TASK, "training.loss_normalization=mean_of_means"),
        (
            (
                "loss_normalization is mean_of_means",
                "set it to global_tokens",
            )
        ),
    ),
    "seed of fine-tuning": (
        over("finetune.seeds=[1, -2]"),
        (
            (
                "finetune.seeds",
                "-2",
                "from 0 to 2^63",
            )
        ),
    ),
    "objective of a package": (
        lambda: require_objectives({"objectives": {"mine": 1}}, {"packages": {"mine": "theirs 1.0"}}),
        ("objective mine belongs to the package theirs 1.0", "install it"),
    ),
    "seed twice": (over("finetune.seeds=[3, 3]"), ("finetune.seeds (3, 3)",)),
}
