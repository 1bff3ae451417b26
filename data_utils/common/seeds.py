"""Seeds of random numbers, from the seed of a run and what they are for. random_streams.py has the numbers."""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(seed: int, *names: str | int) -> int:
    """A 64-bit Philox key for one purpose (`names`) of a run with `seed`. Distinct names give independent keys."""
    hasher = hashlib.blake2b(digest_size=8)
    for name in (seed, *names):
        plain = int(name) if isinstance(name, np.integer) else name  # its repr names the type
        encoded = repr(plain).encode()
        # With lengths, so that ("ab", "c") and ("a", "bc") differ.
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(hasher.digest(), "little")
