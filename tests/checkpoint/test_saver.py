"""Saves in the background, failed saves, the last save."""

import errno
import os
import threading

import pytest
import torch
from support.distributed import run_ranks
from support.training.engines import SAMPLES, layout, make_engine, run_layout
from support.training.stub_engine import StubEngine, whole_state_is
from support.transformer.batches import prefix_batch
from support.waiting import wait_until

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint import write
from megatron_lite.checkpoint.collective_errors import describe_error
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.verify import read_checkpoint, verify_checkpoint
from megatron_lite.config.sections import CheckpointConfig
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.batch import Batch

ALONE = ParallelContext.alone()


def make(directory, context, **options):
    engine = StubEngine(context.rank, context.world_size)
    return engine, Saver(directory, engine, context, CheckpointConfig(save_interval=0, **options))


def valid_steps(directory):
    """Steps of the checkpoints that are complete and hold what they should."""
    steps = []
    for path in list_checkpoints(directory):
        found = read_checkpoint(path)
        verify_checkpoint(found)
        assert whole_state_is(found, found.step)
        steps.append(found.step)
    return steps


class Gate:
    """Holds back the writing of this process until it is opened."""

    def __init__(self):
        self.opened, self.passed = threading.Event(), threading.Event()
        self.write, write._write_rank = write._write_rank, self

    def __call__(self, *args):
        assert self.opened.wait()
        self.write(*args)
        self.passed.set()

    def close(self):
        write._write_rank = self.write


def train_during_a_save(context, directory):
    engine, saver = make(directory, context, asynchronous=True)
    gate = Gate()
    engine.train(1)
    saver.save(1, {})
    for step in (2, 3, 4):
        engine.train(step)
        saver.poll()
        assert saver.saved_step == 0
    assert not list_checkpoints(directory)
    if context.rank == 0:
        gate.opened.set()
        wait_until(gate.passed.is_set)  # one rank is ready: that is not enough
    saver.poll()
    assert saver.saved_step == 0
    gate.opened.set()
    while saver.saved_step == 0:  # changes on all ranks in the same call
        saver.poll()
    gate.close()
    return valid_steps(directory)


def test_a_background_save_holds_the_state_of_its_step_and_all_ranks_commit_together(tmp_path):
    assert run_ranks(train_during_a_save, 3, tmp_path) == [[1], [1], [1]]


def test_the_next_save_waits_for_the_one_in_flight(tmp_path):
    engine, saver = make(tmp_path, ALONE, asynchronous=True)
    gate = Gate()
    engine.train(1)
    saver.save(1, {})
    threading.Timer(0.3, gate.opened.set).start()
    engine.train(2)
    saver.save(2, {})
    assert saver.saved_step == 1
    saver.finish()
    gate.close()
    assert saver.saved_step == 2 and valid_steps(tmp_path) == [1, 2]


def test_the_last_save_is_not_made_twice_and_ends_before_the_run(tmp_path):
    engine, saver = make(tmp_path, ALONE, asynchronous=True)
    engine.train(1)
    saver.save(1, {})
    saver.save_last(1, {})
    (first,) = list_checkpoints(tmp_path)
    written = first.stat().st_ino
    saver.save_last(1, {})
    assert first.stat().st_ino == written
    engine.train(2)
    saver.save_last(2, {})
    assert valid_steps(tmp_path) == [1, 2]


def test_retention_is_the_savers(tmp_path):
    engine, saver = make(tmp_path, ALONE, keep_last=2)
    for step in range(1, 5):
        engine.train(step)
        saver.save(step, {})
    assert valid_steps(tmp_path) == [3, 4]


def break_writing(context, rank=1):
    def broken(*args):
        raise OSError(28, "No space left on device")

    write_rank = write._write_rank
    if context.rank == rank % context.world_size:
        write._write_rank = broken

    def mend():
        write._write_rank = write_rank

    return mend


def fail_and_go_on(context, directory, asynchronous):
    engine, saver = make(directory, context, asynchronous=asynchronous, max_failed_saves=3)

    def save(step):
        engine.train(step)
        saver.save(step, {})
        saver.finish()

    save(1)
    mend = break_writing(context)
    save(2)
    save(3)
    assert saver.saved_step == 1
    mend()
    save(4)  # a good one ends the row
    mend = break_writing(context)
    save(5)
    save(6)
    with pytest.raises(
        CheckpointError, match=r"the newest checkpoint is step_00000004.*start again"
    ) as caught:
        save(7)
    mend()
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.only_here


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_saves_warn_until_the_limit(tmp_path, asynchronous):
    messages, only_here = zip(*run_ranks(fail_and_go_on, 2, tmp_path, asynchronous), strict=True)
    assert only_here == (False, True)  # so that the rank whose message says why is heard
    assert "1 other rank(s) failed" in messages[0] and "No space left on device" in messages[1]
    assert valid_steps(tmp_path) == [1, 4]
    assert len(list(tmp_path.iterdir())) == 2  # what was half written has given its space back


