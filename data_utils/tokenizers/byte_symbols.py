"""The characters in which byte-level BPE writes bytes."""

from __future__ import annotations


def byte_symbols() -> list[str]:
    """The character that stands for each byte: itself if printable, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
