"""Lists of all settings: their help texts, and those that are paths."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from data_utils.common.settings import keys_of, range_text, section_in, to_yaml_scalar


def describe(cls: type, path: str = "", listed: dict[type, str] | None = None) -> Iterator[str]:
    """One line for every setting below `cls`: dotted key, type, range, default and help.

    A section with the keys of one before it is one line: `decoder (section like model, ...)`.

    Args: listed: the sections before it, with the path of each.
    """
    listed = {} if listed is None else listed
    for key, (hint, field) in keys_of(cls).items():
        nested = section_in(hint)
        if nested in listed and field.metadata.get("help"):
            yield ""
            yield f"  {path}{key} (section like {listed[nested]}, {_default_text(field)})"
            yield f"      {field.metadata['help']}"
            continue
        if nested is not None:
            listed[nested] = f"{path}{key}"
            yield ""
            yield from describe(nested, f"{path}{key}.", listed)
            continue
        type_name = (
            _type_name(hint).replace("str", "path") if field.metadata.get("is_path") else _type_name(hint)
        )
        facts = [type_name, range_text(field), _default_text(field)]
        yield f"  {path}{key} ({', '.join(filter(None, facts))})"
        yield f"      {field.metadata.get('help', '')}"


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(inner):
            return "list of {" + ", ".join(field.name for field in dataclasses.fields(inner)) + "}"
        return f"list of {_type_name(inner)}"
    if typing.get_args(hint):
        return str(hint).replace("typing.", "").replace("None", "null")
    return hint.__name__


def _default_text(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"default {to_yaml_scalar(field.default)}"
    if field.default_factory is not dataclasses.MISSING:
        return f"default {to_yaml_scalar(field.default_factory())}"
    return "required"


def path_settings(cls: type, path: str = "") -> Iterator[str]:
    """The dotted key of every setting that is a path; `[]` stands after a list of sections."""
    for key, (hint, field) in keys_of(cls).items():
        if field.metadata.get("is_path"):
            yield f"{path}{key}"
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                is_list = typing.get_origin(hint) is tuple
                yield from path_settings(typing.cast(type, inner), f"{path}{key}{'[]' * is_list}.")
