"""Imported first by a script of a checkout: the script finds the project's packages from any working directory.

An installation imports the scripts as the package glm_scripts (pyproject.toml) and does not need this.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.base.entry  # noqa: F401
