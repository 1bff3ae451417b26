"""A run as a user has it in a shell: started, killed, its directory lost, renamed, full; and the same command again.

Only what the checkout has for users is used.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, forked
from support.project import ROOT, small_run

# The same entry point, which kills itself where the first checkpoint would begin to be written.
DIES = """
import os, runpy, signal, sys
made = os.mkdir
def mkdir(path, *arguments, **options):
    if str(path).endswith(".partial"):
        os.kill(os.getpid(), signal.SIGKILL)
    made(path, *arguments, **options)
os.mkdir = mkdir
sys.argv[0] = sys.argv[1]
del sys.argv[1]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Shell:
    """A home with a blank in its name, a folder in it, and the command that trains there with relative paths."""

    options = ("--config", "~/some folder/my config.yaml")

    def __init__(self, root: Path, corpus: Path):
        self.home, self.folder = root / "my home", root / "my home/some folder"
        self.folder.mkdir(parents=True)
        shutil.copytree(corpus, self.folder / "the corpus")
        self.run = self.home / "my runs/first run"
        tree = small_run(Path("the corpus"), Path("~/my runs/first run"))
        tree["tokenizer"]["path"] = "~/some folder/the corpus/vocab.txt"
        tree["training"]["steps"], tree["schedule"] = 2, {"warmup_steps": 0}
        (self.folder / "my config.yaml").write_text(yaml.safe_dump(tree))

    def start(self, *overrides: str, folder: Path | None = None):
        return forked(
            "pretrain_glm.py", *self.options, *overrides, cwd=folder or self.folder, HOME=str(self.home)
        )

    def start_anew(self, *, wrapped: tuple[str, ...] = (), **options):
        """In a new process. Args: wrapped: what Python is given before the entry point."""
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        command = [sys.executable, *wrapped, str(ROOT / "pretrain_glm.py"), *self.options]
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**environment, "HOME": str(self.home)},
            capture_output=True,
            text=True,
            **options,
        )

    def records(self, kind):
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [record["step"] for record in lines if record["kind"] == kind]


def refused(done, *parts):
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


