"""Settings: frozen dataclasses read strictly from YAML files and dotted overrides, by pydantic.

A section is a frozen dataclass whose fields are made by `setting(default, help)`, with a range where not every value
makes sense; `checked` checks the ranges, also of a section that is made in code. `fields_schema` describes it to
pydantic's core, which converts and checks values and finds all mistakes at once. Field types are `int`, `float`,
`bool`, `str`, `X | None`, `tuple[X, ...]`, free mappings, nested and inline sections. What the settings mean is defined
elsewhere.

pydantic's core is called without its classes: models of all sections would take a tenth of the time in which a command
starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import yaml
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core import core_schema as core

from data_utils.common.errors import ConfigError, expanded_path, local_path
from data_utils.common.setting_files import MAX_DEPTH, parse_override_value, shorten, shown

REQUIRED: Any = dataclasses.MISSING
T = TypeVar("T")
Hint = Any  # the type of a setting
# Of a range, as pydantic names them.
_ENDS = {"at_least": "ge", "above": "gt", "at_most": "le", "below": "lt"}
_WHOLE = {"ge": -(2**63), "lt": 2**63}  # ends of numbers without a range; larger ones would overflow later
_TYPES = {"bool_type": "true or false", "list_type": "a list", "dict_type": "a mapping"}  # in our words
_HERE = "\0"  # in a sentence: the key, which its author does not know
# What YAML 1.1 reads as true and false, and 1.2 as text.
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
# Numbers that YAML 1.1 reads as text: an exponent without a dot or without a sign (1e-4, 1.5e3), and -.5.
_NUMBER_AS_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+|[+-]\.\d+")


def setting(
    default: Any,
    help: str,
    is_path: bool = False,
    or_url: bool = False,
    on_resume: str | None = None,
    one_of: tuple[Any, ...] = (),
    unsupported: Mapping[str, str] | None = None,
    **ends: float,
) -> Any:
    """A field with its help text (purpose, unit). `REQUIRED` as default makes the key mandatory.

    Args:
        is_path: the text, or each of a list, names a file or directory: see `expanded_path`.
        or_url: or it names one in a store.
        on_resume: who may change it in a run: any start ("free"), a phase, for later steps ("phase"), or none
            ("never"); None = as the class variable `on_resume` of the section, "never" without one.
        one_of: all values that it may have; None is always allowed where the type allows it.
        unsupported: a value that it cannot have -> why.
        ends: of its range: at_least, above, at_most, below. NaN and infinity are in none.
    """
    texts = {"help": help, "is_path": is_path, "or_url": or_url, "unsupported": unsupported or {}}
    limits = {"one_of": one_of, "ends": ends, "on_resume": on_resume}
    return dataclasses.field(default=default, metadata={**texts, **limits})


def fraction(default: float, help: str) -> Any:
    """A number from 0 to 1: a probability or a share."""
    return setting(default, help, at_least=0, at_most=1)


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


def range_text(field: dataclasses.Field) -> str:
    """Which values a setting may have, in words; "" = all of its type."""
    if one_of := field.metadata.get("one_of"):
        return f"one of {', '.join(map(str, one_of))}"
    ends = field.metadata.get("ends", {}).items()
    return " and ".join(f"{name.replace('_', ' ')} {value}" for name, value in ends)


Presets = tuple[str, Mapping[str, Mapping[str, Any]]]


_NO_PRESETS: Presets = ("", {})


def checked(name: str, presets: Presets = _NO_PRESETS) -> Callable[[type[T]], type[T]]:
    """Class decorator, below `@dataclass`: values are checked before the section's own `__post_init__`.

    Args:
        name: the section's dotted key, for messages, also in `section_key`; "" = there is none.
        presets: a key of the section, and what each of its values sets where a file does not.
    """

    def decorate(cls: type[T]) -> type[T]:
        own_checks = getattr(cls, "__post_init__", None)

        def __post_init__(self: Any) -> None:
            given = (field for field in dataclasses.fields(self) if "inline" not in field.metadata)
            try:
                _validator(self.__class__).validate_python(
                    {field.name: getattr(self, field.name) for field in given}
                )
            except ValidationError as error:
                raise _refusal(error, self.__class__, f"{name}." if name else "") from None
            if own_checks is not None:
                own_checks(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
        cls.section_key = name  # type: ignore[attr-defined]
        cls.presets = presets  # type: ignore[attr-defined]
        return cls

    return decorate


@functools.cache
def _hints(cls: type) -> dict[str, Hint]:
    return typing.get_type_hints(cls)


def fields_by_key(cls: type) -> dict[str, dataclasses.Field]:
    """Keys of a section in a file, in order, without the classes of their sections, which take time to import."""
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(cls):
        section_keys = dict.fromkeys(field.metadata.get("inline", (field.name,)), field)
        duplicates = fields.keys() & section_keys.keys()
        assert not duplicates, f"{cls.__name__} has the keys {duplicates} twice"
        fields |= section_keys
    return fields


def _type_of(cls: type, key: str, field: dataclasses.Field) -> Hint:
    return field.metadata["class_of"](key) if "inline" in field.metadata else _hints(cls)[key]


def keys_of(cls: type) -> dict[str, tuple[Hint, dataclasses.Field]]:
    """Keys of a section in a file, in order -> type and field."""
    return {key: (_type_of(cls, key, field), field) for key, field in fields_by_key(cls).items()}


def section_in(hint: Hint) -> type | None:
    """The section class of a field that is a section or an optional section."""
    for candidate in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(candidate) and typing.get_origin(hint) is not tuple:
            return typing.cast(type, candidate)
    return None


def setting_names(cls: type, path: str = "") -> Iterator[str]:
    """The dotted key of every setting below `cls`."""
    for key, (hint, _) in keys_of(cls).items():
        nested = section_in(hint)
        yield from [f"{path}{key}"] if nested is None else setting_names(nested, f"{path}{key}.")


def fields_schema(cls: type, nested: Callable[[Callable[[], Hint]], CoreSchema]) -> CoreSchema:
    """pydantic's description of a section as a mapping.

    Args: nested: describes what is below a key. Its argument returns the type, and may import it.
    """
    described = {}
    for key, field in fields_by_key(cls).items():
        class_of = functools.partial(_type_of, cls, key, field)
        is_inline = "inline" in field.metadata
        schema = nested(class_of) if is_inline else value_schema(class_of(), nested, field.metadata)
        needed = is_required(field) and not is_inline
        described[key] = core.typed_dict_field(schema, required=needed, metadata={"field": field})
    return core.typed_dict_schema(described, extra_behavior="forbid", cls_name=cls.__name__)


def is_required(field: dataclasses.Field) -> bool:
    """Whether a setting has no default."""
    return field.default is field.default_factory  # both are MISSING


def value_schema(
    hint: Hint, nested: Callable[[Callable[[], Hint]], CoreSchema], limits: Mapping[str, Any]
) -> CoreSchema:
    """pydantic's description of a type. Types are not converted: true and "8" are no numbers, 8.0 is a whole one."""
    inner, *_ = typing.get_args(hint) or (None,)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return core.nullable_schema(value_schema(inner, nested, limits))
    if typing.get_origin(hint) is tuple:
        items = core.list_schema(value_schema(inner, nested, limits))
        return core.no_info_after_validator_function(tuple, items)
    if dataclasses.is_dataclass(hint):
        return nested(lambda: hint)
    ends = {_ENDS[name]: value for name, value in limits.get("ends", {}).items()}
    one_of = core.literal_schema(list(limits["one_of"])) if limits.get("one_of") else None
    if hint is int:
        whole = core.int_schema(strict=True, **{**_WHOLE, **ends})
        return core.no_info_before_validator_function(_whole_number, one_of or whole)
    if hint is float:
        number = core.float_schema(strict=True, allow_inf_nan=False, **ends)
        return core.no_info_before_validator_function(_number, number)
    if hint is bool:
        return core.no_info_before_validator_function(_switch, core.bool_schema(strict=True))
    if hint is str:
        text = core.no_info_after_validator_function(_text_check(limits), core.str_schema(strict=True))
        return one_of or text
    return core.dict_schema() if typing.get_origin(hint) is dict else core.any_schema()  # one of code


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER_AS_TEXT.fullmatch(value) else value


