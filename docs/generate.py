#!/usr/bin/env python3
"""Write what follows from the code: python docs/generate.py

These are docs/settings.md, and tables in checkpoints.md, coming_from.md, huggingface.md and huggingface_systems.md.

tests/test_documentation.py compares the pages with what this script would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import house

from data_utils.common.settings_listed import describe
from megatron_lite.config.coming_from import SOURCES
from megatron_lite.config.deepspeed_keys import KEYS, Policy
from megatron_lite.config.tree import Config
from megatron_lite.hf.files.left_out import BUFFERS, OTHER_CLASS_TENSORS
from megatron_lite.hf.published.systems import PUBLISHED, SYSTEMS_BY_NAME
from megatron_lite.runtime.run_state import MEANINGS

ROOT = house.ROOT
STATES = ("<!-- the table of states: written by docs/generate.py -->", "<!-- end of the table -->")
SYSTEMS = ("<!-- the table of systems: written by docs/generate.py -->", STATES[1])
ARGUMENTS = ("<!-- the tables of arguments: written by docs/generate.py -->", STATES[1])
LEFT_OUT = ("<!-- the table of what is left out: written by docs/generate.py -->", STATES[1])
NOTICE = "Written by `python docs/generate.py`; change the code, not this page."
# What `describe` writes of a setting: its key, then type, range (if it has one) and default in parentheses.
SETTING = re.compile(
    r"  (?P<key>\S+) \((?P<type>.+?)(?:, (?P<range>(?:at |above |below |in |one of ).+))?"
    r", (?:default (?P<default>.*)|required)\)"
)


def settings() -> str:
    """A table for each section of the configuration."""
    described = [line for line in describe(Config) if line]
    sections: dict[str, list[str]] = {}
    for line, meaning in zip(described[::2], described[1::2], strict=True):
        match = SETTING.fullmatch(line)
        assert match is not None, line
        kind = "mapping" if match["type"].startswith("dict[") else match["type"]
        default = "required" if match["default"] is None else f"`{match['default']}`"
        cells = [f"`{match['key']}`", kind, match["range"] or "", default, meaning.strip()]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        sections.setdefault(match["key"].rpartition(".")[0], []).append(f"| {row} |")
    sections["Keys without a section"] = sections.pop("")
    lines = [
        "# Settings",
        "",
        f"{NOTICE} [configuration.md](configuration.md) says how files and overrides combine.",
    ]
    for section, rows in sections.items():
        lines += [
            "",
            f"## {section}",
            "",
            "| key | type | range | default | meaning |",
            "|---|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def checkpoints() -> str:
    """The page, with its table of a run's states as the code has them."""
    lines = ["| state | what is seen | the same command | `rewind` | report |", "|---|---|---|---|---|"]
    for condition, meaning in MEANINGS.items():
        rewind = "returns to a good one" if meaning.rewind else "is refused"
        note = "shows it" if meaning.note else ""
        lines.append(f"| {condition} | {meaning.sign} | {meaning.start} | {rewind} | {note} |")
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    return _with_table(text, STATES, lines)


def huggingface() -> str:
    """The page, with its table of the classes that are read and written."""
    lines = ["| class of transformers | `model_type` | `model.system` |", "|---|---|---|"]
    for kind, system in PUBLISHED.items():
        names = [name for name, of_name in SYSTEMS_BY_NAME.items() if of_name is system]
        cells = [_listed(each) for each in (system.classes, [kind], names)]
        lines.append(f"| {' | '.join(cells)} |")
    return _with_table((ROOT / "docs/huggingface.md").read_text(encoding="utf-8"), SYSTEMS, lines)


def huggingface_systems() -> str:
    """The page, with its table of the tensors that an import leaves out."""
    lines = ["| tensors | what they are | `model_type` |", "|---|---|---|"]
    for each in (*BUFFERS, *OTHER_CLASS_TENSORS):
        names = each.names if each.types else [f"*.{name}" for name in each.names]  # below any module
        lines.append(f"| {_listed(names)} | {each.what} | {_listed(each.types) or 'any'} |")
    return _with_table((ROOT / "docs/huggingface_systems.md").read_text(encoding="utf-8"), LEFT_OUT, lines)


def coming_from() -> str:
    """The page, with a table of the arguments of each program."""
    lines = []
    for source, arguments in SOURCES.items():
        lines += ["", f"## {source}", "", "| option | setting | note |", "|---|---|---|"]
        has_dashes = source.startswith(("Megatron", "THUDM"))
        for argument in arguments:
            names = [name.replace("_", "-") if has_dashes else name for name in argument.names]
            theirs = ", ".join(f"`--{name}`" for name in names)
            form = argument.setting.replace("{}", "VALUE").replace("{{", "{").replace("}}", "}")
            lines.append(f"| {theirs} | {f'`{form}`' if form else ''} | {argument.note} |")
    decided = [(key, row.reason) for key, row in KEYS.items() if row.policy is Policy.OURS]
    lines += ["", "## DeepSpeed's JSON", "", "| DeepSpeed key | setting |", "|---|---|"]
    lines += [f"| `{key}` | {reason} |" for key, reason in decided]
    text = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    return _with_table(text, ARGUMENTS, lines)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _with_table(text: str, marks: tuple[str, str], lines: list[str]) -> str:
    """A page with these lines between its marks."""
    before = text.index(marks[0]) + len(marks[0])
    return "\n".join([text[:before], *lines, text[text.index(marks[1], before) :]])


PAGES = {
    "settings.md": settings,
    "checkpoints.md": checkpoints,
    "huggingface.md": huggingface,
    "huggingface_systems.md": huggingface_systems,
    "coming_from.md": coming_from,
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
