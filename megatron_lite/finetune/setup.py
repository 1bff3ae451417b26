"""Checks that a task and a model fit, before torch is loaded: configuration, records, samples, lengths.

Mistakes in any of them are found here, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.errors import ConfigError
from data_utils.common.seeds import derive_seed
from data_utils.common.setting_files import load_yaml, shown, yaml_path
from data_utils.common.settings import SettingsError, build, check, merge, parse_override, to_tree
from data_utils.common.untrusted import load_json
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics.metrics_by_task import check_metrics, compared_by, with_no_answers
from data_utils.tasks.readers.by_name import read_records, task_labels, with_labels
from data_utils.tasks.templates.input_formats import choose_input_format
from data_utils.tasks.templates.render import Renderer
from data_utils.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_lite.checkpoint.manifest import RESULTS
from megatron_lite.checkpoint.resolve_path import PathType, path_type
from megatron_lite.config.deepspeed_file import with_deepspeed
from megatron_lite.config.removed import current, moved_settings
from megatron_lite.config.sections import BatchConfig
from megatron_lite.config.systems import with_objective
from megatron_lite.config.task_head import check_inputs, replace_head
from megatron_lite.config.tree import Config, load_file, setting_locations, with_locations
from megatron_lite.finetune.multi_task import batches_per_epoch, join_configs, with_sections
from megatron_lite.models.electra.config import discriminator_alone
from megatron_lite.models.optimus.config import encoder_alone

# Kind of task -> `model.task_head.type`, of those that need one; and the section `model` without a head.
HEAD_OF_KIND = {
    **dict.fromkeys(("classification", "typing"), "classes"),
    "regression": "values",
    "tagging": "tags",
    "spans": "spans",
}
HEADLESS = {"task_head": {"type": "none", "classes": 0, "heads": []}}
# Sections about the steps and the surroundings of a run, which say nothing of its model.
OF_TRAINING = (
    *("checkpoint", "events", "parallel", "timeouts", "run", "trackers", "profiler", "deepspeed"),
    *("schedule", "phases", "ema"),
)
_NOT_INHERITED = (
    "task",
    "tasks",
    "finetune",
    "generation",
    *OF_TRAINING,
)  # by a tuned run of the run it begins with
_NOT_COUNTED = 1 << 40  # steps, until the samples are counted
_PRETRAINING_SETTINGS = {
    "model": ("mtp_layers",),
    "batch": ("ramp",),
    "training": (
        *("steps", "stop_after_step", "eval_interval", "eval_fillings"),
        *("loss_normalization", "loss_weights", "mtp_weight"),  # of the objectives' losses; a task has one
        "cuda_graphs",  # a task may freeze parameters
    ),
    "schedule": ("warmup_steps", "decay_steps"),
    "checkpoint": ("save_interval", "keep_every"),
}


@dataclass(frozen=True)
class Task:
    """A task with its data: the records to train, validate and test on, and their renderer."""

    config: Config  # complete: steps, head, vocabulary
    tokenizer: Tokenizer
    renderer: Renderer
    train: Sequence[TaskRecord]  # as `Renderer.prepare` made them for training
    validation: Mapping[str, Sequence[TaskRecord]]  # by file
    test: Mapping[str, Sequence[TaskRecord]]
    others: tuple[Task, ...] = ()  # of a run of several tasks all but this one, the first

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """All tasks of the run."""
        return (self, *self.others)

    @property
    def subdirectory(self) -> Path:
        """Directory of the task's results, relative to the directory of the run."""
        return Path("tasks") / self.settings.name if self.config.tasks else Path()

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch; of several tasks those of all its batches."""
        if not self.others:
            return len(self.train)
        return sum(self.batches) * self.config.batch.global_batch_size

    @property
    def batches(self) -> list[int]:
        """Batches of each of several tasks in an epoch."""
        return batches_per_epoch([len(task.train) for task in self.all_tasks], self.config)

    @property
    def settings(self) -> TaskConfig:
        assert self.config.task is not None
        return self.config.task

    def seeded(self, seed: int) -> Task:
        """The same with another seed, which also draws the samples where `task.train_samples` says how many."""
        if seed == self.config.training.seed:
            return self
        config = replace(self.config, training=replace(self.config.training, seed=seed))
        renderer, train = make_renderer(config, self.tokenizer), self.train
        if self.settings.train_samples is not None:
            train = training_records(config, renderer)
        others = tuple(other.seeded(seed) for other in self.others)
        return replace(self, config=config, renderer=renderer, train=train, others=others)


def load_tree(
    model_files: Iterable[str],
    task_file: str | None,
    overrides: Iterable[str],
    pretrained: Mapping[str, Any] | None = None,
    tasks: Sequence[str] = (),
    deepspeed_config: Path | None = None,
    processes: int = 1,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Model files, the task's file on top of them, a DeepSpeed file, then overrides.

    Args:
        pretrained: the configuration of the run to begin with, below the model files.
        tasks: files of several tasks, instead of `task_file`. The first one says how the run trains.
        deepspeed_config, processes, say: as for `load_config`.

    A model file's steps, warmup, intervals and division of the loss are those of pretraining: they count only where
    the task says so.
    """
    tree = {name: value for name, value in (pretrained or {}).items() if name not in _NOT_INHERITED}
    if tree.get("decoder"):
        tree = encoder_alone(tree)
    if "electra" in (tree.get("objectives") or {}):
        tree = discriminator_alone(tree)
    if pretrained is not None:
        tree["model"] = merge(tree["model"], HEADLESS)
    for path in model_files:
        tree = merge(tree, load_file(path))
    task_file = next(iter(tasks), task_file)
    task_tree: dict[str, Any] = {} if task_file is None else load_yaml(task_file, "tasks")
    if tasks:
        task_tree["tasks"] = list(tasks)
    changes: dict[str, Any] = {}
    for override in overrides:
        changes = merge(changes, parse_override(override))
    task_tree = merge(task_tree, changes)
    if task_tree.get("tasks"):
        task_tree = with_sections(task_tree, changes.get("task", {}))
    tree = merge(without_pretraining(tree), task_tree)
    if moved := moved_settings(tree):
        raise SettingsError(moved)
    if not isinstance(tree.get("task"), Mapping):
        raise ConfigError("no task given; pass --task FILE with a section task (see configs/tasks/).")
    if deepspeed_config is not None or tree.get("deepspeed"):
        tree = with_deepspeed(tree, changes, deepspeed_config, processes, say)
    return with_objective(tree)


