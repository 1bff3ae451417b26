"""What a file says of an objective, read as text: the class below `@register`, its name and its losses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.common import losses as known
from data_utils.common.errors import ConfigError
from data_utils.common.losses import Loss

_DECORATOR = re.compile(r"^@(?:\w+\.)?register\b[^\n]*\n", re.MULTILINE)


class Declared(NamedTuple):
    """An objective, as its file declares it."""

    name: str
    losses: tuple[Loss, ...]
    module: str
    class_name: str
    package: str = ""  # name and version of the package that brings it; "" = this project


def declared_in(folder: Path, package: str) -> Iterator[Declared]:
    """The objectives of a folder, without an import. Raises: ConfigError for a file that cannot be read so."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        source = path.read_text(encoding="utf-8")
        for decorator in _DECORATOR.finditer(source):
            # What follows alone is parsed: these files are read at every start.
            lines_before = source.count("\n", 0, decorator.end())
            cls = _parsed(source[decorator.end() :], path, lines_before).body[0]
            if not isinstance(cls, ast.ClassDef):
                raise ConfigError(f"{path}:{lines_before + 1}: a class must follow @register.")
            yield _declared_by(cls, path, module, "")


def declared_class(path: Path, module: str, name: str, package: str) -> Declared:
    """The objective that a class of a file is. Raises: ConfigError."""
    for node in _parsed(path.read_text(encoding="utf-8"), path, 0).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _declared_by(node, path, module, package)
    raise ConfigError(f"{path} has no class {name}.")


def _parsed(text: str, path: Path, lines_before: int) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL
        line = lines_before + (getattr(error, "lineno", None) or 1)
        message = getattr(error, "msg", str(error))
        raise ConfigError(f"{path}:{line}: {message}; correct the file.") from None


def _declared_by(cls: ast.ClassDef, path: Path, module: str, package: str) -> Declared:
    lines = [line for line in cls.body if isinstance(line, ast.Assign)]
    values: dict[str, Any] = {ast.unparse(line.targets[0]): line.value for line in lines}
    try:
        losses = tuple(map(_loss, values["losses"].elts))
        return Declared(ast.literal_eval(values["name"]), losses, module, cls.name, package)
    except (KeyError, AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: class {cls.name} is an objective, but its name or losses cannot be read without importing the "
            'file; write name = "..." and losses = (Loss("...", NUMBER),) in it.'
        ) from None


def _loss(value: Any) -> Loss:
    """`Loss("name", number)`, or the name of one in common/losses.py."""
    if isinstance(value, ast.Name):
        return getattr(known, value.id)
    return Loss(*map(ast.literal_eval, value.args))
