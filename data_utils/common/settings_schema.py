"""JSON Schema of settings, with which an editor completes and checks a file while it is typed."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from data_utils.common.settings import REQUIRED, Hint, is_required, keys_of, section_in, to_tree

_ENDS = {
    "at_least": "minimum",
    "above": "exclusiveMinimum",
    "at_most": "maximum",
    "below": "exclusiveMaximum",
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def json_schema(cls: type, title: str, description: str) -> dict[str, Any]:
    """The schema (draft 2020-12) of a file of settings of `cls`.

    A file may hold a part of the settings, as files are merged; so only items of lists have required keys.
    """
    definitions: dict[str, Any] = {}
    properties = _properties(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


def _properties(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    return {key: _setting(hint, field, definitions) for key, (hint, field) in keys_of(cls).items()}


def _setting(hint: Hint, field: dataclasses.Field, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = _value(hint, field, definitions)
    is_section = dataclasses.is_dataclass(hint)
    if help := field.metadata.get("help"):
        schema["description"] = help
    elif is_section and (text := hint.__doc__) and not text.startswith(f"{hint.__name__}("):
        schema["description"] = text.split("\n")[0]
    if not is_section and field.default is not REQUIRED:
        schema["default"] = to_tree(field.default)
    return schema


def _value(hint: Hint, field: dataclasses.Field, definitions: dict[str, Any]) -> dict[str, Any]:
    inner, *_ = typing.get_args(hint) or (None,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return {"anyOf": [_value(inner, field, definitions), {"type": "null"}]}
    if typing.get_origin(hint) is tuple:
        item = _value(inner, field, definitions)
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            item["required"] = [key for key, (_, each) in keys_of(inner).items() if is_required(each)]
        return {"type": "array", "items": item}
    if (cls := section_in(hint)) is not None:
        return {"$ref": f"#/$defs/{_defined(cls, definitions)}"}
    schema: dict[str, Any] = {"type": _TYPES[hint]} if hint in _TYPES else {}
    if typing.get_origin(hint) is dict:
        return {"type": "object"}
    if one_of := field.metadata.get("one_of"):
        return {"enum": list(one_of)}
    return schema | {_ENDS[name]: value for name, value in field.metadata.get("ends", {}).items()}


def _defined(cls: type, definitions: dict[str, Any]) -> str:
    """The name of a section's schema, which is added to the definitions."""
    if cls.__name__ not in definitions:
        definition: dict[str, Any] = {"type": "object"}
        definitions[cls.__name__] = definition  # first, as sections may contain each other
        definition["properties"] = _properties(cls, definitions)
        definition["additionalProperties"] = False
    return cls.__name__
