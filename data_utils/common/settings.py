"""Configuration machinery: frozen dataclasses read strictly from YAML files and dotted overrides.

A section is a frozen dataclass whose fields are made by `setting(default, help)`, with a range where not every value
makes sense; `checked` checks the ranges, also of a section that is made in code. Parsing knows the field
types `int`, `float`, `bool`, `str`, `X | None`, `tuple[X, ...]`, free mappings, nested and inline sections; anything
else in a file is an error that names the value, the rule and the nearest valid key. What
the settings mean is defined elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import yaml

from data_utils.common.errors import ConfigError, expanded_path, local_path
from data_utils.common.setting_files import MAX_DEPTH, parse_yaml, shorten, shown, yaml_comment

REQUIRED: Any = dataclasses.MISSING
T = TypeVar("T")
_LISTED_KEYS = 60  # a longer list, such as of DeepSpeed's keys, hides what is wrong


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Which values a setting may have. NaN and infinity are never among them."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    one_of: tuple[Any, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)  # a value -> why it is none

    def __contains__(self, value: Any) -> bool:
        if self.one_of:
            return value in self.one_of
        return (
            -math.inf < value < math.inf
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.one_of:
            return f"one of {', '.join(map(str, self.one_of))}"
        low = self.above if self.at_least is None else self.at_least
        high = self.below if self.at_most is None else self.at_most
        if high is None:
            return f"at least {low}" if self.above is None else f"above {low}"
        if low is None:
            return f"at most {high}" if self.below is None else f"below {high}"
        return f"in {'[' if self.above is None else '('}{low}, {high}{']' if self.below is None else ')'}"


def setting(
    default: Any,
    help: str,
    is_path: bool = False,
    or_url: bool = False,
    on_resume: str | None = None,
    **limits: Any,
) -> Any:
    """A field with its help text (purpose, unit). `REQUIRED` as default makes the key mandatory.

    Args:
        is_path: the text, or each of a list, names a file or directory: see `expanded_path`.
        or_url: or it names one in a store.
        on_resume: who may change it in a run: any start ("free"), a phase, for later steps ("phase"), or none
            ("never"); None = as the class variable `on_resume` of the section, "never" without one.
        limits: fields of `Range`; None is always allowed where the type allows it.
    """
    limited = Range(**limits) if limits else None
    metadata = {"help": help, "range": limited, "is_path": is_path, "or_url": or_url, "on_resume": on_resume}
    return dataclasses.field(default=default, metadata=metadata)


def fraction(default: float, help: str) -> Any:
    """A number from 0 to 1: a probability or a share."""
    return setting(default, help, at_least=0, at_most=1)


Presets = tuple[str, Mapping[str, Mapping[str, Any]]]


def checked(name: str, presets: Presets | None = None) -> Callable[[type[T]], type[T]]:
    """Class decorator, below `@dataclass`: ranges are checked before the section's own `__post_init__`.

    Args:
        name: the section's dotted key, for messages, also in `section_key`; "" = there is none.
        presets: a key of the section, and what each of its values sets where a file does not.
    """
    path = f"{name}." if name else ""

    def decorate(cls: type[T]) -> type[T]:
        # Ranges first: a section's own checks may then compute with its values.
        own_checks = getattr(cls, "__post_init__", None)

        def __post_init__(self: Any) -> None:
            for field in dataclasses.fields(self):
                _check_range(field, getattr(self, field.name), f"{path}{field.name}")
            if own_checks is not None:
                own_checks(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
        cls.section_key = name  # type: ignore[attr-defined]
        cls.presets = presets  # type: ignore[attr-defined]
        return cls

    return decorate


def _with_preset(cls: type, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    presets: Presets = getattr(cls, "presets", None) or ("", {})
    key, values = presets
    chosen = tree.get(key)
    # Another value is refused later, with the place in the file.
    return {**values[chosen], **tree} if isinstance(chosen, str) and chosen in values else tree


def _check_range(field: dataclasses.Field, value: Any, path: str) -> None:
    allowed = field.metadata.get("range")
    if allowed is None or value is None or value in allowed:
        return
    null = ", or null" if field.default is None else ""
    without = field.default is None or field.default is REQUIRED
    example = "" if without else f"; the default is {to_yaml_scalar(field.default)}"
    why = f" ({reason})" if (reason := allowed.left_out.get(str(value))) else ""
    raise ConfigError(f"{path} is {shown(value)}{why}; it must be {allowed}{null}{example}.")


def section(cls: type) -> Any:
    """A nested section with its own defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": ""})


