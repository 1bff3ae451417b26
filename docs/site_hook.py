"""For mkdocs: pages beside docs/ become pages of the site, and links between them lead there (mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Path in the repository -> path in the site, of what is not in docs/.
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/attention.png": "attention.png",
    "benchmarks/real_tasks.png": "real_tasks.png",
    "benchmarks/recall.png": "recall.png",
    "benchmarks/second_positions.png": "second_positions.png",
    "LICENSE": "license.txt",
}
SOURCES = {place: path for path, place in BESIDE.items()}
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    for path, place in BESIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = ROOT / SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda match: f"]({_place(source, match[1])}", markdown)


def _place(source: Path, target: str) -> str:
    """The path in the site of a link's target; all pages are in one directory. Unknown targets stay: mkdocs warns."""
    path = (source.parent / target).resolve()
    if not path.is_relative_to(ROOT):
        return target
    name = path.relative_to(ROOT).as_posix()
    return BESIDE.get(name, name.removeprefix("docs/"))
