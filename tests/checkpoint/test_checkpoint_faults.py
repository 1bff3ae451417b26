"""What a checkpoint directory must survive: kills at any operation and moment, crashes of the machine, full and
read-only disks, leftovers, flipped bits and cut files. Nothing committed is lost, nothing partial is loaded, nothing
needs cleaning up by hand, nothing hangs.
"""

import os
import random
import shutil
import signal

import pytest
import torch
from support.crash_shim import Disk, record_and_kill
from support.distributed import run_ranks, start_ranks
from support.selection import slow_but
from support.training.stub_engine import StubEngine, whole_state_is
from support.waiting import random_delay, wait_until

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint import read, tensor_files
from megatron_lite.checkpoint.manifest import checkpoint_name, list_checkpoints
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.verify import read_checkpoint, verify_checkpoint
from megatron_lite.config.sections import CheckpointConfig
from megatron_lite.parallel.context import ParallelContext

ALONE = ParallelContext.alone()


def make(directory, context=ALONE, **options):
    engine = StubEngine(context.rank, context.world_size)
    return engine, Saver(directory, engine, context, CheckpointConfig(save_interval=0, **options))


def save(directory, step, **options):
    engine, saver = make(directory, **options)
    engine.train(step)
    saver.save(step, {})
    engine.train(999)  # what a snapshot must not see
    saver.finish()
    assert saver.saved_step == step


def valid_steps(directory):
    """Steps of the checkpoints; each that has a name must be complete and right in every element."""
    steps = []
    for path in list_checkpoints(directory):
        found = read_checkpoint(path)
        verify_checkpoint(found)
        assert whole_state_is(found, int(found.optimizer["adam_step"])), path
        steps.append(found.step)
    return steps


# Kills and crashes at every operation


def first(directory, **options):
    save(directory, 1, **options)


def with_retention(directory, **options):
    save(directory, 3, keep_last=2, **options)


def again(directory, **options):
    """The step of an existing checkpoint, after a fallback."""
    save(directory, 2, **options)


def before(directory, scenario):
    """What is there before, and which lists of steps may be there after a crash."""
    if scenario is first:
        return [[], [1]]
    save(directory, 1)
    save(directory, 2)
    if scenario is again:
        return [[1, 2]]
    leftover = directory / "step_00000003.partial"
    leftover.mkdir()
    (leftover / "rank_00000.safetensors").write_bytes(b"half")
    (directory / "step_00000000.deleted").mkdir()
    return [[1, 2], [1, 2, 3], [2, 3]]


def die_at(operation, scenario, base, journal, options):
    """Run the scenario in a copy of this process that is killed during its n-th operation. True if it was."""
    child = os.fork()
    if child == 0:
        try:
            record_and_kill(journal, operation)
            scenario(base / "run/checkpoints", **options)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", slow_but([first], [first, with_retention, again]))
def test_a_kill_or_crash_at_every_operation(tmp_path, monkeypatch, scenario, asynchronous):
    """For every n: die during the n-th operation, then keep, drop or partly drop what was not synchronized."""
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 40_000)  # several writes
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # outside the journal, for speed
    base = tmp_path / "base"
    base.mkdir()
    allowed = before(base / "run/checkpoints", scenario)
    shutil.copytree(base, tmp_path / "origin")
    seen, operation, killed = set(), 0, True
    while killed:
        shutil.rmtree(base)
        shutil.copytree(tmp_path / "origin", base)
        disk, journal = Disk(base), tmp_path / f"journal{operation}"
        killed = die_at(operation, scenario, base, journal, {"asynchronous": asynchronous})
        disk.replay(journal)
        for survives in ("kept", "dropped", "some"):
            crashed = tmp_path / "crashed"
            shutil.rmtree(crashed, ignore_errors=True)
            disk.write(crashed, survives, seed=operation)
            if survives == "kept":
                assert files(crashed) == files(base)  # the model of the disk is right
            seen.add(check_after(crashed / "run/checkpoints", allowed, killed))
        operation += 1
    assert seen == {tuple(steps) for steps in allowed}
    assert operation > 12  # the operations were seen
    print(
        f"{scenario.__name__}: killed during each of {operation - 1} operations, {3 * operation} states of the disk"
    )


