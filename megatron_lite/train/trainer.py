"""The training loop: steps, evaluation, logging, checkpoints, and a clean stop when asked.

A step's randomness is a pure function of (seed, step, micro-batch, rank), its samples of the number consumed so far,
its learning rate of the step. So the state to save is small, and a resumed run repeats the unbroken one bit for bit.

The loop does not wait for the device in a step: a thread makes its data (step.py), ranks agree beside the device's
work, and a step's outcome is read one step later, or where it is needed: by a log line, a save, an evaluation or the
end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from data_utils.common.errors import ExitStatus
from data_utils.common.settings import to_tree
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.state import TrainerState
from megatron_lite.config.events import EventLog
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import TYPES, Engine, StepResult
from megatron_lite.metrics import version
from megatron_lite.metrics.peak_flops import Yardstick
from megatron_lite.metrics.progress_bar import Advance, progress_bar
from megatron_lite.metrics.reports import (
    Interval,
    memory_gib,
    save_resolved,
    start_line,
    start_values,
    train_line,
)
from megatron_lite.metrics.writer import SAVED, Metrics, chosen_trackers, keep_aside
from megatron_lite.model.batch import Samples
from megatron_lite.model.build import model_spec
from megatron_lite.model.model_input import ModelInput
from megatron_lite.model.transformer import GLM
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Phase, Requests, RunControl
from megatron_lite.runtime.watchdog import NoWatchdog, Section, Watchdog
from megatron_lite.train.evaluation import Evaluation, Judge
from megatron_lite.train.lr_schedule import step_rate
from megatron_lite.train.outcomes import Outcomes
from megatron_lite.train.resume import checkpoint_directory, load_beginning
from megatron_lite.train.step import HostStep, LossShares, Place, Prefetch, StepMaker

log = logging.getLogger(__name__)


class Trainer:
    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        engine: Engine,
        train_data: Samples,
        validation_data: Samples | None,
        loss_names: Sequence[str],
        control: RunControl | None = None,
        watchdog: Watchdog | None = None,
        fill: Callable[[GLM], dict[str, Any]] | None = None,
        judge: Judge | None = None,
        language_weight: Callable[[int], float] | None = None,
    ):
        """Args:
        control, watchdog: of the process. Without them `fit` makes a control, and nothing is watched.
        fill: makes a record of filled blanks at each evaluation, on the main rank.
        judge: evaluates a task, instead of the loss on `validation_data`.
        language_weight: step -> weight of the mean of all losses but the last, the task's, beside the mean of that one.
        """
        self.config = config
        self.context = context
        self.engine = engine
        self.train_data = train_data
        self.loss_names = list(loss_names)
        self.new_interval = partial(Interval.begin, len(self.loss_names), context.device)
        self._plan = config.plan
        self._shares = LossShares(self._plan, loss_names, context.dp.size, language_weight)
        count, factors = len(self.loss_names), self._shares.factors
        self._maker = StepMaker(config, self._plan, context, train_data, engine.prepared, count, factors)
        self._prefetch = Prefetch(self._maker.make, context.device)
        self.directory = Path(config.run.directory)
        self.step = 0
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self.outcomes = Outcomes(config.training.max_nonfinite_steps, self.directory)
        self.restarts = 0  # how often the run was continued from a checkpoint
        self.events = EventLog()
        self._machine_rates: dict[str, float] = {}
        self._profiler = None
        if config.profiler.first_step is not None:
            from megatron_lite.metrics.step_profiler import StepProfiler

            self._profiler = StepProfiler(config.profiler, self.directory, context.rank, context.device)
        self._shrink = config.model.embedding_gradient_shrink
        self.watchdog = watchdog or NoWatchdog()
        # Only the main rank writes it.
        self._program = version.program(packages=config.packages) if context.is_main else {}
        self._control = control
        self.evaluation = Evaluation(
            config, self._plan, context, engine, validation_data, self._shares, judge, fill
        )
        path, settings = checkpoint_directory(config), config.checkpoint
        self._saver = Saver(path, engine, context, settings, self._watch_save, self._record_save)

    # The run

    def fit(self) -> ExitStatus:
        """Train from the newest checkpoint, if any, to `training.steps` or a stop, then save and evaluate.

        Returns: FINISHED, or why the run ended before `training.steps`: STOPPED (signal) or HALTED (file STOP).
        """
        self._begin()
        outcome = "FAILED"
        shown = self.config.run.progress_bar and self.context.is_main
        try:
            with closing(self._prefetch), progress_bar(shown, self.step, self._last_step) as advance:
                requests = self._train(advance)
            if self._profiler is not None:
                self._profiler.write(self.step)  # if the run ends before the last step to trace
            self._end()
            outcome = "FINISHED" if self.is_over else "KILLED"
        finally:
            self.metrics.close(outcome)
        if self._is_over(self._last_step):
            return ExitStatus.FINISHED
        return ExitStatus.HALTED if requests.halt else ExitStatus.STOPPED

    def _train(self, advance: Advance) -> Requests:
        """The loop. Returns the last step's requests. Args: advance: called after each step."""
        training, save_interval = self.config.training, self.config.checkpoint.save_interval
        interval, requests = self.new_interval(), Requests()
        self.control.enter(Phase.TRAINING)
        if self.step > self.evaluation.last_step and self._is_multiple(training.eval_interval):
            with self._aside(interval, Section.EVALUATION):
                self.evaluate()  # the start before was ended between this step's save and its evaluation
        while not self._is_over(self._last_step) and not requests.end:
            self._apply_events()
            if self._profiler is not None:
                self._profiler.begin(self.step + 1)
            result, requests = self._train_step(interval)
            advance(self.step)
            if self._is_multiple(self.config.run.log_interval) or self.step == self._last_step:
                self._log_interval(interval, result)
                interval = self.new_interval()
            if self._profiler is not None and self._profiler.is_last(self.step):
                with self._aside(interval, Section.STEP, "writing a trace"):
                    self._profiler.write(self.step)
            if self._is_multiple(training.replica_check_interval):
                from megatron_lite.runtime.replicas import require_equal_replicas

                with self._aside(interval, Section.STEP, "replica check"):
                    named, stage = self.engine.named_parameters, self.config.parallel.zero_stage
                    require_equal_replicas(named, self.context, stage, self.step, self.directory)
            for event in requests.events():
                self._record(event, self.step)
            if requests.save or requests.end or self._is_multiple(save_interval):
                self.outcomes.read()
                with self._aside(interval, Section.CHECKPOINT, "saving"):
                    self._saver.save(self.step, self._state())
            else:
                self._saver.poll()
            if requests.save:
                self._saver.finish()
                self.control.saved()
            if self._is_multiple(training.eval_interval):  # after the save: it may be long, or hang
                self.outcomes.read()
                with self._aside(interval, Section.EVALUATION):
                    self.evaluate()
        return requests

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, not only this start."""
        return self._is_over(self.config.training.steps)

    def _is_over(self, last_step: int) -> bool:
        return self.step >= last_step or self.evaluation.ends_training

    @property
    def _last_step(self) -> int:
        """The step at which this start ends unless it is asked to before."""
        return self.config.training.stop_after_step or self.config.training.steps

    def _begin(self) -> None:
        self.control = self._control or RunControl(self.directory, self.context.is_main)
        self.watchdog.enter(Section.CHECKPOINT, "loading")
        events = self._resume()
        self.watchdog.enter(Section.SETUP, "measuring the machine")
        peak, dtype = self.config.run.peak_tflops, TYPES[self.config.training.precision]
        self.yardstick = Yardstick(peak, dtype, self.context, self._machine_rates)
        if self.context.is_main:  # not before: a refused start changes nothing in a run's directory
            save_resolved(self.config, self._program)
            log.info("%s", self.yardstick)
            log.info("%s", start_line(self.config, self.context, self.step))
            if not self.restarts:
                keep_aside(self.directory)
        trackers = chosen_trackers(self.config, self.restarts > 0) if self.context.is_main else []
        tensorboard = self.config.run.tensorboard
        self.metrics = Metrics(self.directory, self.context.is_main, tensorboard, self.step, trackers)
        restarts, program = self.restarts, self._program
        values = start_values(self.config, self.context, self.yardstick, restarts, program)
        self.metrics.write("start", self.step, values)
        for event in events:
            self._record(event, self.step)

    def _end(self) -> None:
        self.outcomes.read()
        self.watchdog.enter(Section.CHECKPOINT, "saving")
        self._saver.save_last(self.step, self._state())
        if self.is_over and self.step > self.evaluation.last_step:
            self.watchdog.enter(Section.EVALUATION)
            self.evaluate()
        if self.context.is_main:
            ending, then = "stopped", "start again with the same run.directory to continue."
            if self.is_over:
                ending = "finished"
                then = f"`python scripts/report.py {quote(str(self.directory))}` shows the run."
            log.info("%s at step %d of %d; %s", ending, self.step, self.config.training.steps, then)

    def _is_multiple(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    @contextmanager
    def _aside(self, interval: Interval, section: Section, place: str = "") -> Iterator[None]:
        """Enter a section whose duration is not training time."""
        self.watchdog.enter(section, place)
        start = time.perf_counter()
        yield
        interval.started += time.perf_counter() - start

    # Events

    def _apply_events(self) -> None:
        """Before a step: apply the changes that the configuration plans from this step on."""
        events, step = self.config.events, self.step + 1
        first = events.next_sample(self.consumed_samples, self._plan.batch_size(self.step))
        if first > self.consumed_samples:
            self._record(f"samples {self.consumed_samples} to {first - 1} are skipped", step)
            self.consumed_samples = first
        in_force = [*self._plan.in_force(self.step), *events.in_force(step)]
        for event in self.events.now_in_force(step, in_force):
            self._report(event, step)
        phase = self._plan.config(self.step)
        shrink = events.shrink_at(step, phase.model.embedding_gradient_shrink)
        if shrink != self._shrink:
            self.engine.set_embedding_gradient_shrink(shrink)
            self._shrink = shrink

    def _record(self, event: str, step: int) -> None:
        self.events.add(step, event)
        self._report(event, step)

    def _report(self, event: str, step: int) -> None:
        self.metrics.write("event", step, {"event": event}, f"event at step {step}: {event}")

    # One step

    def _train_step(self, interval: Interval) -> tuple[StepResult, Requests]:
        """One optimizer step. Returns its outcome and the requests that some rank received meanwhile."""
        self.watchdog.enter(Section.STEP, "reading data", self.step + 1)
        start = time.perf_counter()
        place = Place(self.step, self.consumed_samples)
        made = self._prefetch.take(place)
        interval.data_seconds += time.perf_counter() - start
        self.watchdog.at("summing totals of all ranks")
        totals, requests = self._totals(made)
        if self.step + 1 < self._last_step and not requests.end:
            self._prefetch.begin(self._maker.following(place))
        tokens, visible_keys, loss_rows, targets, target_keys, computed = map(int, totals[:6])
        loss_weights = totals[6:]
        self.watchdog.at("forward, backward and optimizer")
        result = self._engine_step(self._shares.micro_batches(made, loss_weights, self.step))
        self.watchdog.at("summing losses of all ranks")

        self.step += 1
        self.consumed_samples = place.first_sample + self._plan.batch_size(place.step)
        self.consumed_tokens += tokens
        interval.steps += 1
        interval.tokens += tokens
        interval.computed += computed
        interval.flops += model_spec(self.config).flops(
            self.config, tokens, loss_rows, visible_keys, targets, target_keys
        )
        sums = self.context.sum_of_losses(result.objective_sums)
        interval.objective_sums += self._shares.divided(sums, loss_weights, place.step)
        self.outcomes.add(self.step, result)
        self.outcomes.read(all_but=1)
        return result, requests

    def _engine_step(self, micro_batches: list[ModelInput]) -> StepResult:
        """The engine's step; at `training.gradient_norm_interval` also a record of each layer's gradient norm."""
        step, interval = self.step + 1, self.config.training.gradient_norm_interval
        lr = step_rate(self.config, self._plan, step)
        self.engine.set_step(step)
        if interval == 0 or step % interval:
            return self.engine.train_step(micro_batches, lr)
        from megatron_lite.engine.gradient_norms import GradientNorms, norms_line

        layers = GradientNorms(self.config, self.context)
        with self.engine.observed_gradients(layers.add):
            result = self.engine.train_step(micro_batches, lr)
        if not result.skipped:
            norms = layers.norms(self.engine.clip_divisor(result.grad_norm))
            self.metrics.write("gradient_norms", step, norms, norms_line(step, norms))
        return result

    def _totals(self, made: HostStep) -> tuple[list[float], Requests]:
        """One sum over all ranks: [counts of a HostStep, weight of each loss], and the requests."""
        requests = self.control.local_requests()
        own = [*made.counts, *made.loss_weights]
        if not self.context.counts_samples:
            own = [0.0] * len(own)
        sums = self.context.sum_of_hosts([*requests, *own])
        return sums[len(requests) :], self.control.agreed(sums[: len(requests)])

    # Reports

    def _log_interval(self, interval: Interval, result: StepResult) -> None:
        self.outcomes.read()
        sums = interval.objective_sums.cpu().numpy()
        elapsed = time.perf_counter() - interval.started
        tflops = interval.flops / elapsed / self.context.world_size / 1e12
        values: dict[str, Any] = {
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            **self._shares.means(sums, self.step),
            "lr": step_rate(self.config, self._plan, self.step),
            **self.engine.annealed,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "skipped_steps": self.outcomes.skipped_steps,
            "tokens_per_second": interval.tokens / elapsed,
            "tflops_per_device": tflops,
            **self.yardstick.share(tflops),
            "padding": 1 - interval.tokens / interval.computed,
            "memory_gib": memory_gib(self.context.device),
            "data_share": interval.data_seconds / elapsed,
            "seconds_per_step": elapsed / interval.steps,
            "eta_seconds": self._plan.steps_left(self.step) * elapsed / interval.steps,
        }
        self.metrics.write(
            "train", self.step, values, train_line(self.step, self.config.training.steps, values)
        )
        self.yardstick.measure_again()  # between intervals: its time is nobody's

    def evaluate(self) -> dict[str, float]:
        """Loss and perplexity on the first `training.eval_samples` validation samples, or the scores of a task."""
        if self.evaluation.judge is not None:
            self._saver.finish()  # the judge keeps the best checkpoint
        return self.evaluation.run(self.step, self.metrics)

    # State

    def _state(self) -> dict[str, Any]:
        return TrainerState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            skipped_steps=self.outcomes.skipped_steps,
            skipped_in_a_row=self.outcomes.skipped_in_a_row,
            restarts=self.restarts,
            events=self.events.state(),
            config=to_tree(self.config),
            data=self.train_data.fingerprint(),
            program=self._program,
            machine_rates=self.yardstick.rates,
        ).to_json()

    def _record_save(self, step: int, seconds: float) -> None:
        """The records say so that the run has saved, which a later start must know (run_state.py)."""
        self.metrics.write(SAVED, step, {"seconds": round(seconds, 3)})

    def _watch_save(self, what: str) -> AbstractContextManager[None]:
        return self.watchdog.beside(Section.CHECKPOINT, what)

    def _resume(self) -> list[str]:
        """Load where the run begins. Returns the events of this start, to be recorded."""
        beginning = load_beginning(
            self.config, self.engine, self.context, self.train_data.fingerprint(), self._program
        )
        state = beginning.state
        if state is not None:
            self.step, self.consumed_samples = state.step, state.consumed_samples
            if self._plan.samples:
                # Phases number samples by their plan; where a changed one is accepted, a batch would span two phases.
                self.consumed_samples = self._plan.consumed(state.step)
            self.consumed_tokens = state.consumed_tokens
            self.outcomes.skipped_steps = state.skipped_steps
            self.outcomes.skipped_in_a_row = state.skipped_in_a_row
            self.events = EventLog.from_state(state.events)
            self._machine_rates = state.machine_rates
            if beginning.is_own:
                self._saver.saved_step = self.step
                self.restarts = state.restarts + 1
        self.evaluation.resume(self.step, beginning.is_own)
        return beginning.events
