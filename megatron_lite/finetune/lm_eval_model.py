"""A run as a model of lm_eval: `lm_eval.simple_evaluate(model=CheckpointLM(harness), ...)`. Needs the package lm_eval.

It runs without a network on local tasks: `LocalTasks(include_path=DIRECTORY, include_defaults=False)`.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager

from data_utils.common.errors import DataError, UserError
from data_utils.common.setting_files import one_line
from megatron_lite.finetune.harness import Harness


@register_model("megatron_lite")
class CheckpointLM(LM):
    """Passes requests to a Harness, which documents them."""

    def __init__(self, harness: Harness) -> None:
        super().__init__()
        self.harness = harness

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.harness.loglikelihood([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self.harness.loglikelihood_rolling([request.args[0] for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self.harness.generate_until([request.args for request in requests])


class LocalTasks(TaskManager):
    """lm_eval's tasks, whose mistakes are one line."""

    def load(self, task_list: Any) -> Any:
        """The tasks of these names. Raises: DataError for a task that cannot be built."""
        try:
            return super().load(task_list)
        except UserError:
            raise
        except Exception as error:
            # Tasks are YAML, templates, data sets and Python: each has exceptions of its own.
            raise DataError(
                f"lm_eval cannot make the tasks {task_list}: {type(error).__name__}: {one_line(error)}; correct their "
                "files."
            ) from error
