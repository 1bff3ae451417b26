"""The name of compiled.py before 0.5.0, which objectives of users import."""

from data_utils.objectives.compiled import *  # noqa: F403
