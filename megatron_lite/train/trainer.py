"""The training loop: one `train_step` after another, with callbacks around them, and a clean stop when asked.

A step's randomness is a pure function of (seed, step, micro-batch, rank), its samples of the number consumed so far,
its learning rate of the step. So the state to save is small, and a resumed run repeats the uninterrupted one bit for
bit.

The loop does not wait for the device in a step: a thread makes the data (prefetch.py), ranks agree in a communication
stream apart from the device's work, and the result of a step is read one step later, or where it is needed: by a log
line, a save, an evaluation or the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from data_utils.common.errors import ExitStatus
from data_utils.common.settings import to_tree
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import TYPES, Engine, StepResult
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Phase, Requests, RunControl
from megatron_lite.runtime.watchdog import NoWatchdog, Section, Watchdog
from megatron_lite.telemetry import version
from megatron_lite.telemetry.peak_flops import PeakFlops
from megatron_lite.telemetry.reports import LogInterval, save_resolved, start_line, start_record
from megatron_lite.telemetry.trackers import make_trackers
from megatron_lite.telemetry.writer import SAVED, Metrics, set_records_aside
from megatron_lite.train.callbacks.callback import Callbacks
from megatron_lite.train.callbacks.checkpoints import Checkpoints
from megatron_lite.train.callbacks.evaluation import EvaluationCallback
from megatron_lite.train.callbacks.gradient_norms import GradientNormRecords
from megatron_lite.train.callbacks.phase_changes import PhaseChanges
from megatron_lite.train.callbacks.profiler import StepProfiler
from megatron_lite.train.callbacks.progress_bar import ProgressBar
from megatron_lite.train.callbacks.replica_check import ReplicaCheck
from megatron_lite.train.callbacks.training_log import TrainingLog
from megatron_lite.train.delayed_results import DelayedResults
from megatron_lite.train.evaluation import Evaluation, TaskEvaluator
from megatron_lite.train.event_log import EventLog
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.train.prefetch import Prefetch
from megatron_lite.train.start import LoadedState, checkpoint_directory, load_start
from megatron_lite.train.step import Progress, StepCounts, StepMaker, StepMessage
from megatron_lite.transformer.batch import Samples
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)


class Trainer:
    """A run that continues from its newest checkpoint, if any: making a trainer loads it, and `fit` trains."""

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
        fill: Callable[[Transformer], dict[str, Any]] | None = None,
        task_evaluator: TaskEvaluator | None = None,
        language_weight: Callable[[int], float] | None = None,
    ):
        """Args:
        control, watchdog: of the process. Without them signals are listened to from now on, and nothing is watched.
        fill: makes a record of filled blanks at each evaluation, on the main rank.
        task_evaluator: evaluates a task, instead of the loss on `validation_data`.
        language_weight: step -> weight of the language-model losses relative to the task's loss, which is the last.
        """
        self.config, self.context, self.engine = config, context, engine
        self.train_data = train_data
        self.directory = Path(config.run.directory)
        self.watchdog = watchdog or NoWatchdog()
        # Before the load: to load a large checkpoint must be interruptible.
        self.control = control or RunControl(self.directory, context.is_main)
        self._phase_plan = config.phase_plan  # which settings hold at which step
        # Only the main rank writes it.
        self._program = version.program(packages=config.packages) if context.is_main else {}

        self.progress = Progress()
        self.events = EventLog()
        self.interval = LogInterval(len(loss_names), context.device)
        self.results = DelayedResults(
            config.training.max_nonfinite_steps, self.directory, config.training.precision
        )

        # Order: the normalizer tells the step maker which losses count, and the prefetch thread runs the step maker.
        self.loss_normalizer = LossNormalizer(self._phase_plan, loss_names, context.dp.size, language_weight)
        self._step_maker = StepMaker(
            config, self._phase_plan, context, train_data, engine.prepared, len(loss_names),
            self.loss_normalizer.scales_ahead,
        )  # fmt: skip
        self._prefetch = Prefetch(self._step_maker.make, context.device)

        self.evaluation = Evaluation(
            config,
            self._phase_plan,
            context,
            engine,
            validation_data,
            self.loss_normalizer,
            task_evaluator,
            fill,
        )
        path, settings = checkpoint_directory(config), config.checkpoint
        # Made before the first step: it allocates its copy of the state, and memory that is short shows at the start.
        self._saver = Saver(path, engine, context, settings, self._watch_save, self._record_save)
        # Made now, because it may refuse its settings: a refused start changes nothing in the run's directory.
        self._profiler = StepProfiler(
            config.profiler, self.directory, context.rank, context.device, self._paused
        )

        self.watchdog.enter(Section.CHECKPOINT, "loading")
        loaded = self._load_start()
        self.watchdog.enter(Section.SETUP, "measuring the machine")
        # Rates that earlier starts measured on this machine come from the checkpoint.
        known_rates = loaded.state.machine_rates if loaded.state else {}
        self.peak_flops = PeakFlops(
            config.run.peak_tflops, TYPES[config.training.precision], context, known_rates
        )
        # Not before: a refused start changes nothing in a run's directory.
        self.metrics = self._open_records()
        for event in loaded.events:
            self._record_event(event, self.progress.step)

    # One step

    def train_step(self) -> tuple[StepResult, Requests]:
        """One optimizer step on all ranks. Waits for the data and for the other ranks' message, but for no device.

        Returns: the result, which the device may still compute, and the requests that some rank has received.
        """
        before, step = self.progress.step, self.progress.step + 1
        self.watchdog.enter(Section.STEP, "reading data", step)
        with self.interval.waiting_for_data():
            inputs = self._prefetch.take(before)  # this rank's micro-batches, in pinned memory

        self.watchdog.at("summing totals of all ranks")
        # Divisors are over all ranks, so they are known before the passes; the loss is then divided once, in any
        # layout.
        totals, requests = self.agree(inputs.counts)
        # Starts only after the ranks agree: the data of a step that no rank trains would be wasted work at the stop.
        if step < self._last_step and not requests.end:
            self._prefetch.start(step)

        self.watchdog.at("forward, backward and optimizer")
        # `before` counts the steps before this one; `step` is the number of this one (from 1).
        micro_batches = self.loss_normalizer.micro_batches(inputs, totals.loss_divisors, before)
        lr = self._phase_plan.learning_rate(step)
        self.engine.set_step(step)
        result = self.engine.train_step(micro_batches, lr)  # see `PlainEngine.train_step`

        self.watchdog.at("summing losses of all ranks")
        # Sums stay on the device: reading them here would stop the queue of kernels at every step.
        loss_sums = self.context.sum_losses(result.objective_sums)
        loss_sums = self.loss_normalizer.with_token_counts(loss_sums, totals.loss_divisors, before)
        flops = model_spec(self.config).flops(self.config, *totals.flops_counts())
        self.interval.add(int(totals.tokens), int(totals.padded_tokens), flops, loss_sums)
        self.progress.advance(step, self._phase_plan.consumed(step), totals)
        self.results.add(step, result)
        self.results.read(all_but=1)  # of the step before: a skipped one, or too many of them in a row
        return result, requests

    def agree(self, counts: StepCounts) -> tuple[StepCounts, Requests]:
        """The counts summed over all ranks, and the requests that some rank has received, in one collective.

        A request is acted on after the step in which all ranks learn of it. The collective sums numbers of the hosts,
        on GPUs in a stream and a process group of their own: in the group of all processes it would queue behind the
        gradients of the step before.
        """
        requests = self.control.local_requests()
        if not self.context.counts_samples:  # another rank works on the same samples
            # Else they would be counted once for each tensor-parallel rank and stage.
            counts = StepCounts.zeros(len(counts.loss_divisors))
        sums = self.context.sum_on_hosts(StepMessage(requests, counts).to_vector())
        summed = StepMessage.from_sums(sums)
        return summed.counts, summed.requests

    # The run

    def fit(self) -> ExitStatus:
        """Train to `training.steps` or a stop, then save and evaluate.

        Returns: FINISHED, or why the run ended before `training.steps`: STOPPED (signal) or HALTED (file STOP).
        """
        # Closed whatever happens: a tracker's run that stays open shows as running for ever.
        outcome = "FAILED"
        try:
            requests = self._train()
            outcome = "FINISHED" if self.is_over else "KILLED"
        finally:
            self.metrics.close(outcome)
        if self._is_over(self._last_step):
            # `stop_after_step` ends a start as planned: the exit status is that of success, though the run goes on
            # later.
            return ExitStatus.FINISHED
        return ExitStatus.HALTED if requests.halt else ExitStatus.STOPPED

    def _train(self) -> Requests:
        """The loop. Returns the last step's requests."""
        progress, callbacks, requests = self.progress, self._make_callbacks(), Requests()
        # Both close on errors too: the thread must not read a dataset that is being closed.
        with closing(self._prefetch), closing(callbacks):
            self.interval.reset()
            self.control.enter(Phase.TRAINING)
            callbacks.on_train_begin(progress.step)
            while not self._is_over(self._last_step) and not requests.end:
                callbacks.on_step_begin(progress.step + 1)
                result, requests = self.train_step()
                callbacks.on_step_end(progress.step, result, requests)
        callbacks.on_train_end(progress.step)
        if self.context.is_main:
            ending, advice = "stopped", "start again with the same run.directory to continue."
            if self.is_over:
                ending = "finished"
                advice = f"`python scripts/report.py {quote(str(self.directory))}` shows the run."
            log.info("%s at step %d of %d; %s", ending, progress.step, self.config.training.steps, advice)
        return requests

    def _make_callbacks(self) -> Callbacks:
        """What happens around steps, in this order (see callback.py)."""
        config, training, context, engine = self.config, self.config.training, self.context, self.engine
        return Callbacks(
            # The order is part of the behaviour. Gradient hooks are set before the step; the log reads the interval
            # before pauses; the checkpoint of a step is saved before its evaluation, which may be long or hang.
            PhaseChanges(self._phase_plan, self.events, report=self._report_event),
            GradientNormRecords(config, context, engine, self.metrics),
            ProgressBar(config.run.progress_bar and context.is_main, self._last_step),
            TrainingLog(
                config, self._phase_plan, context, engine, self.progress, self.interval, self.results,
                self.loss_normalizer, self.peak_flops, self.metrics, self._last_step,
            ),
            self._profiler,
            ReplicaCheck(
                engine, context, config.parallel.zero_stage, training.replica_check_interval,
                self.directory, self._paused,
            ),
            Checkpoints(
                self._saver, self._state, config.checkpoint.save_interval, self.results, self.control,
                self.watchdog, self._paused, self._record_event,
            ),
            EvaluationCallback(
                self.evaluation, self.evaluate, lambda: self.is_over, training.eval_interval, self.results,
                self.watchdog, self._paused,
            ),
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, not only this start."""
        return self._is_over(self.config.training.steps)

    def _is_over(self, last_step: int) -> bool:
        return self.progress.step >= last_step or self.evaluation.ends_training

    @property
    def _last_step(self) -> int:
        """The step at which this start ends unless a request ends it before."""
        return self.config.training.stop_after_step or self.config.training.steps

    @contextmanager
    def _paused(self, section: Section, place: str = "") -> Iterator[None]:
        """Enter a section of the watchdog whose duration is not training time."""
        self.watchdog.enter(section, place)
        with self.interval.paused():
            yield

    def _open_records(self) -> Metrics:
        """Write the configuration and the record of this start."""
        config, context, step, restarts = (
            self.config,
            self.context,
            self.progress.step,
            self.progress.restarts,
        )
        if context.is_main:
            save_resolved(config, self._program)
            log.info("%s", self.peak_flops)
            log.info("%s", start_line(config, context, step))
            if not restarts:
                # Records that are there are of a start that never saved: the run begins again, and they would be
                # counted twice.
                set_records_aside(self.directory)
        trackers = make_trackers(config, restarts > 0) if context.is_main else []
        metrics = Metrics(self.directory, context.is_main, config.run.tensorboard, step, trackers)
        metrics.write("start", step, start_record(config, context, self.peak_flops, restarts, self._program))
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Loss and perplexity on the first `training.eval_samples` validation samples, or the scores of a task."""
        if self.evaluation.task_evaluator is not None:
            self._saver.finish()  # it keeps the best checkpoint
        return self.evaluation.run(self.progress.step, self.metrics)

    def _record_event(self, event: str, step: int) -> None:
        self.events.add(step, event)
        self._report_event(event, step)

    def _report_event(self, event: str, step: int) -> None:
        self.metrics.write("event", step, {"event": event}, f"event at step {step}: {event}")

    # State

    def _state(self) -> dict[str, Any]:
        return TrainerState(
            step=self.progress.step,
            consumed_samples=self.progress.consumed_samples,
            consumed_tokens=self.progress.consumed_tokens,
            skipped_steps=self.results.skipped_steps,
            skipped_in_a_row=self.results.skipped_in_a_row,
            restarts=self.progress.restarts,
            events=self.events.state(),
            config=to_tree(self.config),
            data=self.train_data.fingerprint(),
            program=self._program,
            machine_rates=self.peak_flops.rates,
        ).to_json()

    def _record_save(self, step: int, seconds: float) -> None:
        """Record that the run has saved: a later start refuses a run whose checkpoints are lost (run_state.py)."""
        self.metrics.write(SAVED, step, {"seconds": round(seconds, 3)})

    def _watch_save(self, what: str) -> AbstractContextManager[None]:
        return self.watchdog.in_background(Section.CHECKPOINT, what)

    def _load_start(self) -> LoadedState:
        """Load where the run begins."""
        loaded = load_start(
            self.config, self.engine, self.context, self.train_data.fingerprint(), self._program
        )
        state, progress = loaded.state, self.progress
        if state is not None:
            progress.step, progress.consumed_samples = state.step, self._phase_plan.consumed(state.step)
            progress.consumed_tokens = state.consumed_tokens
            self.engine.set_step(state.step)  # an evaluation may be the first that the engine computes
            self.results.skipped_steps = state.skipped_steps
            self.results.skipped_in_a_row = state.skipped_in_a_row
            self.events = EventLog.from_state(state.events)
            if loaded.is_own:
                self._saver.saved_step = progress.step
                # Not for a branch: its first start is no restart, and another run's step is not saved in this
                # directory.
                progress.restarts = state.restarts + 1
        self.evaluation.resume(progress.step, loaded.is_own)
        return loaded