def setting_mapping(help: str, on_resume: str | None = None) -> Any:
    """A free mapping, empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"help": help, "on_resume": on_resume})


def inline_sections(names: Collection[str], class_of: Callable[[str], Any], help: str = "") -> Any:
    """A mapping of sections by name, those that are given. The names are keys beside the field, not below it.

    Args: class_of: called for a name whose section is given or described, so that it may import the class.
    """
    return dataclasses.field(
        default_factory=dict, metadata={"inline": names, "class_of": class_of, "help": help}
    )


_hints = functools.cache(typing.get_type_hints)


def _fields_by_key(cls: type) -> dict[str, dataclasses.Field]:
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(cls):
        section_keys = dict.fromkeys(field.metadata.get("inline", (field.name,)), field)
        duplicates = fields.keys() & section_keys.keys()
        assert not duplicates, f"{cls.__name__} has the keys {duplicates} twice"
        fields |= section_keys
    return fields


def _type_of(key: str, field: dataclasses.Field, hints: Mapping[str, Any]) -> Any:
    return field.metadata["class_of"](key) if "inline" in field.metadata else hints[key]


def key_names(cls: type) -> list[str]:
    """Keys of a section in a file, in order, without the classes of their sections, which take time to import."""
    return list(_fields_by_key(cls))


def keys_of(cls: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Keys of a section in a file, in order -> type and field."""
    hints = _hints(cls)
    return {key: (_type_of(key, field, hints), field) for key, field in _fields_by_key(cls).items()}


class Emptied(dict[str, Any]):
    """A mapping, and what is set in it after it was emptied: it takes the place of another one."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings merge key by key, everything else is replaced."""
    # An emptied mapping replaces the one below it, also if keys are set in it after that.
    merged = Emptied(base) if isinstance(base, Emptied) else dict(base)
    for key, value in over.items():
        replaces = isinstance(value, Emptied) or not isinstance(value, Mapping)
        if not replaces and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`model.num_layers=4` as a nested mapping. The value is YAML, so lists and null can be written.

    A # after a space begins no comment, which nobody writes on a command line: `run.directory=runs/a #1` is that name.
    A mapping merges with what is there. `{}` empties it: `objectives={}`, then `objectives={masked_lm: 1}`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key or key.count(".") >= MAX_DEPTH:
        raise ConfigError(f"override {shown(text)} must have the form section.key=value.")
    try:
        comment, is_plain = yaml_comment(value)
        if comment and not is_plain:
            raise ValueError(f"{shown(comment)} would be a comment")
        parsed = value.strip() if comment else parse_yaml(value)
    except ValueError as error:
        raise ConfigError(
            f"override {shown(text)}: the value is not valid YAML ({error}); quote it."
        ) from None
    return nest(key, Emptied() if parsed == {} else parsed)


