"""Pages as templates. A value is text whatever it holds, a missing name is an error, and a page loads nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data_utils.common.setting_files import shorten

MISSING = "-"

# Characters that HTML forbids, and those that change the direction of the text around them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """The page that a template makes of values."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_visible,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"thousands": "{:,}".format, "short": _short}
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    # The policy allows this style sheet alone: whatever got through the escaping would do nothing.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(template).render(values, style=style, style_digest=digest)


def _visible(value: Any) -> Any:
    """What a template writes for a value that is no markup, before it is escaped."""
    return value if hasattr(value, "__html__") else _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))


def _short(value: str, length: int = 400) -> str:
    return shorten(value, length)


def utc(time: Any) -> str:
    """Unix time as text; "-" for anything else, since records may be damaged."""
    try:
        return datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError, TypeError):
        return MISSING
