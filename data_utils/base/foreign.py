"""Files that another program, a stranger or a damaged disk may have written: read with limits, checked before use.

`read_bounded` takes regular files of limited size only, `parse_json` limits depth and refuses repeated keys,
`conform` checks types and ranges strictly. Each raises a ValueError in one short line without the file's name; the
caller makes it the error of its own kind, with the file and the remedy.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from data_utils.base.setting_files import shorten, shown

MAX_DEPTH = 40


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. A FIFO or a device is refused, and not waited for.

    Raises: ValueError with the reason; FileNotFoundError if there is nothing of this name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO opens at once
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return content


def parse_json(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for damage, repeated keys and more than `MAX_DEPTH` levels."""
    try:
        tree = json.loads(content, object_pairs_hook=_without_repetition, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"has more than {MAX_DEPTH} levels") from None
    except ValueError as error:  # UnicodeDecodeError and numbers of thousands of digits are among them
        raise ValueError(f"is not valid JSON ({shorten(str(error), 200)})") from None
    if _is_deeper(tree, MAX_DEPTH):
        raise ValueError(f"has more than {MAX_DEPTH} levels")
    return tree


def conform(value: Any, shape: Any) -> Any:
    """`value` as the type `shape` describes: types are not converted (true is no number, 2.0 no integer).

    Args: shape: a type as pydantic reads it. Of a TypedDict (typing_extensions), unknown keys stay out.
    Raises: ValueError with the place, the value and the rule of the first mismatch.
    """
    try:
        return _adapter(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(
            f"[{part}]" if isinstance(part, int) else f".{shorten(str(part))}" for part in first["loc"]
        )
        rule = first["msg"].replace("Input should be", "it must be")
        if first["type"] == "missing":
            raise ValueError(f"has no {place.removeprefix('.')}") from None
        raise ValueError(
            f"says {place.removeprefix('.') or 'in all'} {shown(first['input'])}; {rule}"
        ) from None


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        again = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(again)} appears twice in one object")
    return tree


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _is_deeper(tree: Any, levels: int) -> bool:
    if levels == 0:
        return True
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(_is_deeper(child, levels - 1) for child in children if isinstance(child, (dict, list)))
