"""scripts/checkpoints.py as a user runs it."""

import subprocess
import sys

import pytest
import torch
from support.project import ROOT
from support.stub_engine import StubEngine
from support.whole_weights import load_weights

from megatron_lite.checkpoint.existing import read_checkpoint
from megatron_lite.checkpoint.manifest import list_checkpoints, rewinds
from megatron_lite.checkpoint.merge import shares_of
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


def test_merge_writes_the_weighted_mean(directory, run, tmp_path):
    output = tmp_path / "merged"
    status, out, err = run("merge", directory, 20, 10, "--weights", "0.3,0.7", "--output", output)
    assert status == 0, err
    assert out.splitlines()[0].split() == ["0.3000", str(directory / "checkpoints/step_00000010")]
    (path,) = list_checkpoints(output / "checkpoints")
    merged = read_checkpoint(path)
    assert merged.step == 20 and {piece.kind for piece in merged.pieces} == {"weight"}
    one, two = (load_weights(read_checkpoint(each)) for each in list_checkpoints(directory / "checkpoints"))
    for name, weight in load_weights(merged).items():
        exact = 0.3 * one[name].double() + 0.7 * two[name].double()
        assert torch.equal(weight, exact.float())  # rounded once
    assert run("verify", output)[0] == 0


def test_shares_are_those_of_a_decay():
    """With factors f on the changes between checkpoints: 1, f_1, ..., f_k, where the last is 0."""
    assert shares_of("mean", 4) == [0.25] * 4
    assert shares_of("linear", 6) == pytest.approx([0.2] * 5 + [0])
    assert shares_of("1-sqrt", 6) == pytest.approx([0.4472, 0.1852, 0.1421, 0.1198, 0.1056, 0], abs=1e-4)
    for name, factors in (
        ("linear", [1, 2 / 3, 1 / 3, 0]),
        ("1-sqrt", [1, 1 - 3**-0.5, 1 - (2 / 3) ** 0.5, 0]),
    ):
        weights = torch.tensor([3.0, 4.5, 4.0, 7.0], dtype=torch.float64)
        decayed = weights[0] + (weights.diff() * torch.tensor(factors[1:], dtype=torch.float64)).sum()
        merged = (weights * torch.tensor(shares_of(name, 4), dtype=torch.float64)).sum()
        assert merged.item() == pytest.approx(decayed.item(), rel=1e-12)


def test_merge_refuses_what_has_no_mean(directory, run, tmp_path):
    def refused(*arguments):
        status, out, err = run("merge", *arguments)
        assert status == 2 and out == "" and err.count("\n") == 1, err
        return err

    output = "--output", tmp_path / "merged"
    assert "merge takes --output" in refused(directory, 10, 20)
    assert "two or more different ones" in refused(directory, 10, *output)
    assert "two or more different ones" in refused(directory, 10, 10, *output)
    assert "must be mean, linear, 1-sqrt" in refused(directory, 10, 20, "--weights", "cosine", *output)
    assert "2 numbers with the sum 0.9" in refused(directory, 10, 20, "--weights", "0.3,0.6", *output)
    assert "exists; name a new directory" in refused(directory, 10, 20, "--output", tmp_path)
    assert "step_00000030" in refused(directory, 10, 30, *output)
    assert not (tmp_path / "merged").exists()
    other = StubEngine()
    state = {"config": {"tokenizer": {"path": "other"}}}
    save_checkpoint(tmp_path / "other/checkpoints", 20, other, state, ParallelContext.alone())
    assert "of another tokenizer" in refused(directory, tmp_path / "other", *output)


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
