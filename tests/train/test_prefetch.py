"""The next step's data are made in a thread: each sample once, in order; errors at their step; nothing left behind."""

import itertools
import threading

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.training.engines import tree
from support.training.training import fit, make_trainer
from support.transformer.batches import prefix_batch
from support.waiting import HANG_SECONDS

from data_utils.common.batch_fields import OBJECTIVE, WEIGHTS
from data_utils.common.errors import DataError, ExitStatus
from data_utils.common.settings import build, merge
from megatron_lite.config.tree import Config
from megatron_lite.runtime import control
from megatron_lite.train.prefetch import Prefetch
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import prepare

CPU = torch.device("cpu")


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


# The thread


def test_what_was_made_for_another_step_is_thrown_away():
    made = []

    def make(step, is_wanted):
        made.append(step)
        return step

    ahead = Prefetch(make, CPU)
    assert ahead.take(0) == 0
    ahead.start(1)
    assert ahead.take(1) == 1
    ahead.start(2)
    assert ahead.take(3) == 3
    assert made == [0, 1, 2, 3] and not threads()


def test_the_end_does_not_wait_for_the_rest_of_a_step_that_nobody_wants():
    begun = threading.Event()

    def make(step, is_wanted):
        begun.set()
        while is_wanted():
            pass

    ahead = Prefetch(make, CPU)
    ahead.start(0)
    assert begun.wait(HANG_SECONDS) and threads() == ["prefetch"]
    ahead.close()
    assert not threads()


def test_any_error_is_raised_by_the_step_that_it_concerns():
    def make(step, is_wanted):
        if step == 1:
            raise MemoryError("of the thread")
        return step

    ahead = Prefetch(make, CPU)
    ahead.start(1)
    assert ahead.take(0) == 0  # thrown away: its error does not count
    ahead.start(1)
    with pytest.raises(MemoryError, match="of the thread"):
        ahead.take(1)
    ahead.close()
    assert not threads()


# In a run


def recorded(context, settings, stop_at=None):
    """What happened in a run, in order: ("read", samples) and ("step", micro-batches).

    The file STOP appears in the step before `stop_at`. Every step but the last waits until the next one is read.
    """
    trainer = make_trainer(context, settings)
    calls, fetch, train_step = [], trainer.train_data.batch, trainer.engine.train_step
    arrival = threading.Condition()

    def steps_begun():
        return 1 + sum(call[0] == "step" for call in calls)

    def batch(samples):
        with arrival:
            calls.append(("read", *samples.tolist()))
            arrival.notify()
        return fetch(samples)

    def step(micro_batches, lr):
        number = trainer.progress.step + 1
        if number not in (trainer.config.training.steps, stop_at):
            with arrival:  # this step would not go on if the thread waited for it
                assert arrival.wait_for(lambda: len(reads(calls)) == 4 * (steps_begun() + 1))
        calls.append(("step", len(micro_batches)))
        if number + 1 == stop_at:
            (trainer.directory / "STOP").touch()
        return train_step(micro_batches, lr)

    trainer.train_data.batch = batch
    trainer.engine.train_step = step
    status = trainer.fit()
    return calls, status, trainer.progress.consumed_samples, threads()


def reads(calls):
    return [call[1:] for call in calls if call[0] == "read"]


def test_the_next_step_is_read_before_this_one_is_computed(settings):
    """Each step waits until the following one has been read; the thread reads no further, and nothing after the end."""
    ((calls, _, _, left),) = run_ranks(recorded, 1, settings)
    step = [("step", 4)]
    read = [("read", first, first + 1) for first in range(0, 48, 2)]
    following = [[*read[first : first + 4], *step] for first in range(4, 28, 4)]
    assert calls == [*read[:4], *itertools.chain(*following)]
    assert not left


