"""The record of a cleaning run, OUTPUT/manifest.json: which rules removed how much of a text.

A corpus build copies it into the manifests of its datasets, so that tokens tell how their text was cleaned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import DataError
from data_utils.common.untrusted import conform, parse_json, read_bounded
from data_utils.corpus.stored_files import InputFile, stored_bytes

FILE = "manifest.json"
TEXT = "text"  # the folder of the text beside it
_FORMAT = "megatron_lite cleaned text"
_VERSION = 1
_MAX_BYTES = 64 << 20
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Record(TypedDict):
    """The fields that are read; the others are for people."""

    format_version: _Count
    files: dict[str, _Count]


def record_bytes(facts: Mapping[str, Any], files: Mapping[str, int]) -> bytes:
    """The content of the file. Args: files: bytes of each file of text, by name."""
    tree = {"format": _FORMAT, "format_version": _VERSION, **facts, "files": dict(files)}
    return json.dumps(tree, indent=1, ensure_ascii=False).encode() + b"\n"


def cleaning_records(inputs: Iterable[InputFile]) -> list[dict[str, Any]]:
    """The records of the cleaning runs that wrote the inputs, each once, with `output` and without `files`.

    Objects of a store have none: the record is a local file.

    Raises: DataError for a damaged record, and for a file in such a directory that is not as it was written.
    """
    records: dict[Path, dict[str, Any]] = {}
    for path in inputs:
        if not isinstance(path, Path) or path.parent.name != TEXT:
            continue
        output = path.parent.parent
        if output not in records:
            tree = _read(output / FILE)
            if tree is None:
                continue
            records[output] = tree
        if records[output]["files"].get(path.name) != stored_bytes(path):
            raise DataError(
                f"input {path} is not as the cleaning run wrote it, whose record is {output / FILE}; clean again, or "
                "move the text out of that directory to build without the record."
            )
    return [
        {"output": str(output), **{key: value for key, value in tree.items() if key != "files"}}
        for output, tree in records.items()
    ]


def _read(path: Path) -> dict[str, Any] | None:
    """The record in a file; None where there is none, or another program's manifest."""
    try:
        tree = parse_json(read_bounded(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} {error}; move it away, or clean the text again.") from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        return None
    try:
        version = conform(tree, _Record)["format_version"]
    except ValueError as error:
        raise DataError(f"{path} {error}; move it away, or clean the text again.") from None
    if version != _VERSION:
        raise DataError(
            f"{path} has version {version}, but this program reads {_VERSION}; clean the text again."
        )
    return tree
