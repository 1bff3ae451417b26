"""A trace of some steps on some ranks (torch.profiler), and a snapshot of the GPU's memory, in RUN/profile."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from data_utils.common.errors import ConfigError
from megatron_lite.config.sections import ProfilerConfig
from megatron_lite.engine.engine import StepResult
from megatron_lite.runtime.control import Requests
from megatron_lite.runtime.watchdog import Section
from megatron_lite.train.callbacks.callback import Callback, Pause

log = logging.getLogger(__name__)

MAX_MEMORY_EVENTS = 200_000  # allocations and frees that a snapshot holds; a step makes thousands


class StepProfiler(Callback):
    """torch's profiler, without its schedule, which would be a second way to number steps."""

    def __init__(
        self, config: ProfilerConfig, directory: Path, rank: int, device: torch.device, pause: Pause
    ):
        """Raises: ConfigError if a memory snapshot is asked for and the run is on the CPU."""
        self._config, self._directory, self._rank, self._device = config, directory / "profile", rank, device
        self._pause = pause
        self._profile: torch.profiler.profile | None = None
        self._range: torch.profiler.record_function | None = None  # of the step under way, in the trace
        self._first = 0
        if config.memory and device.type != "cuda":
            raise ConfigError(
                f"profiler.memory is true, but the run is on the {device.type}; set it to false (GPUs only)."
            )

    def on_step_begin(self, step: int) -> None:
        config = self._config
        if config.first_step is None or self._rank not in config.ranks:
            return
        if config.end is None or not config.first_step <= step <= config.end:
            return
        if self._profile is None:
            self._start(step)
        self._close_range()
        self._range = torch.profiler.record_function(f"step {step}")
        self._range.__enter__()

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if step == self._config.end:
            with self._pause(Section.STEP, "writing a trace"):
                self._write(step)

    def on_train_end(self, step: int) -> None:
        self._write(step)  # if the run ends before the last step to trace

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _start(self, step: int) -> None:
        config, self._first = self._config, step
        if config.memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _write(self, step: int) -> None:
        """Write what was recorded up to this step. A disk that fails costs the trace, not the run."""
        if self._profile is None:
            return
        self._close_range()
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"steps_{self._first}_to_{step}_rank_{self._rank}"
        trace, snapshot = self._directory / f"{name}.trace.json.gz", self._directory / f"{name}.memory.pickle"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(trace))
            log.info("wrote %s", trace)
            if self._config.memory:
                # A pickle, as torch's viewers want; we never read one.
                torch.cuda.memory._dump_snapshot(str(snapshot))
                log.info("wrote %s", snapshot)
        except (OSError, RuntimeError) as error:
            log.warning("%s cannot be written: %s; training continues without it.", trace, error)
        finally:
            if self._config.memory:
                torch.cuda.memory._record_memory_history(enabled=None)
