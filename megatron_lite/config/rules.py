"""Rules that concern several sections of the settings together. tree.py asks for them when a configuration is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import check
from data_utils.objectives import OBJECTIVES

Config = Any  # that of tree.py, which imports this file


def check_together(config: Config) -> None:
    """Raise ConfigError naming the value, the rule that it breaks, and the remedy."""
    _check_steps(config)
    _check_objectives(config)
    train = config.data.train
    check(
        bool(config.phases) or not train or any(corpus.weight > 0 for corpus in train),
        "all corpora of data.train have weight 0, so there is nothing to read; give one a weight above 0.",
    )
    _check_lengths(config)
    _check_heads(config)
    _check_fillings(config)
    _check_layout(config)
    if config.training.cuda_graphs:
        _check_graphs(config)
    _check_decoder(config)
    _check_task(config)
    config.data.check_decoder(config.decoder_tokenizer is not None)
    _check_second_stack(config)
    for choice in config.objective_choices:
        choice.section.check_run(config)


def _check_steps(config: Config) -> None:
    steps, schedule = config.training.steps, config.schedule
    check(
        schedule.warmup_steps < config.decay_steps
        or schedule.is_deepspeeds,  # DeepSpeed stops in the warm-up
        f"schedule.warmup_steps ({schedule.warmup_steps}) must be smaller than the step at which the "
        f"schedule ends ({config.decay_steps}); lower it or raise training.steps ({steps}).",
    )
    first = config.profiler.first_step
    check(
        first is None or first <= steps,
        f"profiler.first_step is {first}, but training.steps is {steps}; trace an earlier step.",
    )
    check(
        not config.phases or config.batch.ramp is None,
        "batch.ramp is set beside phases; set it in the batch of a phase.",
    )
    check(
        not config.phases or config.task is None,
        "phases is set with a task, which is learnt in one; set it to [].",
    )


def _check_lengths(config: Config) -> None:
    """Positions, rows and the vocabulary, as long as the objectives need them."""
    chosen = [choice.section for choice in config.objective_choices]
    data, model = config.data, config.model
    needed = max(section.max_position_needed(data.sequence_length) for section in chosen)
    check(
        needed <= model.max_position or model.positions == "none",
        f"data.sequence_length ({data.sequence_length}) needs position ids up to {needed}, but "
        f"model.max_position is {model.max_position}; set model.max_position={needed}, or a "
        "shorter data.sequence_length.",
    )
    if data.row_length is not None:
        least = max(section.least_row_length(data.sequence_length) for section in chosen)
        usual = max(section.row_length_for(data.sequence_length) for section in chosen)
        check(
            data.row_length >= least,
            f"data.row_length ({data.row_length}) is too short for data.sequence_length ({data.sequence_length}) "
            f"and its masks; it must be at least {least}, null chooses {usual}.",
        )
    if model.vocab_size is not None:
        for section in chosen:
            section.check_vocabulary_size(model.vocab_size)


def _check_objectives(config: Config) -> None:
    for name, weight in config.objectives.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        check(
            number and 0 <= weight < float("inf"),
            f"objectives.{name} is {shown(weight)}; it must be a number, 0 or more.",
        )
    for name, first in config.objective_starts.items():
        check(
            name in config.objectives,
            f"objective_starts names {shown(name)}, which is not among objectives; add it there or remove it.",
        )
        whole = isinstance(first, int) and not isinstance(first, bool)
        check(
            whole and first >= 0,
            f"objective_starts.{name} is {shown(first)}; it must be a number of samples, 0 or more.",
        )
    check(
        any(choice.first_sample == 0 for choice in config.objective_choices),
        "no objective takes part from sample 0 on; give one in objectives a positive weight and no "
        "entry in objective_starts.",
    )


def _check_heads(config: Config) -> None:
    """Heads, tables, and the objectives that need them."""
    model, chosen = config.model, config.objective_choices
    labelled = [choice.name for choice in chosen if choice.section.has_sentence_label]
    check(
        model.sentence_classes > 0 or not labelled,
        f"model.sentence_classes is 0, but {', '.join(labelled)} makes next-sentence or sentence-order "
        "labels; set it to 2, or switch the labels off in that section.",
    )
    needed = [f"{name}:{count}" for choice in chosen for name, count in choice.section.class_heads.items()]
    check(
        set(needed) <= set(model.class_heads),
        f"model.class_heads is {shown(list(model.class_heads))}, but the objectives make labels for {shown(needed)}; "
        "set it to these.",
    )
    if model.span_boundary_places and not any(choice.section.has_span_boundaries for choice in chosen):
        raise ConfigError(
            f"model.span_boundary_places is {model.span_boundary_places} without the objective "
            f"{_with_ability('has_span_boundaries')}; set it to 0, or add that to objectives."
        )
    segments = max(choice.section.segments for choice in chosen)
    check(
        model.segments in (0, 1) or model.segments >= segments,
        f"model.segments is {model.segments}, but the objectives use {segments}; set it to {segments}, to 1 for "
        "one row that all tokens share, or to 0 for no segment embedding.",
    )
    check(
        not model.task_types or len(chosen) <= model.task_types,
        f"model.task_types is {model.task_types}, but {len(chosen)} objectives take a row each; set it to "
        f"{len(chosen)} or more, or to 0 for no task embedding.",
    )
    check(
        all(row < model.task_types for row in model.task_rows),
        f"model.task_rows is {shown(list(model.task_rows))}, but the table has {model.task_types} rows; leave it "
        "out: a start fills it in.",
    )
    in_blocks = [choice.name for choice in chosen if choice.section.has_block_positions]
    check(
        model.positions in ("learned_blocks", "rotary") or model.block_positions == "none" or not in_blocks,
        f"model.positions is {model.positions}, but {', '.join(in_blocks)} tells the positions in a span by a table "
        "of their own; set it to learned_blocks or rotary, or to do without model.block_positions to none.",
    )


def _check_fillings(config: Config) -> None:
    parallel, count = config.parallel, config.training.eval_fillings
    whole = parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1 and parallel.zero_stage < 3
    check(
        not count or whole,
        f"training.eval_fillings is {count}, but in this layout no rank holds the whole model; set it to 0 and "
        "fill blanks with scripts/generate.py, or set tensor_parallel_size and pipeline_parallel_size to 1 and "
        "zero_stage to 1 or 2.",
    )
    check(
        not count or any(choice.name == "blank_infilling" for choice in config.objective_choices),
        f"training.eval_fillings is {count} without the objective blank_infilling; set it to 0.",
    )


_MODERN = {"rms_norm": False, "ffn": "plain", "ffn_size": None, "biases": "all", "num_key_value_heads": None}


def _check_graphs(config: Config) -> None:
    """Under these settings blocks are not one function each, or what a graph reads lies elsewhere in each step."""
    parallel, training, model, given = (
        config.parallel,
        config.training,
        config.model,
        "training.cuda_graphs is true, but ",
    )
    summed_as = config.deepspeed.get("communication_data_type", "fp32")
    for name, value, needed, why in (
        ("parallel.pipeline_parallel_size", parallel.pipeline_parallel_size, 1, "stages wait for each other"),
        ("parallel.tensor_parallel_size", parallel.tensor_parallel_size, 1, "blocks communicate"),
        ("parallel.zero_stage", parallel.zero_stage, 1, "sums of gradients, or weights, move"),
        ("deepspeed.communication_data_type", summed_as, "fp32", "sums of gradients move"),
        ("training.recompute", training.recompute, "none", "blocks run twice"),
        ("training.kernels", training.kernels, "fused", "blocks are many functions"),
        ("training.layernorm", training.layernorm, "torch", "blocks are many functions"),
        ("model.share_layers", model.share_layers, "none", "gradients of a block are several"),
        ("model.decoder_layers", model.decoder_layers, 0, "a decoder's blocks have no graph"),
    ):
        check(
            value == needed, f"{given}{name} is {value}: {why}; set it to {needed}, or cuda_graphs to false."
        )
    rest = "set cuda_graphs to false."
    check(
        training.precision != "fp32", f"{given}training.precision is fp32; set it to bf16 or fp16, or {rest}"
    )
    check(config.task is None, f"{given}a task is learnt, whose parameters may be frozen; {rest}")
    check(
        replace(model, **_MODERN).is_plain and model.has_plain_blocks and model.query_factor == 1.0,
        f"{given}the model has options under which its blocks have no graph; {rest}",
    )


def _check_layout(config: Config) -> None:
    parallel, model = config.parallel, config.model
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    check(
        model.num_attention_heads % tp == 0,
        f"model.num_attention_heads ({model.num_attention_heads}) must be divisible by "
        f"parallel.tensor_parallel_size ({tp}); choose a divisor of {model.num_attention_heads}.",
    )
    check(
        model.key_value_heads % tp == 0,
        f"model.num_key_value_heads ({model.key_value_heads}) must be divisible by parallel.tensor_parallel_size "
        f"({tp}); choose a divisor of {model.key_value_heads}.",
    )
    check(
        pp <= model.total_layers,
        f"parallel.pipeline_parallel_size ({pp}) exceeds model.num_layers ({model.num_layers}) and decoder_layers "
        f"({model.decoder_layers}); a stage needs a block.",
    )
    check(
        pp == 1 or model.share_layers == "none",
        f"parallel.pipeline_parallel_size is {pp} with model.share_layers {model.share_layers}, but weights that all "
        "blocks share cannot be on several stages; set the size to 1, or share_layers to none.",
    )
    check(
        pp == 1 or config.training.precision != "fp16",
        "training.precision is fp16 with pipeline_parallel_size > 1, where DeepSpeed lets the tied "
        "embedding of the first and last stage drift apart; use bf16.",
    )
    check(
        config.optimizer.kernel == "torch" or not parallel.offload_optimizer,
        f"optimizer.kernel is {config.optimizer.kernel}, which runs on GPUs only, with parallel.offload_optimizer; "
        "set the kernel to torch, or do not offload.",
    )
    config.optimizer.check_layout(parallel)
    config.ema.check_run(parallel, config.task is not None)
    check(
        model.inner_size % tp == 0,
        f"the inner width of the FFN ({model.inner_size}) must be divisible by parallel.tensor_parallel_size "
        f"({tp}); change model.ffn_size.",
    )
    tokens = config.batch.micro_batch_size * config.row_length
    check(
        not parallel.sequence_parallel or tokens % tp == 0,
        f"batch.micro_batch_size x row length = {tokens} tokens must be divisible by "
        f"parallel.tensor_parallel_size ({tp}) for sequence_parallel; change data.row_length.",
    )


def _check_task(config: Config) -> None:
    task, head = config.task, config.model.task_head
    check(
        task is not None or head == "none",
        f"model.task_head is {head} without a task; give one to scripts/finetune.py, or set task_head to none.",
    )
    check(
        bool(config.tasks) or not config.model.task_heads,
        f"model.task_heads is {shown(list(config.model.task_heads))} without tasks, which fill it in; leave it out.",
    )
    if task is None:
        check(
            not config.model.task_mix,
            f"model.task_mix is true with model.task_head {head}, but the head is what mixes; set it to false.",
        )
        check(
            config.model.task_pool == "token",
            f"model.task_pool is {config.model.task_pool} with model.task_head {head}, but the head is what pools; "
            "set it to token.",
        )
        return
    check(
        config.finetune.trained != "adapters" or config.model.adapter_size > 0,
        "finetune.trained is adapters, but model.adapter_size is 0; set it to their inner width, such as 64.",
    )
    stages, normalization = config.parallel.pipeline_parallel_size, config.training.loss_normalization
    check(
        stages == 1,
        f"parallel.pipeline_parallel_size is {stages} with a task, whose losses read several tokens together; set "
        "it to 1 and use tensor parallelism: checkpoints of any layout can be fine-tuned.",
    )
    check(
        normalization == "global_tokens",
        f"training.loss_normalization is {normalization} with a task, whose loss is divided by what has a label in "
        "the step; set it to global_tokens.",
    )


def _check_decoder(config: Config) -> None:
    """Check the settings that a model with encoder and decoder depends on. Raises: ConfigError."""
    count = config.model.decoder_layers
    without = [choice.name for choice in config.objective_choices if not choice.section.has_target]
    check(
        not count or not without,
        f"model.decoder_layers is {count}, but {', '.join(without)} predicts tokens that are no decoder's; set it "
        "to 0, or choose objectives with a target: t5, bart, mass, prefix_lm, blank_infilling.",
    )
    check(
        not count or not config.training.eval_fillings,
        f"training.eval_fillings is {config.training.eval_fillings} with model.decoder_layers ({count}), but blanks "
        "are filled by one stack only; set it to 0.",
    )


def _check_second_stack(config: Config) -> None:
    if config.decoder is not None:
        for name, model in (("model", config.model), ("decoder", config.decoder)):
            check(
                not model.attention_window,
                f"{name}.attention_window is {model.attention_window}, but two stacks have no "
                "local layers; set it to 0.",
            )
    if any(choice.section.has_second_stack for choice in config.objective_choices):
        return
    for name in ("decoder", "decoder_tokenizer"):
        if getattr(config, name) is not None:
            with_two = _with_ability("has_second_stack")
            raise ConfigError(
                f"{name} is set without the objective {with_two}; set it to null, or objectives to "
                f"{{{with_two.partition(' ')[0]}: 1}}."
            )


def _with_ability(ability: str) -> str:
    """The objectives whose sections have it, for messages."""
    own = {name: OBJECTIVES[name].config_class for name in OBJECTIVES.own}
    return " or ".join(name for name, section in own.items() if getattr(section, ability))
