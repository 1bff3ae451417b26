"""scripts/checkpoints.py as a user runs it."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.crash_shim import at_every_operation, fill_disk, record_and_kill
from support.project import ROOT
from support.training.stub_engine import StubEngine
from support.training.whole_weights import load_weights

from data_utils.common.errors import DataError
from data_utils.common.files import new_directory
from megatron_lite.checkpoint.manifest import list_checkpoints, rewound_directories
from megatron_lite.checkpoint.merge import merge_shares
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.lease import LeaseError, held
from scripts import checkpoints

SCRIPT = ROOT / "scripts" / "checkpoints.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """The script in this process, which has imported torch: exit status, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            checkpoints.command()
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def directory(tmp_path):
    state = {"consumed_tokens": 12345, "config": {"parallel": {"zero_stage": 2, "tensor_parallel_size": 1}}}
    for step in (10, 20):
        engine = StubEngine()
        engine.train(step)
        save_checkpoint(tmp_path / "run/checkpoints", step, engine, state, ParallelContext.alone())
    return tmp_path / "run"


def test_list_and_verify_good_checkpoints(directory, run):
    for arguments in (
        ("list", directory),
        ("verify", directory / "checkpoints"),
        ("verify", directory / "checkpoints/step_00000020"),
    ):
        status, out, err = run(*arguments)
        assert status == 0 and err == ""
        last = out.splitlines()[-1].split()
        assert last[0] == "step_00000020" and len(last[1]) == len("2026-01-01T00:00:00")
        assert last[2:] == ["0.2", "MB", "tp1", "pp1", "dp1", "zero2", "12,345", "good"]


def test_damage_is_distinguished_from_a_wrong_command(directory, run, tmp_path):
    file = directory / "checkpoints/step_00000010/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    assert run("list", directory)[0] == 0  # sizes and manifest are right
    status, out, err = run("verify", directory)
    assert status == 1
    assert [line.split()[-1] for line in out.splitlines()] == ["checksums", "damaged", "good"]
    assert "rank_00000.safetensors does not match its checksum in bytes 0 to" in err and err.count("\n") == 1
    file.write_bytes(content[:100])
    status, _, err = run("list", directory)
    assert status == 1 and "has 100 bytes" in err
    (file.parent / "manifest.json").unlink()
    assert run("verify", file.parent)[0] == 1
    for absent in (tmp_path / "absent", tmp_path / "step_00000001"):
        status, _, err = run("list", absent)
        assert status == 2 and err.startswith("error: ") and "does not exist; give" in err


def test_merge_writes_the_weighted_mean(directory, run, tmp_path):
    output = tmp_path / "merged"
    status, out, err = run("merge", directory, 20, 10, "--weights", "0.3,0.7", "--output", output)
    assert status == 0, err
    # each number belongs to the step in its place, and the steps are listed in their order
    assert out.splitlines()[0].split() == ["0.7000", str(directory / "checkpoints/step_00000010")]
    (path,) = list_checkpoints(output / "checkpoints")
    merged = read_checkpoint(path)
    assert merged.step == 20 and {stored.state_name for stored in merged.slices} == {"weight"}
    one, two = (load_weights(read_checkpoint(each)) for each in list_checkpoints(directory / "checkpoints"))
    for name, weight in load_weights(merged).items():
        exact = 0.7 * one[name].double() + 0.3 * two[name].double()
        assert torch.equal(weight, exact.float())  # rounded once
    assert run("verify", output)[0] == 0


DECAYS = {"linear": lambda x: 1 - x, "1-sqrt": lambda x: 1 - x**0.5}


@pytest.mark.parametrize("steps", [(0, 10), (10, 20, 30), (100, 130, 190, 200, 1000), (7, 8, 9, 10, 11, 12)])
@pytest.mark.parametrize("name", DECAYS)
def test_shares_match_a_decay(name, steps):
    """The model moves by a known amount at each step; with the decay's factor on every one of 10^5 small updates it
    ends where the mean of the checkpoints is."""
    generator = np.random.default_rng(1)
    speeds = generator.normal(size=len(steps) - 1)  # of the weight between two checkpoints
    weights = np.concatenate([[3.0], 3.0 + np.cumsum(speeds * np.diff(steps))])
    places = (np.arange(100_000) + 0.5) / 100_000
    interval = np.searchsorted(steps, steps[0] + places * (steps[-1] - steps[0]), side="right") - 1
    updates = speeds[interval] * DECAYS[name](places) * (steps[-1] - steps[0]) / 100_000
    shares = merge_shares(name, steps)
    assert np.dot(shares, weights) == pytest.approx(3.0 + updates.sum(), rel=1e-4)
    assert sum(shares) == pytest.approx(1) and min(shares) > 0


