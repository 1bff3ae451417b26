"""The lint of English: wording that hides the subject of a sentence, in code, messages and pages.

`python tests/support/figures.py --sentences` prints each place; tests/test_house.py holds their number.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from support import house

# A docstring or comment that begins without its noun, and a docstring that is a noun clause: name the noun instead.
NO_NOUN = re.compile(r"(Of|As of)\b")
NOUN_CLAUSE = re.compile(r"What\b")
# Anywhere: a number without a name ("one token in so many"), and old or impersonal words ("again", "your own").
PHRASES = re.compile(r"\b(so\s+many|anew|one's\s+own)\b", re.IGNORECASE)
# These pages follow from docstrings and settings; the changelog is history.
GENERATED = ("docs/rooms.md", "docs/settings.md")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _phrases(text: str, first_line: int) -> Iterator[int]:
    """Line numbers of PHRASES in a text that begins at `first_line`."""
    for match in PHRASES.finditer(text):
        yield first_line + text.count("\n", 0, match.start())


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment; lines below each other at one column are one comment."""
    first, last, column, lines = 0, 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.removeprefix("#").strip()
        if lines and (line, token.start[1]) == (last + 1, column):
            lines.append(text)
        else:
            if lines:
                yield first, "\n".join(lines)
            first, column, lines = line, token.start[1], [text]
        last = line
    if lines:
        yield first, "\n".join(lines)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, text, is it a docstring) of each string of a file, parts of f-strings included."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            assert isinstance(node.body[0], ast.Expr)
            docstrings.add(node.body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, node in docstrings


def refused_in_code(source: str) -> list[int]:
    """Lines of Python source at which the lint refuses a docstring, a comment or another string."""
    lines = []
    for line, text, is_docstring in _strings(ast.parse(source)):
        if is_docstring and (NO_NOUN.match(text.lstrip()) or NOUN_CLAUSE.match(text.lstrip())):
            lines.append(line)
        lines += _phrases(text, line)
    for line, text in _comments(source):
        lines += [line + at for at, part in enumerate(text.split("\n")) if NO_NOUN.match(part)]
        lines += _phrases(text, line)
    return sorted(lines)


def refused_in_page(text: str) -> list[int]:
    """Lines of a page at which the lint refuses a phrase."""
    return list(_phrases(text, 1))


def pages() -> list[Path]:
    """The pages that people write."""
    found = [house.ROOT / "README.md", house.ROOT / "CONTRIBUTING.md", *(house.ROOT / "docs").glob("*.md")]
    return sorted(path for path in found if path.relative_to(house.ROOT).as_posix() not in GENERATED)


def refused() -> list[str]:
    """`file:line` of every place in the product and its pages that the lint refuses."""
    found = {path: refused_in_code(path.read_text(encoding="utf-8")) for path in house.product_files()}
    found |= {path: refused_in_page(path.read_text(encoding="utf-8")) for path in pages()}
    return [f"{path.relative_to(house.ROOT)}:{line}" for path, lines in found.items() for line in lines]
