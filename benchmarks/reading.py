#!/usr/bin/env python3
"""Figures on how a checkout of a Python project reads: `python benchmarks/reading.py [CHECKOUT ...]`.

Comments, functions, private functions used once, files of one definition, imports inside functions, words of markdown;
of this checkout by default. They are for a reader who compares projects, and no test asserts them. Tests and hidden
directories are left out.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from data_utils.common.errors import ArgumentParser, ConfigError, run_command

ROOT = Path(__file__).resolve().parents[1]
Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def figures(checkout: Path) -> dict[str, str]:
    """Name of a figure -> its value. Files that do not parse are left out."""
    lines = comments = trailing = one_definition = files = local_imports = 0
    lengths: list[int] = []
    private: list[str] = []
    names: Counter[str] = Counter()
    for path in _files(checkout, ".py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        files += 1
        lines += len(text.splitlines())
        whole, after_code = _comments(text)
        comments, trailing = comments + whole, trailing + after_code
        one_definition += sum(isinstance(node, Definition) for node in tree.body) == 1
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                local_imports += sum(isinstance(inner, (ast.Import, ast.ImportFrom)) for inner in node.body)
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private.append(node.name)
            elif isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
    words = sum(len(path.read_text(errors="replace").split()) for path in _files(checkout, ".md"))
    share = 100 / max(1, lines)
    return {
        "Python files, lines": f"{files:,}, {lines:,}",
        "comments, % of lines (with trailing ones)": f"{comments * share:.1f} ({(comments + trailing) * share:.1f})",
        "functions, median lines": f"{len(lengths):,}, {statistics.median(lengths or [0]):g}",
        "private functions used once": f"{sum(names[name] == 1 for name in private):,} of {len(private):,}",
        "files of one definition": f"{one_definition:,}",
        "imports inside functions": f"{local_imports:,}",
        "words of markdown": f"{words:,}",
    }


def _files(checkout: Path, suffix: str) -> Iterator[Path]:
    """Files that git tracks, since a checkout also holds environments and runs."""
    command = ["git", "-C", str(checkout), "ls-files", "-z", f"*{suffix}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{checkout} is no checkout of git ({done.stderr.strip()}); give one.")
    for name in sorted(filter(None, done.stdout.split("\0"))):
        if not any(part in ("tests", "test") or part.startswith(".") for part in Path(name).parts):
            yield checkout / name


def _comments(text: str) -> tuple[int, int]:
    """Comments that are a line, and comments after code."""
    whole = after_code = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line[: token.start[1]].isspace() or token.start[1] == 0
            whole, after_code = whole + alone, after_code + (not alone)
    return whole, after_code


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT", default=[ROOT])
    checkouts = parser.parse_args(arguments).checkouts
    for checkout in checkouts:
        if not checkout.is_dir():
            raise ConfigError(
                f"CHECKOUT is {checkout}, which is not a directory; pass the root of a project."
            )
    tables = [figures(checkout) for checkout in checkouts]
    print(f"| | {' | '.join(checkout.resolve().name for checkout in checkouts)} |")
    print(f"|---|{'---|' * len(checkouts)}")
    for name in tables[0]:
        print(f"| {name} | {' | '.join(table[name] for table in tables)} |")


if __name__ == "__main__":
    run_command(main)
