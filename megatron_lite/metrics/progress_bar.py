"""A progress bar below the log lines of a terminal, for those who ask: run.progress_bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from data_utils.common import progress

Advance = Callable[[int], None]  # to a step


@contextmanager
def progress_bar(wanted: bool, first_step: int, last_step: int) -> Iterator[Advance]:
    """Show the steps within the context. Without a terminal on stderr, such as in a log file, nothing is written."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda step: None
        return
    from tqdm.contrib.logging import logging_redirect_tqdm

    with (
        progress.progress_bar(total=last_step, initial=first_step, unit="step", dynamic_ncols=True) as bar,
        logging_redirect_tqdm(),  # log lines are written above the bar, to the stream that they went to
    ):

        def advance(step: int) -> None:
            bar.update(step - bar.n)

        yield advance
