"""Rules that concern several sections of the settings. tree.py checks them whenever a configuration is created."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import ConfigError
from data_utils.common.losses import MTP
from data_utils.common.setting_files import shown
from data_utils.common.settings import check
from data_utils.objectives import OBJECTIVES, objective_class
from data_utils.objectives.own_corpora import TEXT_PAIRS
from megatron_lite.config.attention import check_attention
from megatron_lite.config.experts import check_run
from megatron_lite.config.lora import check_updates
from megatron_lite.config.systems import ENCODER_DECODERS, can_mean, default_objective
from megatron_lite.config.task_head import check_head

if TYPE_CHECKING:  # tree.py imports this module
    from megatron_lite.config.tree import Config


def check_together(config: Config) -> None:
    """Raise ConfigError naming the value, the rule that it breaks, and the remedy."""
    _check_steps(config)
    _check_objectives(config)
    train = config.data.train
    check(
        bool(config.phases) or not train or any(corpus.share > 0 for corpus in train),
        f"all corpora of data.train have {'weight' if train and train[0].tokens is None else 'tokens'} 0; set at least "
        "one above 0.",
    )
    _check_lengths(config)
    _check_heads(config)
    _check_fillings(config)
    _check_parallel_sizes(config)
    check_attention(config)
    if config.training.cuda_graphs:
        _check_graphs(config)
    _check_decoder(config)
    check_head(config)
    _check_task(config)
    check_updates(config)
    check_run(config)
    _check_further_tokens(config)
    config.data.check_decoder(config.decoder_tokenizer is not None)
    _check_second_stack(config)
    for choice in config.objective_choices:
        choice.section.check_run(config)
    _check_system(config)


def _check_steps(config: Config) -> None:
    steps, schedule = config.training.steps, config.schedule
    check(
        schedule.warmup_steps < config.decay_steps or schedule.is_deepspeeds,  # DeepSpeed stops in the warmup
        f"schedule.warmup_steps ({schedule.warmup_steps}) must be smaller than the end of the schedule "
        f"({config.decay_steps}); lower it, or raise training.steps ({steps}).",
    )
    first = config.profiler.first_step
    check(
        first is None or first <= steps,
        f"profiler.first_step is {first}, but training.steps is {steps}; lower first_step.",
    )
    check(
        not config.phases or config.batch.ramp is None,
        "batch.ramp is set together with phases; set it in the batch of a phase instead.",
    )
    check(
        not config.phases or config.task is None,
        "phases is set, but fine-tuning has a single phase; set it to [].",
    )


def _check_lengths(config: Config) -> None:
    """Positions, sequences and the vocabulary have at least the size that the objectives need."""
    chosen = [choice.section for choice in config.objective_choices]
    data, model = config.data, config.model
    needed = max(section.max_position_needed(data.sequence_length) for section in chosen)
    check(
        needed <= model.max_position or model.positions == "none",
        f"data.sequence_length ({data.sequence_length}) needs position ids up to {needed}, but "
        f"model.max_position is {model.max_position}; set model.max_position={needed}, or lower "
        "data.sequence_length.",
    )
    if data.row_length is not None:
        least = max(section.least_row_length(data.sequence_length) for section in chosen)
        default = max(section.row_length_for(data.sequence_length) for section in chosen)
        check(
            data.row_length >= least,
            f"data.row_length ({data.row_length}) is too short for data.sequence_length "
            f"({data.sequence_length}) and its masks; it must be at least {least} (null = {default}).",
        )
    if model.vocab_size is not None:
        for section in chosen:
            section.check_vocabulary_size(model.vocab_size)


def _check_objectives(config: Config) -> None:
    for name, weight in config.objectives.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        check(
            is_number and 0 <= weight < float("inf"),
            f"objectives.{name} is {shown(weight)}; it must be a number, 0 or more.",
        )
    check(
        bool(config.objective_choices),
        "objectives gives all a weight of 0; give one a positive weight.",
    )


def _check_system(config: Config) -> None:
    """A run of a published system trains what its class computes: an export reads texts as training did."""
    system, model = config.model.system, config.model
    if config.task is not None:
        return
    check(
        system not in ENCODER_DECODERS or model.decoder_layers > 0,
        f"model.decoder_layers is 0, but model.system {system} has a decoder; set "
        f"model.decoder_layers={model.num_layers}.",
    )
    for choice in config.objective_choices:
        text_format = objective_class(choice.name).text_format_for(choice.section)
        if text_format is None or choice.section.model_module is not None:
            continue
        check(
            can_mean(system, choice.name, text_format.input_format),
            f"objectives has {choice.name}, but the class of model.system {system} does not read texts so; set "
            f"{alone(config, default_objective(system))}, or describe the model by its options, without model.system.",
        )


def alone(config: Config, name: str) -> str:
    """What to write on a command line for a run of one objective: mappings merge, so the others get 0."""
    others = [
        f"objectives.{other}=0" for other, weight in config.objectives.items() if weight and other != name
    ]
    return " ".join([*others, f"objectives.{name}=1"])


def _check_heads(config: Config) -> None:
    """Heads, tables, and the objectives that need them."""
    model, chosen = config.model, config.objective_choices
    labelled = [choice.name for choice in chosen if choice.section.has_sentence_label]
    check(
        model.sentence_classes > 0 or not labelled,
        f"model.sentence_classes is 0, but {', '.join(labelled)} has next-sentence or sentence-order "
        "labels; set it to 2, or turn the labels off in that section.",
    )
    needed = [f"{name}:{count}" for choice in chosen for name, count in choice.section.class_heads.items()]
    check(
        set(needed) <= set(model.class_heads),
        f"model.class_heads is {shown(list(model.class_heads))}, but the objectives have labels for "
        f"{shown(needed)}; set it to these.",
    )
    if model.span_boundary_places and not any(choice.section.has_span_boundaries for choice in chosen):
        raise ConfigError(
            f"model.span_boundary_places is {model.span_boundary_places}, but only "
            f"{_objectives_with('has_span_boundaries')} uses it; set it to 0, or add that objective."
        )
    segments = max(choice.section.segments for choice in chosen)
    check(
        model.segments in (0, 1) or model.segments >= segments,
        f"model.segments is {model.segments}, but the objectives use {segments} segments; set it to "
        f"{segments}, to 1 for one shared row, or to 0 for no segment embedding.",
    )
    check(
        not model.task_types or len(chosen) <= model.task_types,
        f"model.task_types is {model.task_types}, but there are {len(chosen)} objectives with one row "
        f"each; set it to at least {len(chosen)}, or to 0 for no task embedding.",
    )
    check(
        all(row < model.task_types for row in model.task_rows),
        f"model.task_rows is {shown(list(model.task_rows))}, but the task embedding has "
        f"{model.task_types} rows; remove it: it is filled in at the start.",
    )
    block_objectives = [choice.name for choice in chosen if choice.section.has_block_positions]
    check(
        model.positions in ("learned_blocks", "rotary")
        or model.block_positions == "none"
        or not block_objectives,
        f"model.positions is {model.positions}, but {', '.join(block_objectives)} needs positions in the span; "
        "set it to learned_blocks or rotary, or set model.block_positions to none to ignore them.",
    )


def _check_fillings(config: Config) -> None:
    parallel, count = config.parallel, config.training.eval_fillings
    # Filling reads the model token by token, for which a rank must hold all weights.
    is_on_one_rank = (
        parallel.tensor_parallel_size == parallel.pipeline_parallel_size == parallel.expert_parallel_size == 1
        and parallel.zero_stage < 3
    )
    check(
        not count or is_on_one_rank,
        f"training.eval_fillings is {count}, but no rank holds the whole model; set it to 0 and use "
        "scripts/generate.py, or set tensor_parallel_size, pipeline_parallel_size and expert_parallel_size to 1 and "
        "zero_stage to 1 or 2.",
    )
    check(
        not count or any(choice.name == "blank_infilling" for choice in config.objective_choices),
        f"training.eval_fillings is {count}, but it needs the objective blank_infilling; set it to 0.",
    )


# Options with which graphs work too: they get their defaults before all others are compared with plain blocks.
_MODERN: dict[str, Any] = {
    "rms_norm": False,
    "ffn": "plain",
    "ffn_size": None,
    "biases": "all",
    "num_key_value_heads": None,
}


def _check_graphs(config: Config) -> None:
    """Raise ConfigError where a block is not one function, or a graph's inputs have other addresses in each step."""
    parallel, training, model = config.parallel, config.training, config.model
    rule = "training.cuda_graphs is true, but "
    communication_type = config.deepspeed.get("communication_data_type", "fp32")
    for name, value, needed, why in (
        (
            "parallel.pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            1,
            "pipeline stages are not captured",
        ),
        ("parallel.tensor_parallel_size", parallel.tensor_parallel_size, 1, "blocks communicate"),
        ("parallel.zero_stage", parallel.zero_stage, 1, "gradient or weight buffers are reallocated"),
        ("deepspeed.communication_data_type", communication_type, "fp32", "gradient buffers are reallocated"),
        ("training.recompute", training.recompute, "none", "recomputation runs blocks twice"),
        ("training.kernels", training.kernels, "fused", "blocks are not a single fused function"),
        ("training.layernorm", training.layernorm, "torch", "blocks are not a single fused function"),
        ("model.share_layers", model.share_layers, "none", "shared blocks accumulate several gradients"),
        ("model.decoder_layers", model.decoder_layers, 0, "decoder blocks are not captured"),
    ):
        check(
            value == needed, f"{rule}{name} is {value} ({why}); set it to {needed}, or cuda_graphs to false."
        )
    rest = "set cuda_graphs to false."
    check(
        training.precision != "fp32", f"{rule}training.precision is fp32; set it to bf16 or fp16, or {rest}"
    )
    check(config.task is None, f"{rule}fine-tuning may freeze parameters; {rest}")
    check(
        replace(model, **_MODERN).is_plain and model.has_plain_blocks and model.query_factor == 1.0,
        f"{rule}the model has options that graphs do not support; {rest}",
    )


