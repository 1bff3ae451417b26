"""For mkdocs: README.md and other pages outside docs/ become pages of the site, and links follow them (mkdocs.yml)."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Path in the repository -> path in the site, for files outside docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/attention.png": "attention.png",
    "benchmarks/real_tasks.png": "real_tasks.png",
    "benchmarks/recall.png": "recall.png",
    "benchmarks/second_positions.png": "second_positions.png",
    "CITATION.cff": "citation.txt",
    "LICENSE": "license.txt",
}
SOURCES = {in_site: path for path, in_site in OUTSIDE.items()}
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    for path, in_site in OUTSIDE.items():
        files.append(File.generated(config, in_site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = ROOT / SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda match: f"]({_target_in_site(source, folder, match[1])}", markdown)


def _target_in_site(source: Path, folder: str, target: str) -> str:
    """A link's target as a page in this folder of the site needs it. Unknown targets stay: mkdocs warns of them."""
    path = (source.parent / target).resolve()
    if not path.is_relative_to(ROOT):
        return target
    name = path.relative_to(ROOT).as_posix()
    return posixpath.relpath(OUTSIDE.get(name, name.removeprefix("docs/")), folder or ".")