def test_shares_of_equal_distances():
    assert merge_shares("mean", [5, 6, 9, 100]) == [0.25] * 4
    assert merge_shares("linear", [10, 20]) == pytest.approx([0.5, 0.5])
    assert merge_shares("linear", [10, 20, 30]) == pytest.approx([0.25, 0.5, 0.25])
    assert merge_shares("1-sqrt", [10, 20, 30]) == pytest.approx([0.4714, 0.3905, 0.1381], abs=1e-4)
    assert merge_shares("linear", [0, 1, 4]) == pytest.approx([1 / 8, 1 / 2, 3 / 8])  # unequal ones count


def test_a_merge_of_two_by_a_decay_is_their_mean(directory, run, tmp_path):
    status, out, err = run("merge", directory, 10, 20, "--weights", "linear", "--output", tmp_path / "merged")
    assert status == 0, err
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["0.5000", "0.5000"]


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_merge_into_a_directory_of_checkpoints_is_refused(directory, run):
    within = directory / "checkpoints/merged"
    status, out, err = run("merge", directory, 10, 20, "--output", within)
    assert (status, out) == (2, "") and "choose a directory outside" in err
    assert not within.exists()


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_file_instead_of_a_run_is_not_to_be_moved_away(directory, run, command):
    status, out, err = run(command, directory / "checkpoints/step_00000010/manifest.json")
    assert (status, out) == (2, "") and "is not a directory; give the directory of a run" in err


def merge_again(directory, output):
    sys.argv = [str(SCRIPT), "merge", str(directory), "10", "20", "--output", str(output)]
    checkpoints.command()


@pytest.mark.parametrize(
    ("change", "least"), [(record_and_kill, 12), pytest.param(fill_disk, 10, marks=pytest.mark.slow)]
)
def test_a_merge_that_is_killed_or_finds_the_disk_full_is_done_by_the_same_command(
    directory, run, tmp_path, change, least
):
    output = tmp_path / "out/merged"
    assert run("merge", directory, 10, 20, "--output", tmp_path / "whole")[0] == 0
    (whole,) = list_checkpoints(tmp_path / "whole/checkpoints")
    seen = set()

    def before():
        shutil.rmtree(output.parent, ignore_errors=True)
        return tmp_path / "journal"

    def after(status, err):
        if change is fill_disk:
            assert status == 2 and err.count("error: ") == 1 and "No space left on device" in err, err
            assert "Traceback" not in err
            # The last operation waits for the name of the whole output.
            assert not output.parent.exists() or list(output.parent.iterdir()) == [output]
        else:
            assert status == -signal.SIGKILL
        seen.add(output.exists())
        if not output.exists():
            assert run("merge", directory, 10, 20, "--output", output)[0] == 0
            assert [path.name for path in output.parent.iterdir()] == ["merged"]  # nothing is left
        (merged,) = list_checkpoints(output / "checkpoints")
        assert files(merged)["rank_00000.safetensors"] == files(whole)["rank_00000.safetensors"]
        assert run("verify", output)[0] == 0

    count = at_every_operation(change, lambda: merge_again(directory, output), before, after)
    assert count >= least and False in seen


def test_a_second_merge_to_one_output_is_refused(directory, run, tmp_path):
    with new_directory(tmp_path / "merged"):
        status, out, err = run("merge", directory, 10, 20, "--output", tmp_path / "merged")
        assert (status, out, err.count("\n")) == (2, "", 1) and "being written by another" in err
    with (
        pytest.raises(DataError, match="Directory not empty"),
        new_directory(tmp_path / "other") as partial,
    ):
        (partial / "file").touch()
        (tmp_path / "other").mkdir()
        (tmp_path / "other/mine").touch()  # made meanwhile: stays
    assert files(tmp_path / "other") == {"mine": b""}


