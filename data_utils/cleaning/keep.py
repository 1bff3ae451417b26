"""The expression `keep` of a recipe: which documents stay, by the fields of their records.

    language == "en" and score >= 3
    not (source in ["ads", "menu"]) or metadata.quality > 0.5

It is a small part of Python's own syntax: names of fields (a.b for the field b of the field a), text, numbers, True,
False, None, comparisons, in, and, or, not, parentheses. The library's parser reads it, and what is not on that list is
refused; nothing is evaluated as Python.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data_utils.common.setting_files import shorten

MAX_CHARACTERS = 4000  # the parser's memory grows with the expression
MAX_DEPTH = 50
_WORDS = {"true": True, "false": False, "null": None}  # as YAML and JSON write them
_EQUAL: dict[type[ast.cmpop], bool] = {ast.Eq: True, ast.NotEq: False}
_ORDERED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_AMONG: dict[type[ast.cmpop], bool] = {ast.In: True, ast.NotIn: False}


class Keep:
    """A checked expression. Raises ValueError, in one short line, for anything else.

    Attributes: fields: the fields that it names, in order, each once.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parse(text)
        self.fields = tuple(dict.fromkeys(_names(self._tree)))
        if not self.fields:
            raise ValueError("it names no field, so it is the same for every document")

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Whether a document with these values stays. A field that is missing is null.

        null is smaller or larger than nothing. Text that is a number is compared with numbers as a number, because a
        CSV file holds text only. Other types that cannot be ordered are neither smaller nor larger.
        """
        return _holds(self._tree, values)

    def __reduce__(self) -> tuple[type[Keep], tuple[str]]:
        return Keep, (self.text,)  # trees of the parser are large to send


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python code: what it warns of is refused below
            tree = ast.parse(text.strip(), mode="eval").body
        _check(tree)
    except SyntaxError as error:
        raise ValueError(f"{error.msg} at character {error.offset or 1}") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None
    return tree


def _check(node: ast.expr, depth: int = 0) -> None:
    """Raise ValueError unless `node` is an expression that is true or false."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value, depth + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand, depth + 1)
    elif isinstance(node, ast.Compare):
        _check_operand(node.left)
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            if type(comparison) in _AMONG:
                _check_list(operand)
            elif type(comparison) in _EQUAL or type(comparison) in _ORDERED:
                _check_operand(operand)
            else:
                raise _refusal(node, "use ==, !=, <, <=, >, >=, in or not in")
    elif (name := _name(node)) is not None:
        raise ValueError(
            f"{name} alone is neither true nor false; write a comparison, such as {name} == true"
        )
    else:
        raise _refusal(node, 'write comparisons of fields, such as language == "en" and score >= 3')


def _check_operand(node: ast.expr) -> None:
    if _name(node) is None and not _is_constant(node):
        raise _refusal(
            node, "compare a field with text in quotes, a number, true, false, null, or another field"
        )


def _check_list(node: ast.expr) -> None:
    if not isinstance(node, (ast.List, ast.Tuple)) or not all(map(_is_constant, node.elts)):
        raise _refusal(node, 'write a list of values behind `in`, such as language in ["en", "de"]')


def _refusal(node: ast.expr, remedy: str) -> ValueError:
    return ValueError(f"{shorten(ast.unparse(node), 80)!r} is not allowed; {remedy}")


def _name(node: ast.expr) -> str | None:
    """The dotted name of a field; None for anything else."""
    if isinstance(node, ast.Name):
        return None if node.id in _WORDS else node.id
    if isinstance(node, ast.Attribute) and (above := _name(node.value)) is not None:
        return f"{above}.{node.attr}"
    return None


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
    if isinstance(node, ast.Name):
        return node.id in _WORDS
    return isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None))


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.UnaryOp):
        return -_constant(node.operand)
    return _WORDS[node.id] if isinstance(node, ast.Name) else node.value  # type: ignore[attr-defined]


def _names(node: ast.expr) -> Iterator[str]:
    if (name := _name(node)) is not None:
        yield name
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _names(child)


def _holds(node: ast.expr, values: Mapping[str, Any]) -> bool:
    if isinstance(node, ast.BoolOp):
        combine = all if isinstance(node.op, ast.And) else any
        return combine(_holds(value, values) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, values)
    assert isinstance(node, ast.Compare)
    left = _value(node.left, values)
    for comparison, operand in zip(node.ops, node.comparators, strict=True):
        if type(comparison) in _AMONG:
            is_among = any(_equal(left, _constant(item)) for item in operand.elts)  # type: ignore[attr-defined]
            if is_among != _AMONG[type(comparison)]:
                return False
            continue
        right = _value(operand, values)
        if type(comparison) in _EQUAL:
            holds = _equal(left, right) == _EQUAL[type(comparison)]
        else:
            holds = _ordered(_ORDERED[type(comparison)], left, right)
        if not holds:
            return False
        left = right  # 0 < score < 3, as in Python
    return True


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    name = _name(node)
    return _constant(node) if name is None else values.get(name)


def _equal(left: Any, right: Any) -> bool:
    left, right = _alike(left, right)
    # true is no 1, as in JSON.
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _ordered(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    left, right = _alike(left, right)
    both_text = isinstance(left, str) and isinstance(right, str)
    return (both_text or (_is_number(left) and _is_number(right))) and compare(left, right)


def _alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Both values, as numbers if one is a number and the other a text that says one."""
    if _is_number(left) and isinstance(right, str):
        return left, _as_number(right)
    if _is_number(right) and isinstance(left, str):
        return _as_number(left), right
    return left, right


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_number(text: str) -> Any:
    for number in (int, float):  # whole numbers first: a float rounds long ones, such as keys of records
        with contextlib.suppress(ValueError):
            return number(text)
    return text