def _whole_number(value: Any) -> Any:
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _switch(value: Any) -> Any:
    return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _text_check(limits: Mapping[str, Any]) -> Callable[[str], str]:
    expand = expanded_path if limits.get("or_url") else local_path

    def check_text(value: str) -> str:
        if "\0" in value:  # no file's name has one
            raise PydanticCustomError("text", "Input should be text without NUL")
        try:
            return expand(value, _HERE) if limits.get("is_path") else value
        except ConfigError as error:
            raise PydanticCustomError("rule", "{sentence}", {"sentence": str(error)}) from None

    return check_text


@functools.cache
def _validator(cls: type) -> SchemaValidator:
    return SchemaValidator(fields_schema(cls, _section_schema))


def _section_schema(class_of: Callable[[], Hint]) -> CoreSchema:
    """A section is described when it is given, so that a start pays only for those of its run."""
    return core.no_info_plain_validator_function(lambda value: _section(class_of(), value))


def _section(hint: Hint, value: Any) -> Any:
    """A section below another one. pydantic takes over the mistakes that are found in it."""
    if not dataclasses.is_dataclass(hint):
        return SchemaValidator(value_schema(hint, _section_schema, {})).validate_python(value)
    if isinstance(value, typing.cast(type, hint)):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("section", "Input should be a section")
    try:
        return _construct(typing.cast(type, hint), value)
    except ConfigError as error:
        problems = error.problems if isinstance(error, SettingsError) else {}
        context = {"sentence": str(error), "problems": problems}
        raise PydanticCustomError("rule", "{sentence}", context) from None


