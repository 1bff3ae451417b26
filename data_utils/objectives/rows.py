"""The name of base.py before 0.5.0, which objectives of users import."""

from data_utils.objectives.base import *  # noqa: F403
