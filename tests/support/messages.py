"""Every sentence that the product can show, from its source.

`PYTHONPATH=.:tests python -m support.messages --write` writes tests/golden/messages.txt. A reviewer reads there, as a
diff, what users will read; it replaces tests of wording.

A sentence is a string of three words or more: errors, warnings, log lines, help of options. `{...}` holds the
expression of an f-string. Docstrings and operands of comparisons are no messages; the help of settings is in
docs/settings.md.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

from support import code_structure

LIST = code_structure.ROOT / "tests/golden/messages.txt"
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’-]+")
_SETTINGS = ("setting", "fraction", "setting_mapping", "inline_sections")


def listed() -> str:
    """The whole list: each file's path, then its sentences, indented, in the order of the source."""
    lines = []
    for path in sorted(code_structure.product_files()):
        found = sentences(path.read_text(encoding="utf-8"))
        if found:
            lines += [
                path.relative_to(code_structure.ROOT).as_posix(),
                *(f"    {sentence}" for sentence in found),
            ]
    return "\n".join(lines) + "\n"


def sentences(source: str) -> list[str]:
    """The sentences of a file, in its order."""
    return list(_sentences(ast.parse(source)))


def _sentences(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, (ast.Compare, ast.Assert)):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SETTINGS:
        return
    text = _template(node)
    if text is not None and len(_WORDS.findall(re.sub(r"\{.*?\}", " ", text))) >= 3 and " " in text:
        yield text.replace("\n", "\\n")
        if isinstance(node, ast.JoinedStr):
            return
    for child in ast.iter_child_nodes(node):
        yield from _sentences(child)


def _template(node: ast.AST) -> str | None:
    """A string or f-string as text, None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    text = ""
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            # One kind of quotes, because Python 3.12 nests them otherwise than older versions.
            text += f"{{{ast.unparse(value.value)}}}".replace('"', "'")
        else:
            text += str(ast.literal_eval(value))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="write tests/golden/messages.txt")
    if parser.parse_args().write:
        LIST.parent.mkdir(exist_ok=True)
        LIST.write_text(listed(), encoding="utf-8")
    else:
        print(listed(), end="")


if __name__ == "__main__":
    main()
