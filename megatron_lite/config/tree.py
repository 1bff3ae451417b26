"""Every setting of a run: one tree of frozen dataclasses, checked before any process group exists.

The sections are in sections.py, model.py, data_utils/loader/config.py and with each objective. rules.py
checks what concerns several. A component that needs one section takes that one; those that put a run together take the
tree. Derived values are properties, so that nothing is stored twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import listed, load_yaml, setting_lines, shorten, yaml_path
from data_utils.common.settings import (
    REQUIRED,
    SettingsError,
    build,
    fields_by_key,
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
from data_utils.objectives.own_corpora import TEXT_PAIRS
from data_utils.tasks.config import TaskConfig
from data_utils.tokenizers.tokenizer_readers import TokenizerConfig
from megatron_lite.config.deepspeed_file import with_deepspeed
from megatron_lite.config.deepspeed_options import deepspeed_options
from megatron_lite.config.deepspeed_table import table
from megatron_lite.config.embedding import EmbeddingConfig
from megatron_lite.config.finetuning import FinetuneConfig
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.phases import PhaseConfig
from megatron_lite.config.removed import moved_settings, without_removed
from megatron_lite.config.rules import alone, check_together
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
from megatron_lite.config.systems import with_objective

_FEW = 3  # wrong keys of a file, below which each is named


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
        "Objective -> share of the samples, relative to the others; {} = the one of model.system's paper, without a "
        "system blank_infilling. The section of the same name configures an objective.",
        on_resume="phase",
    )
    objective_sections: dict[str, ObjectiveConfig] = inline_sections(  # those of `objectives` alone
        OBJECTIVES, section_class
    )
    phases: tuple[PhaseConfig, ...] = setting(
        (),
        "Phases, each with its length and the settings that it changes (docs/data_mixtures.md); [] = one phase.",
        on_resume="phase",
    )
    task: TaskConfig | None = setting(None, "Task for scripts/finetune.py; null = pretraining.")
    tasks: tuple[TaskConfig, ...] = setting(
        (), "Several tasks trained together: files of configs/tasks/ or sections like `task`; [] = one task."
    )
    finetune: FinetuneConfig = section(FinetuneConfig)
    generation: GenerationConfig = section(GenerationConfig)
    embedding: EmbeddingConfig = section(EmbeddingConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    timeouts: TimeoutsConfig = section(TimeoutsConfig)
    run: RunConfig = section(RunConfig)
    trackers: TrackersConfig = section(TrackersConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
    deepspeed: dict[str, Any] = setting_mapping(
        "DeepSpeed's own keys, see docs/coming_from.md: those that are settings here become them, the others go to "
        "DeepSpeed",
        on_resume="free",
    )

    def __post_init__(self) -> None:
        """Raises: ConfigError for what cannot be trained: a value, the rule that it breaks, and a remedy."""
        # Sections of objectives that the run does not train have no effect. They are checked where they are read, and
        # left out here, so that a resolved configuration records only settings in effect.
        names = self.objectives or ("blank_infilling",)
        chosen = {name: _objective_section(name, self.objective_sections.get(name)) for name in names}
        # The dataclass is frozen; this is its only moment to be completed.
        object.__setattr__(self, "objective_sections", chosen)  # those of the run's objectives, no others
        check_together(self)
        self.deepspeed_options()
        PhasePlan(self)  # refuses phases that contradict the run

    @property
    def objective_choices(self) -> tuple[ObjectiveChoice, ...]:
        """The objectives of the run that have a weight, with their sections."""
        weights = self.objectives or {"blank_infilling": 1.0}
        return tuple(
            ObjectiveChoice(name, self.objective_sections[name], float(weight))
            for name, weight in weights.items()
            if weight > 0
        )

    @property
    def packages(self) -> dict[str, str]:
        """Objective -> the package that brings it, with its version; those of this project are left out."""
        packages = {choice.name: OBJECTIVES.package(choice.name) for choice in self.objective_choices}
        return {name: package for name, package in packages.items() if package}

    @property
    def has_sentence_labels(self) -> bool:
        """Whether an objective makes labels for the head on CLS."""
        return any(choice.section.has_sentence_label for choice in self.objective_choices)

    @property
    def phase_plan(self) -> PhasePlan:
        """Which settings hold at which step; computed at each call."""
        return PhasePlan(self)

    def trained(self, steps: int) -> Config:
        """The configuration of a checkpoint's model, whose options a phase may have changed. Args: steps: of it."""
        return replace(self, model=self.phase_plan.model(steps))

    @property
    def sample_unit(self) -> int:
        """Consecutive samples that are of one corpus: a global batch where an objective reads text pairs, else 1."""
        reads_pairs = any(choice.section.own_corpora == TEXT_PAIRS for choice in self.objective_choices)
        return self.batch.global_batch_size if reads_pairs else 1

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
            phase_plan = self.phase_plan
            phase_plan.require_ranks(dp_size)
            batch = phase_plan.configs[0].batch
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