def nest(key: str, value: Any) -> dict[str, Any]:
    """`value` at a dotted key, as a nested mapping."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


class SettingsError(ConfigError):
    """Settings that are refused: `problems` has a sentence on each key that is unknown, or whose value cannot be.

    Args: rest: the sentence of another error in the same settings; "" = there is none.
    """

    def __init__(self, problems: Mapping[str, str], rest: str):
        super().__init__(" ".join(filter(None, [rest, *problems.values()])))
        self.problems, self.rest = problems, rest


def build(cls: type, tree: Mapping[str, Any], path: str = "", root: type | None = None) -> Any:
    """Make the section `cls` from a mapping, strictly.

    Args:
        path: dotted prefix of the section, for messages.
        root: the whole tree's class, where an unknown key may belong; None = `cls`.
    Raises: ConfigError for an unknown, missing or ill-typed key, and what the section's own checks find. It names all
        keys that are unknown or have a value that they cannot have at once, as a SettingsError.
    """
    if root is not None:
        return _build(cls, tree, path, root)
    try:
        return _build(cls, tree, path, cls)
    except ConfigError as error:
        # The first error stops the construction; all wrong and missing keys are collected in a second pass, so that
        # they are named at once.
        problems = dict(wrong_settings(cls, tree, path, cls))
        # A key that is a misspelling of a missing one is named once, with the right name.
        named = " ".join(problems.values())
        for key, sentence in missing_settings(cls, tree, path):
            if not any(f"the nearest valid key is {key}{end}" in named for end in ".:"):
                problems.setdefault(key, sentence)
        if not problems:
            raise
        raise SettingsError(problems, "" if str(error) in problems.values() else str(error)) from None


def _build(cls: type, tree: Mapping[str, Any], path: str, root: type) -> Any:
    known, hints = _fields_by_key(cls), _hints(cls)
    tree = _with_preset(cls, tree)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(_unknown_key(str(key), value, path, known, root))
        field = known[key]
        converted = _checked_value(value, _type_of(key, field, hints), field, f"{path}{key}", root)
        # Sections of objectives are keys of the file's top level, but one field of the tree holds them by name.
        if "inline" in field.metadata:
            values.setdefault(field.name, {})[key] = converted
        else:
            values[key] = converted
    for name, field in known.items():
        if not _is_required(field) or name in values:
            continue
        if not dataclasses.is_dataclass(hint := hints[name]):
            raise ConfigError(_missing_key(f"{path}{name}", field))
        # The error names the key that is missing in it.
        values[name] = _convert({}, hint, f"{path}{name}", root)
    return cls(**values)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _missing_key(place: str, field: dataclasses.Field) -> str:
    help = field.metadata.get("help", "").rstrip(".")
    # An override cannot name an item of a list.
    override = "" if "[" in place else f" or as {place}=VALUE"
    return f"{place} is required ({help}); set it in a file{override}."


def _checked_value(value: Any, hint: Any, field: dataclasses.Field, path: str, root: type) -> Any:
    """The value of a key in its type and range. Raises: ConfigError."""
    converted = _convert(value, hint, path, root)
    if field.metadata.get("is_path"):
        converted = _expanded(converted, path, expanded_path if field.metadata["or_url"] else local_path)
    if "inline" not in field.metadata:
        _check_range(field, converted, path)  # here with the position in a list
    return converted


def _expanded(value: Any, path: str, expand: Callable[[str, str], str]) -> Any:
    """A path, None, or a list of paths."""
    if isinstance(value, tuple):
        return tuple(_expanded(item, f"{path}[{i}]", expand) for i, item in enumerate(value))
    return None if value is None else expand(value, path)


def setting_names(cls: type, path: str = "") -> Iterator[str]:
    """The dotted key of every setting below `cls`."""
    for key, (hint, _) in keys_of(cls).items():
        nested = section_in(hint)
        if nested is None:
            yield f"{path}{key}"
        else:
            yield from setting_names(nested, f"{path}{key}.")


def wrong_settings(cls: type, tree: Mapping[str, Any], path: str, root: type) -> Iterator[tuple[str, str]]:
    """Each key that is no setting, or whose value is not of its type and range, in the sections below too.

    Yields: the dotted key, and a sentence on it. Args: as for `build`.
    """
    known, hints = _fields_by_key(cls), _hints(cls)
    try:
        tree = _with_preset(cls, tree)
    except ConfigError as error:
        yield path.rstrip("."), str(error)
        return
    for key, value in tree.items():
        if key not in known:
            yield f"{path}{key}", _unknown_key(str(key), value, path, known, root)
            continue
        hint, name = _type_of(key, known[key], hints), f"{path}{key}"
        (item_type,) = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else (None,)
        if isinstance(value, Mapping) and (nested := section_in(hint)) is not None:
            yield from wrong_settings(nested, value, f"{name}.", root)
        elif dataclasses.is_dataclass(item_type) and isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from wrong_settings(typing.cast(type, item_type), item, f"{name}[{number}].", root)
        else:
            try:
                _checked_value(value, hint, known[key], name, root)
            except ConfigError as error:
                yield name, str(error)


def missing_settings(cls: type, tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Each key that has no default and is not in a tree, in the sections below too. Yields: as `wrong_settings`."""
    hints = _hints(cls)
    try:
        tree = _with_preset(cls, tree)
    except ConfigError:
        return  # `wrong_settings` names what is wrong
    for key, field in _fields_by_key(cls).items():
        hint, place = _type_of(key, field, hints), f"{path}{key}"
        (of_list,) = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else (None,)
        value = tree.get(key, {} if _is_required(field) and dataclasses.is_dataclass(hint) else None)
        if isinstance(value, Mapping) and (nested := section_in(hint)) is not None:
            yield from missing_settings(nested, value, f"{place}.")
        elif dataclasses.is_dataclass(of_list) and isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from missing_settings(typing.cast(type, of_list), item, f"{place}[{number}].")
        elif _is_required(field) and key not in tree and "inline" not in field.metadata:
            yield place, _missing_key(place, field)


