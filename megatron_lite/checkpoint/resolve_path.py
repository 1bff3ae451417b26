"""What a path that a command is given leads to: a run, a checkpoint, tuned runs, an export, or nothing of these.

Every command asks here, so that all take the same, and refuse in the same words what they do not take. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from data_utils.common.errors import CheckpointError
from data_utils.common.hub import hub_name
from megatron_lite.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    NAME,
    is_checkpoint,
    list_checkpoints,
)

A_MODEL = "a run directory or one of its checkpoints"
A_MODEL_OR_EXPORT = "a run, one of its checkpoints, or an exported directory"
A_RUN = "the directory of a run that has begun, as run.directory names it"
RECORDS = "metrics.jsonl"  # in the directory of a run that has begun
_SHOWN = 4  # paths that a message names


class Place(StrEnum):
    """The values are what messages say of a path."""

    ABSENT = "does not exist"
    FILE = "is not a directory"
    CHECKPOINT = "is a checkpoint"
    RUN = "is a run"
    CHECKPOINTS = "is a directory of checkpoints"
    TUNED = "is an output of scripts/finetune.py"
    RUN_WITH_TUNED = "is a run, and outputs of scripts/finetune.py lie in it too"
    EXPORT = "is a directory of Hugging Face transformers"
    REFERENCE = "is a checkpoint of the reference (mp_rank_XX_model_states.pt)"
    ABOVE = "is a directory above runs"
    OTHER = "holds no run and no checkpoint"


def place_of(path: Path) -> Place:
    """Raises CheckpointError if the path cannot be looked at."""
    try:
        return _place_of(path)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror}; get permission to read it."
        ) from None


def _place_of(path: Path) -> Place:
    if not path.is_dir():
        return Place.FILE if path.exists() else Place.ABSENT
    if (path / "manifest.json").exists():
        return Place.CHECKPOINT
    if _is_export(path) and not (path / CHECKPOINTS).is_dir():
        return Place.EXPORT
    if is_checkpoint(path):  # damaged, since it has no manifest
        return Place.CHECKPOINT
    tuned = bool(_seeds(path))
    if _is_run(path):
        return Place.RUN_WITH_TUNED if tuned else Place.RUN
    if tuned:
        return Place.TUNED
    if list_checkpoints(path):
        return Place.CHECKPOINTS
    if next(path.glob("mp_rank_*_model_states.pt"), None) is not None:
        return Place.REFERENCE
    return Place.ABOVE if _runs_in(path) else Place.OTHER


def _is_export(path: Path) -> bool:
    """Whether there is a model's description, of one model or of the parts of a pair."""
    names = ("config.json", "ernie_config.json", "latent.json", "generator/config.json")
    return any((path / name).exists() for name in names)


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


def best_of_seeds(path: Path) -> list[Path]:
    """The best checkpoint of each seed of an output of scripts/finetune.py; its run where no score has chosen one."""
    return [seed / BEST if list_checkpoints(seed / BEST) else seed for seed in _seeds(path)]


def model_at(path: Path, option: str = "", takes: str = A_MODEL) -> Path:
    """The run, checkpoint or directory of checkpoints to open for one model; the best one of a tuned output.

    Args: option: under which the path was given. takes: A_MODEL, or A_MODEL_OR_EXPORT: an export is itself.
    Raises: CheckpointError naming what the path is and what to give instead.
    """
    place = place_of(path)
    if place in (Place.CHECKPOINT, Place.RUN, Place.CHECKPOINTS):
        return path
    if place is Place.EXPORT and takes == A_MODEL_OR_EXPORT:
        return path
    best = best_of_seeds(path) if place in (Place.TUNED, Place.RUN_WITH_TUNED) else []
    if place is Place.TUNED and len(best) == 1:
        return best[0]
    if place is Place.RUN_WITH_TUNED:
        best = [path / CHECKPOINTS, *best]
    raise refusal(path, place, option, takes, best)


