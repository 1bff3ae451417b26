"""Every setting of a run: one tree of frozen dataclasses, checked before any process group exists.

One YAML file is the truth of a run; `load_config` merges several files in order, then dotted overrides, then
(when given) a DeepSpeed JSON whose values must agree with ours. Components receive their own section, never
the tree. Derived values are properties, so that nothing is stored twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_utils.objectives import (
    LOSS_NAMES,
    OBJECTIVES,
    TASKS,
    ObjectiveChoice,
    loss_share,
    objective_class,
)
from data_utils.objectives.planes import ObjectiveConfig
from data_utils.tokenizers import TokenizerConfig
from megatron_lite.deepspeed_options import check_agreement
from megatron_lite.errors import ConfigError
from megatron_lite.events import EventsConfig
from megatron_lite.settings import (
    REQUIRED,
    build,
    check,
    choice,
    inline_sections,
    load_yaml,
    merge,
    parse_override,
    section,
    setting,
    setting_mapping,
)

LOSS_NORMALIZATIONS = ("global_tokens", "per_objective", "mean_of_means")
VOCAB_MULTIPLE = 128  # the reference pads vocabularies to this; a multiple suits GPU matrix units
SPAN_PLACE_SIZE = 200  # width of the place embedding of SpanBERT's head


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    num_layers: int = setting(REQUIRED, "Transformer blocks")
    hidden_size: int = setting(REQUIRED, "width of the residual stream")
    num_attention_heads: int = setting(REQUIRED, "attention heads; must divide hidden_size")
    vocab_size: int | None = setting(
        None, "tokens including GLM's special ones, unpadded; null = the tokenizer's"
    )
    max_position: int = setting(512, "largest position id; both tables have max_position + 1 rows")
    embedding_dropout: float = setting(0.1, "dropout probability after the embeddings")
    attention_dropout: float = setting(0.1, "dropout probability on attention weights")
    output_dropout: float = setting(0.1, "dropout probability on the output of attention and FFN")
    layernorm_epsilon: float = setting(1e-5, "epsilon of every LayerNorm")
    init_std: float = setting(
        0.02, "standard deviation of initial weights; output projections get init_std/sqrt(2L)"
    )
    gelu: str = setting("tanh", "tanh (training of the released models) or erf (their Hugging Face code)")
    embedding_gradient_shrink: float = setting(
        1.0, "factor on the gradient of the embeddings; GLM-130B trained stably with 0.1, 1 = off"
    )
    segments: int = setting(
        0, "rows of a segment embedding: BERT 2 (texts A and B), UniLM 6 (kinds of language model), 0 = none"
    )
    task_embedding: bool = setting(False, "add an embedding of the objective that made a token (ERNIE 2.0)")
    sentence_head: bool = setting(
        False, "two-class head on CLS for next-sentence and sentence-order labels (BERT, ALBERT, UniLM)"
    )
    span_boundary_places: int = setting(
        0, "places of SpanBERT's head that predicts a span from the tokens around it; 0 = no such head"
    )
    embedding_size: int | None = setting(
        None, "width of the embeddings, projected to hidden_size (ALBERT: 128); null = hidden_size itself"
    )
    share_layers: bool = setting(False, "one set of weights for all blocks (ALBERT)")

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position"):
            value = getattr(self, name)
            check(value >= 1, f"model.{name} is {value}; it must be at least 1.")
        check(
            self.hidden_size % self.num_attention_heads == 0,
            f"model.num_attention_heads ({self.num_attention_heads}) must divide model.hidden_size "
            f"({self.hidden_size}); choose a divisor of {self.hidden_size}.",
        )
        for name in ("embedding_dropout", "attention_dropout", "output_dropout"):
            value = getattr(self, name)
            check(0.0 <= value < 1.0, f"model.{name} is {value}; it must be in [0, 1).")
        shrink = self.embedding_gradient_shrink
        check(0.0 < shrink <= 1.0, f"model.embedding_gradient_shrink is {shrink}; it must be in (0, 1].")
        for name in ("init_std", "layernorm_epsilon"):
            value = getattr(self, name)
            check(value > 0, f"model.{name} is {value}; it must be positive.")
        if self.vocab_size is not None:
            check(
                self.vocab_size >= 1, f"model.vocab_size is {self.vocab_size}; it must be at least 1 or null."
            )
        choice("model.gelu", self.gelu, ("tanh", "erf"))
        for name in ("segments", "span_boundary_places"):
            value = getattr(self, name)
            check(value >= 0, f"model.{name} is {value}; it must not be negative.")
        size = self.embedding_size
        check(size is None or size >= 1, f"model.embedding_size is {size}; it must be at least 1, or null.")

    @property
    def is_plain(self) -> bool:
        """GLM's own layers and no others: what exports and their proofs know."""
        return not (
            self.segments
            or self.task_embedding
            or self.sentence_head
            or self.span_boundary_places
            or self.embedding_size is not None
            or self.share_layers
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    micro_batch_size: int = setting(8, "samples per data-parallel rank and forward pass")
    global_batch_size: int = setting(16, "samples per optimizer step, all ranks together")

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            check(value >= 1, f"batch.{name} is {value}; it must be at least 1.")
        check(
            self.global_batch_size % self.micro_batch_size == 0,
            f"batch.global_batch_size ({self.global_batch_size}) must be a multiple of "
            f"batch.micro_batch_size ({self.micro_batch_size}); change one of them.",
        )

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches per optimizer step and rank.

        Raises: ConfigError when the world does not fit the batch.
        """
        per_pass = self.micro_batch_size * data_parallel_size
        if self.global_batch_size % per_pass:
            raise ConfigError(
                f"batch.global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"batch.micro_batch_size ({self.micro_batch_size}) x data-parallel ranks "
                f"({data_parallel_size}) = {per_pass}; start a number of processes that divides "
                f"{self.global_batch_size // self.micro_batch_size}, or change one of the sizes."
            )
        return self.global_batch_size // per_pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    tensor_parallel_size: int = setting(1, "ranks that share every layer; must divide the attention heads")
    sequence_parallel: bool = setting(
        False, "split norms, dropout and residuals along the tokens over the tensor-parallel ranks"
    )
    pipeline_parallel_size: int = setting(1, "stages that share the sequence of blocks; needs zero_stage 1")
    zero_stage: int = setting(
        1, "DeepSpeed ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights"
    )
    offload_optimizer: bool = setting(
        False, "keep fp32 weights and Adam moments in CPU memory and step there; not with pipeline stages"
    )

    def __post_init__(self) -> None:
        # Stage 0 is refused: with fp16 DeepSpeed then unscales gradients of a loss that was never scaled.
        choice("parallel.zero_stage", self.zero_stage, (1, 2, 3))
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            check(value >= 1, f"parallel.{name} is {value}; it must be at least 1.")
        check(
            self.pipeline_parallel_size == 1 or self.zero_stage == 1,
            f"parallel.zero_stage is {self.zero_stage} with pipeline_parallel_size "
            f"{self.pipeline_parallel_size}; DeepSpeed's pipeline shards the optimizer only: set zero_stage to 1.",
        )
        check(
            self.pipeline_parallel_size == 1 or not self.offload_optimizer,
            f"parallel.offload_optimizer is true with pipeline_parallel_size {self.pipeline_parallel_size}, where "
            "DeepSpeed lets the tied embedding of the first and last stage drift apart; set one of them to its "
            "default.",
        )
        check(
            not self.sequence_parallel or self.tensor_parallel_size > 1,
            "parallel.sequence_parallel is true with tensor_parallel_size 1; it splits tokens over the "
            "tensor-parallel ranks: raise tensor_parallel_size, or set it to false.",
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that share the samples. Raises ConfigError when the processes do not divide."""
        per_replica = self.tensor_parallel_size * self.pipeline_parallel_size
        if world_size % per_replica:
            raise ConfigError(
                f"the run has {world_size} processes, but parallel.tensor_parallel_size "
                f"({self.tensor_parallel_size}) x pipeline_parallel_size ({self.pipeline_parallel_size}) = "
                f"{per_replica} must divide their number; start a multiple of {per_replica}."
            )
        return world_size // per_replica


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    steps: int = setting(REQUIRED, "optimizer steps of the whole run")
    seed: int = setting(1234, "seed of initial weights, samples and dropout")
    precision: str = setting("bf16", "bf16, fp16 (dynamic loss scaling) or fp32; accumulation is always fp32")
    recompute: str = setting(
        "none", "what the backward pass recomputes: none, selective (attention) or full (whole blocks)"
    )
    loss_normalization: str = setting(
        "global_tokens",
        "global_tokens: sum over loss tokens / their number in the whole step; mean_of_means: the "
        "reference's mean per micro-batch, then over micro-batches and ranks; per_objective: the sum over the "
        "losses (masked, next_sentence, ...) of each one's mean over its own tokens in the whole step",
    )
    loss_weights: dict[str, Any] = setting_mapping(
        "per_objective only: loss -> factor of its mean, 1 if not named; names as in the log line, loss/NAME"
    )
    max_nonfinite_steps: int = setting(
        20, "consecutive skipped non-finite steps (beyond fp16 scale search) that stop the run"
    )
    replica_check_interval: int = setting(
        0, "steps between checks that weights held by several ranks are equal bit for bit; 0 = never"
    )
    gradient_norm_interval: int = setting(
        0, "steps between records of every layer's gradient norm, before clipping; 0 = never"
    )
    eval_interval: int = setting(
        1000, "steps between evaluations on the validation split; 0 = only at the end"
    )
    eval_samples: int = setting(256, "validation samples per evaluation, the same ones every time")
    stop_after_step: int | None = setting(
        None, "save and stop cleanly after this step (a planned interruption); null = run to the end"
    )

    def __post_init__(self) -> None:
        check(self.steps >= 1, f"training.steps is {self.steps}; it must be at least 1.")
        for name in ("eval_interval", "replica_check_interval", "gradient_norm_interval"):
            value = getattr(self, name)
            check(value >= 0, f"training.{name} is {value}; it must not be negative.")
        check(self.eval_samples >= 1, f"training.eval_samples is {self.eval_samples}; it must be at least 1.")
        check(
            self.max_nonfinite_steps >= 1,
            f"training.max_nonfinite_steps is {self.max_nonfinite_steps}; it must be at least 1.",
        )
        check(0 <= self.seed < 2**63, f"training.seed is {self.seed}; it must be in [0, 2^63).")
        choice("training.precision", self.precision, ("bf16", "fp16", "fp32"))
        choice("training.recompute", self.recompute, ("none", "selective", "full"))
        choice("training.loss_normalization", self.loss_normalization, LOSS_NORMALIZATIONS)
        check(
            not self.loss_weights or self.loss_normalization == "per_objective",
            f"training.loss_weights is set but training.loss_normalization is {self.loss_normalization}; set "
            "that to per_objective, or remove the weights.",
        )
        for name, weight in self.loss_weights.items():
            choice("a name in training.loss_weights", name, LOSS_NAMES)
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            check(
                number and 0 <= weight < float("inf"),
                f"training.loss_weights.{name} is {weight!r}; it must be a number, 0 or more.",
            )
        if self.stop_after_step is not None:
            check(
                1 <= self.stop_after_step <= self.steps,
                f"training.stop_after_step is {self.stop_after_step}; it must be between 1 and "
                f"training.steps ({self.steps}).",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = setting(1e-4, "peak learning rate of AdamW")
    beta1: float = setting(0.9, "decay of the first moment")
    beta2: float = setting(0.98, "decay of the second moment")
    eps: float = setting(1e-6, "Adam epsilon")
    weight_decay: float = setting(0.1, "decoupled weight decay; none on LayerNorm and biases")
    clip_grad_norm: float = setting(
        1.0, "global gradient norm above which gradients are scaled down; 0 = off"
    )

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            value = getattr(self, name)
            check(value > 0, f"optimizer.{name} is {value}; it must be positive.")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check(0.0 <= value < 1.0, f"optimizer.{name} is {value}; it must be in [0, 1).")
        for name in ("weight_decay", "clip_grad_norm"):
            value = getattr(self, name)
            check(value >= 0, f"optimizer.{name} is {value}; it must not be negative.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    kind: str = setting("cosine", "cosine, linear or constant, after a linear warm-up")
    warmup_steps: int = setting(0, "steps of linear warm-up from 0 to the peak")
    decay_steps: int | None = setting(
        None, "step at which the floor is reached, warm-up included; null = training.steps"
    )
    min_lr_ratio: float = setting(0.1, "floor of the schedule as a fraction of the peak")

    def __post_init__(self) -> None:
        choice("schedule.kind", self.kind, ("cosine", "linear", "constant"))
        check(
            self.warmup_steps >= 0, f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative."
        )
        check(
            0.0 <= self.min_lr_ratio <= 1.0,
            f"schedule.min_lr_ratio is {self.min_lr_ratio}; it must be in [0, 1].",
        )
        if self.decay_steps is not None:
            check(
                self.decay_steps > self.warmup_steps,
                f"schedule.decay_steps ({self.decay_steps}) must be larger than schedule.warmup_steps "
                f"({self.warmup_steps}).",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    prefix: str = setting(REQUIRED, "dataset path without .bin/.idx/.json")
    weight: float = setting(1.0, "share of the samples drawn from this corpus, relative to the others")

    def __post_init__(self) -> None:
        check(self.weight > 0, f"weight of corpus {self.prefix} is {self.weight}; it must be positive.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    train: tuple[CorpusConfig, ...] = setting((), "list of {prefix, weight}: the training corpora")
    validation: tuple[CorpusConfig, ...] = setting(
        (), "list of {prefix, weight}: the validation corpora; empty = no evaluation"
    )
    sequence_length: int = setting(512, "tokens of source text per sample (before corruption)")
    local_directory: str | None = setting(
        None,
        "node-local directory to which the corpora are copied before training; null = read where they are",
    )
    row_length: int | None = setting(
        None, "padded length of a row; null = derived from sequence_length and the objective"
    )

    def __post_init__(self) -> None:
        check(
            self.sequence_length >= 16,
            f"data.sequence_length is {self.sequence_length}; it must be at least 16.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    save_interval: int = setting(1000, "steps between checkpoints; 0 = only when the run stops")
    keep_last: int = setting(3, "newest checkpoints kept; 0 = all")
    keep_every: int = setting(0, "checkpoints at multiples of this many steps are kept for good; 0 = none")
    asynchronous: bool = setting(
        False,
        "write in the background, from a copy of the state in CPU memory (12 bytes per parameter owned)",
    )
    max_failed_saves: int = setting(
        3, "failed saves in a row, for example on a full disk, that stop the run; below that it only warns"
    )
    resume: str = setting(
        "auto",
        "auto: continue from the newest valid checkpoint of the run directory; never: refuse to start if it "
        "has one",
    )
    initialize_from: str | None = setting(
        None,
        "run directory or step_... directory to begin with where the run directory has no checkpoint yet; "
        "null = initial weights",
    )
    initialize: str = setting(
        "weights",
        "what of it: weights (fresh optimizer, step 0) or all (optimizer, step and samples too: a branch)",
    )

    def __post_init__(self) -> None:
        for name in ("save_interval", "keep_last", "keep_every"):
            value = getattr(self, name)
            check(value >= 0, f"checkpoint.{name} is {value}; it must not be negative.")
        check(
            self.save_interval == 0 or self.keep_every % self.save_interval == 0,
            f"checkpoint.keep_every ({self.keep_every}) must be a multiple of checkpoint.save_interval "
            f"({self.save_interval}), or no checkpoint exists at most of its steps; change one of them.",
        )
        check(
            self.max_failed_saves >= 1,
            f"checkpoint.max_failed_saves is {self.max_failed_saves}; it must be at least 1.",
        )
        choice("checkpoint.initialize", self.initialize, ("weights", "all"))
        check(
            self.initialize == "weights" or self.initialize_from is not None,
            "checkpoint.initialize is all, but checkpoint.initialize_from is null; name a checkpoint there.",
        )
        choice("checkpoint.resume", self.resume, ("auto", "never"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    directory: str = setting(
        "runs/glm", "where checkpoints, metrics.jsonl, TensorBoard files and the resolved config go"
    )
    log_interval: int = setting(10, "steps between log lines")
    tensorboard: bool = setting(True, "write TensorBoard event files below directory/tensorboard")
    peak_tflops: float | None = setting(
        None, "peak TFLOP/s of one device for MFU; null = known GPUs by name, else measured on CPU"
    )

    def __post_init__(self) -> None:
        check(self.log_interval >= 1, f"run.log_interval is {self.log_interval}; it must be at least 1.")
        peak = self.peak_tflops
        check(peak is None or peak > 0, f"run.peak_tflops is {peak}; it must be positive or null.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig:
    setup_seconds: int = setting(1800, "longest time from the start of a process to the first step")
    step_seconds: int = setting(1800, "longest time of one optimizer step, or of a check between steps")
    evaluation_seconds: int = setting(3600, "longest time of an evaluation")
    checkpoint_seconds: int = setting(3600, "longest time of loading or saving a checkpoint")
    heartbeat_seconds: int = setting(
        10, "time between the notes of where each rank is, in directory/heartbeats"
    )

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            check(value >= 1, f"timeouts.{name} is {value}; it must be at least 1.")

    @property
    def sections(self) -> dict[str, float]:
        """Limit in seconds by section (watchdog.py)."""
        return {
            "setup": self.setup_seconds,
            "step": self.step_seconds,
            "evaluation": self.evaluation_seconds,
            "checkpoint": self.checkpoint_seconds,
        }

    @property
    def collective_seconds(self) -> float:
        """Longest wait in one collective: beyond all limits, because the watchdog says more than torch does."""
        return max(self.sections.values()) + 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: ModelConfig = setting(REQUIRED, "the Transformer")
    training: TrainingConfig = setting(REQUIRED, "the loop")
    batch: BatchConfig = section(BatchConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    tokenizer: TokenizerConfig | None = setting(
        None, "the tokenizer the corpora were built with; required for training"
    )
    data: DataConfig = section(DataConfig)
    objectives: dict[str, Any] = setting_mapping(
        "objective -> share of the samples, relative to the others; empty = blank_infilling alone. The section "
        "of the same name says how it works"
    )
    objective_starts: dict[str, Any] = setting_mapping(
        "objective -> first sample from which it takes part, 0 if not named (a cumulative schedule of tasks)"
    )
    objective_sections: dict[str, ObjectiveConfig] = inline_sections(
        {name: objective.config_class for name, objective in OBJECTIVES.items()}
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    events: EventsConfig = section(EventsConfig)
    timeouts: TimeoutsConfig = section(TimeoutsConfig)
    run: RunConfig = section(RunConfig)
    deepspeed: dict[str, Any] = setting_mapping(
        "further DeepSpeed options, passed on as they are; what this file already decides must not be "
        "contradicted"
    )

    def __post_init__(self) -> None:
        steps, schedule = self.training.steps, self.schedule
        check(
            schedule.warmup_steps < self.decay_steps,
            f"schedule.warmup_steps ({schedule.warmup_steps}) must be smaller than the step at which the "
            f"schedule ends ({self.decay_steps}); lower it or raise training.steps ({steps}).",
        )
        self._check_objectives()
        chosen = [choice.section for choice in self.objective_choices]
        needed = max(section.max_position_needed(self.data.sequence_length) for section in chosen)
        check(
            needed <= self.model.max_position,
            f"data.sequence_length ({self.data.sequence_length}) needs position ids up to {needed}, but "
            f"model.max_position is {self.model.max_position}; set model.max_position={needed}, or a "
            "shorter data.sequence_length.",
        )
        self._check_row_length()
        if self.model.vocab_size is not None:
            for section in chosen:
                section.check_vocabulary_size(self.model.vocab_size)
        self._check_heads()
        self._check_layout()
        check_agreement(self)

    def _check_row_length(self) -> None:
        length = self.data.row_length
        if length is None:
            return
        chosen = [choice.section for choice in self.objective_choices]
        least = max(section.least_row_length(self.data.sequence_length) for section in chosen)
        usual = max(section.row_length_for(self.data.sequence_length) for section in chosen)
        check(
            length >= least,
            f"data.row_length ({length}) is too short for data.sequence_length ({self.data.sequence_length}) "
            f"and its masks; it must be at least {least}, null chooses {usual}.",
        )

    def _check_objectives(self) -> None:
        for name, weight in self.objectives.items():
            objective_class(name)
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            check(
                number and 0 <= weight < float("inf"),
                f"objectives.{name} is {weight!r}; it must be a number, 0 or more.",
            )
        for name, first in self.objective_starts.items():
            check(
                name in self.objectives,
                f"objective_starts names {name!r}, which is not among objectives; add it there or remove it.",
            )
            whole = isinstance(first, int) and not isinstance(first, bool)
            check(
                whole and first >= 0,
                f"objective_starts.{name} is {first!r}; it must be a number of samples, 0 or more.",
            )
        check(
            any(choice.first_sample == 0 for choice in self.objective_choices),
            "no objective takes part from sample 0 on; give one in objectives a positive weight and no "
            "entry in objective_starts.",
        )

    @property
    def objective_choices(self) -> tuple[ObjectiveChoice, ...]:
        """The objectives of the run that have a weight, with their sections."""
        weights = self.objectives or {"blank_infilling": 1.0}
        return tuple(
            ObjectiveChoice(
                name, self.objective_sections[name], float(weight), self.objective_starts.get(name, 0)
            )
            for name, weight in weights.items()
            if weight > 0
        )

    def _check_heads(self) -> None:
        """Heads and the objectives that need them: a head without labels would never get a gradient."""
        model, chosen = self.model, self.objective_choices
        labelled = [choice.name for choice in chosen if choice.section.has_sentence_label]
        with_labels = [
            name for name, cls in OBJECTIVES.items() if any(loss.sentence_level for loss in cls.losses)
        ]
        with_borders = [
            name for name, section in self.objective_sections.items() if section.has_span_boundaries
        ]
        check(
            model.sentence_head or not labelled,
            f"model.sentence_head is false, but {', '.join(labelled)} makes next-sentence or sentence-order "
            "labels; set it to true, or switch the labels off in that section.",
        )
        check(
            not model.sentence_head or bool(labelled),
            "model.sentence_head is true, but no objective makes labels for it; set it to false, or choose one of "
            f"{', '.join(with_labels)} and switch its labels on.",
        )
        check(
            not model.span_boundary_places or any(choice.section.has_span_boundaries for choice in chosen),
            f"model.span_boundary_places is {model.span_boundary_places} without the objective "
            f"{' or '.join(with_borders)}; set it to 0, or add that to objectives.",
        )
        segments = max(choice.section.segments for choice in chosen)
        check(
            model.segments in (0, *range(segments, 1000)),
            f"model.segments is {model.segments}, but the objectives use {segments}; set it to {segments}, or "
            "to 0 for no segment embedding.",
        )

    def _check_layout(self) -> None:
        parallel, model = self.parallel, self.model
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        check(
            model.num_attention_heads % tp == 0,
            f"model.num_attention_heads ({model.num_attention_heads}) must be divisible by "
            f"parallel.tensor_parallel_size ({tp}); choose a divisor of {model.num_attention_heads}.",
        )
        check(
            pp <= model.num_layers,
            f"parallel.pipeline_parallel_size ({pp}) exceeds model.num_layers ({model.num_layers}); a stage "
            "needs a block.",
        )
        check(
            pp == 1 or not model.share_layers,
            f"parallel.pipeline_parallel_size is {pp} with model.share_layers, whose one block cannot be on "
            "several stages; set the size to 1, or share_layers to false.",
        )
        check(
            pp == 1 or self.training.precision != "fp16",
            "training.precision is fp16 with pipeline_parallel_size > 1, where DeepSpeed lets the tied "
            "embedding of the first and last stage drift apart; use bf16.",
        )
        tokens = self.batch.micro_batch_size * self.row_length
        check(
            not parallel.sequence_parallel or tokens % tp == 0,
            f"batch.micro_batch_size x row length = {tokens} tokens must be divisible by "
            f"parallel.tensor_parallel_size ({tp}) for sequence_parallel; change data.row_length.",
        )

    @property
    def row_length(self) -> int:
        """Tokens of a row, padding included."""
        if self.data.row_length is not None:
            return self.data.row_length
        return max(
            choice.section.row_length_for(self.data.sequence_length) for choice in self.objective_choices
        )

    @property
    def loss_share(self) -> float:
        """Part of the row tokens that is predicted, on average and without padding."""
        return loss_share(self.objective_choices)

    def with_vocab_size(self, tokenizer_vocab_size: int) -> Config:
        """This configuration with model.vocab_size settled.

        Raises: ConfigError if it contradicts the tokenizer.
        """
        configured = self.model.vocab_size
        if configured is not None and configured != tokenizer_vocab_size:
            raise ConfigError(
                f"model.vocab_size is {configured}, but the tokenizer has {tokenizer_vocab_size} tokens; use "
                "the tokenizer of this model, or set model.vocab_size=null."
            )
        return replace(self, model=replace(self.model, vocab_size=tokenizer_vocab_size))

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its floor."""
        return self.training.steps if self.schedule.decay_steps is None else self.schedule.decay_steps


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int = 1) -> int:
    """Rows of the word embedding: `vocab_size` rounded up so that every shard has a multiple of 128 rows."""
    multiple = VOCAB_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters, padded vocabulary rows included. Needs model.vocab_size."""
    assert model.vocab_size is not None
    h, e = model.hidden_size, model.embedding_size or model.hidden_size
    tables = padded_vocab_size(model.vocab_size) + 2 * (model.max_position + 1) + model.segments
    tables += TASKS * model.task_embedding
    block = 12 * h * h + 13 * h  # QKV 3h(h+1), dense h(h+1), FFN 4h(h+1) + h(4h+1), two LayerNorms 4h
    heads = 0
    if model.embedding_size is not None:
        heads += (h * e + h) + (h * e + e + 2 * e)  # to the hidden size; back, with a LayerNorm
    if model.sentence_head:
        heads += h * (h + 1) + 2 * (h + 1)
    if model.span_boundary_places:
        place = SPAN_PLACE_SIZE
        heads += model.span_boundary_places * place + (2 * h + place) * h + h * h + 2 * 3 * h
    return tables * e + (1 if model.share_layers else model.num_layers) * block + 2 * h + heads


def load_config(
    files: Iterable[str | Path], overrides: Iterable[str] = (), deepspeed_config: str | Path | None = None
) -> Config:
    """Merge YAML files in order, then `section.key=value` overrides, then a DeepSpeed JSON file, and check.

    Raises: ConfigError naming the value, the rule and the remedy.
    """
    tree: dict[str, Any] = {}
    for path in files:
        tree = merge(tree, load_yaml(path))
    for override in overrides:
        tree = merge(tree, parse_override(override))
    if deepspeed_config is not None:
        ours = tree.get("deepspeed", {})
        if isinstance(ours, Mapping):
            tree["deepspeed"] = _joined(_load_json(deepspeed_config), ours, str(deepspeed_config))
    return build(Config, tree)


def _joined(given: Mapping[str, Any], ours: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A DeepSpeed file and the configuration's deepspeed section together; ConfigError where they differ."""
    joined = {**given, **ours}
    for key in given.keys() & ours.keys():
        if isinstance(given[key], Mapping) and isinstance(ours[key], Mapping):
            joined[key] = _joined(given[key], ours[key], path)
        elif given[key] not in ("auto", ours[key]):
            raise ConfigError(
                f"{path}: {key} is {given[key]!r}, but the configuration's deepspeed section says "
                f"{ours[key]!r}; make them equal, or remove one."
            )
    return joined


def _load_json(path: str | Path) -> dict[str, Any]:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"DeepSpeed configuration {path}: {error.strerror}; check the path.") from None
    except ValueError as error:
        raise ConfigError(f"DeepSpeed configuration {path} is not valid JSON: {error}; mend it.") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"DeepSpeed configuration {path} must hold a JSON object, not {type(tree).__name__}."
        )
    return tree
