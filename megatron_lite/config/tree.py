"""Every setting of a run: one tree of frozen dataclasses, checked before any process group exists.

The sections are in sections.py, model.py, events.py, data_utils/loader/config.py and with each objective. rules.py
checks what concerns several. A component that needs one section takes that one; those that put a run together take the
tree. Derived values are properties, so that nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml, setting_lines, shorten, yaml_path
from data_utils.common.settings import (
    REQUIRED,
    SettingsError,
    build,
    inline_sections,
    leaves,
    merge,
    parse_override,
    section,
    setting,
    setting_mapping,
    wrong_settings,
)
from data_utils.loader.config import DataConfig
from data_utils.objectives import OBJECTIVES, ObjectiveChoice, loss_share, objective_class, section_class
from data_utils.objectives.interface import ObjectiveConfig
from data_utils.tasks.config import TaskConfig
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig
from megatron_lite.config.deepspeed_file import with_deepspeed
from megatron_lite.config.deepspeed_keys import KEYS
from megatron_lite.config.deepspeed_options import deepspeed_options
from megatron_lite.config.events import EventsConfig
from megatron_lite.config.finetuning import FinetuneConfig
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phases import PhaseConfig
from megatron_lite.config.plan import Plan
from megatron_lite.config.rules import check_together
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import (
    BatchConfig,
    CheckpointConfig,
    EmaConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfilerConfig,
    RunConfig,
    TimeoutsConfig,
    TrackersConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: ModelConfig = setting(REQUIRED, "The Transformer.")
    training: TrainingConfig = setting(REQUIRED, "The training loop.")
    batch: BatchConfig = section(BatchConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    ema: EmaConfig = section(EmaConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    tokenizer: TokenizerConfig | None = setting(None, "Tokenizer of the corpora; required for training.")
    decoder: ModelConfig | None = setting(None, "Decoder of the objective optimus; null otherwise.")
    decoder_tokenizer: TokenizerConfig | None = setting(
        None, "Tokenizer of the decoder's texts (decoder_prefix of the corpora); null = as tokenizer."
    )
    data: DataConfig = section(DataConfig)
    objectives: dict[str, Any] = setting_mapping(
        "Objective -> share of the samples, relative to the others; {} = blank_infilling only. The section "
        "of the same name configures an objective."
    )
    objective_starts: dict[str, Any] = setting_mapping(
        "Objective -> first sample at which it takes part; 0 if not listed (a cumulative schedule of "
        "objectives)."
    )
    objective_sections: dict[str, ObjectiveConfig] = inline_sections(  # those of `objectives` alone
        OBJECTIVES, section_class
    )
    phases: tuple[PhaseConfig, ...] = setting(
        (),
        "Phases, each with its length and the settings that it changes (docs/data_mixtures.md); [] = one phase.",
    )
    task: TaskConfig | None = setting(None, "Task for scripts/finetune.py; null = pretraining.")
    tasks: tuple[TaskConfig, ...] = setting(
        (), "Several tasks trained together: files of configs/tasks/ or sections like `task`; [] = one task."
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
        "DeepSpeed's own keys, see docs/coming_from.md: those that are settings here become them, the others go to "
        "DeepSpeed"
    )

    def __post_init__(self) -> None:
        """Raises: ConfigError for what cannot be trained: a value, the rule that it breaks, and a remedy."""
        # Sections of objectives that the run does not choose decide nothing. They are checked where they are
        # read, and left out here, so that a resolved configuration records only what holds.
        given, names = self.objective_sections, self.objectives or ("blank_infilling",)
        chosen = {name: _section_of(name, given.get(name)) for name in names}
        glm: Any = chosen.get("blank_infilling")
        if glm is not None and glm.short_seq_prob:  # as in files of former versions
            data = replace(self.data, short_prob=self.data.short_prob or glm.short_seq_prob)
            # The dataclass is frozen; this is its only moment to be completed.
            object.__setattr__(self, "data", data)
            chosen["blank_infilling"] = replace(glm, short_seq_prob=0.0)
        object.__setattr__(self, "objective_sections", chosen)  # those of the run's objectives, no others
        check_together(self)
        self.deepspeed_options()
        _plan_of(self)  # refuses phases that contradict the run

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
    def packages(self) -> dict[str, str]:
        """Objective -> the package that brings it, with its version; those of this project are left out."""
        found = {choice.name: OBJECTIVES.package(choice.name) for choice in self.objective_choices}
        return {name: package for name, package in found.items() if package}

    @property
    def has_sentence_labels(self) -> bool:
        """Whether an objective makes labels for the head on CLS."""
        return any(choice.section.has_sentence_label for choice in self.objective_choices)

    @property
    def plan(self) -> Plan:
        """Which settings hold at which step; made at each call."""
        return _plan_of(self)

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


def _section_of(name: str, given: Any) -> ObjectiveConfig:
    """The section of an objective that is chosen. That of a package was a mapping until here."""
    cls = objective_class(name).config_class
    return build(cls, given or {}, f"{name}.") if given is None or isinstance(given, Mapping) else given


def _plan_of(config: Config) -> Plan:
    changes = config.phases, config.batch.ramp, config.schedule.parts, config.data.region
    # Most runs never change a setting: the modules of phases and timetables are loaded for those that do.
    if any(changes) or config.events.skip_samples:
        from megatron_lite.config.phased_plan import PhasedPlan

        return PhasedPlan(config)
    return Plan(config)


def _with_size(key: str, model: ModelConfig, size: int) -> ModelConfig:
    if model.vocab_size not in (None, size):
        raise ConfigError(
            f"{key}.vocab_size is {model.vocab_size}, but the tokenizer has {size} tokens; use the model's "
            f"tokenizer, or set {key}.vocab_size to null."
        )
    return replace(model, vocab_size=size)


def load_config(
    files: Iterable[str | Path],
    overrides: Iterable[str] = (),
    deepspeed_config: str | Path | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda note: None,
) -> Config:
    """Merge YAML files in order, then a DeepSpeed file, then `section.key=value` overrides, and check.

    Args:
        processes: of the run, which decide the batch where DeepSpeed options give it for a process.
        say: called with a line on each setting that is not as it stands in the files, and on DeepSpeed options that
            have no effect.
    Raises: ConfigError naming the value, the rule and the remedy.
    """
    files = tuple(files)
    tree, given, usual, notes = load_tree(files, overrides)
    for note in notes:
        say(note)
    if deepspeed_config is not None or tree.get("deepspeed"):
        try:
            tree = with_deepspeed(tree, given, deepspeed_config, processes, say)
        except ConfigError as error:  # the settings' own mistakes are named with those of DeepSpeed's file
            problems = dict(wrong_settings(Config, {**tree, "deepspeed": {}}, "", Config))
            raise located(SettingsError(problems, str(error)), places_of(files), given) from None
    require_objectives(tree)
    try:
        config = build(Config, tree)
    except ConfigError as error:
        if isinstance(error, SettingsError):
            error = located(error, places_of(files), given)
        error.args = (f"{error}{_first_steps(tree, usual)}",)
        raise error from None
    _require_chosen(given, config)
    return config


def places_of(files: Iterable[str | Path]) -> dict[str, str]:
    """Dotted keys of files -> `FILE:LINE: ` of the last file that has them."""
    places: dict[str, str] = {}
    for file in map(yaml_path, files):
        if file.is_file():  # what came through a pipe is gone
            places |= {key: f"{file}:{line}: " for key, line in setting_lines(file).items()}
    return places


def located(error: SettingsError, places: Mapping[str, str], given: Mapping[str, Any]) -> SettingsError:
    """The error with file and line before each key that a file has and the command line does not replace.

    Args: places: of `places_of`. given: settings of the command line.
    """
    overridden = {key for key, _ in leaves(given)}
    problems = {
        key: sentence if key in overridden else f"{places.get(key, '')}{sentence}"
        for key, sentence in error.problems.items()
    }
    return SettingsError(problems, error.rest)


def require_objectives(tree: Mapping[str, Any], program: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError if a tree names an objective that no installed package brings, before its section is unknown.

    Args: program: what a checkpoint records of the program that trained it, packages of objectives among it.
    """
    named, recorded = tree.get("objectives"), (program or {}).get("packages")
    packages = recorded if isinstance(recorded, Mapping) else {}
    for name in named if isinstance(named, Mapping) else ():
        if name not in OBJECTIVES and name in packages:
            raise ConfigError(
                f"the objective {name} belongs to the package {shorten(str(packages[name]))}, which is not "
                "installed; install it."
            )
        objective_class(name)


