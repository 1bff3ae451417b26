"""The type of a path given to a command: a run, a checkpoint, an output of fine-tuning, an export, or none of these.

Every command resolves its paths here, so all accept the same ones and refuse others with the same message. Needs no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from data_utils.common.errors import CheckpointError, system_problem, system_remedy
from data_utils.common.hub import hub_name
from data_utils.objectives import sections_with_models
from megatron_lite.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    NAME,
    is_checkpoint,
    list_checkpoints,
)

MODEL_PATH = "a run directory or one of its checkpoints"
MODEL_OR_EXPORT_PATH = "a run, one of its checkpoints, or an exported directory"
RUN_PATH = "the directory of a run that has started, as run.directory names it"
CONFIG_JSON = "config.json"  # of a class of transformers
ADAPTER_CONFIG = "adapter_config.json"  # of peft
RECORDS = "metrics.jsonl"  # in the directory of a run that has started
_MAX_SHOWN = 4  # paths that a message names


class PathType(StrEnum):
    """Types of path. The values complete a message that begins with the path."""

    ABSENT = "does not exist"
    FILE = "is not a directory"
    CHECKPOINT = "is a checkpoint"
    RUN = "is a run"
    CHECKPOINTS = "is a directory of checkpoints"
    FINETUNED = "is an output of scripts/finetune.py"
    RUN_AND_FINETUNED = "is a run that also holds outputs of scripts/finetune.py"
    EXPORT = "is a model directory of Hugging Face transformers"
    ADAPTER = "is an adapter of peft, the updates of another model"
    ORIGINAL_GLM = "is a checkpoint of the original GLM code (mp_rank_XX_model_states.pt)"
    PARENT = "is not a run, but holds runs"
    OTHER = "holds no run and no checkpoint"


def path_type(path: Path) -> PathType:
    """The type of a path, by the files in it. Raises CheckpointError if it cannot be read."""
    try:
        return _classify(path)
    except OSError as error:
        remedy = system_remedy(error, "check that it can be read")
        raise CheckpointError(f"{system_problem(error)}; {remedy}.") from None


def _classify(path: Path) -> PathType:
    if not path.is_dir():
        return PathType.FILE if path.exists() else PathType.ABSENT
    # The first match wins: a manifest makes a checkpoint, wherever it lies and whatever lies beside it.
    if (path / "manifest.json").exists():
        return PathType.CHECKPOINT
    if not (path / CHECKPOINTS).is_dir() and _is_export(path):
        return PathType.EXPORT
    if is_checkpoint(path):  # damaged, since it has no manifest
        return PathType.CHECKPOINT
    tuned = bool(_seeds(path))
    if _is_run(path):
        return PathType.RUN_AND_FINETUNED if tuned else PathType.RUN
    if tuned:
        return PathType.FINETUNED
    if list_checkpoints(path):
        return PathType.CHECKPOINTS
    if (path / ADAPTER_CONFIG).exists():
        return PathType.ADAPTER
    if next(path.glob("mp_rank_*_model_states.pt"), None) is not None:
        return PathType.ORIGINAL_GLM
    return PathType.PARENT if _runs_in(path) else PathType.OTHER


def _is_export(path: Path) -> bool:
    """Whether there is a config.json of one Transformer, or the file that marks a model with a spec."""
    if (path / CONFIG_JSON).exists():
        return True
    markers = [section.model_files[0] for section in sections_with_models() if section.model_files]
    return any((path / f"{each}{CONFIG_JSON * each.endswith('/')}").exists() for each in markers)


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / RECORDS).exists()


def _seeds(path: Path) -> list[Path]:
    """The runs in an output of scripts/finetune.py, in the order of their seeds."""
    found = [
        each
        for each in path.glob("seed_*")
        if each.name[5:].isdigit() and (_is_run(each) or (each / BEST).is_dir())
    ]
    return sorted(found, key=lambda each: int(each.name[5:]))


def _runs_in(path: Path) -> list[Path]:
    visible = [each for each in sorted(path.iterdir()) if each.is_dir() and not each.name.startswith(".")]
    return [each for each in visible if _is_run(each) or _seeds(each)]


def best_checkpoints(path: Path) -> list[Path]:
    """The best checkpoint of each seed in an output of scripts/finetune.py; the seed's run where no score chose one."""
    return [seed / BEST if list_checkpoints(seed / BEST) else seed for seed in _seeds(path)]


def resolve_model(path: Path, option: str = "", takes: str = MODEL_PATH) -> Path:
    """The run, checkpoint or directory of checkpoints that holds one model; of a fine-tuning output the best.

    Args:
        option: the command-line option that the path was given as, for messages.
        takes: MODEL_PATH, or MODEL_OR_EXPORT_PATH where an export is accepted and returned as it is.
    Raises: CheckpointError naming what the path is and what to give instead.
    """
    found = path_type(path)
    if found in (PathType.CHECKPOINT, PathType.RUN, PathType.CHECKPOINTS):
        return path
    if found is PathType.EXPORT and takes == MODEL_OR_EXPORT_PATH:
        return path
    best = best_checkpoints(path) if found in (PathType.FINETUNED, PathType.RUN_AND_FINETUNED) else []
    if found is PathType.FINETUNED and len(best) == 1:
        return best[0]
    if found is PathType.RUN_AND_FINETUNED:
        # The user must choose one of them.
        best = [path / CHECKPOINTS, *best]
    raise path_error(path, found, option, takes, best)


