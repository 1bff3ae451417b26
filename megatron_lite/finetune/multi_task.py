"""Multi-task fine-tuning: a shared model with a head for each task; every batch is of one task.

An epoch has the batches of all tasks in one random order. A task's batches read its samples in the order of single-task
training, epoch after epoch; the last batch of an epoch is filled from the next. Batch number -> task and samples is a
pure function, so a resumed run equals an uninterrupted one.

Source: MT-DNN, arXiv:1901.11504, section 3; the power of the sizes: arXiv:1901.07291.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_utils.common.errors import ConfigError, expanded_path
from data_utils.common.seeds import derive_seed
from data_utils.common.setting_files import load_yaml, shown
from data_utils.common.settings import check, merge
from megatron_lite.config.task_head import replace_head
from megatron_lite.config.tree import Config


def with_sections(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A task's tree whose `tasks` are files or sections -> the same with all sections, the first one also as `task`.

    Args: overrides: the section `task` of the command line, which holds for all of them.
    """
    sections = []
    for given in tree["tasks"]:
        found = (
            load_yaml(expanded_path(given, "tasks"), "tasks").get("task") if isinstance(given, str) else given
        )
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"tasks has {shown(given)}; each must be a file with a section task, or such a section."
            )
        sections.append(merge(found, overrides))
    return {**tree, "task": sections[0], "tasks": sections if len(sections) > 1 else []}


def join_configs(config: Config, parts: Sequence[Config]) -> Config:
    """The configuration of the run. Args: parts: the same with the section and head of one task each."""
    tasks = [part.task for part in parts if part.task is not None]
    heads = tuple(
        f"{part.task.name}:{part.model.task_head.type}:{part.model.task_head.classes}"
        for part in parts
        if part.task is not None and part.model.task_head.type != "none"
    )
    check_run(config, len(heads) == len(parts))
    return replace(config, tasks=tuple(tasks), model=replace_head(config.model, heads=heads))


def check_run(config: Config, all_headed: bool) -> None:
    """Raise ConfigError for settings that several tasks do not support. Args: all_headed: each task adds a head."""
    names = [task.name for task in config.tasks]
    for name in names:
        check(
            names.count(name) == 1 and re.fullmatch(r"[\w-]+", name) is not None,
            f"tasks has the names {', '.join(map(shown, names))}; they must differ and consist of letters, digits, _ "
            "and -: set name in the section of the task.",
        )
    of_heads = (config.finetune.trained, config.finetune.unfreeze)
    pool = config.model.task_head.pool
    refused = {
        f"parallel.zero_stage is {config.parallel.zero_stage}": (
            config.parallel.zero_stage == 3, "whose optimizer would change idle heads; set it to 2"
        ),
        f"finetune.lm_weight is {config.finetune.lm_weight}": (config.finetune.lm_weight > 0, "set it to 0"),
        f"model.task_head.pool is {pool}": (pool != "token", "set it to token"),
        "batch.ramp is set": (config.batch.ramp is not None, "whose batches have one size; leave it out"),
        f"finetune has trained {of_heads[0]}, unfreeze {of_heads[1]}": (
            (of_heads[0] == "head" or of_heads[1] not in ("all", "gradual")) and not all_headed,
            "one of which adds no head that could be trained alone; set both to all",
        ),
    }  # fmt: skip
    for setting, (is_refused, remedy) in refused.items():
        check(not is_refused, f"{setting} with several tasks ({', '.join(names)}); {remedy}.")


def batches_per_epoch(samples: Sequence[int], config: Config) -> list[int]:
    """Batches of each task in an epoch: all its samples, or in all about as many by `finetune.tasks_alpha`."""
    size, alpha = config.batch.global_batch_size, config.finetune.tasks_alpha
    whole = [-(-count // size) for count in samples]
    # Below 1 small tasks come more often than their share; the sum of batches stays about the same.
    powers = [count**alpha for count in whole]
    return [max(1, round(sum(whole) * power / sum(powers))) for power in powers]


class TaskOrder:
    """Batch number -> its task, and the number of the batch within the task; both from 0.

    Args: batches: of each task in an epoch. seed: that of the run.
    """

    def __init__(self, batches: Sequence[int], seed: int):
        self._batches, self._seed = np.array(batches), seed
        self._epoch = functools.lru_cache(maxsize=2)(self._order_of)

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Task and number of each batch of an epoch."""
        tasks = np.repeat(np.arange(len(self._batches)), self._batches)
        order = np.random.default_rng(derive_seed(self._seed, "order of tasks", epoch)).permutation(tasks)
        numbers = np.zeros_like(order)
        for task, count in enumerate(self._batches):
            # A task's batches go on in its own order through all epochs, so that one task alone has the batches
            # that it has without others.
            numbers[order == task] = epoch * count + np.arange(count)
        return order, numbers

    def of(self, batch: int) -> tuple[int, int]:
        epoch, place = divmod(batch, int(self._batches.sum()))
        order, numbers = self._epoch(epoch)
        return int(order[place]), int(numbers[place])

    def has(self, task: int, step: int) -> bool:
        """Whether a step, from 1, is of a task."""
        return self.of(step - 1)[0] == task
