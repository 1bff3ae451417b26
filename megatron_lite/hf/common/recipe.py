"""The recipe of a run in training.json: the settings that an export writes and an import takes, and no others.

A downloaded training.json is untrusted. It may decide what is learnt, from the model to the learning rate, but not
where the new run reads and writes, to whom it reports, or how it uses the machine. `RECIPE` is the list for both
directions: a setting that is not in it is neither exported nor imported.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.setting_files import shorten
from data_utils.common.settings import build, keys_of, merge, nest, section_in, to_tree
from data_utils.common.untrusted import conform
from data_utils.objectives import OBJECTIVES
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig
from megatron_lite.config.removed import current
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.weights import TRAINING_JSON, read_json
from megatron_lite.inference.open_run import OpenRun

log = logging.getLogger(__name__)

FORMAT = "megatron-lite-export"
# Section -> its settings in a recipe; None = all its numbers, flags and choices. Free text, which can be a path or an
# address, is in a recipe only by name.
RECIPE: Mapping[str, tuple[str, ...] | None] = {
    "model": None,
    "decoder": None,
    "training": ("steps", "seed", "precision", "loss_normalization", "loss_weights", "label_smoothing"),
    "batch": None,
    "optimizer": ("kind", "lr", "beta1", "beta2", "eps", "weight_decay", "clip_grad_norm"),
    "schedule": None,
    "data": ("sequence_length", "row_length"),
    "task": (
        "name", "kind", "reader", "labels", "text_fields", "label_field", "form", "pattern", "template", "verbalizers",
        "scoring", "length_power", "loss", "mask", "sequence_length", "target_length", "question_length",
        "answer_length", "stride", "masked_ratio", "target_mask_prob", "blank_ratio", "metrics",
    ),
    **dict.fromkeys(OBJECTIVES),
}  # fmt: skip
TOKENIZERS = ("tokenizer", "decoder_tokenizer")  # stored next to the recipe, with their fingerprints


class _Training(TypedDict):
    """The fields of training.json that an import reads."""

    format: typing.Literal["megatron-lite-export"]
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    decoder_tokenizer: NotRequired[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The record of the exported run in a directory."""

    config: dict[str, Any]  # sections of a configuration; {} = not recorded
    tokenizers: dict[str, dict[str, Any]]  # of TOKENIZERS: options without a path


def portable_recipe(config: Config) -> dict[str, Any]:
    """The settings of a run that an export writes."""
    tree = to_tree(config)
    recipe = {
        name: tree.get(name) and _only(tree[name], _portable(name, cls)) for name, cls in _sections().items()
    }
    return {**recipe, "objectives": tree["objectives"]}


def tokenizer_options(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's options without its path, and its fingerprint."""
    options = to_tree(tokenizer.config)
    taken = {key: options[key] for key in _TOKENIZER_OPTIONS if key != "roles" or options[key]}
    return {**taken, "fingerprint": tokenizer.fingerprint}


def write_recipe(directory: Path, run: OpenRun) -> None:
    """Write training.json, which an import reads."""
    described = {
        "format": FORMAT,
        "step": run.checkpoint.step,
        "config": portable_recipe(run.config),
        "tokenizer": tokenizer_options(run.tokenizer),
        "state": {key: value for key, value in run.checkpoint.state.items() if key != "config"},
    }
    if run.config.decoder is not None:
        described["decoder_tokenizer"] = tokenizer_options(run.decoder_tokenizer or run.tokenizer)
    (directory / TRAINING_JSON).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def read_recipe(directory: Path) -> Recorded:
    """The record in training.json; an empty one if there is no such file.

    Raises: CheckpointError for anything that an export does not write.
    """
    path = directory / TRAINING_JSON
    if not path.exists():
        return Recorded({}, {})
    try:
        described = conform(read_json(path), _Training)
        described["config"] = current(described["config"])
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; fetch it again, or remove it.") from None
    config = {}
    for name, section in described["config"].items():
        taken = _taken(path, name, section)
        if taken is not None:
            config[name] = taken
    tokenizers = {name: _tokenizer(path, name, described[name]) for name in TOKENIZERS if name in described}
    return Recorded(config, tokenizers)


def _sections() -> dict[str, type]:
    """The sections of a recipe."""
    keys = keys_of(Config)
    return {name: typing.cast(type, section_in(keys[name][0])) for name in RECIPE}


def _only(section: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The settings of a section with these dotted names."""
    chosen: dict[str, Any] = {}
    for name in names:
        key, _, inner = name.partition(".")
        chosen = merge(chosen, nest(name, section[key][inner] if inner else section[key]))
    return chosen


def _portable(name: str, cls: type) -> tuple[str, ...]:
    named = RECIPE[name]
    return tuple(_numbers_and_choices(cls, has_lists=name in OBJECTIVES)) if named is None else named


def _numbers_and_choices(cls: type, *, has_lists: bool = False) -> Iterator[str]:
    """Dotted names. Args: has_lists: whether lists of sections that hold nothing else count as well."""
    for key, (hint, field) in keys_of(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from (f"{key}.{name}" for name in _numbers_and_choices(typing.cast(type, hint)))
            continue
        kinds = set(typing.get_args(hint) or (hint,)) - {type(None), ...}
        is_list = has_lists and all(map(_has_no_text, kinds))
        # Free text is in a recipe by name only, since any other text may be a path.
        if is_list or kinds <= {int, float, bool} or field.metadata.get("one_of"):
            yield key


# `roles` is text that must be a token of the file. It is written only where it is set.
_TOKENIZER_OPTIONS = (*_numbers_and_choices(TokenizerConfig), "roles")


def _has_no_text(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and {*_numbers_and_choices(cls)} == keys_of(cls).keys()


def _taken(path: Path, name: str, section: Any) -> Any:
    """A section's settings. Raises: CheckpointError for any that an export does not hold."""
    if name == "objectives":  # name -> share
        return _checked(path, f"config.{name}", section, dict[str, int | float])
    cls = _sections().get(name)
    # Unknown sections are refused: settings of a foreign file may name paths or addresses.
    if cls is None:
        raise CheckpointError(
            f"{path}: config.{shorten(name)} is no part of an export; remove it from the file, and set what you want "
            "of it yourself."
        )
    if section is None:
        return None
    section, portable = _checked(path, f"config.{name}", section, dict[str, Any]), _portable(name, cls)
    given = [
        f"{key}.{inner}" if inner else key
        for key, value in section.items()
        for inner in (value if isinstance(value, Mapping) and key not in portable else ("",))
    ]
    for key in set(given) - set(portable):
        raise CheckpointError(
            f"{path}: config.{name}.{shorten(key)} is no part of an export; remove it from the file, and set it "
            "yourself if you want it."
        )
    _require_valid(path, cls, section, f"{name}.")
    return section


def _tokenizer(path: Path, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    taken = {key: value for key, value in options.items() if key != "fingerprint"}
    for key in taken.keys() - set(_TOKENIZER_OPTIONS):
        raise CheckpointError(
            f"{path}: {name}.{shorten(key)} is no part of an export; remove it from the file, and set it yourself if "
            "you want it."
        )
    _require_valid(path, TokenizerConfig, {**taken, "path": "."}, f"{name}.")
    return taken


def _checked(path: Path, name: str, value: Any, shape: Any) -> Any:
    try:
        return conform(value, shape)
    except ValueError as error:
        raise CheckpointError(f"{path}: {name} {error}; fetch it again, or remove it.") from None


def _require_valid(path: Path, cls: type, section: Mapping[str, Any], prefix: str) -> None:
    try:
        build(cls, section, prefix)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
