"""HTML elements as text. Everything that is not an element is escaped, so that no text of a run becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence

from megatron_lite.report.style import STYLE

# Characters that HTML forbids, and those that change the direction of the text around them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class Html(str):
    """Markup that is safe to put into a page."""


def escaped(value: object) -> Html:
    """Any value as text of a page."""
    return (
        value
        if isinstance(value, Html)
        else Html(html.escape(_HIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value))))
    )


def joined(*values: object) -> Html:
    """The values one after another, escaped."""
    return Html("".join(map(escaped, values)))


def element(name: str, *children: object, **attributes: object) -> Html:
    """<name ...>children</name>. An attribute `class_` is written `class`, `stroke_width` as `stroke-width`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def table(head: list[object], rows: list[list[object]], class_: str | None = None) -> Html:
    """A table that scrolls within its box on a narrow page. The first cell of each row is its heading."""
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
        for row in rows
    ]
    top = element("thead", element("tr", *(element("th", cell, scope="col") for cell in head)))
    inner = element("table", top, element("tbody", *body), class_=class_)
    return element("div", inner, class_="scroll", tabindex="0")


def whole_page(title: str, sections: Sequence[Html]) -> str:
    """A page that is one file. Nothing is loaded: the browser refuses even what a mistake here would ask for."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = joined(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("title", title),
        element("style", Html(STYLE)),
    )
    body = element("body", element("main", *sections))
    return f"<!doctype html>\n{element('html', element('head', head), body, lang='en')}\n"
