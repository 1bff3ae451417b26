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
from megatron_lite.hf.files.config_json import CONFIG_JSON, by_transformers, quiet
from megatron_lite.hf.files.system_table import ConfigField, PublishedSystem
from megatron_lite.hf.files.weights import Weights
from megatron_lite.hf.published.heads import architectures, head_problems, head_settings
from megatron_lite.hf.published.recognition import architecture, body_class, has_head, stem


def model_settings(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, path: Path
) -> dict[str, Any]:
    """The section `model` of a config.json. Raises: CheckpointError for what the model cannot express."""
    settings, problems = settings_and_problems(system, described, theirs, path)
    require_none(path, problems)
    return settings


def require_none(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError for all that stands against an import at once. Args: problems: sentences."""
    if problems:
        raise CheckpointError(f"{path / CONFIG_JSON}: {' '.join(dict.fromkeys(problems))}")


def settings_and_problems(
    system: PublishedSystem, described: Mapping[str, Any], theirs: Weights, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The section `model`, without what cannot be expressed, and a sentence on each of that."""
    config = transformers_config(system, described, path)
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
        if entry.names is not None and value not in entry.names:
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
    problems += _contradictions(system, described, config, settings)
    if kind := architectures(system).get(_architecture(system, config)):
        settings |= head_settings(system, kind, config)
        problems += head_problems(system, kind, config)
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
    described: Mapping[str, Any],
    config: PretrainedConfig,
    settings: Mapping[str, Any],
) -> list[str]:
    """A sentence on each field of one version of transformers that contradicts the same in another's spelling.

    Args: config: what the installed version makes of `described`. settings: of the section `model`, from it.
    """
    said = {}  # name -> what it says, and what was read
    for entry in system.fields:
        outer, *inner = entry.theirs.split(".")
        within = described.get(outer)
        for name in inner:
            within = within.get(name) if isinstance(within, Mapping) else None
        if inner and within is not None:  # another field goes over it
            said[entry.theirs] = within, field_of(config, entry.theirs)
    for former in system.former:
        given = described.get(former.theirs)
        if given is None or not former.is_another_name or former.ours not in settings:
            continue
        read = former.writes(settings[former.ours])
        if isinstance(given, Mapping):  # "type" is the oldest name of its kind
            read = {"rope_type": "default"} if read is None else read
            given = {"rope_type": given.get("type"), **given}
            given = {name: given.get(name) for name in read}
        said[former.theirs] = given, read
    return [
        f"{name} is {shown(given)}, but another field gives {shown(read)}; remove the wrong one, or make them equal."
        for name, (given, read) in said.items()
        if given != read
    ]


def option_from_shape(option: str, weights: Weights, name: str) -> int | bool:
    """The value of an option by the first dimension of a parameter, 0 if there is none."""
    rows = weights.shapes.get(name, (0,))[0]
    return {"tie_word_embeddings": not rows, "sentence_classes": rows, "task_types": rows}.get(
        option, rows > 0
    )


def _architecture(system: PublishedSystem, config: PretrainedConfig) -> str:
    return architecture({"architectures": config.architectures}) or next(iter(system.classes))


def transformers_config(
    system: PublishedSystem, described: Mapping[str, Any], path: Path
) -> PretrainedConfig:
    with by_transformers(path), quiet():
        return CONFIG_MAPPING[system.model_type].from_dict(dict(described))


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
    """`model.system`, and what stands against the class."""
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