def test_samples_are_skipped_and_none_is_read_twice(settings):
    skip = {"phases": [{"steps": 2}, {"skip_samples": 84}]}
    ((calls, _, consumed, _),) = run_ranks(recorded, 1, merge(settings, skip))
    expected = [*range(16), *range(100, 132)]
    assert np.concatenate(reads(calls)).tolist() == expected and consumed == 132


def stop(context, settings):
    control.FILE_CHECK_SECONDS = 0.0
    return recorded(context, settings, stop_at=3)


def test_a_stopped_run_has_read_no_step_that_it_does_not_make(settings, tmp_path):
    """The file STOP appears in step 2, so step 3 is the last; the second start goes on with the next sample."""
    ((calls, status, consumed, left),) = run_ranks(stop, 1, settings)
    assert status == ExitStatus.HALTED and consumed == 24 and not left
    (tmp_path / "run/STOP").unlink()
    ((rest, status, consumed, left),) = run_ranks(recorded, 1, settings)
    assert status == ExitStatus.FINISHED and consumed == 48 and not left
    assert np.concatenate(reads(calls) + reads(rest)).tolist() == list(range(48))
    whole = run_ranks(fit, 1, merge(settings, {"run": {"directory": str(tmp_path / "whole")}}))[0]
    resumed = run_ranks(fit, 1, settings)[0]  # of the last checkpoint: nothing is left to do
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def lack_the_third_step(context, settings):
    trainer = make_trainer(context, settings)
    fetch = trainer.train_data.batch

    def batch(samples):
        if samples[0] >= 16:
            raise DataError("document 3 is cut off.")
        return fetch(samples)

    trainer.train_data.batch = batch
    with pytest.raises(DataError, match="document 3 is cut off") as caught:
        trainer.fit()
    return trainer.progress.step, caught.value.only_here, threads()


def test_an_error_of_the_thread_ends_the_run_at_its_step(settings, tmp_path):
    """Both steps before it are made, recorded and saved."""
    settings = merge(settings, {"checkpoint": {"save_interval": 1}})
    assert run_ranks(lack_the_third_step, 1, settings) == [(2, True, [])]
    assert sorted(path.name[-1] for path in (tmp_path / "run/checkpoints").iterdir()) == ["1", "2"]


# Results


def count_reads(context, tree):
    """For every step, the steps whose outcome had been read when it ended."""
    trainer = make_trainer(context, tree)
    train_step, read, seen = trainer.engine.train_step, [], []

    class Result:
        def __init__(self, result, step):
            self.result, self.step, self.objective_sums = result, step, result.objective_sums

        def __getattr__(self, name):
            read.append(self.step)
            return getattr(self.result, name)

    trainer.engine.train_step = lambda micro_batches, lr: Result(
        train_step(micro_batches, lr), trainer.progress.step + 1
    )
    one_step = trainer.train_step

    def step():
        out = one_step()
        seen.append(sorted(set(read)))
        return out

    trainer.train_step = step
    trainer.fit()
    return seen, sorted(set(read))


def test_a_step_does_not_wait_for_its_own_outcome(settings):
    ((seen, read),) = run_ranks(count_reads, 1, merge(settings, {"run": {"log_interval": 100}}))
    assert seen == [list(range(1, step)) for step in range(1, 7)] and read == [1, 2, 3, 4, 5, 6]


# Weights that become means after the sum over ranks


def test_weights_are_scaled_in_the_prepared_input_as_in_the_batch():
    config = build(Config, tree()).model
    fields = prefix_batch(3, rows=2, vocab=500)
    fields[1, OBJECTIVE] = 1
    batch = Batch(fields)
    scales = np.array([0.3, 7.0, 0.0], np.float32)
    expected = Batch(fields)
    expected.weights = fields[:, WEIGHTS].view(np.float32) * scales[fields[:, OBJECTIVE]]
    scaled = prepare(batch, CPU, config, dropout_seed=1)
    scaled.scale_weights(scales)
    assert torch.equal(scaled.buffer.data, prepare(expected, CPU, config, dropout_seed=1).buffer.data)