def resolve_models(path: Path, option: str = "") -> list[Path]:
    """As `resolve_model` with MODEL_OR_EXPORT_PATH, but the best checkpoints of all seeds of a fine-tuning output."""
    return (
        best_checkpoints(path)
        if path_type(path) is PathType.FINETUNED
        else [resolve_model(path, option, MODEL_OR_EXPORT_PATH)]
    )


def resolve_run(path: Path, option: str = "") -> Path:
    """A run's directory, to read its records. Raises: CheckpointError as `resolve_model`."""
    found = path_type(path)
    has_started = found is PathType.OTHER and (path / "config.yaml").exists()  # started, without records yet
    if has_started or found in (PathType.RUN, PathType.RUN_AND_FINETUNED):
        return path
    within = _seeds(path) if found is PathType.FINETUNED else []
    raise path_error(path, found, option, RUN_PATH, within)


def check_is_export(path: Path, option: str) -> None:
    """Raise CheckpointError for a path to import that needs no import: a run or checkpoint of this program."""
    found = path_type(path)
    if found in _OF_THIS_PROGRAM:
        raise CheckpointError(
            f"{option} {path} {found}, which needs no import; pass it as --checkpoint or as "
            "checkpoint.initialize_from."
        )


_OF_THIS_PROGRAM = (
    PathType.RUN,
    PathType.RUN_AND_FINETUNED,
    PathType.CHECKPOINT,
    PathType.CHECKPOINTS,
    PathType.FINETUNED,
)


def check_output_directory(path: Path, option: str, is_tuned: bool = False) -> None:
    """Raise CheckpointError unless a run may write into the directory: not into a checkpoint, an export or another run.

    Args: is_tuned: the output is that of scripts/finetune.py, else of a run.
    """
    found = path_type(path)
    expected = (PathType.FINETUNED,) if is_tuned else (PathType.RUN, PathType.RUN_AND_FINETUNED)
    if (
        found in (*_OF_THIS_PROGRAM, PathType.EXPORT, PathType.ADAPTER, PathType.ORIGINAL_GLM)
        and found not in expected
    ):
        remedy = "give this as --checkpoint" if is_tuned else "give this as checkpoint.initialize_from"
        raise CheckpointError(
            f"{option} {path} {found}; choose another directory, and {remedy} to start from its weights."
        )
    # Through links: what counts is where files would really be deleted.
    resolved = Path(os.path.realpath(path))
    for parent in (resolved, *resolved.parents):
        if _keeps_checkpoints(parent):
            raise CheckpointError(
                f"{option} {path} is inside {parent}, where a run deletes old checkpoints; choose a directory "
                "outside it."
            )


def _keeps_checkpoints(path: Path) -> bool:
    if NAME.fullmatch(path.name) and (path / "manifest.json").exists():
        return True
    return (
        path.name in (CHECKPOINTS, BEST)
        and path.is_dir()
        and (_is_run(path.parent) or bool(list_checkpoints(path)))
    )


def path_error(
    path: Path, found: PathType, option: str, takes: str, within: Sequence[Path] = ()
) -> CheckpointError:
    """The error for a path of a type that the command does not take.

    Args: found: the path's type. takes: what the command takes. within: paths inside it that the user may mean.
    """
    if found is PathType.PARENT:
        within = _runs_in(path)
    elif found is PathType.ABSENT and NAME.fullmatch(path.name):
        within = list_checkpoints(path.parent)[::-1]
    convert = {
        PathType.EXPORT: f"import --input {path}",
        PathType.ADAPTER: f"import --input {path} --base RUN_OF_ITS_MODEL",
        PathType.ORIGINAL_GLM: f"import-megatron --input {path}",
    }.get(found)
    remedy = f"give {takes}"
    if convert:
        remedy += f"; to convert it, run python scripts/convert_checkpoint.py {convert} --output RUN"
    elif within:
        more = f" and {len(within) - _MAX_SHOWN} more" if len(within) > _MAX_SHOWN else ""
        remedy = f"give one: {', '.join(map(str, within[:_MAX_SHOWN]))}{more}"
    elif found is PathType.ABSENT and takes != RUN_PATH and (name := hub_name(str(path))) is not None:
        run = f"runs/{name.repository.rpartition('/')[2]}"
        command = f"python scripts/convert_checkpoint.py import --input {path} --output {run}"
        remedy += (
            f"; a model of the Hugging Face hub is imported first, by `{command}`, and then given as {run}"
        )
    return CheckpointError(f"{option} {path} {found}; {remedy}.".strip())
