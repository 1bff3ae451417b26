"""What a planted bug is, and the tests that several of them name."""

from __future__ import annotations

from dataclasses import dataclass

RECIPES = "tests/data/objectives/test_recipes.py"


@dataclass(frozen=True)
class Plant:
    """One bug."""

    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # what pytest is called with
    shipped: str = ""  # a report of it in another project: owner/repository#number