def without_pretraining(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the settings that are about the steps and losses of pretraining."""
    tree = dict(tree)
    for section, keys in _PRETRAINING_SETTINGS.items():
        if isinstance(tree.get(section), Mapping):
            tree[section] = {key: value for key, value in tree[section].items() if key not in keys}
    return tree


@contextmanager
def located_settings(
    model_files: Iterable[str | Path],
    task_file: str | Path | None,
    overrides: Iterable[str],
    tasks: Sequence[str | Path] = (),
) -> Iterator[None]:
    """Context that names file and line of each wrong setting. Args: as for `load_tree`."""
    try:
        yield
    except SettingsError as error:
        first_task = next(iter(tasks), task_file)
        files = [*model_files, *([] if first_task is None else [yaml_path(first_task, "tasks")])]
        locations, problems = setting_locations(files), error.problems
        given: dict[str, Any] = {}
        for override in overrides:
            given = merge(given, parse_override(override))
        if len(tasks) > 1:
            # The section `task` is the first of `tasks`, so its mistakes are there too.
            problems = {key: sentence for key, sentence in problems.items() if not key.startswith("task.")}
            for number, file in enumerate(tasks):
                file_locations = setting_locations([yaml_path(file, "tasks")])
                locations |= {
                    f"tasks[{number}]{key.removeprefix('task')}": line for key, line in file_locations.items()
                }
        raise with_locations(SettingsError(problems, error.rest), locations, given) from None


def is_export(path: Path) -> bool:
    """Whether a directory is one of transformers."""
    return path_type(path) is PathType.EXPORT


def for_import(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration that describe the export it begins with: model, tokenizer and objectives."""
    inherited = {name: value for name, value in tree.items() if name not in _NOT_INHERITED}
    if isinstance(inherited.get("model"), Mapping):  # updates are of the run that begins with the import
        inherited["model"] = {name: value for name, value in inherited["model"].items() if name != "lora"}
    defaults = {"training": {"steps": _NOT_COUNTED}}  # an import trains nothing
    if "batch" not in inherited:  # the texts of a task are shorter than an import's samples
        defaults["batch"] = {"micro_batch_size": BatchConfig().micro_batch_size}
    return merge(defaults, inherited)


def prepare(tree: Mapping[str, Any]) -> Task:
    """Read the task's files and complete the configuration. Raises ConfigError; DataError."""
    # Values until the samples are counted.
    preliminary = {"training": {"steps": _NOT_COUNTED}, "schedule": {"warmup_steps": 0}}
    config = build(Config, merge(preliminary, tree))
    check(config.tokenizer is not None, "a task needs a tokenizer; set tokenizer.kind and tokenizer.path.")
    assert config.tokenizer is not None
    tokenizer = load_tokenizer(config.tokenizer)
    config = replace(config.with_vocab_size(tokenizer.vocab_size), tokenizer=config.tokenizer.absolute())
    tasks = [
        _with_files(replace(config, task=task, tasks=()), tokenizer)
        for task in config.tasks or (config.task,)
    ]
    joint = join_configs(config, [task.config for task in tasks]) if config.tasks else tasks[0].config
    # The steps follow from the samples of all tasks.
    together = replace(tasks[0], config=joint, others=tuple(tasks[1:]))
    if together.train:
        joint = with_steps(joint, together.epoch_samples, tree)
    first, *others = (replace(task, config=replace(joint, task=task.settings)) for task in tasks)
    return replace(first, others=tuple(others))


def _with_files(config: Config, tokenizer: Tokenizer) -> Task:
    """One task with its files. Its configuration has the task's head, and no steps yet."""
    assert config.task is not None
    task = with_labels(config.task)
    config = replace(config, task=task)
    renderer = make_renderer(config, tokenizer)
    check_metrics(task, renderer.prediction_type, renderer.labels)
    train = [] if task.train is None else training_records(config, renderer)
    validation, test = (
        {path: read_records(task, path, labelled=labelled) for path in paths}
        for paths, labelled in ((task.validation, True), (task.test, False))
    )
    if renderer.head != "sets" and any(
        record.label == () for records in (train, *validation.values(), *test.values()) for record in records
    ):
        task = with_no_answers(task)
        config = replace(config, task=task)
        renderer = make_renderer(config, tokenizer)
    compared_by(task, config.finetune.best)
    config = with_head(config, renderer)
    check_lengths(config, renderer)
    return Task(config, tokenizer, renderer, train, validation, test)


def make_renderer(config: Config, tokenizer: Tokenizer) -> Renderer:
    """The renderer of a configuration, checked."""
    task = config.task
    assert task is not None
    input_format = choose_input_format(task.form, config.objective_choices, config.model.decoder_layers > 0)
    renderer = Renderer(task, tokenizer, input_format, config.training.seed, task_labels(task))
    renderer.check()
    return renderer


def training_records(config: Config, renderer: Renderer) -> list[TaskRecord]:
    """The records to train on: all of the file, or `task.train_samples` of them, drawn by the seed."""
    task = config.task
    assert task is not None and task.train is not None
    records: Sequence[TaskRecord] = read_records(task, task.train, labelled=True)
    if task.train_samples is not None:
        check(
            task.train_samples <= len(records),
            f"task.train_samples is {task.train_samples}, but {task.train} has {len(records)} samples; lower it, or "
            "set it to null.",
        )
        generator = np.random.default_rng(derive_seed(config.training.seed, "task samples"))
        chosen = np.sort(generator.permutation(len(records))[: task.train_samples])
        records = [records[i] for i in chosen]
    prepared = renderer.prepare(records, training=True)
    check(
        bool(prepared),
        f"{task.train} holds no sample to train on; give a file with labelled samples as task.train.",
    )
    return prepared


def with_head(config: Config, renderer: Renderer) -> Config:
    """The configuration with the head that the task needs."""
    head = HEAD_OF_KIND.get(renderer.inputs.config.kind, "none")
    classes = len(renderer.labels) if head in ("classes", "tags") else 0
    check(
        head not in ("classes", "tags") or classes > 1,
        f"task.labels has {classes} names; a task of kind {renderer.inputs.config.kind} needs two or more.",
    )
    config = replace(config, model=replace_head(config.model, type=head, classes=classes))
    check_inputs(config.model.task_head, f"the task is of kind {renderer.inputs.config.kind}")
    if config.finetune.lm_weight:
        check_language(config)
    return config


def check_language(config: Config) -> None:
    """Raise ConfigError where the run's objective cannot be learnt beside the task."""
    task, model, weight = config.task, config.model, config.finetune.lm_weight
    assert task is not None
    check(
        model.task_head.type != "none",
        f"finetune.lm_weight is {weight}, but a task of kind {task.kind} adds no head: it is learnt by predicting "
        "tokens itself; set it to 0.",
    )
    needed = max(c.section.max_position_needed(task.sequence_length) for c in config.objective_choices)
    check(
        needed <= model.max_position or not model.has_position_tables,
        f"finetune.lm_weight is {weight}, and the run's objective needs positions up to {needed} for texts of "
        f"task.sequence_length ({task.sequence_length}), but model.max_position is {model.max_position}; shorten them.",
    )


def check_lengths(config: Config, renderer: Renderer) -> None:
    """Raise ConfigError unless the model has positions for the task's samples."""
    task, model, needed = config.task, config.model, renderer.max_position_needed
    assert task is not None
    targets = f" with target_length ({task.target_length})" if task.kind == "seq2seq" else ""
    remedy = ", and target_length too" if targets else ""
    check(
        needed <= model.max_position or not model.has_position_tables,
        f"task.sequence_length ({task.sequence_length}){targets} needs positions up to {needed}, but "
        f"model.max_position is {model.max_position}; set it to {model.max_position} or less{remedy}.",
    )


def with_steps(config: Config, samples: int, tree: Mapping[str, Any]) -> Config:
    """Derive steps from `finetune.epochs`, warmup, and the intervals of saves and evaluations.

    Args: samples: of an epoch. tree: its settings are not replaced.
    """
    finetune = config.finetune
    settings = {**(tree.get("training") or {}), **(tree.get("schedule") or {})}
    steps = settings.get("steps") or max(1, finetune.epochs * samples // config.batch.global_batch_size)
    warmup = settings.get("warmup_steps")
    if warmup is None:
        warmup = min(round(finetune.warmup_share * steps), steps - 1)
    interval = settings.get("eval_interval") or max(
        1, steps // (finetune.epochs * finetune.evaluations_per_epoch)
    )
    return replace(
        config,
        training=replace(config.training, steps=steps, eval_interval=interval),
        schedule=replace(config.schedule, warmup_steps=warmup),
        checkpoint=replace(config.checkpoint, save_interval=interval),  # the best one is a checkpoint
    )


def check_output(output: Path, config: Config) -> None:
    """Raise ConfigError if the directory has results of other settings: they would be taken for these."""
    for path in sorted(output.glob(f"seed_*/**/{RESULTS}")):
        try:
            recorded = current(load_json(path, "results").get("settings") or {})
            differing = next(_differences(recorded, settings_of(config)), None)
        except ValueError as error:
            differing = str(error)
        if differing is not None:
            raise ConfigError(
                f"{path.parent} was finished with other settings ({differing}); choose another --output, or remove it."
            )


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that a result depends on, as results.json has them."""
    return {
        name: to_tree(getattr(config, name))
        for name in ("model", "task", *["tasks"][: len(config.tasks)], "finetune", "optimizer", "generation")
    }


def _differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after} - {"seeds"}):
            yield from _differences(before.get(key), after.get(key), f"{path}{key}.")
    elif before != after:
        yield f"{path.rstrip('.')} was {shown(before)} and is {shown(after)}"


def run_directory(output: Path, seed: int) -> Path:
    """Directory of the run of a seed."""
    return output / f"seed_{seed}"
