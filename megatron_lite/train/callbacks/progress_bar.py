"""A progress bar below the log lines of a terminal: run.progress_bar."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field

from tqdm import tqdm

from data_utils.common.progress import progress_bar
from megatron_lite.engine.engine import StepResult
from megatron_lite.runtime.control import Requests
from megatron_lite.train.callbacks.callback import Callback


@dataclass
class ProgressBar(Callback):
    """Shows the steps. Writes nothing where stderr is not a terminal, such as to a log file.

    Attributes: last_step: of this start.
    """

    is_wanted: bool
    last_step: int
    _bar: tqdm | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    def on_train_begin(self, step: int) -> None:
        if not (self.is_wanted and sys.stderr.isatty()):
            return
        from tqdm.contrib.logging import logging_redirect_tqdm

        bar = progress_bar(total=self.last_step, initial=step, unit="step", dynamic_ncols=True)
        self._bar = self._open.enter_context(bar)
        # Log lines are written above the bar, to the stream that they went to.
        self._open.enter_context(logging_redirect_tqdm())

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._open.close()