def _construct(cls: type, tree: Mapping[str, Any]) -> Any:
    """Raises: ValidationError for wrong keys and values, ConfigError for what the section itself refuses."""
    fields = fields_by_key(cls)
    key, presets = getattr(cls, "presets", _NO_PRESETS)
    chosen = tree.get(key)
    preset = presets[chosen] if isinstance(chosen, str) and chosen in presets else {}
    # The error names the keys that are missing in a section that is missing.
    needed = (key for key, field in fields.items() if is_required(field) and section_in(_hints(cls)[key]))
    empty: dict[str, Any] = {key: {} for key in needed}
    given = merge({**empty, **preset}, {str(key): value for key, value in tree.items()})
    values: dict[str, Any] = {}
    validated = _validator(cls).validate_python(given)
    for key in given:  # in their order, which in a mapping of sections may mean something
        # Sections of objectives are keys of the file's top level, but one field of the tree holds them by name.
        if "inline" in fields[key].metadata:
            values.setdefault(fields[key].name, {})[key] = validated[key]
        else:
            values[key] = validated[key]
    return cls(**values)


class SettingsError(ConfigError):
    """Settings that are refused: `problems` has a sentence on each key that is unknown, or whose value cannot be.

    Args: rest: the sentence of another error in the same settings; "" = there is none.
    """

    def __init__(self, problems: Mapping[str, str], rest: str = ""):
        super().__init__(" ".join(filter(None, [rest, *problems.values()])))
        self.problems, self.rest = problems, rest


def build(cls: type, tree: Mapping[str, Any], path: str = "") -> Any:
    """Make the section `cls` from a mapping, strictly. Args: path: dotted prefix of the section, for messages.

    Raises: SettingsError with all unknown, missing and ill-typed keys, and all that sections below find; ConfigError
        for what the section's own checks find.
    """
    try:
        return _construct(cls, tree)
    except ValidationError as error:
        raise _refusal(error, cls, path) from None


def wrong_settings(cls: type, tree: Mapping[str, Any]) -> Mapping[str, str]:
    """Each key that is no setting, or whose value is not of its type and range -> a sentence. Keys may be missing."""
    try:
        _construct(cls, tree)
    except ValidationError as error:
        return _refusal(error, cls, "", is_whole=False).problems
    except ConfigError:
        pass
    return {}


