"""Reads the directory of a run for the report: configuration, metrics, checkpoints, scores of scripts.

A missing or damaged file is not an error: the report has a note about it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import DataError, UserError
from data_utils.common.files import short_names
from data_utils.common.setting_files import MAX_BYTES, parse_yaml
from data_utils.common.settings import build, to_tree
from data_utils.common.untrusted import conform, parse_json, read_bounded
from megatron_lite.checkpoint.manifest import Checkpoint, checkpoint_step, list_checkpoints
from megatron_lite.checkpoint.resolve_path import resolve_run
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.removed import renamed
from megatron_lite.config.tree import Config
from megatron_lite.report.curves import Records, read_records
from megatron_lite.runtime.run_state import MEANINGS, read_run_state

MAX_CHECKPOINTS = 20  # of a run that are read
SCORES = "scores.json"  # written by scripts/quickstart/scores.py
RESULTS = "results.json"  # written by scripts/finetune.py in the directory of each seed
# Of scripts/evaluate.py --minimal-pairs --json; the * names the measurement.
MINIMAL_PAIRS = "minimal_pairs*.json"
_Figures = dict[str, float | int | None]


class PairFigures(TypedDict):
    """Accuracy of some minimal pairs."""

    accuracy: Annotated[float, Field(ge=0, le=1)]
    standard_error: Annotated[float, Field(ge=0, le=1)] | None


class PairScores(PairFigures):
    """Results on minimal pairs. Other keys of the file are not read."""

    score: str  # how sentences were scored
    phenomena: dict[str, PairFigures]
    paradigms: dict[str, PairFigures]


class _FileResult(TypedDict):
    metrics: _Figures


class _Results(TypedDict):
    files: dict[str, _FileResult]


REQUIRED = {  # the settings without a default
    "model": ("num_layers", "hidden_size", "num_attention_heads"),
    "training": ("steps",),
}


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint, as one line of the report."""

    step: int
    saved_at: str
    bytes: int | None  # None: it cannot be used
    ranks: int
    problem: str = ""