def _objective_section(name: str, section: Any) -> ObjectiveConfig:
    """The section of an objective of the run. The section of a package's objective is a mapping until here."""
    cls = objective_class(name).config_class
    if section is None or isinstance(section, Mapping):
        return build(cls, section or {}, f"{name}.")
    return section


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
    tree, typed, file_steps, notes = load_tree(files, overrides)
    for note in notes:
        say(note)
    if deepspeed_config is not None or tree.get("deepspeed"):
        try:
            tree = with_deepspeed(tree, typed, deepspeed_config, processes, say)
        except ConfigError as error:  # mistakes of settings are named together with those of DeepSpeed's file
            problems = wrong_settings(Config, {**tree, "deepspeed": {}})
            raise with_locations(
                SettingsError(problems, str(error)), setting_locations(files), typed
            ) from None
    tree = with_objective(tree)
    require_objectives(tree)
    try:
        config = build(Config, tree)
    except ConfigError as error:
        if isinstance(error, SettingsError):
            error = with_locations(error, setting_locations(files), typed)
        error.args = (f"{error}{_first_steps_advice(tree, file_steps)}",)
        raise error from None
    _require_chosen(typed, config)
    return config


def settings_schema() -> dict[str, Any]:
    """JSON Schema of a file of settings."""
    from data_utils.common.settings_schema import json_schema  # few starts need it

    description = (
        "Settings of a run for pretrain_glm.py and scripts/finetune.py. All are in docs/settings.md."
    )
    return json_schema(Config, "Settings of GLM and its relatives", description)


def setting_locations(files: Iterable[str | Path]) -> dict[str, str]:
    """Dotted keys of files -> `FILE:LINE: ` of the last file that has them."""
    locations: dict[str, str] = {}
    for file in map(yaml_path, files):
        if file.is_file():  # a pipe cannot be read again
            lines = setting_lines(file)
            lists = tuple(
                {f"{key.partition('[')[0]}[" for key in lines if "[" in key}
            )  # each replaces the whole list
            kept = {key: place for key, place in locations.items() if not key.startswith(lists)}
            locations = kept | {key: f"{file}:{line}: " for key, line in lines.items()}
    return locations


def with_locations(
    error: SettingsError, locations: Mapping[str, str], typed: Mapping[str, Any]
) -> SettingsError:
    """The error with file and line before each key that a file has and the command line does not replace.

    Args: locations: of `setting_locations`. typed: settings of the command line.
    """
    overridden = {key for key, _ in leaves(typed)}
    problems = {
        key: sentence if key in overridden else f"{_location(locations, key)}{sentence}"
        for key, sentence in error.problems.items()
    }
    return SettingsError(problems, error.rest)