def listing(directory):
    return {path: path.lstat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def killed(corpus, tmp_path_factory):
    """A shell whose run was killed between `mkdir checkpoints` and the first `.partial`."""
    shell = Shell(tmp_path_factory.mktemp("shell"), corpus)
    done = shell.start_anew(wrapped=("-c", DIES))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((shell.run / "checkpoints").iterdir()) == [] and shell.records("train") == [1, 2]
    assert not (shell.folder / "~").exists() and not (ROOT / "~").exists()
    return shell


@pytest.fixture(scope="module")
def finished(killed):
    """The same command again, with exit status 0."""
    done = killed.start()
    assert done.returncode == 0, done.stdout + done.stderr
    killed.said = done.stdout
    return killed


@pytest.mark.slow
def test_a_run_that_was_killed_at_its_first_save_starts_again(finished):
    assert (
        "the records of an earlier start are in" in finished.said
        and "finished at step 2 of 2" in finished.said
    )
    assert finished.records("train") == [1, 2] and finished.records("checkpoint") == [2]
    assert len(list(finished.run.glob("metrics_before_*.jsonl"))) == 1
    assert (finished.run / "checkpoints/step_00000002/manifest.json").exists()


def test_a_finished_run_says_so_also_from_another_folder(finished):
    corpus = finished.folder / "the corpus/corpus"
    again = finished.start(
        f"data.train=[{{prefix: '{corpus}_train'}}]", f"data.validation=[{{prefix: '{corpus}_validation'}}]",
        "parallel.zero_stage=2", "training.eval_samples=8", folder=finished.home,
    )  # fmt: skip
    assert again.returncode == 0 and again.stderr == "", again.stderr
    assert again.stdout.count("\n") == 1 and "nothing to do: the newest checkpoint of" in again.stdout


def test_settings_of_another_run_are_refused(finished):
    before = listing(finished.run)
    others = {
        "optimizer.lr=1e-4": "optimizer.lr: 0.003 -> 0.0001",
        "model.num_layers=3": "model.num_layers: 2 -> 3",
        "training.seed=8": "training.seed: 7 -> 8",
        "data.train=[{prefix: the corpus/corpus_validation}]": "the corpus/corpus_validation",
    }
    refused(
        finished.start(*others),
        *list(others.values())[:2],
        "so the new ones would train nothing",
    )
    for setting, message in list(others.items())[2:]:
        refused(
            finished.start(setting),
            message,
            "Choose another run.directory, or the settings of its config.yaml",
        )
    assert listing(finished.run) == before


def broken(shell, change, *parts):
    """Refused in one line, nothing changed; put back, the run is as before."""
    aside = shell.home / "aside"
    checkpoints = shell.run / "checkpoints"
    checkpoints.rename(aside)
    try:
        change(checkpoints)
        before = listing(shell.run)
        refused(shell.start(), *parts)
        assert listing(shell.run) == before
    finally:
        if checkpoints.is_symlink() or checkpoints.is_file():
            checkpoints.unlink()
        elif checkpoints.exists():
            shutil.rmtree(checkpoints)
        aside.rename(checkpoints)


def test_lost_checkpoints_are_refused(finished):
    message = "metrics.jsonl records a save, but"
    broken(finished, lambda path: None, message, "restore the checkpoints")
    broken(
        finished,
        lambda path: path.symlink_to("/nowhere/checkpoints"),
        "link to /nowhere/checkpoints",
        "mount",
    )


def test_a_dollar_is_refused(finished):
    refused(finished.start("run.directory=$HOME/x"), "run.directory is '$HOME/x', but $ is not expanded")


# The same entry point as nobody, once its modules are loaded: an installation may be its user's alone.
AS_NOBODY = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import data_utils.objectives.blank_infilling
import pretrain_glm
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.argv[0] = sys.argv.pop(1)
pretrain_glm.command()
"""


def test_another_user_is_refused(finished):
    """A run that its user may not read, in a directory that everyone may enter."""
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        config = root / "config.yaml"
        config.write_text((finished.folder / "my config.yaml").read_text())
        run = shutil.copytree(finished.run, root / "run")
        run.chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, str(ROOT / "pretrain_glm.py"), "--config", str(config)]
        done = subprocess.run([*command, f"run.directory={run}"], cwd=root, capture_output=True, text=True)
        refused(done, "Permission denied; change its permissions, or choose another run.directory")
    finally:
        (root / "run").chmod(0o700)
        shutil.rmtree(root)


@pytest.mark.slow
def test_a_full_disk_at_the_first_save(corpus, tmp_path):
    """A limit of the size of files stands for the disk: every write beyond it fails."""
    shell = Shell(tmp_path, corpus)

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = shell.start_anew(preexec_fn=small_files)
    assert done.returncode == 2 and "could not be saved; there is no checkpoint" in done.stderr, done.stderr
    done = shell.start()
    assert done.returncode == 0 and shell.records("checkpoint") == [2], done.stdout + done.stderr


@pytest.mark.slow
def test_a_renamed_checkpoint_and_a_damaged_last_one_are_not_taken(corpus, tmp_path):
    shell = Shell(tmp_path, corpus)
    options = ("checkpoint.save_interval=1", "checkpoint.keep_last=0")
    assert shell.start(*options).returncode == 0
    checkpoints = shell.run / "checkpoints"
    (checkpoints / "step_00000001").rename(checkpoints / "step_00000039")
    done = shell.start("training.steps=3", *options)
    assert done.returncode == 0 and "rename it to step_00000001" in done.stdout, done.stdout
    assert shell.records("train") == [1, 2, 3]
    (checkpoints / "step_00000039").rename(checkpoints / "step_00000001")
    file = checkpoints / "step_00000003/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    done = shell.start("training.steps=3", *options)
    assert done.returncode == 0 and "does not match its checksum" in done.stdout, done.stdout
    assert shell.records("train") == [1, 2, 3, 3] and "nothing to do" not in done.stdout
