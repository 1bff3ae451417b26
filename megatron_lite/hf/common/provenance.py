"""Where the weights of a run come from: what they began as, and what each run on the way trained, by its own record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import UserError
from data_utils.common.setting_files import shorten
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import task_labels
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.lora import LORA
from megatron_lite.hf.common.weights import ADAPTER_SOURCE, IMPORTED_FILES, PADDING_ROWS, SOURCE, read_json
from megatron_lite.inference.open_run import OpenRun, objective_names

_MOST_RUNS = 100  # in a chain; one whose files were edited may have no end
_OF_IMPORTS = (ADAPTER_SOURCE, SOURCE, IMPORTED_FILES, PADDING_ROWS)  # in the directory of an imported run
_NO_NAMES = ("checkpoints", "best", "imported")  # of directories in a run


@dataclass(frozen=True)
class Provenance:
    """
    Args:
        begun: what the weights began as; of an import, from where, or "".
        trained: what each run trained them on, oldest first.
    """

    begun: str
    is_imported: bool
    trained: list[str]

    def __str__(self) -> str:
        """A sentence of the model card. The subject of the first is the model."""
        names = ", then on ".join(self.trained)
        if self.is_imported:
            rest = f"trained further on {names}" if names else "were not trained further"
            return f"Its weights were imported{self.begun}, and {rest}."
        if not names:
            return f"It has {self.begun}, and was not trained."
        return f"It was trained from {self.begun}, on {names}."


def provenance(run: OpenRun, names: str | None = None) -> Provenance:
    """Args: names: of what the run trains, where neither its task nor its objectives tell."""
    names, checkpoint = names or ", ".join(objective_names(run.objectives)), run.checkpoint
    trained: list[str] = []
    for _ in range(_MOST_RUNS):
        directory, tree = checkpoint.path.parent.parent, checkpoint.state.get("config", {})
        if checkpoint.step:
            trained.insert(0, _trained_on(checkpoint, tree, names))
        if any((directory / name).exists() for name in _OF_IMPORTS):
            adapter = directory / ADAPTER_SOURCE
            updates = f" with updates of LoRA{_of(adapter)}" if adapter.exists() else ""
            return Provenance(_of(directory / SOURCE) + updates, True, trained)
        begin = (tree.get("checkpoint") or {}).get("initialize_from")
        if begin is None:
            break
        try:
            checkpoint, names = find_manifest(Path(begin)), ""
        except (UserError, OSError):
            lost = f"the weights of a run that is no longer there (`{_name(Path(begin))}`)"
            return Provenance(lost, False, trained)
    return Provenance("initial weights", False, trained)


def _of(path: Path) -> str:
    described = read_json(path) if path.exists() else {}
    if not described.get("repository"):
        return ""
    return f" from `{described['repository']}` (commit {described.get('commit')})"


def _trained_on(checkpoint: Checkpoint, tree: Mapping[str, Any], names: str) -> str:
    """Args: names: of the objectives; "": those of the tree."""
    task = tree.get("task")
    what = names or ", ".join(tree.get("objectives") or ("blank_infilling",))
    if isinstance(task, Mapping):
        labels = task.get("labels") or ()
        what = described_task(str(task.get("name")), str(task.get("kind")), list(map(str, labels)))
    return what + " (updates of LoRA alone)" * any(LORA in name for name in checkpoint.shapes)


def described_task(name: str, kind: str, labels: list[str]) -> str:
    of_labels = f", labels {shorten(', '.join(labels), 300)}" if labels else ""
    return f"the task `{name}` ({kind}{of_labels})"


def task_of(task: TaskConfig) -> str:
    """A task with its kind and labels."""
    return described_task(task.name, task.kind, list(task_labels(task)))


def _name(path: Path) -> str:
    """The name of a run's directory, of the path of the run or of one of its checkpoints."""
    named = [part for part in path.parts if not part.startswith("step_") and part not in _NO_NAMES]
    return named[-1] if named else path.name
