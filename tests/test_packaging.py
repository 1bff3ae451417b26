"""What an installation declares fits what the tests run with."""

import importlib
import itertools
import tomllib

import pytest
from packaging.requirements import Requirement
from support.project import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins():
    """Package -> version, of the requirements that are pinned."""
    lines = [(ROOT / name).read_text(encoding="utf-8").splitlines()
             for name in ("requirements.txt", "requirements-dev.txt")]  # fmt: skip
    found = [line.partition("#")[0].strip() for part in lines for line in part]
    return dict(line.lower().split("==") for line in found if "==" in line)


DECLARED = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]


@pytest.mark.parametrize("requirement", DECLARED)
def test_a_declared_range_holds_the_pinned_version(requirement):
    declared = Requirement(requirement)
    version = pins().get(declared.name.lower())
    assert version is not None or not declared.specifier
    assert version is None or version in declared.specifier


def test_every_pinned_requirement_is_declared():
    pinned = [line.partition("==")[0].lower() for line in (ROOT / "requirements.txt").read_text().splitlines()
              if "==" in line]  # fmt: skip
    assert set(pinned) <= {Requirement(requirement).name.lower() for requirement in DECLARED}


def test_commands_exist():
    for target in PROJECT["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