@dataclass
class RunReport:
    """Everything that the page displays of a run."""

    path: Path
    name: str
    records: Records
    config: dict[str, Any] = field(default_factory=dict)  # the resolved tree
    defaults: dict[str, Any] = field(default_factory=dict)  # of this version; {} if they could not be made
    checkpoints: list[SavedStep] = field(default_factory=list)  # newest first
    num_checkpoints: int = 0
    state: dict[str, Any] = field(default_factory=dict)  # of the newest checkpoint
    unigram: dict[str, float] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # model or file -> metric -> value
    minimal_pairs: dict[str, PairScores] = field(default_factory=dict)  # by measurement
    notes: list[str] = field(default_factory=list)

    def setting(self, key: str) -> Any:
        """A setting of the configuration, which may hold anything; None if it is not there."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def read_run(path: Path) -> RunReport:
    """Read the directory of a run. Raises: CheckpointError if it is not one."""
    resolve_run(path)
    records = read_records(path)
    run = RunReport(path, _name(path), records, notes=list(records.notes))
    _read_config(run)
    _read_checkpoints(run)
    try:
        run.unigram = read_unigram(path)
        run.scores = read_scores(path)
    except DataError as error:
        run.notes.append(str(error))
    for file in sorted(path.glob(MINIMAL_PAIRS)):
        try:
            run.minimal_pairs |= read_minimal_pairs(file)
        except DataError as error:
            run.notes.append(str(error))
    return run


def _name(path: Path) -> str:
    """The last two names of the directory: the last one alone is often just "run"."""
    return os.sep.join(path.absolute().parts[-2:])


def _read_config(run: RunReport) -> None:
    try:
        config = _settings(run.path / "config.yaml")
        run.config = _public(config)
        # Another version may have written config.yaml, so defaults are built from the required settings only.
        required = {
            section: {key: config[section][key] for key in keys} for section, keys in REQUIRED.items()
        }
        run.defaults = to_tree(build(Config, required))
    except UserError as error:
        run.notes.append(f"Settings cannot be compared with the defaults: {error}")
    except (KeyError, TypeError):
        run.notes.append(
            "Settings cannot be compared with the defaults: config.yaml has no model sizes or no steps."
        )
    for section, keys in REQUIRED.items():
        for key in keys:
            run.defaults.get(section, {}).pop(key, None)


def _settings(path: Path) -> dict[str, Any]:
    """The resolved configuration of a run as a tree. Raises DataError."""
    try:
        content = read_bounded(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path}: {error.strerror}.") from None
    except ValueError as error:
        raise DataError(f"{path} {error}.") from None
    try:
        tree = parse_yaml(content.decode("utf-8"))
    except ValueError as error:  # also of text that is not UTF-8
        raise DataError(f"{path} is not valid YAML: {error}.") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path} must hold a mapping of sections.")
    return renamed(tree)


def _public(tree: Any) -> Any:
    """A tree of settings without the passwords in URLs, because a report is sent to others."""
    if isinstance(tree, Mapping):
        return {key: _public(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_public(value) for value in tree]
    return re.sub(r"(://[^/@\s]*?:)[^/@\s]+@", r"\1***@", tree) if isinstance(tree, str) else tree


def _read_checkpoints(run: RunReport) -> None:
    state = read_run_state(run.path)
    if MEANINGS[state.condition].note:
        run.notes.append(f"Checkpoints: {state.condition}. {state.problem}")
    try:
        paths = list_checkpoints(run.path / "checkpoints")
    except OSError:
        return
    run.num_checkpoints = len(paths)
    for path in reversed(paths[-MAX_CHECKPOINTS:]):
        try:
            checkpoint = read_checkpoint(path)
        except (UserError, OSError, RecursionError) as error:
            run.checkpoints.append(SavedStep(checkpoint_step(path), "", None, 0, str(error)))
            continue
        run.checkpoints.append(_saved_step(checkpoint))
        if not run.state and isinstance(checkpoint.state, dict):
            run.state = checkpoint.state


def _saved_step(checkpoint: Checkpoint) -> SavedStep:
    return SavedStep(checkpoint.step, str(checkpoint.saved_at or ""), checkpoint.bytes, len(checkpoint.files))


def read_unigram(run: Path) -> dict[str, float]:
    """Losses of the unigram model; {} if they were not computed. Raises: DataError for a damaged file."""
    path = run / "unigram.json"
    try:
        return conform(parse_json(read_bounded(path, MAX_BYTES)), dict[str, float])
    except FileNotFoundError:
        return {}
    except ValueError:
        raise DataError(
            f"{path} cannot be read; recreate it with scripts/quickstart/unigram_baseline.py."
        ) from None


def read_scores(run: Path) -> dict[str, dict[str, float]]:
    """The metrics of each model in scores.json and of each file of a task in results.json.

    Raises: DataError for a damaged file.
    """
    found: dict[str, dict[str, float]] = {}
    for name in (SCORES, RESULTS):
        path = run / name
        if not path.exists():
            continue
        try:
            tree = parse_json(read_bounded(path, MAX_BYTES))
            tables = (
                conform(tree, _Results)["files"] if name == RESULTS else conform(tree, dict[str, _Figures])
            )
        except (ValueError, OSError) as error:
            raise DataError(f"{path} {error}; recreate it, or remove it.") from None
        found |= {key: table["metrics"] if name == RESULTS else table for key, table in tables.items()}
    return found


def read_minimal_pairs(path: Path) -> dict[str, PairScores]:
    """The results of a file on minimal pairs, by label. Raises: DataError for a damaged file."""
    try:
        measured = conform(parse_json(read_bounded(path, MAX_BYTES)), dict[str, PairScores])
    except (ValueError, OSError) as error:
        raise DataError(f"{path} {error}; recreate it, or remove it.") from None
    label = path.stem.removeprefix("minimal_pairs").strip("_.-").replace("_", " ") or "minimal pairs"
    if len(measured) == 1:
        return dict(zip([label], measured.values(), strict=True))
    names = short_names(measured)  # several with --every-step
    return {f"{label}, {names[checkpoint]}": scores for checkpoint, scores in measured.items()}


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """Dotted key -> value as text, of a tree of settings."""
    if isinstance(tree, Mapping) and tree:
        return {
            key: text
            for name, value in tree.items()
            for key, text in flat(value, f"{path}.{name}".lstrip(".")).items()
        }
    if not path:
        return {}
    try:
        return {path: json.dumps(tree, ensure_ascii=False, default=str)}
    except ValueError:  # a list that holds itself
        return {path: str(tree)}
