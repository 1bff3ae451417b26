"""Configuration machinery: frozen dataclasses read strictly from YAML files and dotted overrides.

A section is a frozen dataclass whose fields are made by `setting(default, help)`. Parsing knows the field
types `int`, `float`, `bool`, `str`, `X | None`, `tuple[X, ...]`, free mappings, nested and inline sections; anything
else in a file is an error that names the value, the rule and the nearest valid key. Nothing here knows what
the settings mean: see config.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.errors import ConfigError

REQUIRED: Any = dataclasses.MISSING


def setting(default: Any, help: str) -> Any:
    """A field with its help text (purpose, unit). `REQUIRED` as default makes the key mandatory."""
    if default is REQUIRED:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def section(cls: type) -> Any:
    """A nested section with its own defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": ""})


def setting_mapping(help: str) -> Any:
    """A free mapping, empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"help": help})


def inline_sections(classes: Mapping[str, type]) -> Any:
    """A mapping of sections by name, each with its defaults, whose names are keys beside the field and not below it."""
    return dataclasses.field(default_factory=lambda: _defaults(classes), metadata={"inline": classes})


def _defaults(classes: Mapping[str, type]) -> dict[str, Any]:
    return {name: cls() for name, cls in classes.items()}


def _keys(cls: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Key of the section `cls` in a file -> its type and its field."""
    hints = typing.get_type_hints(cls)
    keys: dict[str, tuple[Any, dataclasses.Field]] = {}
    for field in dataclasses.fields(cls):
        own = field.metadata.get("inline", {field.name: hints[field.name]})
        assert not keys.keys() & own.keys(), f"{cls.__name__} has the keys {keys.keys() & own.keys()} twice"
        keys |= {key: (hint, field) for key, hint in own.items()}
    return keys


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: plain YAML lets the last one win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        again = next((key for key in keys if keys.count(key) > 1), None)
        if again is not None:
            raise yaml.YAMLError(f"key {again!r} appears twice in one mapping; keep one of them")
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read one YAML file as a mapping. Raises ConfigError when it is missing, malformed or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}; check the path.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration file {path} is not UTF-8 text; convert it.") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"configuration file {path} is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration file {path} must hold a mapping of sections, not {type(tree).__name__}; see configs/."
        )
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`model.num_layers=4` as a nested mapping. The value is YAML, so lists and null can be written."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r} must have the form section.key=value.")
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise ConfigError(f"override {text!r}: the value is not valid YAML; quote it.") from None
    return nest(key, parsed)


def nest(key: str, value: Any) -> dict[str, Any]:
    """`value` at a dotted key, as a nested mapping."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def build(cls: type, tree: Mapping[str, Any], path: str = "", root: type | None = None) -> Any:
    """Make the section `cls` from a mapping, strictly.

    Args:
        path: dotted prefix of the section, for messages.
        root: the whole tree's class, where an unknown key may belong; None = `cls`.
    Raises: ConfigError for an unknown, missing or ill-typed key, and what the section's own checks find.
    """
    root = root or cls
    known = _keys(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(_unknown_key(str(key), path, known, root))
        hint, field = known[key]
        converted = _convert(value, hint, f"{path}{key}", root)
        if "inline" in field.metadata:
            values.setdefault(field.name, {name: cls() for name, cls in field.metadata["inline"].items()})[
                key
            ] = converted
        else:
            values[key] = converted
    for name, (hint, field) in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if not required or name in values:
            continue
        if not dataclasses.is_dataclass(hint):
            help = field.metadata.get("help", "")
            raise ConfigError(
                f"{path}{name} is required ({help}); set it in a file or as {path}{name}=VALUE."
            )
        values[name] = _convert({}, hint, f"{path}{name}", root)  # names the key that is missing in it
    return cls(**values)


def setting_names(cls: type, path: str = "") -> Iterator[str]:
    """The dotted key of every setting below `cls`."""
    for key, (hint, _) in _keys(cls).items():
        nested = _section_in(hint)
        if nested is None:
            yield f"{path}{key}"
        else:
            yield from setting_names(nested, f"{path}{key}.")


def _unknown_key(key: str, path: str, known: Mapping[str, Any], root: type) -> str:
    elsewhere = [name for name in setting_names(root) if name.rpartition(".")[2] == key]
    close = [path + name for name in difflib.get_close_matches(key, known, n=1, cutoff=0.6)]
    for nearest in (*elsewhere, *close):
        return f"unknown setting {path}{key}; the nearest valid key is {nearest}."
    return f"unknown setting {path}{key}; valid keys here are {', '.join(sorted(known))}."


def _convert(value: Any, hint: Any, path: str, root: type) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(value, inner, path, root)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{path} is a section, but its value is {value!r}; write its keys, or remove it."
            )
        return build(typing.cast(type, hint), value, f"{path}.", root)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, not {value!r}; write its keys, or remove it.")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, not {value!r}; write [...].")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(item, inner, f"{path}[{i}]", root) for i, item in enumerate(value))
    return _convert_scalar(value, hint, path)


# Numbers that YAML 1.1 reads as text: an exponent without a dot or without a sign (1e-4, 1.5e3), and -.5.
_NUMBER_AS_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]\.\d+")


def _convert_scalar(value: Any, hint: Any, path: str) -> Any:
    if isinstance(value, str) and hint in (int, float) and _NUMBER_AS_TEXT.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if hint is float and is_number and abs(value) <= sys.float_info.max:
        return float(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    quote = "; put quotes around it" if hint is str and value is not None else ""
    raise ConfigError(f"{path} must be {names[hint]}, not {value!r}{quote}.")


def to_tree(config: Any) -> Any:
    """The inverse of `build`: plain mappings, lists and scalars, in field order."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        tree: dict[str, Any] = {}
        for field in dataclasses.fields(config):
            value = to_tree(getattr(config, field.name))
            tree |= value if "inline" in field.metadata else {field.name: value}
        return tree
    if isinstance(config, (tuple, list)):
        return [to_tree(item) for item in config]
    if isinstance(config, Mapping):
        return {key: to_tree(value) for key, value in config.items()}
    return config


def describe(cls: type, path: str = "") -> Iterator[str]:
    """One line for every setting below `cls`: dotted key, type, default and help."""
    for key, (hint, field) in _keys(cls).items():
        nested = _section_in(hint)
        if nested is not None:
            yield ""
            yield from describe(nested, f"{path}{key}.")
            continue
        yield f"  {path}{key} ({_type_name(hint)}, {_default_text(field)})"
        yield f"      {field.metadata.get('help', '')}"


def _section_in(hint: Any) -> type | None:
    """The section class of a field that is a section or an optional section."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and typing.get_origin(hint) is not tuple:
            return typing.cast(type, candidate)
    return None


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


def to_yaml_scalar(value: Any) -> str:
    """A value as one would write it in an override."""
    return yaml.safe_dump(to_tree(value), default_flow_style=True).strip().removesuffix("...").strip()


def check(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def choice(path: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    check(value in allowed, f"{path} is {value!r}; it must be one of {', '.join(map(str, allowed))}.")
