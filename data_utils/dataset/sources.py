"""The files of which a dataset was built, as its manifest names them.

A few are listed as people read them: `sources`, an object for each file. Many are listed by directory: `source_groups`,
whose objects have the beginning of the paths, their ends, and sizes. A corpus of a million small files has a manifest
of some 30 MB so, which each process of a run reads in less than a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from data_utils.common.errors import DataError

LISTED = 1000  # files, up to which each has its object
MAX_BYTES = 192 << 20  # of their description; a manifest of more than 256 MiB is not read
Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class Source(TypedDict):
    path: str
    bytes: int


class SourceGroup(TypedDict):
    """Files in the order in which they were read. All paths begin with `directory`, which ends with / or is empty."""

    directory: str
    names: list[str]
    bytes: list[Size]


def described_sources(sources: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The entry of a manifest. Args: sources: path and bytes of each file, in their order.

    Raises: DataError if they are too many for a manifest.
    """
    if len(sources) <= LISTED:
        return {"sources": [{"path": path, "bytes": size} for path, size in sources]}
    groups = []
    for directory, of_it in groupby(sources, lambda source: source[0][: source[0].rfind("/") + 1]):
        files = list(of_it)
        names = [path[len(directory) :] for path, _ in files]
        groups.append({"directory": directory, "names": names, "bytes": [size for _, size in files]})
    described = {"source_groups": groups}
    if (size := len(json.dumps(described))) > MAX_BYTES:
        raise DataError(
            f"{len(sources):,} input files take {size:,} bytes to name, and a manifest has room for {MAX_BYTES:,}; "
            "join files, or build several datasets and give them all as data.train."
        )
    return described


def sources_of(manifest: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Path and bytes of each file, in their order."""
    for source in manifest.get("sources", []):
        yield source["path"], source["bytes"]
    for group in manifest.get("source_groups", []):
        for name, size in zip(group["names"], group["bytes"], strict=True):
            yield group["directory"] + name, size