def _refusal(error: ValidationError, cls: type, path: str, is_whole: bool = True) -> SettingsError:
    """All mistakes that pydantic found. Args: is_whole: False = settings are missing on which rules depend."""
    problems: dict[str, str] = {}
    for found in error.errors(include_url=False):
        place = (
            path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"])[1:]
        )
        context = found.get("ctx", {})
        if is_whole or not (found["type"] == "missing" or "problems" in context):
            problems |= context.get("problems") or {place: _sentence(found, cls, place)}
    return SettingsError(problems)


def _sentence(found: Any, cls: type, place: str) -> str:
    """One mistake in words."""
    kind, value = found["type"], found["input"]
    names = [part for part in found["loc"] if isinstance(part, str)]
    holder = functools.reduce(_section_below, names[:-1], cls)
    field = fields_by_key(holder).get(names[-1])
    if field is None:
        return _unknown_key(place, names[-1], value, holder, cls)
    if kind == "rule":
        return found["ctx"]["sentence"].replace(_HERE, place)
    if kind == "missing":
        # An override cannot name an item of a list.
        override = "" if "[" in place else f" or as {place}=VALUE"
        return f"{place} is required ({field.metadata['help'].rstrip('.')}); set it in a file{override}."
    reason = field.metadata.get("unsupported", {}).get(value) if isinstance(value, str) else None
    why = f" ({reason})" if reason else ""
    is_range = not kind.endswith(("type", "section", "text", "finite_number")) and range_text(field)
    rule = is_range or _TYPES.get(kind) or found["msg"].removeprefix("Input should be ")
    rule += ", or null" if field.default is None else ""
    rule += "; put quotes around it" if kind == "string_type" and value is not None else ""
    if kind in ("list_type", "section"):
        hint = _type_of(holder, names[-1], field)
        rule += f"; write {_form(typing.get_args(hint)[0] if place.endswith(']') else hint)}"
    is_example = is_range and field.default not in (None, REQUIRED)
    example = f"; the default is {to_yaml_scalar(field.default)}" if is_example else ""
    return f"{place} is {shown(value)}{why}; it must be {rule}{example}."


def _section_below(cls: type, key: str) -> type:
    hint = _type_of(cls, key, fields_by_key(cls)[key])
    inner = next(each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each))
    return typing.cast(type, inner)


def _form(hint: Hint) -> str:
    """How a value of a type is written: `[{prefix: ...}]` for a list of sections with a required key."""
    if typing.get_origin(hint) is tuple:
        return f"[{_form(typing.get_args(hint)[0])}]"
    cls = section_in(hint)
    required = (
        [f"{key}: ..." for key, field in fields_by_key(cls).items() if is_required(field)] if cls else []
    )
    return f"{{{', '.join(required)}}}" if required else "its keys" if cls else "..."


def _unknown_key(place: str, key: str, value: Any, holder: type, root: type) -> str:
    """What to write in place of an unknown key."""
    written = f"unknown setting {shorten(place) if place.isprintable() else shown(place)}"
    names, known = list(setting_names(root)), list(fields_by_key(holder))
    if "." in key and key in names:
        return f"{written}: in a file write {shorten(to_yaml_scalar(nest(key, value)), 90)[1:-1]}."
    sections = dict.fromkeys(name[: end.start()] for name in names for end in re.finditer(r"\.", name))
    elsewhere = [name for name in (*sections, *names) if f".{name}".endswith(f".{key}")]
    close = [place.removesuffix(key) + name for name in difflib.get_close_matches(key, known, n=1)]
    for nearest in (*elsewhere, *close):
        return f"{written}; the nearest valid key is {nearest}."
    return f"{written}; valid keys here are {shorten(', '.join(sorted(known)) or 'none', 200)}."


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

    A mapping merges with what is there. `{}` empties it: `objectives={}`, then `objectives={masked_lm: 1}`.
    """
    key, equals, value = text.partition("=")
    if not equals or not key or key.count(".") >= MAX_DEPTH:
        raise ConfigError(f"override {shown(text)} must have the form section.key=value.")
    try:
        parsed = parse_override_value(value)
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


def to_yaml_scalar(value: Any) -> str:
    """A value in the form of an override."""
    return (
        yaml.safe_dump(to_tree(value), default_flow_style=True, width=10**6)
        .strip()
        .removesuffix("...")
        .strip()
    )


def check(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
