"""The row of the task embedding (ERNIE 2.0) that the tokens of a loss take: `model.task_rows`.

The objectives of a run take the rows 0, 1, 2, ... in their order, with all their losses. So a run of one objective
trains row 0, which the class of transformers reads by default. A run keeps the rows of the checkpoint
that it begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data_utils.common.errors import ConfigError
from data_utils.objectives import LOSSES, OBJECTIVES, ObjectiveChoice
from megatron_lite.config.tree import Config

NO_ROW = -1  # for a loss that no objective of the run has; its tokens take row 0


def assign_task_rows(
    choices: Sequence[ObjectiveChoice], task_types: int, former: Sequence[int] = ()
) -> tuple[int, ...]:
    """The row of each loss, by its number.

    Args: task_types: rows of the table. former: rows of the checkpoint, which stay; objectives that it lacks take the
        next ones.
    Raises: ConfigError for more objectives than rows.
    """
    rows = [*former, *[NO_ROW] * (len(LOSSES) - len(former))]
    for choice in choices:
        losses = [loss.number for loss in OBJECTIVES[choice.name].losses]
        # A loss of two objectives belongs to the one that makes its labels, the first if both do.
        if not choice.section.has_sentence_label:
            losses = [number for number in losses if not LOSSES[number].sentence_level]
        if all(rows[number] != NO_ROW for number in losses):
            continue
        row = max(rows) + 1
        if row >= task_types:
            raise ConfigError(
                f"model.task_types is {task_types}, but the objective {choice.name} needs row {row} of the task "
                f"embedding; set task_types to at least {row + 1} for a new model, or remove objectives."
            )
        for number in losses:
            rows[number] = row if rows[number] == NO_ROW else rows[number]
    return tuple(rows)


def with_task_rows(config: Config, former: Sequence[int] = ()) -> Config:
    """A configuration with `model.task_rows`, where the model has such a table. See `assign_task_rows`."""
    model = config.model
    if not model.task_types:
        return config
    rows = assign_task_rows(config.objective_choices, model.task_types, model.task_rows or former)
    return replace(config, model=replace(model, task_rows=rows))