def _location(locations: Mapping[str, str], key: str) -> str:
    """Where a key is, or the section that lacks it."""
    while key and key not in locations:
        key = re.sub(r"(^|\.)[^.\[]*$|\[\d+\]$", "", key)
    return locations.get(key, "")


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

    Returns: the merged tree, the overrides alone, `training.steps` of the files (0: not set), and notes on changes.

    A warmup that is not shorter than an override such as `training.steps=30` becomes the same fraction of these steps
    that it is of the files' steps, so that one setting suffices to try the first steps of a recipe.
    """
    files = tuple(files)
    file_tree: dict[str, Any] = {}
    for path in files:
        file_tree = merge(file_tree, load_file(path))
    typed: dict[str, Any] = {}
    for override in overrides:
        typed = merge(typed, parse_override(override))
    try:
        file_tree, typed = without_removed(file_tree), without_removed(typed)
    except ValueError as error:
        raise ConfigError(f"the configuration {error}.") from None
    tree = merge(file_tree, typed)
    if moved := moved_settings(tree):
        raise with_locations(SettingsError(moved), setting_locations(files), typed)
    schedule = _section(tree, "schedule")
    file_steps, steps, warmup = (
        value if type(value) is int else 0
        for value in (
            _section(file_tree, "training").get("steps"),
            _section(typed, "training").get("steps"),
            schedule.get("warmup_steps"),
        )
    )
    # A user who sets both numbers means both; only a warmup of the files that would not end is shortened.
    is_set = "warmup_steps" in _section(typed, "schedule") or schedule.get("decay_steps") is not None
    if is_set or not 0 < steps <= warmup < file_steps:
        return tree, typed, file_steps, []
    scaled_warmup = warmup * steps // file_steps
    note = (
        f"schedule.warmup_steps is scaled to {scaled_warmup:,} for training.steps={steps:,} (the files have "
        f"{warmup:,} for {file_steps:,} steps); set it to use another value"
    )
    return merge(tree, {"schedule": {"warmup_steps": scaled_warmup}}), typed, file_steps, [note]


def load_file(path: str | Path) -> dict[str, Any]:
    """A YAML file of settings. Raises: ConfigError, in one short line for a file of another program."""
    coming_from = "docs/coming_from.md names the settings to write for files of other programs."
    suffix = Path(path).suffix.lower()
    if suffix in (".toml", ".sh", ".py"):
        raise ConfigError(f"configuration file {path} is not YAML; {coming_from}")
    tree = load_yaml(path)
    names = fields_by_key(Config)
    others = [str(key) for key in tree if key not in names]
    is_foreign = bool(others) and suffix not in (".yaml", ".yml")
    if is_foreign and 2 * len(table().top_level.intersection(tree)) > len(tree):
        raise ConfigError(f"{path} is a DeepSpeed file; pass it as --deepspeed_config {path}.")
    if len(others) < _FEW or 2 * len(others) <= len(tree):
        return tree  # with mistakes, which are named one by one
    raise ConfigError(
        f"configuration file {path} has {len(others)} keys that are no sections of settings, such as "
        f"{listed(others[:3], 100)}; settings stand in sections, as in configs/, and {coming_from}"
    )


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of an unchecked tree; {} where it is none."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def _first_steps_advice(tree: Mapping[str, Any], file_steps: int) -> str:
    """How to train only the first steps of a recipe, where fewer steps are the mistake; else "".

    Args: file_steps: training.steps of the files.
    """
    steps = _section(tree, "training").get("steps")
    if type(steps) is not int or not 0 < steps < file_steps:
        return ""
    try:
        build(Config, merge(tree, {"training": {"steps": file_steps, "stop_after_step": steps}}))
    except ConfigError:
        return ""
    return (
        f" To run only the first {steps} steps of that schedule, set training.stop_after_step={steps} "
        "instead."
    )


def _require_chosen(typed: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError for an override of an objective that the run has not. Files may hold several objectives'."""
    chosen = [choice.name for choice in config.objective_choices]
    for name in typed.keys() & OBJECTIVES.keys():
        if name not in chosen and config.task is None:
            raise ConfigError(
                f"{name} is set, but the run trains {', '.join(chosen)}; set {alone(config, name)} to train it, or "
                "remove the setting."
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