def _check_parallel_sizes(config: Config) -> None:
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
        tp == 1 or model.query_key_norm_over == "head",
        f"parallel.tensor_parallel_size is {tp} with model.query_key_norm_over {model.query_key_norm_over}, which "
        "needs all heads on a rank; set tensor_parallel_size to 1.",
    )
    check(
        pp <= model.total_layers,
        f"parallel.pipeline_parallel_size ({pp}) exceeds model.num_layers ({model.num_layers}) + "
        f"decoder_layers ({model.decoder_layers}); each stage needs at least one block.",
    )
    check(
        pp == 1 or model.share_layers == "none",
        f"parallel.pipeline_parallel_size is {pp} with model.share_layers {model.share_layers}, but "
        "blocks that share weights must be on one stage; set pipeline_parallel_size to 1, or "
        "share_layers to none.",
    )
    check(
        pp == 1 or config.training.precision != "fp16",
        "training.precision is fp16 with pipeline_parallel_size > 1, where DeepSpeed lets the tied "
        "embeddings of the first and last stage diverge; use bf16.",
    )
    check(
        config.optimizer.kernel == "torch" or not parallel.offload_optimizer,
        f"optimizer.kernel is {config.optimizer.kernel}, which runs on GPUs only, but "
        "parallel.offload_optimizer is true; set the kernel to torch, or offload_optimizer to false.",
    )
    config.optimizer.check_layout(parallel)
    config.ema.check_run(parallel, config.task is not None)
    check(
        model.inner_size % tp == 0,
        f"model.ffn_size ({model.inner_size}) must be divisible by parallel.tensor_parallel_size ({tp}); "
        "change ffn_size.",
    )
    # Padding included: every rank takes an equal share of the tokens of a micro-batch.
    tokens = config.batch.micro_batch_size * config.row_length
    check(
        not parallel.sequence_parallel or tokens % tp == 0,
        f"batch.micro_batch_size x data.row_length = {tokens} tokens must be divisible by "
        f"parallel.tensor_parallel_size ({tp}) for sequence_parallel; change data.row_length.",
    )


