"""The commands; installed as the package glm_scripts."""

import importlib

import data_utils.common.entry  # noqa: F401


def try_page() -> None:
    """Run try.py, whose name no import statement takes."""
    importlib.import_module(f"{__name__}.try").command()
