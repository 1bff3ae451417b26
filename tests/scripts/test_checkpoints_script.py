"""scripts/checkpoints.py as a user runs it."""

import subprocess
import sys

import pytest
from support.project import ROOT
from support.stub_engine import StubEngine

from megatron_lite.checkpoint.manifest import list_checkpoints, rewinds
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.guard.lease import LeaseError, held
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


def test_damage_is_told_apart_from_a_wrong_command(directory, run, tmp_path):
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
        assert status == 2 and err.startswith("error: ") and "holds no checkpoint" in err


def test_rewind_sets_newer_checkpoints_aside(directory, run):
    checkpoints = directory / "checkpoints"
    (checkpoints / "step_00000020").rename(checkpoints / "step_00000020.replaced")  # left by a kill
    status, out, _ = run("rewind", directory, 10)
    (aside,) = checkpoints.glob("rewound_*")
    assert status == 0 and f"continues from step 10; 1 newer checkpoints are in {aside}" in out
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step_00000010"]
    assert run("verify", aside)[0] == 0  # whole, for another time
    status, out, _ = run("rewind", directory, 10)
    assert status == 0 and "is the newest already" in out
    assert list(rewinds(checkpoints)) == [(aside, 20)]


def test_rewind_refuses_what_would_lose_the_run(directory, run):
    def refused(*arguments):
        status, out, err = run("rewind", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    assert "no checkpoint of step 15; it holds those of steps 10, 20" in refused(directory, 15)
    assert "rewind takes RUN and STEP" in refused(directory)
    (directory / "checkpoints/step_00000010/rank_00000.safetensors").write_bytes(b"damaged")
    assert "rank_00000.safetensors has 7 bytes" in refused(directory, 10)
    assert len(list_checkpoints(directory / "checkpoints")) == 2
    status, _, err = run("verify", directory, 10)
    assert status == 2 and "verify takes no STEP" in err


def test_rewind_refuses_while_the_run_is_training_and_keeps_starts_away_meanwhile(
    directory, run, monkeypatch
):
    with held(directory, "trains"):
        status, out, err = run("rewind", directory, 10)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"error: {directory} is in use: process " in err and " trains in it since " in err
    assert len(list_checkpoints(directory / "checkpoints")) == 2

    def start_meanwhile(*arguments):
        with pytest.raises(LeaseError, match="rewinds in it since"), held(directory, "trains"):
            pass

    monkeypatch.setattr("megatron_lite.checkpoint.write.rewind", start_meanwhile)
    assert run("rewind", directory, 10)[0] == 0
    assert not (directory / "LEASE").exists()


def test_the_script_starts_from_a_checkout(directory, tmp_path):
    command = [sys.executable, str(SCRIPT), "list", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stderr
