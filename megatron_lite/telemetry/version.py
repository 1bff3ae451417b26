"""The version of this program and, in a checkout, its commit. Never fails, and never takes long."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "megatron-lite-glm"
ROOT = Path(__file__).resolve().parents[2]  # of a checkout
GIT_SECONDS = 5.0  # a large checkout on a slow file system


def program(root: Path = ROOT, packages: Mapping[str, str] | None = None) -> dict[str, Any]:
    """{version, commit, changed}: changed says whether files of the commit were edited; None means unknown.

    Args: packages: objective -> its package with version; where there are any, the result has the key `packages` too.
    """
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changes = None if commit is None else _git(root, "status", "--porcelain", "--untracked-files=no")
    description: dict[str, Any] = {
        "version": release(root),
        "commit": commit,
        "changed": None if changes is None else bool(changes),
    }
    return description | ({"packages": dict(packages)} if packages else {})


def describe(program: Mapping[str, Any]) -> str:
    """`0.1.0, commit 1234abc with changes, my-package 1.2`, for people."""
    changed = " with changes" if program.get("changed") else ""
    named = program.get("packages")  # perhaps from a checkpoint of any origin, so its type is checked
    packages = "".join(f", {package}" for package in named.values()) if isinstance(named, Mapping) else ""
    return f"{program.get('version') or 'unknown'}, commit {program.get('commit') or 'unknown'}{changed}{packages}"


def sources(root: Path = ROOT) -> str:
    """12 hexadecimal digits that change with any source file of the program.

    All ranks compute it; git may not answer all of them in time.
    """
    digest = hashlib.sha256()
    for package in ("data_utils", "megatron_lite"):
        files = [path for path in (root / package).rglob("*") if path.suffix in (".py", ".yaml", ".json")]
        for path in sorted(files):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()[:12]


def release(root: Path = ROOT) -> str | None:
    """The version of pyproject.toml or of the installed package."""
    try:
        return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, ValueError, KeyError):  # not a checkout
        try:
            return importlib.metadata.version(NAME)
        except importlib.metadata.PackageNotFoundError:
            return None


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
