"""Writes the config.json of a published system from the section `model` of our configuration: read_config.py inverted.

The result is read back and compared, so that no option is lost without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, leaves, to_tree
from megatron_lite.config.model import OF_TRAINING, ModelConfig
from megatron_lite.hf.common.system_table import PublishedSystem
from megatron_lite.hf.published.heads import head_fields, transformers_class_name
from megatron_lite.hf.published.read_config import field_of, our_value
from megatron_lite.hf.published.systems import published_system

# Options that are of the training, or that a file of weights does not tell.
NOT_IN_FILES = OF_TRAINING | {"span_boundary_places", "class_heads", "task_rows", "mtp_layers"}

# Options that may be null, and what they then stand for.
DERIVED = {"ffn_size": "inner_size", "head_dim": "head_size", "num_key_value_heads": "key_value_heads"}


def hf_config(config: ModelConfig, base: Mapping[str, Any], labels: Sequence[str] = ()) -> PretrainedConfig:
    """The transformers configuration of a model.

    Args: base: fields of the config.json that was imported. labels: names of the classes of a task's head.

    Raises: CheckpointError for an option that the class cannot express.
    """
    system = published_system(config)
    values, default = dict(base), CONFIG_MAPPING[system.model_type]()
    system = system.padded_with(values.get("pad_token_id", default.pad_token_id))
    for entry in reversed(system.fields):  # the first of several options decides a field
        value = getattr(config, entry.ours)
        if value is None and entry.null_as is not None:
            value = getattr(config, entry.null_as)
        if entry.ours in DERIVED and field_of(default, entry.theirs) is not None:  # GPT-2's is None, as ours
            value = getattr(config, DERIVED[entry.ours])
        if entry.ours in system.optional and not value:
            continue  # the class's default, which it does not use
        for name, number in zip(entry.numbers, value if entry.numbers else (), strict=False):
            _set_field(values, name, int(number) if name.endswith("position_embeddings") else number)
        if entry.names is not None:
            value = None if entry.numbers and value else value
            value = _their_value(entry.names, value, base.get(entry.theirs), entry.ours)
        if entry.writes is not None:
            value = entry.writes(value, config)
        if entry.counts_positions:
            value += 1 + system.skipped_positions * system.counts_skipped
        _set_field(values, entry.theirs, value)
    for name, value in system.required.items():
        if hasattr(default, name.partition(".")[0]):
            _set_field(values, name, value)
    if config.task_types:
        values["use_task_id"] = True
    if system.legacy is not None:
        # A new run takes the names that all versions of transformers load; that of the others is broken to 5.19.
        values.setdefault("legacy", "model_type" not in base)
    name, head = transformers_class_name(system, config), head_fields(system, config, labels)
    values |= {**head, "architectures": [name]}
    class_config = CONFIG_MAPPING[system.model_type].from_dict(values)
    _require_expressed(system, config, class_config, name)
    return class_config


def former_fields(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json by which other versions of transformers read a model. See `FormerField`."""
    return {
        entry.theirs: entry.writes(getattr(config, entry.ours)) for entry in published_system(config).former
    }


def _set_field(values: dict[str, Any], name: str, value: Any) -> None:
    outer, _, inner = name.partition(".")
    if inner:
        within = dict(values.get(outer) or {})
        _set_field(within, inner, value)
        value = within
    values[outer] = value


def _their_value(names: Mapping[Any, Any], ours: Any, former: Any, option: str) -> Any:
    if former in names and names[former] == ours:
        return former
    for theirs, value in names.items():
        if value == ours:
            return theirs
    raise CheckpointError(f"model.{option} is {ours}, which the class of transformers does not have.")


def _require_expressed(
    system: PublishedSystem, config: ModelConfig, class_config: PretrainedConfig, class_name: str
) -> None:
    """Raise CheckpointError unless reading the class's configuration back gives the model's options."""
    settings: dict[str, Any] = {"system": config.system}
    settings["task_head"] = {"type": config.task_head.type, "classes": config.task_head.classes}
    for entry in system.fields:
        settings[entry.ours] = our_value(system, entry, field_of(class_config, entry.theirs), class_config)
    for option in system.optional:
        settings[option] = getattr(config, option)
    again = build(ModelConfig, settings)
    # Without a table of positions max_position is a limit of training alone.
    has_positions = any(entry.counts_positions for entry in system.fields)
    for name, (value, _) in different_options(config, again).items():
        if has_positions or name != "max_position":
            raise CheckpointError(
                f"model.{name} is {shown(value)}, which {class_name} does not have; only models of the published "
                "architecture can be exported."
            )


def different_options(model: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names of the options in which two models differ -> both values. Files do not tell those left out."""
    ours, theirs = (
        dict(leaves(to_tree(each))) | {name: getattr(each, known) for name, known in DERIVED.items()}
        for each in (model, other)
    )
    return {
        name: (ours.get(name), theirs.get(name))
        for name in ours | theirs
        if name not in NOT_IN_FILES and ours.get(name) != theirs.get(name)
    }