def test_merge_refuses_what_has_no_mean(directory, run, tmp_path):
    def refused(*arguments):
        status, out, err = run("merge", *arguments)
        assert status == 2 and out == "" and err.count("\n") == 1, err
        return err

    output = "--output", tmp_path / "merged"
    assert "merge takes --output" in refused(directory, 10, 20)
    assert "at least two" in refused(directory, 10, *output)
    assert "at least two" in refused(directory, 10, 10, *output)
    assert "must be mean, linear, 1-sqrt" in refused(directory, 10, 20, "--weights", "cosine", *output)
    assert "2 numbers with the sum 0.9" in refused(directory, 10, 20, "--weights", "0.3,0.6", *output)
    assert "exists; choose a new directory" in refused(directory, 10, 20, "--output", tmp_path)
    message = refused(directory, 10, 30, 40, *output)
    assert "no checkpoint of step 30, 40; it holds steps 10, 20" in message
    assert "0.6 is neither" in refused(directory, 10, 20, "--weights", "0.5", "0.6", *output)
    assert "order of their steps, and these have 20, 20" in refused(
        directory, directory / "checkpoints/step_00000020", "--weights", "linear", *output
    )
    assert not (tmp_path / "merged").exists()
    other = StubEngine()
    state = {"config": {"tokenizer": {"path": "other"}}}
    save_checkpoint(tmp_path / "other/checkpoints", 20, other, state, ParallelContext.alone())
    assert "has another tokenizer" in refused(directory, tmp_path / "other", *output)


def test_rewind_sets_newer_checkpoints_aside(directory, run):
    checkpoints = directory / "checkpoints"
    (checkpoints / "step_00000020").rename(checkpoints / "step_00000020.replaced")  # left by a kill
    status, out, _ = run("rewind", directory, 10)
    (aside,) = checkpoints.glob("rewound_*")
    assert status == 0 and f"will resume from step 10; 1 newer checkpoints were moved to {aside}" in out
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step_00000010"]
    assert run("verify", aside)[0] == 0  # whole, for another time
    status, out, _ = run("rewind", directory, 10)
    assert status == 0 and "is already the latest" in out
    assert list(rewound_directories(checkpoints)) == [(aside, 20)]


def test_rewind_says_what_an_overlay_needs(directory, run, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))

    monkeypatch.setattr(os, "rename", refuse)
    status, _, err = run("rewind", directory, 10)
    assert status == 2 and "step_00000020: Invalid cross-device link; an overlay moves no directory" in err
    monkeypatch.undo()
    copy = shutil.copytree(directory, directory.with_name("copy"))
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "rewind", str(copy), "10"])
    checkpoints.main()
    assert [path.name for path in list_checkpoints(copy / "checkpoints")] == ["step_00000010"]


def test_rewind_refuses_what_would_lose_the_run(directory, run):
    def refused(*arguments):
        status, out, err = run("rewind", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    assert "no checkpoint of step 15; it holds steps 10, 20" in refused(directory, 15)
    assert "needs RUN and the number of a step, and none is given" in refused(directory)
    assert "needs RUN and the number of a step, and 'x' is none" in refused(directory, "x")
    (directory / "checkpoints/step_00000010/rank_00000.safetensors").write_bytes(b"damaged")
    assert "rank_00000.safetensors has 7 bytes" in refused(directory, 10)
    assert len(list_checkpoints(directory / "checkpoints")) == 2
    status, _, err = run("verify", directory, 10)
    assert status == 2 and "verify takes a single run" in err


def test_rewind_refuses_while_the_run_is_training_and_keeps_starts_away_meanwhile(
    directory, run, monkeypatch
):
    with held(directory, "trains"):
        status, out, err = run("rewind", directory, 10)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"error: {directory} is in use: process " in err and " trains in it, since " in err
    assert len(list_checkpoints(directory / "checkpoints")) == 2

    def start_meanwhile(*arguments):
        with pytest.raises(LeaseError, match="rewinds in it, since"), held(directory, "trains"):
            pass

    monkeypatch.setattr("megatron_lite.checkpoint.write.rewind", start_meanwhile)
    assert run("rewind", directory, 10)[0] == 0
    assert not (directory / "LEASE").exists()


def test_the_script_starts_from_a_checkout(directory, tmp_path):
    command = [sys.executable, str(SCRIPT), "list", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stderr
