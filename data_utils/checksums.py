"""Checksums of a dataset's files: SHA-256 of the whole, and CRC-32 of every MiB, of which a start checks a few.

The whole says whether a file is the one that was written; the blocks say so of a part without reading the rest, and
where the damage is. A manifest holds both (`FileChecksums.tree`): eight hexadecimal digits for each block, one string.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20
_DIGITS = 8  # of one CRC-32


class FileChecksums:
    """Of bytes that are given in order."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._finished: list[int] = []
        self._block = 0  # CRC-32 of the block that is not full yet
        self._used = 0  # bytes of it

    def update(self, data: bytes | memoryview) -> None:
        if not len(data):  # an empty array cannot be cast
            return
        rest = memoryview(data).cast("B")
        self._whole.update(rest)
        while len(rest):
            part = rest[: BLOCK_BYTES - self._used]
            self._block = zlib.crc32(part, self._block)
            self._used += len(part)
            rest = rest[len(part) :]
            if self._used == BLOCK_BYTES:
                self._finished.append(self._block)
                self._block = self._used = 0

    def tree(self) -> dict[str, Any]:
        """What the manifest records."""
        blocks = self._finished + [self._block] * (self._used > 0)
        return {
            "sha256": self._whole.hexdigest(),
            "block_bytes": BLOCK_BYTES,
            "crc32": "".join(f"{value:0{_DIGITS}x}" for value in blocks),
        }


def first_difference(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """How two results of `FileChecksums.tree` differ, in words; None: not at all. Older manifests have no blocks."""
    if recorded["sha256"] == found["sha256"]:
        return None
    if "crc32" in recorded:
        pairs = zip(_split(recorded["crc32"]), _split(found["crc32"]), strict=False)
        for number, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                return damage_at(number * BLOCK_BYTES)
    return f"has SHA-256 {found['sha256']}, the manifest says {recorded['sha256']}"


def damage_at(position: int) -> str:
    return f"is not as it was written in the MiB that begins at byte {position}"


def are_blocks_of(recorded: Mapping[str, Any]) -> bool:
    """Whether a manifest's entry for a file has a checksum for each block, or none at all."""
    if "crc32" not in recorded:
        return True
    blocks = -(-recorded["bytes"] // BLOCK_BYTES)
    return recorded["block_bytes"] == BLOCK_BYTES and len(recorded["crc32"]) == blocks * _DIGITS


def damaged_block(path: Path, recorded: Mapping[str, Any], numbers: Iterable[int]) -> int | None:
    """The first byte of the first of these blocks of a file that is not as recorded; None: all are."""
    sums, size = _split(recorded["crc32"]), BLOCK_BYTES
    with open(path, "rb", buffering=0) as file:
        for number in numbers:
            file.seek(number * size)
            if f"{zlib.crc32(file.read(size)):0{_DIGITS}x}" != sums[number]:
                return number * size
    return None


def _split(sums: str) -> list[str]:
    return [sums[at : at + _DIGITS] for at in range(0, len(sums), _DIGITS)]
