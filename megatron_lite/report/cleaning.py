"""The page about a cleaning run: what came in, what went out, what each rule removed, with examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from megatron_lite.report.render import render


def page(report: Mapping[str, Any]) -> str:
    """The page of a report of `data_utils.cleaning.run`."""
    recipe = yaml.safe_dump(report["recipe"], sort_keys=False, allow_unicode=True)
    return render("cleaning.html", title="Cleaning report", report=report, recipe=recipe)
