"""The commands; installed as the package glm_scripts."""

import data_utils.base.entry  # noqa: F401