def load_tree(
    files: Iterable[str | Path], overrides: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any], int, list[str]]:
    """YAML files in order with overrides on top, unchecked.

    Returns: also the overrides alone, `training.steps` of the files (0: not set), and lines about what has changed.

    A warm-up of the files that is not shorter than `training.steps=30` becomes the same part of these steps as it was
    of the files': so the first steps of a recipe are tried by one setting.
    """
    of_files: dict[str, Any] = {}
    for path in files:
        tree = load_yaml(path)
        if _is_deepspeed_file(tree):
            raise ConfigError(f"{path} is a DeepSpeed file; pass it as --deepspeed_config {path}.")
        of_files = merge(of_files, tree)
    given: dict[str, Any] = {}
    for override in overrides:
        given = merge(given, parse_override(override))
    tree = merge(of_files, given)
    schedule = _section(tree, "schedule")
    usual, steps, warmup = (
        value if type(value) is int else 0
        for value in (
            _section(of_files, "training").get("steps"),
            _section(given, "training").get("steps"),
            schedule.get("warmup_steps"),
        )
    )
    # Whoever gives both numbers means both; only a recipe's warm-up that would not end is shortened.
    is_own = "warmup_steps" in _section(given, "schedule") or schedule.get("decay_steps") is not None
    if is_own or not 0 < steps <= warmup < usual:
        return tree, given, usual, []
    shorter = warmup * steps // usual
    note = (
        f"schedule.warmup_steps is scaled to {shorter:,} for training.steps={steps:,} (the files have "
        f"{warmup:,} for {usual:,} steps); set it to use another value"
    )
    return merge(tree, {"schedule": {"warmup_steps": shorter}}), given, usual, [note]


