"""Every setting of a run: one tree of frozen dataclasses, checked before any process group exists.

The sections are in sections.py, model.py, events.py, observation.py, data_utils/samples/config.py and beside each
objective. This file checks what concerns several. A component that needs one section takes that one; those that put a
run together take the tree. Derived values are properties, so that nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.base.setting_files import load_json, load_yaml, shown
from data_utils.base.settings import (
    REQUIRED,
    build,
    check,
    inline_sections,
    merge,
    parse_override,
    section,
    setting,
    setting_mapping,
)
from data_utils.objectives import OBJECTIVES, ObjectiveChoice, loss_share, objective_class
from data_utils.objectives.interface import ObjectiveConfig
from data_utils.samples.config import DataConfig
from data_utils.tasks.config import TaskConfig
from data_utils.text.tokenizers import TokenizerConfig
from megatron_lite.config.deepspeed_options import deepspeed_options
from megatron_lite.config.ema import EmaConfig
from megatron_lite.config.events import EventsConfig
from megatron_lite.config.finetuning import FinetuneConfig
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.observation import ProfilerConfig, TrackersConfig
from megatron_lite.config.phases import PhaseConfig, Plan
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import (
    BatchConfig,
    CheckpointConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TimeoutsConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: ModelConfig = setting(REQUIRED, "the Transformer")
    training: TrainingConfig = setting(REQUIRED, "the loop")
    batch: BatchConfig = section(BatchConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    ema: EmaConfig = section(EmaConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    tokenizer: TokenizerConfig | None = setting(
        None, "the tokenizer the corpora were built with; required for training"
    )
    decoder: ModelConfig | None = setting(
        None, "the decoder's own Transformer, where a latent vector joins two (objective optimus); else null"
    )
    decoder_tokenizer: TokenizerConfig | None = setting(
        None, "of that decoder's texts (decoder_prefix of the corpora); null = the same as the encoder's"
    )
    data: DataConfig = section(DataConfig)
    objectives: dict[str, Any] = setting_mapping(
        "objective -> share of the samples, relative to the others; empty = blank_infilling alone. The section "
        "of the same name says how it works"
    )
    objective_starts: dict[str, Any] = setting_mapping(
        "objective -> first sample from which it takes part, 0 if not named (a cumulative schedule of tasks)"
    )
    objective_sections: dict[str, ObjectiveConfig] = inline_sections(  # those of `objectives` alone
        OBJECTIVES, lambda name: objective_class(name).config_class
    )
    phases: tuple[PhaseConfig, ...] = setting(
        (), "list of phases, each with its length and what changes: see docs/data.md; empty = one phase"
    )
    task: TaskConfig | None = setting(
        None, "what scripts/finetune.py trains instead of objectives; null = pretraining"
    )
    finetune: FinetuneConfig = section(FinetuneConfig)
    generation: GenerationConfig = section(GenerationConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    events: EventsConfig = section(EventsConfig)
    timeouts: TimeoutsConfig = section(TimeoutsConfig)
    run: RunConfig = section(RunConfig)
    trackers: TrackersConfig = section(TrackersConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
    deepspeed: dict[str, Any] = setting_mapping(
        "further DeepSpeed options, see docs/configuration.md; what this file already decides must not be "
        "contradicted"
    )

    def __post_init__(self) -> None:
        steps, schedule = self.training.steps, self.schedule
        check(
            schedule.warmup_steps < self.decay_steps,
            f"schedule.warmup_steps ({schedule.warmup_steps}) must be smaller than the step at which the "
            f"schedule ends ({self.decay_steps}); lower it or raise training.steps ({steps}).",
        )
        first = self.profiler.first_step
        check(
            first is None or first <= steps,
            f"profiler.first_step is {first}, but training.steps is {steps}; trace an earlier step.",
        )
        self._choose_sections()
        self._check_objectives()
        chosen = [choice.section for choice in self.objective_choices]
        needed = max(section.max_position_needed(self.data.sequence_length) for section in chosen)
        check(
            needed <= self.model.max_position or self.model.positions == "none",
            f"data.sequence_length ({self.data.sequence_length}) needs position ids up to {needed}, but "
            f"model.max_position is {self.model.max_position}; set model.max_position={needed}, or a "
            "shorter data.sequence_length.",
        )
        self._check_row_length()
        if self.model.vocab_size is not None:
            for section in chosen:
                section.check_vocabulary_size(self.model.vocab_size)
        self._check_heads()
        self._check_fillings()
        self._check_layout()
        self._check_decoder()
        self._check_task()
        self.data.check_decoder(self.decoder_tokenizer is not None)
        self._check_second_stack()
        for choice in self.objective_choices:
            choice.section.check_run(self)
        self.deepspeed_options()
        check(
            not self.phases or self.batch.ramp is None,
            "batch.ramp is set beside phases; set it in the batch of a phase.",
        )
        check(
            not self.phases or self.task is None,
            "phases is set with a task, which is learnt in one; set it to [].",
        )
        Plan(self)

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

    def _choose_sections(self) -> None:
        """Leave the sections of the run's objectives, with defaults where none is given."""
        given, names = self.objective_sections, self.objectives or ("blank_infilling",)
        chosen = {name: given.get(name) or objective_class(name).config_class() for name in names}
        object.__setattr__(self, "objective_sections", chosen)

    def _check_objectives(self) -> None:
        for name, weight in self.objectives.items():
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            check(
                number and 0 <= weight < float("inf"),
                f"objectives.{name} is {shown(weight)}; it must be a number, 0 or more.",
            )
        for name, first in self.objective_starts.items():
            check(
                name in self.objectives,
                f"objective_starts names {shown(name)}, which is not among objectives; add it there or remove it.",
            )
            whole = isinstance(first, int) and not isinstance(first, bool)
            check(
                whole and first >= 0,
                f"objective_starts.{name} is {shown(first)}; it must be a number of samples, 0 or more.",
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

    @property
    def has_sentence_labels(self) -> bool:
        """Whether an objective makes labels for the head on CLS."""
        return any(choice.section.has_sentence_label for choice in self.objective_choices)

    def _check_heads(self) -> None:
        """Heads, tables, and the objectives that need them."""
        model, chosen = self.model, self.objective_choices
        labelled = [choice.name for choice in chosen if choice.section.has_sentence_label]
        check(
            model.sentence_classes > 0 or not labelled,
            f"model.sentence_classes is 0, but {', '.join(labelled)} makes next-sentence or sentence-order "
            "labels; set it to 2, or switch the labels off in that section.",
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
            model.positions in ("learned_blocks", "rotary") or not in_blocks,
            f"model.positions is {model.positions}, but {', '.join(in_blocks)} tells the places in a span by a table "
            "of their own; set it to learned_blocks or rotary, or choose another objective.",
        )

    def _check_fillings(self) -> None:
        parallel, count = self.parallel, self.training.eval_fillings
        whole = (
            parallel.tensor_parallel_size == parallel.pipeline_parallel_size == 1 and parallel.zero_stage < 3
        )
        check(
            not count or whole,
            f"training.eval_fillings is {count}, but in this layout no rank holds the whole model; set it to 0 and "
            "fill blanks with scripts/generate.py, or set tensor_parallel_size and pipeline_parallel_size to 1 and "
            "zero_stage to 1 or 2.",
        )
        check(
            not count or any(choice.name == "blank_infilling" for choice in self.objective_choices),
            f"training.eval_fillings is {count} without the objective blank_infilling; set it to 0.",
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
            pp == 1 or not model.share_layers,
            f"parallel.pipeline_parallel_size is {pp} with model.share_layers, whose one block cannot be on "
            "several stages; set the size to 1, or share_layers to false.",
        )
        check(
            pp == 1 or self.training.precision != "fp16",
            "training.precision is fp16 with pipeline_parallel_size > 1, where DeepSpeed lets the tied "
            "embedding of the first and last stage drift apart; use bf16.",
        )
        check(
            self.optimizer.kernel == "torch" or not parallel.offload_optimizer,
            f"optimizer.kernel is {self.optimizer.kernel}, which runs on GPUs only, with parallel.offload_optimizer; "
            "set the kernel to torch, or do not offload.",
        )
        self.optimizer.check_layout(parallel)
        self.ema.check_run(parallel, self.task is not None)
        check(
            model.inner_size % tp == 0,
            f"the inner width of the FFN ({model.inner_size}) must be divisible by parallel.tensor_parallel_size "
            f"({tp}); change model.ffn_size.",
        )
        tokens = self.batch.micro_batch_size * self.row_length
        check(
            not parallel.sequence_parallel or tokens % tp == 0,
            f"batch.micro_batch_size x row length = {tokens} tokens must be divisible by "
            f"parallel.tensor_parallel_size ({tp}) for sequence_parallel; change data.row_length.",
        )

    def _check_task(self) -> None:
        task, head = self.task, self.model.task_head
        check(
            task is not None or head == "none",
            f"model.task_head is {head} without a task; give one to scripts/finetune.py, or set task_head to none.",
        )
        if task is None:
            check(
                not self.model.task_mix,
                f"model.task_mix is true with model.task_head {head}, but the head is what mixes; set it to false.",
            )
            check(
                self.model.task_pool == "token",
                f"model.task_pool is {self.model.task_pool} with model.task_head {head}, but the head is what pools; "
                "set it to token.",
            )
            return
        check(
            self.finetune.trained != "adapters" or self.model.adapter_size > 0,
            "finetune.trained is adapters, but model.adapter_size is 0; set it to their inner width, such as 64.",
        )
        stages, normalization = self.parallel.pipeline_parallel_size, self.training.loss_normalization
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

    def _check_decoder(self) -> None:
        """Check the settings that a model with encoder and decoder depends on. Raises: ConfigError."""
        count = self.model.decoder_layers
        without = [choice.name for choice in self.objective_choices if not choice.section.has_target]
        check(
            not count or not without,
            f"model.decoder_layers is {count}, but {', '.join(without)} predicts tokens that are no decoder's; set it "
            "to 0, or choose objectives with a target: t5, bart, mass, prefix_lm, blank_infilling.",
        )
        check(
            not count or not self.training.eval_fillings,
            f"training.eval_fillings is {self.training.eval_fillings} with model.decoder_layers ({count}), but blanks "
            "are filled by one stack only; set it to 0.",
        )

    def _check_second_stack(self) -> None:
        if any(choice.section.has_second_stack for choice in self.objective_choices):
            return
        for name in ("decoder", "decoder_tokenizer"):
            if getattr(self, name) is not None:
                with_two = _with_ability("has_second_stack")
                raise ConfigError(
                    f"{name} is set without the objective {with_two}; set it to null, or objectives to "
                    f"{{{with_two.partition(' ')[0]}: 1}}."
                )

    @property
    def plan(self) -> Plan:
        """Which settings hold at which step; made at each call."""
        return Plan(self)

    @property
    def has_memory(self) -> bool:
        """Whether some tokens are a memory, through which no gradient goes."""
        return self.task is None and any(choice.section.memory_length for choice in self.objective_choices)

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

    def with_vocab_size(self, tokenizer_vocab_size: int, of_decoder: int | None = None) -> Config:
        """This configuration with model.vocab_size set, and decoder.vocab_size where there is one.

        Args: of_decoder: of the decoder's own tokenizer; None = it has none.
        Raises: ConfigError if a size contradicts the tokenizer.
        """
        model = _with_size("model", self.model, tokenizer_vocab_size)
        if self.decoder is None:
            return replace(self, model=model)
        decoder = _with_size("decoder", self.decoder, of_decoder or tokenizer_vocab_size)
        return replace(self, model=model, decoder=decoder)

    def deepspeed_options(self, dp_size: int | None = None) -> dict[str, Any]:
        """The dictionary for `deepspeed.initialize` on `dp_size` data-parallel ranks; None = not known yet.

        Raises: ConfigError for DeepSpeed options that are wrong, or contradict the rest.
        """
        batch = self.batch
        if dp_size is not None:
            plan = self.plan
            plan.require_ranks(dp_size)
            batch = plan.configs[0].batch
        sections = (batch, self.optimizer, self.parallel, self.training)
        return deepspeed_options(self.deepspeed, *sections, dp_size)

    @property
    def settings_for_apex(self) -> list[str]:
        """The settings that ask for NVIDIA's apex."""
        asked = {"optimizer.kernel": self.optimizer.kernel, "training.layernorm": self.training.layernorm}
        return [name for name, value in asked.items() if value == "apex"]

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its floor."""
        return self.training.steps if self.schedule.decay_steps is None else self.schedule.decay_steps


def _with_ability(ability: str) -> str:
    """The objectives whose sections have it, for messages."""
    return " or ".join(name for name, made in OBJECTIVES.items() if getattr(made.config_class, ability))


def _with_size(key: str, model: ModelConfig, size: int) -> ModelConfig:
    if model.vocab_size not in (None, size):
        raise ConfigError(
            f"{key}.vocab_size is {model.vocab_size}, but the tokenizer has {size} tokens; use "
            f"the tokenizer of this model, or set {key}.vocab_size=null."
        )
    return replace(model, vocab_size=size)


def load_config(
    files: Iterable[str | Path], overrides: Iterable[str] = (), deepspeed_config: str | Path | None = None
) -> Config:
    """Merge YAML files in order, then `section.key=value` overrides, then a DeepSpeed JSON file, and check.

    Raises: ConfigError naming the value, the rule and the remedy.
    """
    tree: dict[str, Any] = {}
    for path in files:
        tree = merge(tree, load_yaml(path))
    given: dict[str, Any] = {}
    for override in overrides:
        given = merge(given, parse_override(override))
    tree = merge(tree, given)
    if deepspeed_config is not None:
        ours = tree.get("deepspeed", {})
        if isinstance(ours, Mapping):
            tree["deepspeed"] = _joined(
                load_json(deepspeed_config, "DeepSpeed configuration"), ours, str(deepspeed_config)
            )
    config = build(Config, tree)
    _require_chosen(given, config)
    return config


def _require_chosen(given: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError for an override of an objective that the run has not. Files may hold several objectives'."""
    chosen = [choice.name for choice in config.objective_choices]
    for name in given.keys() & OBJECTIVES.keys():
        if name not in chosen and config.task is None:
            raise ConfigError(
                f"{name} is set, but the run trains {', '.join(chosen)}, which does not read it; set "
                f"objectives={{{name}: 1}} to train it, or leave the setting out."
            )


def require_validation(overrides: Iterable[str], config: Config) -> None:
    """Raise ConfigError for an override that concerns evaluations where there are none. Files may say when and how."""
    if config.data.validation or config.task is not None:
        return
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith("training.eval_"):
            raise ConfigError(
                f"{key} is set, but data.validation is not, so nothing is evaluated; set data.validation, or leave it "
                "out."
            )


def _joined(given: Mapping[str, Any], ours: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A DeepSpeed file merged with the configuration's deepspeed section. Raises ConfigError where they differ."""
    joined = {**given, **ours}
    for key in given.keys() & ours.keys():
        if isinstance(given[key], Mapping) and isinstance(ours[key], Mapping):
            joined[key] = _joined(given[key], ours[key], path)
        elif given[key] not in ("auto", ours[key]):
            raise ConfigError(
                f"{path}: {key} is {shown(given[key])}, but the configuration's deepspeed section says "
                f"{shown(ours[key])}; make them equal, or remove one."
            )
    return joined
