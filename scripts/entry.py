"""Imported first by a script of a checkout: the script finds the project's packages from any working directory.

An installation imports the scripts as the package glm_scripts (pyproject.toml) and does not need this.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.realpath(__file__))
# Without the scripts themselves: some have the names of packages that others import (evaluate).
sys.path[:] = [os.path.dirname(_FOLDER), *(path for path in sys.path if os.path.realpath(path) != _FOLDER)]

import data_utils.common.entry  # noqa: E402, F401
