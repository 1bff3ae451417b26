"""The record of a cleaning run, OUTPUT/manifest.json: which rules removed how much of a text.

A corpus build copies it into the manifests of its datasets, so that tokens tell how their text was cleaned.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import DataError
from data_utils.common.untrusted import conform, parse_json, read_bounded
from data_utils.common.urls import is_url
from data_utils.corpus.stored_files import InputFile, stored_bytes
from data_utils.storage.listing import stored_content
from data_utils.storage.objects import RefusedError
from data_utils.storage.web import is_signed

FILE = "manifest.json"
TEXT = "text"  # the folder of the text, next to the record
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

    The record of objects is read from their store. A URL with a signature or a password has none: it names one object.

    Raises: DataError for a damaged record, for a file in such a directory that is not as it was written, and for a
        store that does not answer.
    """
    records: dict[str, dict[str, Any] | None] = {}
    for path in inputs:
        output = _output(path)
        if output is None:
            continue
        if output not in records:
            records[output] = _read(f"{output}/{FILE}")
        record = records[output]
        if record is not None and record["files"].get(path.name) != stored_bytes(path):
            raise DataError(
                f"input {path} is not as the cleaning run wrote it, whose record is {output}/{FILE}; clean again, or "
                "move the text out of that directory to build without the record."
            )
    return [
        {"output": output, **{key: value for key, value in tree.items() if key != "files"}}
        for output, tree in records.items()
        if tree is not None
    ]


def _output(path: InputFile) -> str | None:
    """The output of the cleaning run that may have written a file; None where its name or URL excludes one."""
    if isinstance(path, Path):
        # The name of a folder may be in no path: 00000.jsonl, given where it lies.
        parent = path.parent if path.parent.name == TEXT else Path(os.path.abspath(path)).parent
        return str(parent.parent) if parent.name == TEXT else None
    output, _, folder = path.label.rpartition("/")[0].rpartition("/")
    return output if folder == TEXT and "://" in output and not is_signed(path) else None


def _read(name: str) -> dict[str, Any] | None:
    """The record in a file or object; None where there is none, or another program's manifest."""
    try:
        content = _stored_content(name) if is_url(name) else read_bounded(name, _MAX_BYTES)
        tree = None if content is None else parse_json(content)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{name} {error}; move it away, or clean the text again.") from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        return None
    try:
        version = conform(tree, _Record)["format_version"]
    except ValueError as error:
        raise DataError(f"{name} {error}; move it away, or clean the text again.") from None
    if version != _VERSION:
        raise DataError(
            f"{name} has version {version}, but this program reads {_VERSION}; clean the text again."
        )
    return tree


def _stored_content(url: str) -> bytes | None:
    # Refused is no error: a store whose objects we may read but not list says so of one that it does not have.
    with contextlib.suppress(RefusedError):
        return stored_content(url, _MAX_BYTES)
    return None