def _is_deepspeed_file(tree: Mapping[str, Any]) -> bool:
    """Whether a file has keys that only DeepSpeed knows, and none that only this project does."""
    theirs, ours = {key.partition(".")[0] for key in KEYS}, Config.__dataclass_fields__.keys()
    return bool(tree.keys() & (theirs - ours)) and not tree.keys() & (ours - theirs)


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of an unchecked tree; {} where it is none."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _first_steps(tree: Mapping[str, Any], usual: int) -> str:
    """What a refused tree should set to have the first steps of its plan; "" where fewer steps are not at fault.

    Args: usual: training.steps of the files.
    """
    steps = _section(tree, "training").get("steps")
    if type(steps) is not int or not 0 < steps < usual:
        return ""
    try:
        build(Config, merge(tree, {"training": {"steps": usual, "stop_after_step": steps}}))
    except ConfigError:
        return ""
    return (
        f" To run only the first {steps} steps of that schedule, set training.stop_after_step={steps} "
        "instead."
    )


def _require_chosen(given: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError for an override of an objective that the run has not. Files may hold several objectives'."""
    chosen = [choice.name for choice in config.objective_choices]
    for name in given.keys() & OBJECTIVES.keys():
        if name not in chosen and config.task is None:
            raise ConfigError(
                f"{name} is set, but the run trains {', '.join(chosen)}; set objectives={{{name}: 1}} to train "
                "it, or remove the setting."
            )


def require_validation(overrides: Iterable[str], config: Config) -> None:
    """Raise ConfigError for an override that concerns evaluations where there are none. Files may say when and how."""
    if config.data.validation or config.task is not None:
        return
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith("training.eval_"):
            raise ConfigError(
                f"{key} is set, but data.validation is not, so there are no evaluations; set data.validation, or "
                "remove it."
            )