def _unknown_key(key: str, value: Any, path: str, known: Mapping[str, Any], root: type) -> str:
    written_key = shorten(path + key) if key.isprintable() else shown(path + key)
    if "." in key and path + key in setting_names(root):
        given = value if _takes(root, path + key, value) else "VALUE"
        return f"unknown setting {written_key}: in a file write {_nested_text(path + key, given)}."
    too_many = f"the {len(known)} keys here have no such name: correct it, or remove it."
    if path and section_in(keys_of(root).get(key, (None,))[0]) is not None:
        names = [name for name, field in known.items() if "inline" not in field.metadata]
        listed = f"keys here are {', '.join(names)}." if len(known) <= _LISTED_KEYS else too_many
        return f"unknown setting {written_key}: {key} is a section of the whole run; {listed}"
    elsewhere = [name for name in setting_names(root) if name.rpartition(".")[2] == key]
    if isinstance(value, Mapping):
        beginnings = (name.rpartition(f".{key}.")[:2] for name in setting_names(root))
        elsewhere += dict.fromkeys(f"{before}.{key}" for before, found in beginnings if found)
    if not isinstance(value, (list, tuple, Mapping)):  # learning_rate: 0.1 is no list of events
        elsewhere = [name for name in elsewhere if not _is_list(root, name)]
    close = [path + name for name in difflib.get_close_matches(key, known, n=1, cutoff=0.6)]
    for nearest in (*elsewhere, *close):
        # A key of a section that stands outside of all sections, with a value that it can have there.
        fits = not path and nearest.endswith(f".{key}") and _takes(root, nearest, value)
        written = f": write {_nested_text(nearest, value)}" if fits else ""
        return f"unknown setting {written_key}; the nearest valid key is {nearest}{written}."
    if not known:
        return f"unknown setting {written_key}; there are no settings here: remove it."
    listed = f"valid keys here are {', '.join(sorted(known))}." if len(known) <= _LISTED_KEYS else too_many
    return f"unknown setting {written_key}; {listed}"


def _is_list(root: type, name: str) -> bool:
    """Whether a setting of the tree, given by its dotted key, is a list."""
    *sections, last = name.split(".")
    for section_name in sections:
        root = typing.cast(type, section_in(keys_of(root)[section_name][0]))
    return typing.get_origin(keys_of(root)[last][0]) is tuple


def _takes(root: type, key: str, value: Any) -> bool:
    """Whether a setting of the tree, given by its dotted key, may have a value."""
    return not any(wrong_settings(root, nest(key, value), "", root))


def _nested_text(key: str, value: Any) -> str:
    """`section: {key: value}` of a dotted key, as a file has it."""
    *sections, last = key.split(".")
    text = f"{last}: {shorten(to_yaml_scalar(value), 60)}"
    for name in reversed(sections):
        text = f"{name}: {{{text}}}"
    return text


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
                f"{path} is a section, but its value is {shown(value)}; write {_example(hint)}, or remove it."
            )
        return build(typing.cast(type, hint), value, f"{path}.", root)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, not {shown(value)}; write its keys, or remove it.")
        return dict(value)
    if origin is tuple:
        if isinstance(value, Mapping) and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            raise ConfigError(
                f"{path} must be a list, not {shown(value)}; put brackets around it: [{shown(value)}]."
            )
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, not {shown(value)}; write {_example(hint)}.")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(item, inner, f"{path}[{i}]", root) for i, item in enumerate(value))
    return _convert_scalar(value, hint, path)


def _example(hint: Any) -> str:
    """Example of a value's syntax for messages: `[{prefix: ...}]` for a list of sections, with its required keys."""
    if typing.get_origin(hint) is tuple:
        return f"[{_example(typing.get_args(hint)[0])}]"
    if not dataclasses.is_dataclass(hint):
        return "..."
    defaults = (dataclasses.MISSING, dataclasses.MISSING)
    required = [
        field.name for field in dataclasses.fields(hint) if (field.default, field.default_factory) == defaults
    ]
    return "{" + ", ".join(f"{name}: ..." for name in required) + "}" if required else "its keys"


# What YAML 1.1 reads as true and false, and 1.2 as text.
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
# Numbers that YAML 1.1 reads as text: an exponent without a dot or without a sign (1e-4, 1.5e3), and -.5.
_NUMBER_AS_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]\.\d+")


def _convert_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint is bool and isinstance(value, str):
        value = _SWITCHES.get(value.lower(), value)
    if isinstance(value, str) and hint in (int, float) and _NUMBER_AS_TEXT.fullmatch(value):
        value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_number = is_number and abs(value) <= sys.float_info.max
    if hint is int and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if hint is float and is_number:
        return float(value)
    if hint in (bool, str) and isinstance(value, hint) and "\0" not in str(value):  # no file's name has a NUL
        return value
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    quote = "; put quotes around it" if hint is str and value is not None else ""
    raise ConfigError(f"{path} must be {names[hint]}, not {shown(value)}{quote}.")


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


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a tree, as `data.train[0].prefix`; empty mappings and lists are values."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, (list, tuple)) and tree and isinstance(tree[0], Mapping):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}[{number}]")
    else:
        yield path, tree


def section_in(hint: Any) -> type | None:
    """The section class of a field that is a section or an optional section."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and typing.get_origin(hint) is not tuple:
            return typing.cast(type, candidate)
    return None


def to_yaml_scalar(value: Any) -> str:
    """A value in the form of an override."""
    return yaml.safe_dump(to_tree(value), default_flow_style=True).strip().removesuffix("...").strip()


def check(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