def test_a_warning_names_the_cause_and_what_is_left(tmp_path, caplog):
    _, saver = make(tmp_path, ALONE)
    mend = break_writing(ALONE)
    saver.save(1, {})
    mend()
    (record,) = caplog.records
    assert "No space left on device. Earlier checkpoints are untouched" in record.message
    assert (
        "after 3 consecutive failed saves (checkpoint.max_failed_saves), this was number 1" in record.message
    )


def test_a_failed_last_save_is_an_error_at_once(tmp_path):
    _, saver = make(tmp_path, ALONE)
    mend = break_writing(ALONE)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        saver.save_last(1, {})
    mend()


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning_and_keeps_no_other(
    tmp_path, caplog, monkeypatch
):
    """As one in a lower layer of an overlay, which cannot be renamed, or a leftover that is not ours."""
    engine, saver = make(tmp_path, ALONE, keep_last=1)
    (tmp_path / "step_00000000.deleted").mkdir()
    for name in ("rename", "rmdir"):
        refuse_for(monkeypatch, name, ("step_00000001", "step_00000000.deleted"))
    for step in (1, 2, 3):
        engine.train(step)
        saver.save(step, {})
    assert valid_steps(tmp_path) == [1, 3]
    assert f"cannot be deleted: {tmp_path}/step_00000001: Invalid cross-device link" in caplog.text


def refuse_for(monkeypatch, name, names):
    """The function `name` of os fails for paths with these names."""
    real = getattr(os, name)

    def change(path, *arguments, **options):
        if os.path.basename(path) in names:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, name, change)


def test_a_snapshot_reuses_its_memory(tmp_path):
    engine, saver = make(tmp_path, ALONE, asynchronous=True)
    places = []
    for step in (1, 2):
        engine.train(step)
        fragments = list(saver._snapshot.take(engine))
        places.append([t.data_ptr() for f in fragments for t in f.tensors.values()])
        live = [t.data_ptr() for f in engine.fragments() for t in f.tensors.values()]
        assert not set(places[-1]) & set(live)
        assert all(torch.equal(a, b) for f, g in zip(fragments, engine.fragments(), strict=True)
                   for a, b in zip(f.tensors.values(), g.tensors.values(), strict=True))  # fmt: skip
    assert places[0] == places[1]


def update_during_a_slow_copy(context, settings, directory):
    """A real engine, three updates while the copy of the state before them is held back; the saved state."""
    engine = make_engine(context, settings)
    saver = Saver(directory, engine, context, CheckpointConfig(save_interval=0, asynchronous=True))
    before = {f"{f.name}/{kind}": t.clone() for f in engine.fragments() for kind, t in f.tensors.items()}
    copy, updated = saver._snapshot._copy, threading.Event()

    def slow_copy(fragments):
        updated.wait(0.5)  # an update that does not wait for the copy is done by then
        copy(fragments)

    saver._snapshot._copy = slow_copy
    saver.save(1, {})
    train = engine.train_step

    def train_step(*args, **kwargs):
        result = train(*args, **kwargs)
        updated.set()
        return result

    engine.train_step = train_step
    run_steps(engine, settings, context)
    saver.finish()
    after = {f"{f.name}/{kind}": t.clone() for f in engine.fragments() for kind, t in f.tensors.items()}
    assert not any(torch.equal(after[name], before[name]) for name in after if "word_embeddings" in name)
    load_checkpoint(newest_valid(directory, context), engine, context)
    for fragment in engine.fragments():
        for kind, values in fragment.tensors.items():
            for owned in fragment.ranges():  # without padding rows, which are not saved
                part = slice(owned.start - fragment.start, owned.stop - fragment.start)
                assert torch.equal(values[part], before[f"{fragment.name}/{kind}"][part])


def run_steps(engine, settings, context):
    size = settings["batch"]["micro_batch_size"]
    count = SAMPLES // size // context.dp.size
    for step in range(2):
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(count)]
        engine.train_step([engine.prepared(Batch(batch), step, 0.01) for batch in mine], lr=1e-2)


@pytest.mark.parametrize(
    "ranks, parallel",
    [
        pytest.param(1, layout(), marks=pytest.mark.slow),
        (2, layout(zero=3)),
        pytest.param(2, layout(pp=2), marks=pytest.mark.slow),
        pytest.param(2, layout(zero=2), marks=pytest.mark.slow),
    ],
)
def test_an_update_waits_for_the_copy_of_the_state_before_it(tmp_path, ranks, parallel):
    settings = {"batch": {"micro_batch_size": 1}}
    run_layout(update_during_a_slow_copy, ranks, parallel, settings, tmp_path)


def test_a_copy_that_fails_fails_the_save(tmp_path, caplog):
    _, saver = make(tmp_path, ALONE, asynchronous=True)
    saver._snapshot._buffers.pop()
    saver.save(1, {})
    saver.finish()
    assert saver.saved_step == 0 and "ValueError" in caplog.text


@pytest.mark.parametrize(
    "error",
    [OSError(2, "No such file", "a\x1b[2J\u202eb"), ValueError("a\x1b[2J\u202eb is unknown")],
    ids=["os", "value"],
)
def test_a_foreign_name_cannot_write_to_the_terminal(error):
    described = describe_error(error)
    assert described.isprintable() and r"a\x1b[2J\u202eb" in described