def models_at(path: Path, option: str = "") -> list[Path]:
    """As `model_at` of A_MODEL_OR_EXPORT, but of a tuned output the best of every seed."""
    return (
        best_of_seeds(path) if place_of(path) is Place.TUNED else [model_at(path, option, A_MODEL_OR_EXPORT)]
    )


def run_at(path: Path, option: str = "") -> Path:
    """A run's directory, to read what it has recorded. Raises: CheckpointError as `model_at`."""
    place = place_of(path)
    has_begun = place is Place.OTHER and (path / "config.yaml").exists()  # and recorded nothing yet
    if has_begun or place in (Place.RUN, Place.RUN_WITH_TUNED):
        return path
    within = _seeds(path) if place is Place.TUNED else []
    raise refusal(path, place, option, A_RUN, within)


def require_export(path: Path, option: str) -> None:
    """Raise CheckpointError for a directory to import that is one of this program's own."""
    place = place_of(path)
    if place in _OURS:
        raise CheckpointError(
            f"{option} {path} {place}, which needs no import; give it as --checkpoint, or as "
            "checkpoint.initialize_from."
        )


_OURS = (Place.RUN, Place.RUN_WITH_TUNED, Place.CHECKPOINT, Place.CHECKPOINTS, Place.TUNED)


def require_own_directory(path: Path, option: str, is_tuned: bool = False) -> None:
    """Raise CheckpointError for a directory of other files, among which a run would write, or that lies among them.

    Args: is_tuned: whether it is for the output of scripts/finetune.py, else for a run.
    """
    place = place_of(path)
    own = (Place.TUNED,) if is_tuned else (Place.RUN, Place.RUN_WITH_TUNED)
    if place in (*_OURS, Place.EXPORT, Place.REFERENCE) and place not in own:
        remedy = "name this with --checkpoint" if is_tuned else "name this as checkpoint.initialize_from"
        raise CheckpointError(
            f"{option} {path} {place}; choose another directory, and {remedy} to begin with its weights."
        )
    whole = Path(os.path.realpath(path))
    for above in (whole, *whole.parents):
        if _keeps_checkpoints(above):
            raise CheckpointError(
                f"{option} {path} lies in {above}, where a run keeps checkpoints and deletes old ones; choose a "
                "directory outside of it."
            )


def _keeps_checkpoints(path: Path) -> bool:
    if NAME.fullmatch(path.name) and (path / "manifest.json").exists():
        return True
    return (
        path.name in (CHECKPOINTS, BEST)
        and path.is_dir()
        and (_is_run(path.parent) or bool(list_checkpoints(path)))
    )


def refusal(
    path: Path, place: Place, option: str, takes: str, within: Sequence[Path] = ()
) -> CheckpointError:
    """The error for a path that leads to something else.

    Args: takes: what the command takes. within: what lies in the directory and may be meant.
    """
    if place is Place.ABOVE:
        within = _runs_in(path)
    elif place is Place.ABSENT and NAME.fullmatch(path.name):
        within = list_checkpoints(path.parent)[::-1]
    convert = {Place.EXPORT: "import", Place.REFERENCE: "import-megatron"}.get(place)
    remedy = f"give {takes}"
    if convert:
        remedy += f"; this makes one of it: python scripts/convert_checkpoint.py {convert} --input {path} --output RUN"
    elif within:
        more = f" and {len(within) - _SHOWN} more" if len(within) > _SHOWN else ""
        remedy = f"give one: {', '.join(map(str, within[:_SHOWN]))}{more}"
    elif place is Place.ABSENT and takes != A_RUN and (name := hub_name(str(path))) is not None:
        run = f"runs/{name.repository.rpartition('/')[2]}"
        command = f"python scripts/convert_checkpoint.py import --input {path} --output {run}"
        remedy += (
            f"; a model of the Hugging Face hub is imported first, by `{command}`, and then given as {run}"
        )
    return CheckpointError(f"{option} {path} {place}; {remedy}.".strip())
