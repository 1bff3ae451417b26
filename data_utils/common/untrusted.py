"""Files that another program, a stranger or a damaged disk may have written: read with limits, checked before use.

`read_bounded` takes regular files of limited size only, `parse_json` limits depth and refuses repeated keys,
`conform` checks types and ranges strictly. Each raises a ValueError in one short line without the file's name; the
caller makes it the error of its own kind, with the file and the remedy.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import typing
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pydantic_core import ValidationError
from typing_extensions import TypedDict

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import read_text, shorten, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_DEPTH = 40
T = TypeVar("T")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. A FIFO or a device is refused, and not waited for. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO opens at once
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. A FIFO or a device is refused, and not waited for.

    Raises: ValueError with the reason; FileNotFoundError if there is nothing of this name.
    """
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return content


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for damage, repeated keys and more than `MAX_DEPTH` levels."""
    return _parsed(content, json.loads, parse_constant=_no_number, parse_float=_finite)


def _parsed(content: str | bytes, parse: Callable[..., Any], **options: Any) -> Any:
    try:
        tree = parse(content, object_pairs_hook=_without_repetition, **options)
        too_deep = _is_deeper(tree, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:  # UnicodeDecodeError and numbers of thousands of digits are among them
        raise ValueError(f"is not valid JSON ({shorten(str(error), 200)})") from None
    if too_deep:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    return tree


def load_json(path: str | Path, name: str, is_hjson: bool = False) -> dict[str, Any]:
    """Read one JSON file as an object. Raises ConfigError, which calls it `name`.

    Args: is_hjson: it may have comments, trailing commas and keys without quotes, as DeepSpeed reads its files.
    """
    text = read_text(path, name)
    try:
        tree = _parse_hjson(text) if is_hjson else parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{name} {path} {error}; correct it.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} {path} must hold a JSON object, not {type(tree).__name__}.")
    return tree


def _parse_hjson(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        import hjson  # of DeepSpeed; few files need it

        try:
            return _parsed(text, hjson.loads)
        except (ValueError, LookupError, TypeError):  # it reads beyond the end of a text that is cut off
            raise error from None  # its message is the plainer one


def conform(value: Any, shape: Any) -> Any:
    """`value` as the type `shape` describes: types are not converted (true is no number, 2.0 no integer).

    Args: shape: a type as pydantic reads it. Of a TypedDict (typing_extensions), unknown keys stay out.
    Raises: ValueError with the place, the value and the rule of the first mismatch.
    """
    try:
        return _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = "".join(
            f"[{key}]" if isinstance(key, int) else f".{shorten(str(key))}" for key in first["loc"]
        )
        rule = first["msg"].replace("Input should be", "it must be")
        if first["type"] == "missing":
            raise ValueError(f"has no {path.removeprefix('.')}") from None
        raise ValueError(
            f"says {path.removeprefix('.') or 'in all'} {shown(first['input'])}; {rule}"
        ) from None


def conform_to(value: Any, cls: type[T]) -> T:
    """The dataclass `cls` from an object with a value of its type for each field. Raises ValueError, as `conform`."""
    return cls(**conform(value, _fields(cls)))  # type: ignore[arg-type]


@cache
def _fields(cls: type) -> Any:
    return TypedDict(cls.__name__, typing.get_type_hints(cls))  # type: ignore[operator]


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # takes time, which a refused configuration does not need

    return TypeAdapter(shape)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        again = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(again)} appears twice in one object")
    return tree


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is too large for a number")
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper(tree: Any, levels: int) -> bool:
    if levels == 0:
        return True
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(_is_deeper(child, levels - 1) for child in children if isinstance(child, (dict, list)))
