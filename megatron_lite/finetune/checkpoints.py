"""Evaluates checkpoints of any parallel sizes, and exported directories, on a task, in one process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import merge, to_tree
from megatron_lite.checkpoint.manifest import checkpoints_in, is_checkpoint, list_checkpoints
from megatron_lite.config.task_head import replace_head
from megatron_lite.config.tree import Config
from megatron_lite.finetune.evaluation import Evaluation, EvaluationResult, Model, Predict
from megatron_lite.finetune.setup import (
    HEAD_OF_KIND,
    HEADLESS,
    OF_TRAINING,
    Task,
    for_import,
    is_export,
    prepare,
    without_pretraining,
)
from megatron_lite.finetune.writing import writer
from megatron_lite.inference.open_run import OpenRun, Run, open_run
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.task_batch import TaskBatch
from megatron_lite.transformer.task_heads import task_configs


@dataclass(frozen=True)
class CheckpointResult:
    """Results of a checkpoint on one task."""

    name: str  # as it was given
    step: int
    task: Task
    files: dict[str, EvaluationResult]


def steps_of(path: Path) -> list[Path]:
    """All checkpoints of a run, the oldest first; a checkpoint or an export alone."""
    if is_checkpoint(path) or is_export(path):
        return [path]
    return list_checkpoints(checkpoints_in(path)) or [path]


@contextlib.contextmanager
def opened(path: Path, tokenizer: Path | None, tree: Mapping[str, Any]) -> Iterator[OpenRun]:
    """A run, a checkpoint, or an export, which is imported into a temporary directory."""
    if not is_export(path):
        yield open_run(path, tokenizer)
        return
    from megatron_lite.hf.importing import import_directory

    with tempfile.TemporaryDirectory(prefix="glm_evaluate_") as directory:
        run = Path(directory) / "run"
        import_directory(path, run, for_import(tree), verify=False)
        yield open_run(run, tokenizer)


def evaluate(
    path: Path,
    tree: Mapping[str, Any],
    size: int,
    tokenizer: Path | None = None,
    device: torch.device | None = None,
) -> CheckpointResult:
    """Evaluate a checkpoint on the validation and test files of a task.

    Args:
        tree: sections that replace those of the run, such as `task`; {}: the run's own task.
        size: samples of a forward pass.
    Raises: ConfigError; DataError; CheckpointError.
    """
    with opened(path, tokenizer, tree) as given:
        run = with_one_head(given, tree, path)
        task = task_of(run, tree, path)
        context = ParallelContext.alone()
        evaluations = {
            file: Evaluation(task.settings, task.renderer, records, context, size)
            for file, records in {**task.validation, **task.test}.items()
        }
        loaded = run.with_model(device, for_task=True)
        write = writer(loaded.model, task.config, task.tokenizer, loaded.objectives, str(run.checkpoint.path))
        model = Model(make_predict(loaded, task.config), write)
        found = {file: evaluation.run(model) for file, evaluation in evaluations.items()}
        return CheckpointResult(str(path), run.checkpoint.step, task, found)


def with_one_head(run: OpenRun, tree: Mapping[str, Any], name: Path) -> OpenRun:
    """A run with the head of the task of `tree` alone, if it has those of several. Raises: ConfigError without it."""
    if not run.config.tasks:
        return run
    chosen = (tree.get("task") or {}).get("name")
    names = [task.name for task in run.config.tasks]
    if chosen not in names:
        raise ConfigError(
            f"{name} was trained on the tasks {', '.join(names)}; give one of them with --task FILE."
        )
    model = run.config.model
    of_task = task_configs(model).get(chosen, replace_head(model, heads=()))
    config = replace(run.config, task=run.config.tasks[names.index(chosen)], tasks=(), model=of_task)
    return replace(run, config=config, checkpoint=run.checkpoint.with_task_head(chosen))


def task_of(run: OpenRun, tree: Mapping[str, Any], name: Path) -> Task:
    """The task that a run is measured on. Args: name: of the run or export in messages."""
    if run.config.decoder is not None:
        raise ConfigError(
            f"{name} joins two Transformers by a latent vector, which cannot be evaluated on a task; "
            "fine-tune its encoder with scripts/finetune.py first, or evaluate its latent space with scripts/latent.py."
        )
    run.require_one_transformer(for_task=True)
    # What a run was trained with, and no task may be trained with, is no reason not to measure it.
    own = {
        name: value for name, value in to_tree(run.config).items() if name not in (*OF_TRAINING, "optimizer")
    }
    if not isinstance(tree.get("task", {}), Mapping):
        raise ConfigError(f"task is {shown(tree['task'])}; it must be a section (see configs/tasks/).")
    tree, tuned_on = dict(tree), run.config.task
    if "name" in tree.get("task", {}):
        if tuned_on is not None and tree["task"]["name"] == tuned_on.name:  # its head's classes
            tree["task"] = {**tree["task"], "labels": tree["task"].get("labels") or list(tuned_on.labels)}
        own["task"] = None  # another task: not a mixture of two
    together = merge(merge(without_pretraining(own), tree), {"task": {"train": None}})
    kind, has = together["task"].get("kind"), run.config.model
    if "name" not in together["task"]:
        raise ConfigError(f"{name} was not trained on a task; give one with --task FILE.")
    # First what the checkpoint is: settings and files of the task would not help it.
    if HEAD_OF_KIND.get(kind, has.task_head.type) != has.task_head.type:
        found = "no head" if has.task_head.type == "none" else f"a head for {has.task_head.type}"
        raise ConfigError(
            f"{name} has {found}, but a task of kind {kind} needs one for {HEAD_OF_KIND[kind]}; tune it on the task "
            "with scripts/finetune.py, or give a checkpoint that was."
        )
    together["model"] = merge(together["model"], HEADLESS)
    task = prepare(together)
    needed = task.config.model
    if kind in HEAD_OF_KIND and needed.task_head.classes != has.task_head.classes:
        raise ConfigError(
            f"{name} has a head for {has.task_head.classes} classes, but the task has {needed.task_head.classes}; "
            "give a checkpoint that was fine-tuned on this task."
        )
    if not task.validation and not task.test:
        raise ConfigError("the task names no file to evaluate on; set task.validation or task.test.")
    return task


def make_predict(run: Run, config: Config | None = None) -> Predict:
    """The function that computes a run's predictions of a batch, on one device.

    Args: config: with the task to predict, if it is not the run's own.
    """
    device = next(run.model.parameters()).device
    read = model_spec(run.config).task_batches(config or run.config)

    @torch.no_grad()
    def predict(batch: TaskBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return run.model(MicroBatch.from_batch(read(batch), device, run.config.model), predict=True)

    return predict
