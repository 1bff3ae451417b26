"""Random numbers as a pure function of (key, sample, chunk, attempt): Philox 4x32-10, compiled.

How a sample's random numbers follow from the run's seed:

1. `derive_seed(seed, purpose)` hashes the seed and a purpose ("objective") into a 64-bit Philox *key*.
2. The 128-bit Philox *counter* is (block, chunk * 32 + attempt, sample, sample >> 32), four words of 32 bits.
3. `seed_rng(rng, key, sample, chunk, attempt)` sets key and counter, with block 0.
4. `philox4x32` encrypts the counter with the key into four random words; then block counts up.
5. `below`, `chance`, `uniform` and `shuffle` consume these words in order.

*sample* is the number of the sample in the run, *chunk* numbers the chunks of documents in the sample, and *attempt*
separates independent draws for one chunk, for example when spans that did not fit are drawn again. Nothing else enters.
The same (key, sample, chunk, attempt) gives the same numbers on every rank, in every worker, in any order and after any
restart. The price is about 15 ns per four numbers, instead of 2-3 ns for a generator with hidden state.

`rng` is a small record: counter, key, and the unused words of the last block. It is not an array, because numba counts
references to an array at every call, which costs four times as much as the draw. A draw is inlined, because a call
costs as much as the draw. The same code runs as plain Python under NUMBA_DISABLE_JIT=1: every value is a masked
np.uint64, so nothing overflows.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; bounded integers:
Lemire, arXiv:1805.10941.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from data_utils.common.compiler import njit

MAX_ATTEMPT = 31  # attempt shares a 32-bit counter word with the chunk, which leaves 2**27 chunks per sample

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_ONE = np.uint64(1)
_TWO_POWER_32 = np.uint64(1 << 32)
_ZERO = np.uint64(0)
_WORDS_PER_BLOCK = np.uint64(4)
_RNG = np.dtype(
    (
        np.record,
        [
            (name, np.uint64)
            for name in (
                *("counter_0", "counter_1", "counter_2", "counter_3", "key_0", "key_1"),
                *("word_0", "word_1", "word_2", "word_3", "words_left"),
            )
        ],
    )
)


def source_digest(*paths: str) -> int:
    """Digest of source files, for a cached compiled function to close over.

    Numba's cache on disk notices changes only in the function's own file. The values that a function closes over
    are part of the cache key, so with this digest it also notices changes in the files that it calls into.
    """
    hasher = hashlib.blake2b(digest_size=7)  # fits an int64
    for path in paths:
        hasher.update(Path(path).read_bytes())
    return int.from_bytes(hasher.digest(), "little")


@njit(nogil=True)
def philox4x32(c0, c1, c2, c3, k0, k1):
    """One block of four words from a counter of four and a key of two; all np.uint64 below 2**32."""
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _HALF) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = (product_0 >> _HALF) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def new_rng() -> np.record:
    """A generator that `seed_rng` has yet to seed. Made in Python, which keeps it alive."""
    return np.zeros(1, _RNG)[0]


@njit(nogil=True)
def seed_rng(rng, key, sample, chunk, attempt):
    """Set key and counter of `rng`: it restarts at the first number of (key, sample, chunk, attempt).

    Args:
        key: np.uint64, see `derive_seed`.
        sample: 0 <= int64. chunk: 0 <= int < 2**27. attempt: 0 <= int <= MAX_ATTEMPT.
    """
    rng.counter_0 = _ZERO  # the block
    # The counter names (block, chunk and attempt, sample): every Example has numbers of its own, in any batch
    # and order.
    rng.counter_1 = np.uint64(chunk * (MAX_ATTEMPT + 1) + attempt)
    rng.counter_2 = np.uint64(sample) & _MASK
    rng.counter_3 = np.uint64(sample) >> _HALF
    rng.key_0 = key & _MASK
    rng.key_1 = key >> _HALF
    rng.words_left = _ZERO


@njit(nogil=True)
def rewind(rng):
    """Set the block counter to 0: the same numbers come again."""
    rng.counter_0 = _ZERO
    rng.words_left = _ZERO


@njit(nogil=True)
def _next_block(rng):
    rng.word_0, rng.word_1, rng.word_2, rng.word_3 = philox4x32(
        rng.counter_0, rng.counter_1, rng.counter_2, rng.counter_3, rng.key_0, rng.key_1
    )
    rng.counter_0 = (rng.counter_0 + _ONE) & _MASK
    rng.words_left = _WORDS_PER_BLOCK


@njit(nogil=True, inline="always")
def next_word(rng):
    """The next uniform 32-bit word, as np.uint64."""
    if rng.words_left == _ZERO:
        _next_block(rng)
    rng.words_left -= _ONE
    word = rng.word_0
    rng.word_0 = rng.word_1
    rng.word_1 = rng.word_2
    rng.word_2 = rng.word_3
    return word


@njit(nogil=True, error_model="numpy")  # no test for a division by zero
def _unbiased(rng, limit, product):
    """`product`, or the first later product without modulo bias (rejection sampling)."""
    threshold = _TWO_POWER_32 - limit
    if threshold >= limit:  # a division costs more than the draw, and a large bound always needs this test
        threshold %= limit
    while product & _MASK < threshold:
        product = next_word(rng) * limit
    return product


@njit(nogil=True, inline="always")
def below(rng, bound):
    """A uniform int64 in [0, bound), 1 <= bound <= 2**32, without modulo bias."""
    limit = np.uint64(bound)
    product = next_word(rng) * limit
    if product & _MASK < limit:  # rare, so it is not inlined
        product = _unbiased(rng, limit, product)
    return np.int64(product >> _HALF)


@njit(nogil=True)
def uniform(rng):
    """A uniform double in [0, 1) with 53 random bits."""
    high = np.float64(next_word(rng) >> np.uint64(5))
    low = np.float64(next_word(rng) >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0


def chance_threshold(probability: float) -> np.uint64:
    """The argument of `chance` for a probability in [0, 1]; exact to 2**-33, and exact at 0 and 1."""
    return np.uint64(round(probability * 2.0**32))


@njit(nogil=True)
def chance(rng, threshold):
    """True with probability threshold / 2**32; consumes one word."""
    return next_word(rng) < threshold


@njit(nogil=True)
def shuffle(rng, array, count):
    """Shuffle array[:count] in place, every order equally likely."""
    for i in range(count - 1, 0, -1):
        j = below(rng, i + 1)
        swapped = array[i]
        array[i] = array[j]
        array[j] = swapped