def _check_task(config: Config) -> None:
    if config.task is None:
        return
    check(
        config.finetune.trained != "adapters" or config.model.adapter_size > 0,
        "finetune.trained is adapters, but model.adapter_size is 0; set it to a bottleneck size such as 64.",
    )
    # The loss of a task needs the head's outputs of a whole micro-batch, which no pipeline stage has.
    stages, normalization = config.parallel.pipeline_parallel_size, config.training.loss_normalization
    check(
        stages == 1,
        f"parallel.pipeline_parallel_size is {stages}, but fine-tuning does not support pipeline stages; "
        "set it to 1 and use tensor parallelism. Checkpoints of any layout can be fine-tuned.",
    )
    check(
        normalization == "global_tokens",
        f"training.loss_normalization is {normalization}, but fine-tuning divides the loss by the number "
        "of labels in the step; set it to global_tokens.",
    )


def _check_decoder(config: Config) -> None:
    """Check the settings that a model with encoder and decoder depends on. Raises: ConfigError."""
    count = config.model.decoder_layers
    # Text pairs train the encoder, whose vectors they are.
    without = [
        choice.name
        for choice in config.objective_choices
        if not choice.section.has_target and choice.section.own_corpora != TEXT_PAIRS
    ]
    check(
        not count or not without,
        f"model.decoder_layers is {count}, but {', '.join(without)} does not train a decoder; set it to "
        "0, or use only t5, bart, mass, tsdae, prefix_lm or blank_infilling.",
    )
    check(
        not count or not config.training.eval_fillings,
        f"training.eval_fillings is {config.training.eval_fillings} with model.decoder_layers ({count}), "
        "but blanks are filled by single-stack models only; set it to 0.",
    )