def files(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def check_after(directory, allowed, killed):
    steps = valid_steps(directory)
    assert steps in allowed if killed else steps == allowed[-1]  # a save that returned is there to stay
    found = newest_valid(directory, ALONE)
    assert (found.step if found else 0) == max(steps, default=0)
    save(directory, 4, keep_last=0)  # the next run saves without help
    assert valid_steps(directory) == [*steps, 4]
    assert all(p.name.startswith("step_") and p.suffix == "" for p in directory.iterdir())
    return tuple(steps)


# Kills at random moments with four ranks

RANKS, REPORT = 4, "reported"


def save_for_ever(context, directory, asynchronous, keep_last):
    """Save one step after the other; rank 0 reports each that was committed."""
    engine, saver = make(directory / "checkpoints", context, asynchronous=asynchronous, keep_last=keep_last)
    report = os.open(directory / REPORT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(1, 100_000):
        engine.train(step)
        saver.save(step, {})
        saver.poll()
        if context.is_main and saver.saved_step:
            os.write(report, b"%8d" % saver.saved_step)


def kill_at_a_random_moment(directory, seed):
    rng = random.Random(seed)
    directory.mkdir()
    options = rng.random() < 0.5, rng.choice([0, 1, 3])
    ranks = start_ranks(save_for_ever, RANKS, directory, *options)
    try:
        report = directory / REPORT
        wait_until(lambda: report.exists() and report.stat().st_size)  # all are under way
        random_delay(rng, 0.25)
        for process in ranks if rng.random() < 0.5 else [rng.choice(ranks)]:
            process.kill()
        for process in ranks:  # those left alone end by themselves
            process.join()
            assert process.exitcode is not None, "a rank hangs"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    steps = valid_steps(directory / "checkpoints")
    assert steps[-1] >= int(report.read_bytes()[-8:])
    assert run_ranks(continue_saving, 2, directory / "checkpoints", steps[-1]) == [steps[-1] + 1] * 2
    assert all(p.suffix == "" for p in (directory / "checkpoints").iterdir())


def continue_saving(context, directory, step):
    """In another number of ranks: load, which must give every element, and save the next step."""
    engine, saver = make(directory, context)
    load_checkpoint(newest_valid(directory, context), engine, context)
    assert engine.holds(step)
    engine.train(step + 1)
    saver.save_last(step + 1, {})
    return saver.saved_step


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_a_random_moment_with_four_ranks(tmp_path, seed):
    kill_at_a_random_moment(tmp_path / "run", seed)


# Disks


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_keeps_what_there_is_and_training_goes_on(small_disk, caplog, asynchronous):
    disk = small_disk("size=600k")  # a checkpoint takes 160 kB
    engine, saver = make(disk / "c", asynchronous=asynchronous, keep_last=0)
    for step in (1, 2, 3, 4):
        engine.train(step)
        saver.save(step, {})
        saver.finish()
    assert valid_steps(disk / "c") == [1, 2, 3]
    assert "No space left on device" in caplog.text and "training goes on" in caplog.text
    small_disk("size=2m")
    saver.save(4, {})
    saver.finish()
    assert valid_steps(disk / "c") == [1, 2, 3, 4]
    assert sorted(p.name for p in (disk / "c").iterdir()) == [checkpoint_name(s) for s in (1, 2, 3, 4)]


def test_a_read_only_directory_is_a_warning_then_an_error(small_disk, caplog):
    disk = small_disk("size=2m")
    save(disk / "c", 1)
    small_disk("ro")
    _, saver = make(disk / "c", max_failed_saves=2)
    saver.save(2, {})
    assert "Read-only file system" in caplog.text
    with pytest.raises(CheckpointError, match=r"Read-only file system.*newest checkpoint is step_00000001"):
        saver.save(3, {})
    assert valid_steps(disk / "c") == [1]
    assert newest_valid(disk / "c", ALONE).step == 1


def test_a_disk_that_fails_while_synchronizing_fails_the_save(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    _, saver = make(tmp_path)
    saver.save(2, {})
    assert saver.saved_step == 0 and "Input/output error" in caplog.text
    assert valid_steps(tmp_path) == [1]


# Damage


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    old, tensor_files.BLOCK_BYTES = tensor_files.BLOCK_BYTES, 40_000
    save(directory, 1)
    save(directory, 2)
    tensor_files.BLOCK_BYTES = old
    return directory


def damaged(two, tmp_path, damage, count):
    """Damage random places of the newest checkpoint, one at a time: each must be named, and the one before used."""
    directory = shutil.copytree(two, tmp_path / "c")
    newest = directory / checkpoint_name(2)
    names = sorted(p.name for p in newest.iterdir())
    assert names == ["manifest.json", "manifest.json.sha256", "rank_00000.safetensors"]
    for seed in range(count):
        rng = random.Random(seed)
        file = newest / names[seed % len(names)]
        content = file.read_bytes()
        file.write_bytes(damage(rng, content))
        yield directory, file.name
        file.write_bytes(content)
    assert newest_valid(directory, ALONE).step == 2


def flip(rng, content):
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng, content):
    return content[: rng.randrange(len(content))]


def named(file, text):
    """manifest.json and its checksum contradict each other: both are named."""
    return file in text or (file == "manifest.json.sha256" and "manifest.json" in text)


@pytest.mark.parametrize("damage, count", [(flip, 200), (cut, 50)])
def test_flipped_bits_and_cut_files(two, tmp_path, caplog, damage, count):
    for directory, file in damaged(two, tmp_path, damage, count):
        caplog.clear()
        assert newest_valid(directory, ALONE).step == 1
        assert named(file, caplog.text) and "step_00000002" in caplog.text
        assert "Falling back to the checkpoint before it" in caplog.text


def read_where_one_rank_sees_less(context, directory):
    """One node of several does not see the newest checkpoint, or not all of it."""
    if context.rank == 1:
        whole = read.read_checkpoint

        def blind(path):
            if path.name == "step_00000002":
                raise CheckpointError("stale handle")
            return whole(path)

        read.read_checkpoint = blind
    return newest_valid(directory, context).step


def test_what_one_rank_cannot_read_none_uses(two):
    assert run_ranks(read_where_one_rank_sees_less, 2, two) == [1, 1]


def test_a_missing_file_and_leftovers(two, tmp_path, caplog):
    directory = shutil.copytree(two, tmp_path / "c")
    (directory / "step_00000002/rank_00000.safetensors").unlink()
    shutil.copytree(directory / "step_00000001", directory / "step_00000007.partial")
    (directory / "step_00000003.deleted").mkdir()
    (directory / "notes.partial").write_text("not ours")
    assert newest_valid(directory, ALONE).step == 1
    assert "rank_00000.safetensors: No such file" in caplog.text
    save(directory, 2)
    save(directory, 3)
    assert valid_steps(directory) == [1, 2, 3]
    assert {p.name for p in directory.iterdir() if p.suffix} == {"notes.partial"}


def test_loading_needs_little_memory_beside_the_state(tmp_path, monkeypatch):
    """What a reader holds at once is a few rows, though the tensor is large and the layout another."""
    monkeypatch.setattr(tensor_files, "READ_BYTES", 1000)
    save(tmp_path, 1)
    sizes = []
    frombuffer = torch.frombuffer

    def counted(buffer, **options):
        sizes.append(len(buffer))
        return frombuffer(buffer, **options)

    monkeypatch.setattr(torch, "frombuffer", counted)
    engine = StubEngine(rank=1, world_size=3)
    load_checkpoint(read_checkpoint(list_checkpoints(tmp_path)[0]), engine, ALONE)
    assert engine.holds(1)
    assert len(sizes) > 50 and max(sizes) <= 1000
