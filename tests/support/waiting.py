"""Waits for conditions with a limit, instead of fixed times: the only module of the tests that may sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

HANG_SECONDS = 2400.0  # a test that waits for longer hangs, also on a machine that is busy with others


def wait_until(
    condition: Callable[[], object],
    seconds: float = HANG_SECONDS,
    what: str = "",
    logs: Callable[[], str] = str,
) -> None:
    """Poll until `condition()` holds. Raises AssertionError with `what` and the logs after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what or 'the condition'}: not within {seconds:g} s\n{logs()}"
        time.sleep(0.02)


def random_delay(rng: random.Random, longest: float) -> None:
    """For a kill at a random moment."""
    time.sleep(rng.uniform(0, longest))


def slow_work(seconds: float) -> None:
    """Stands for work that takes so long that a test can interrupt it."""
    time.sleep(seconds)