def _check_further_tokens(config: Config) -> None:
    """The layer of multi-token prediction continues a text from left to right, in one Transformer."""
    model, parallel = config.model, config.parallel
    if not model.mtp_layers:
        weight = config.training.mtp_weight
        check(
            weight == type(config.training).__dataclass_fields__["mtp_weight"].default,
            f"training.mtp_weight is {weight}, but model.mtp_layers is 0; set that to 1, or remove mtp_weight.",
        )
        check(
            config.decoder is None or not config.decoder.mtp_layers,
            "decoder.mtp_layers is 1, but only model can have such a layer; set it to 0.",
        )
        return
    chosen = [choice.name for choice in config.objective_choices]
    others = [name for name in chosen if MTP not in objective_class(name).losses]
    for name, value, is_supported, remedy in (
        ("objectives", ", ".join(others), not others, alone(config, "causal")),
        ("task.kind", config.task and config.task.kind, config.task is None, "task=null"),
        ("parallel.zero_stage", parallel.zero_stage, parallel.zero_stage < 3, "parallel.zero_stage=1"),
        (
            "training.loss_normalization",
            config.training.loss_normalization,
            config.training.loss_normalization == "global_tokens",
            "training.loss_normalization=global_tokens",
        ),
        ("training.cuda_graphs", True, not config.training.cuda_graphs, "training.cuda_graphs=false"),
        *(
            (f"model.{name}", getattr(model, name), is_plain, f"model.{name}={plain}")
            for name, is_plain, plain in (
                ("decoder_layers", not model.decoder_layers, "0"),
                ("share_layers", model.share_layers == "none", "none"),
                ("embedding_size", model.embedding_size is None, "null"),
                ("embedding_gradient_shrink", model.embedding_gradient_shrink == 1.0, "1"),
                ("relative", model.relative == "none", "none"),
                ("mup", model.mup is None, "null"),
                ("lora", model.lora is None, "null"),
            )
        ),
    ):
        check(
            is_supported,
            f"model.mtp_layers is 1 with {name} {value}, but multi-token prediction does not support it; set "
            f"{remedy}, or model.mtp_layers=0.",
        )


def _check_second_stack(config: Config) -> None:
    if config.decoder is not None:
        for name, model in (("model", config.model), ("decoder", config.decoder)):
            check(
                not model.attention_window,
                f"{name}.attention_window is {model.attention_window}, but local layers are not supported with a "
                "decoder section; set it to 0.",
            )
    if any(choice.section.has_second_stack for choice in config.objective_choices):
        return
    for name in ("decoder", "decoder_tokenizer"):
        if getattr(config, name) is not None:
            objectives = _objectives_with("has_second_stack")
            raise ConfigError(
                f"{name} is set, but only the objective {objectives} uses it; set {name}=null, or "
                f"{alone(config, objectives.partition(' ')[0])}."
            )


def _objectives_with(ability: str) -> str:
    """The names of this project's objectives whose sections have an ability, for messages."""
    sections = {name: OBJECTIVES[name].config_class for name in OBJECTIVES.own}
    return " or ".join(name for name, section in sections.items() if getattr(section, ability))
