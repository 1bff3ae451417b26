"""The manifest of a dataset, PREFIX.json, without which the two other files do not open.

It describes the files, and its own SHA-256 shows any change of it. A build writes it last, so the files of a stopped
build have none. `scripts/dataset.py adopt` makes one for files of another program, such as Megatron-LM;
`scripts/dataset.py upgrade` converts one of an older version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.base.checksums import check_entry
from data_utils.base.errors import DataError
from data_utils.base.setting_files import shorten

SUFFIXES = (".bin", ".idx", ".json")

_FORMAT = "megatron_lite indexed dataset"
_VERSION = 3
_OLD_VERSIONS = (1, 2)  # 1: SHA-256 of each file; 2: no checksum of the manifest
_HEADER = ("format", "format_version", "checksum")
_TYPES = {  # None: it may be missing
    "files": (dict,),
    "num_documents": (int,),
    "num_tokens": (int,),
    "dtype": (str,),
    "vocab_size": (int, type(None)),
    "eos": (int, type(None)),
    "documents_end_with_eos": (bool, type(None)),
    "tokenizer": (dict, type(None)),
}
_MAX_BYTES = 256 << 20


def dataset_path(prefix: str | Path, suffix: str) -> Path:
    """PREFIX.bin and the like; `with_suffix` would replace what follows a dot in the prefix."""
    return Path(f"{prefix}{suffix}")


def existing_files(prefix: str | Path) -> list[Path]:
    """The files of a dataset that exist under `prefix`."""
    return [path for path in (dataset_path(prefix, suffix) for suffix in SUFFIXES) if path.exists()]


def damaged(prefix: str | Path, suffix: str, problem: str) -> DataError:
    path = dataset_path(prefix, suffix)
    return DataError(f"dataset {prefix}: {path} {problem}; rebuild the dataset or copy it again.")


def manifest_bytes(facts: Mapping[str, Any]) -> bytes:
    """The content of PREFIX.json for the facts about a dataset. Equal facts give equal bytes."""
    facts = {key: value for key, value in facts.items() if key not in _HEADER}
    tree = {"format": _FORMAT, "format_version": _VERSION, "checksum": "", **facts}
    tree["checksum"] = checksum(tree)
    return json.dumps(tree, indent=2).encode() + b"\n"


def checksum(tree: Mapping[str, Any]) -> str:
    """64 hexadecimal digits that change with any fact of a manifest, but not with its formatting."""
    facts = {key: value for key, value in tree.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_manifest(prefix: str | Path) -> dict[str, Any]:
    """The manifest. Raises DataError unless it exists, has this version, and is unchanged."""
    tree = _parse(prefix)
    if _is_old(tree):
        raise DataError(
            f"dataset {prefix} has a manifest of version {tree['format_version']}, and version {_VERSION} is needed; "
            f"bring it up to date with: python scripts/dataset.py upgrade {prefix}"
        )
    if tree.get("format_version") != _VERSION:
        raise damaged(prefix, ".json", f"has version {tree.get('format_version')!r}, not {_VERSION}")
    if tree.get("checksum") != checksum(tree):
        raise damaged(prefix, ".json", "is not as it was written")
    require_facts(prefix, tree)
    return tree


def read_old_manifest(prefix: str | Path) -> dict[str, Any]:
    """A manifest of an older version, unconverted. Raises DataError for any other."""
    tree = _parse(prefix)
    if not _is_old(tree):
        read_manifest(prefix)  # damage has its own message
        raise DataError(
            f"dataset {prefix} has a manifest of version {_VERSION}; there is nothing to upgrade."
        )
    return tree


def require_facts(prefix: str | Path, tree: Mapping[str, Any]) -> None:
    """Raise DataError unless the manifest has the entries that readers need."""
    for key, types in _TYPES.items():
        if not isinstance(tree.get(key), types):
            raise damaged(prefix, ".json", f"says {key} {tree.get(key)!r}")
    try:
        for suffix in (".bin", ".idx"):
            check_entry(tree["files"][suffix])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise damaged(prefix, ".json", "does not hold the checksums of both files") from None


def require_finished(prefix: str | Path) -> None:
    """Raise DataError for files that a stopped or a running build has begun to replace."""
    if any(dataset_path(prefix, f"{suffix}.partial").exists() for suffix in SUFFIXES):
        raise DataError(
            f"dataset {prefix} is not complete: its build was stopped or still runs; wait for it, or run the same "
            f"command again."
        )


def tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    """A tokenizer of a manifest in a few words; its whole configuration has hundreds of columns."""
    config = tokenizer.get("config")
    config = config if isinstance(config, dict) else {}
    words = (config.get("kind"), config.get("path"), str(tokenizer.get("fingerprint"))[:12])
    return ", ".join(shorten(str(word), 80) for word in words if word)


def _parse(prefix: str | Path) -> dict[str, Any]:
    path = dataset_path(prefix, ".json")
    if not path.is_file():
        require_finished(prefix)
        raise DataError(
            f"dataset {prefix} has no manifest ({path}), and without one no dataset opens; copy the manifest or build "
            f"the dataset again. Files of another program get one with: python scripts/dataset.py adopt {prefix}"
        )
    if path.stat().st_size > _MAX_BYTES:
        raise damaged(prefix, ".json", f"is larger than {_MAX_BYTES} bytes")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise damaged(prefix, ".json", "is not a dataset manifest")
    return tree


def _is_old(tree: Mapping[str, Any]) -> bool:
    return tree.get("format_version") in _OLD_VERSIONS and "checksum" not in tree
