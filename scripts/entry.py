"""Imported first by a script of a checkout: the script finds the project's packages from any working directory.

An installation imports the scripts as the package glm_scripts (pyproject.toml) and does not need this.
"""

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# Without the scripts themselves: some have the names of packages that others import (evaluate).
sys.path[:] = [str(_FOLDER.parent), *(path for path in sys.path if Path(path).resolve() != _FOLDER)]

import data_utils.base.entry  # noqa: E402, F401
