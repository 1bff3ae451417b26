"""Reads the config.json of a published system as the section `model` of our configuration.

What our model cannot express is collected as sentences, so that one error names everything that prevents an import.
write_config.py is the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from megatron_lite.hf.common.config_json import CONFIG_JSON, by_transformers, quiet
from megatron_lite.hf.common.system_table import ConfigField, PublishedSystem
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.heads import architectures, head_problems, head_settings
from megatron_lite.hf.published.recognition import architecture, body_class, has_head, stem


def model_settings(
    system: PublishedSystem, config_json: Mapping[str, Any], theirs: Weights, path: Path
) -> dict[str, Any]:
    """The section `model` of a config.json. Raises: CheckpointError for what the model cannot express."""
    settings, problems = settings_and_problems(system, config_json, theirs, path)
    require_none(path, problems)
    return settings


def require_none(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError for all that stands against an import at once. Args: problems: sentences."""
    if problems:
        raise CheckpointError(f"{path / CONFIG_JSON}: {' '.join(dict.fromkeys(problems))}")


def settings_and_problems(
    system: PublishedSystem, config_json: Mapping[str, Any], theirs: Weights, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The section `model`, and a sentence on each field that it cannot express."""
    config = transformers_config(system, config_json, path)
    problems = []
    for name, value in system.required.items():
        actual = field_of(config, name, value)
        if actual != value:
            problems.append(f"{name} is {shown(actual)}; only {shown(value)} can be imported.")
    if system.skips_pad and not (isinstance(config.pad_token_id, int) and config.pad_token_id >= 0):
        problems.append(
            f"pad_token_id is {shown(config.pad_token_id)}, but a {system.model_type} counts positions from it; set it "
            "to the tokenizer's."
        )
    name, class_problem = _system_name(system, config)
    problems += class_problem
    settings: dict[str, Any] = {"system": name}
    for entry in system.fields:
        value = field_of(config, entry.theirs)
        if entry.names is not None and value not in list(entry.names):  # by ==: a foreign value may be a list
            problems.append(
                f"{entry.theirs} is {shown(value)}; it must be one of {', '.join(map(str, entry.names))}."
            )
            continue
        ours = our_value(system, entry, value, config)
        if ours is None and entry.reads is not None:
            problems.append(f"{entry.theirs} is {shown(value)}, which the model here cannot be.")
        elif settings.setdefault(entry.ours, ours) != ours:
            problems.append(
                f"{entry.theirs} gives model.{entry.ours} {shown(ours)}, another field gives "
                f"{shown(settings[entry.ours])}; only equal ones can be imported."
            )
    for option, name in system.optional.items():
        settings[option] = option_from_shape(option, theirs, name)
    if "sentence_classes" in system.optional:
        settings["sentence_classes"] = _sentence_classes(system, settings["sentence_classes"], theirs)
    problems += _contradictions(system, config_json, config, settings)
    if head_type := architectures(system).get(_architecture(system, config)):
        settings["task_head"] = head_settings(system, head_type, config)
        problems += head_problems(system, head_type, config)
    return settings, problems


def _sentence_classes(system: PublishedSystem, classes: int, theirs: Weights) -> int:
    """Rows of the head on CLS. Without the layer below it there is none; a layer alone, of a base model, has two."""
    (pooler,) = (rule.theirs[0] for rule in system.rules if rule.ours == "heads.sentence.dense")
    has_pooler = f"{pooler}.weight" in theirs.shapes
    if has_pooler and not classes and not has_head(system, theirs.shapes):
        return 2
    return classes if has_pooler else 0


def _contradictions(
    system: PublishedSystem,
    config_json: Mapping[str, Any],
    config: PretrainedConfig,
    settings: Mapping[str, Any],
) -> list[str]:
    """A sentence on each field whose value contradicts the name that another version of transformers has for it.

    Args: config: what the installed version makes of `config_json`. settings: of the section `model`, from it.
    """
    values = {}  # name of a field -> its value, and the value that was read
    for entry in system.fields:
        outer, *inner = entry.theirs.split(".")
        within = config_json.get(outer)
        for name in inner:
            within = within.get(name) if isinstance(within, Mapping) else None
        if inner and within is not None:  # another field may override it
            values[entry.theirs] = within, field_of(config, entry.theirs)
    for former in system.former:
        value = config_json.get(former.theirs)
        if value is None or not former.is_another_name or former.ours not in settings:
            continue
        read = former.writes(settings[former.ours])
        if isinstance(value, Mapping):  # "type" is the oldest name of rope_type
            read = {"rope_type": "default"} if read is None else read
            value = {"rope_type": value.get("type"), **value}
            value = {name: value.get(name) for name in read}
        values[former.theirs] = value, read
    return [
        f"{name} is {shown(value)}, but another field gives {shown(read)}; remove the wrong one, or make them equal."
        for name, (value, read) in values.items()
        if value != read
    ]


def option_from_shape(option: str, weights: Weights, name: str) -> int | bool:
    """The value of an option by the rows of a parameter, 0 rows if the parameter is missing."""
    rows = weights.shapes.get(name, (0,))[0]
    return {"tie_word_embeddings": not rows, "sentence_classes": rows, "task_types": rows}.get(
        option, rows > 0
    )


def _architecture(system: PublishedSystem, config: PretrainedConfig) -> str:
    return architecture({"architectures": config.architectures}) or next(iter(system.classes))


def transformers_config(
    system: PublishedSystem, config_json: Mapping[str, Any], path: Path
) -> PretrainedConfig:
    with by_transformers(path), quiet():
        return CONFIG_MAPPING[system.model_type].from_dict(dict(config_json))


def field_of(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    """The value of a field, `default` if it is missing. Args: name: as in `ConfigField`."""
    outer, *inner = name.split(".")
    value = getattr(config, outer, default)
    for mapping in inner:
        value = (value or {}).get(mapping, default)
    return value


def our_value(system: PublishedSystem, entry: ConfigField, value: Any, config: PretrainedConfig) -> Any:
    if entry.counts_positions:
        return value - 1 - system.skipped_positions * system.counts_skipped
    if entry.null_as is not None and value == field_of(config, entry.null_as):
        return None
    if entry.reads is not None:
        return entry.reads(value, config)
    ours = value if entry.names is None else entry.names[value]
    return tuple(field_of(config, name) for name in entry.numbers) if entry.numbers and ours is None else ours


def _system_name(system: PublishedSystem, config: PretrainedConfig) -> tuple[str, list[str]]:
    """`model.system`, and a sentence if the class cannot be imported."""
    name, known = _architecture(system, config), (*system.classes, *architectures(system), body_class(system))
    problems = []
    if name == f"{stem(name)}EncoderModel":
        problems = [
            f"architectures names {name}, an encoder alone; a {system.model_type} here has a decoder."
        ]
    elif name not in known:
        problems = [
            f"architectures names {shown(name)}, which has a head of its own; only {', '.join(known)} can be imported."
        ]
    ours = system.classes.get(name, next(iter(system.classes.values())))
    return "ernie2" if getattr(config, "use_task_id", False) else ours, problems
