"""Writes a record and a log line every `run.log_interval` steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine, StepResult
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Requests
from megatron_lite.telemetry.peak_flops import PeakFlops
from megatron_lite.telemetry.reports import LogInterval, memory_gib, train_line
from megatron_lite.telemetry.writer import Metrics
from megatron_lite.train.callbacks.callback import Callback, is_multiple
from megatron_lite.train.delayed_results import DelayedResults
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.train.step import Progress


@dataclass
class TrainingLog(Callback):
    """The log line and the record of metrics.jsonl, by rank 0; the trainer has summed their values over all ranks.

    Attributes: interval: sums over the steps since the last line; last_step: of this start, which has a line too.
    """

    config: Config
    phase_plan: PhasePlan
    context: ParallelContext
    engine: Engine
    progress: Progress
    interval: LogInterval
    results: DelayedResults
    loss_normalizer: LossNormalizer
    peak_flops: PeakFlops
    metrics: Metrics
    last_step: int

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if not is_multiple(step, self.config.run.log_interval) and step != self.last_step:
            return
        self.results.read()
        values = self._values(step, result)
        self.metrics.write("train", step, values, train_line(step, self.config.training.steps, values))
        self.peak_flops.measure_again()  # between two intervals, so that its time counts in neither
        self.interval.reset()

    def _values(self, step: int, result: StepResult) -> dict[str, Any]:
        interval = self.interval
        sums = interval.objective_sums.cpu().numpy()  # waits for the device
        elapsed = time.perf_counter() - interval.started
        # On a shared machine seconds of the clock say little. With a GPU the host's seconds say nothing of the work.
        on_cpu = self.context.device.type == "cpu"
        cpu_seconds = {"cpu_seconds": time.process_time() - interval.cpu_started} if on_cpu else {}
        tflops = interval.flops / elapsed / self.context.world_size / 1e12
        return {
            "consumed_samples": self.progress.consumed_samples,
            "consumed_tokens": self.progress.consumed_tokens,
            **self.loss_normalizer.means(sums, step),
            "lr": self.phase_plan.learning_rate(step),
            **self.engine.annealed,
            **self.engine.expert_measures(),
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_steps": self.results.skipped_steps,
            "tokens_per_second": interval.tokens / elapsed,
            "tflops_per_device": tflops,
            **self.peak_flops.utilisation(tflops),
            "padding": 1 - interval.tokens / interval.padded_tokens,
            "memory_gib": memory_gib(self.context.device),
            "data_share": interval.data_seconds / elapsed,
            "seconds_per_step": elapsed / interval.steps,
            **cpu_seconds,
            "eta_seconds": self.phase_plan.steps_left(step) * elapsed / interval.steps,
        }
