"""The commands of the documents: the settings of each are accepted, and those of the tutorial run as written."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from support.project import ROOT

from data_utils.base.settings import merge
from megatron_lite.config.tree import load_config

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks/README.md"]
# First words of commands, and where they run.
RUN = {
    "bash scripts/quickstart.sh": ".ci/run, with --smoke",
    "bash scripts/test.sh": ".ci/run",
    "bash .ci/run": "continuous integration itself",
    "make": "the commands of .ci/run",
    "python scripts/train_tokenizer.py": "the tutorial below; tests/scripts",
    "python scripts/preprocess_data.py": "the tutorial below; tests/scripts",
    "python scripts/dataset.py": "the tutorial below; tests/scripts",
    "python scripts/inspect_batch.py": "the tutorial below; tests/scripts",
    "python scripts/generate.py": "the tutorial below; tests/scripts",
    "python scripts/report.py": "tests/report",
    "python scripts/plot_metrics.py": "the tutorial below; tests/scripts",
    "python scripts/convert_checkpoint.py": "the tutorial below; tests/hf",
    "python scripts/checkpoints.py": "tests/scripts",
    "python scripts/heartbeats.py": "tests/train/test_watchdog.py",
    "python scripts/profile_step.py": "tests/profile",
    "python pretrain_glm.py": "the tutorial below; its settings are read below",
    "deepspeed": "tests/train/test_launcher.py; its settings are read below",
    "mpirun": "tests/data/build, with --mpi",
    "sbatch": "tests/train/test_slurm.py",
    "bash scripts/launch_node.sh": "tests/train/test_slurm.py",
    "python benchmarks/": "tests/test_benchmarks.py",
    "python tests/support/parity.py": "tests/train/test_parity.py",
    "python -m pytest": "this",
    "python -m mkdocs": "tests/test_site.py",
    "diff": "its two commands are python pretrain_glm.py",
    # What no test can run: they install, ask for an account, or need SLURM's own step.
    "pip install": "",
    "wandb login": "",
    "srun": "",
    "docker": "",
}


def commands(page, languages=("bash", "sh", "")):
    """The commands in the blocks of a page, continued lines joined, comments and assignments before them left out."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        if language in languages:
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            found += [re.sub(r"^(\w+=\S+\s+)+", "", line.partition("  #")[0].strip()) for line in lines]
    starts = (
        "python ",
        "deepspeed ",
        "bash ",
        "make ",
        "pip ",
        "wandb ",
        "mpirun ",
        "srun ",
        "sbatch ",
        "diff ",
        "docker ",
    )
    return [line for line in found if line.startswith(starts)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_it_is_known_where_each_command_runs(page):
    unknown = [line for line in commands(page) if not line.startswith(tuple(RUN))]
    assert unknown == []


def test_commands_are_found():
    found = [line for page in PAGES for line in commands(page)]
    assert len(found) > 60
    assert [start for start in RUN if not any(line.startswith(start) for line in found)] == []


def training_commands():
    found = [(page, line) for page in PAGES for line in commands(page)]
    return [
        pytest.param(line, id=f"{page.stem}-{i}")
        for i, (page, line) in enumerate(found)
        if re.match(r"(python|deepspeed .*?)\s?pretrain_glm\.py", line) and "--config runs/" not in line
    ]


@pytest.mark.parametrize("line", training_commands())
def test_settings_of_a_documented_start_are_accepted(line):
    words = shlex.split(line.partition("pretrain_glm.py")[2])
    files = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
    overrides = [word for word in words if re.match(r"[a-z][\w.]*=", word) and "..." not in word]
    assert load_config([ROOT / file for file in files], overrides).training.steps > 0


@pytest.fixture
def scratch(tmp_path):
    """A directory where the tutorial's commands find what they name, with text and a model that trains in seconds."""
    for name in ("scripts", "data_utils", "megatron_lite", "pretrain_glm.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    small = yaml.safe_load((tmp_path / "configs/small.yaml").read_text())
    tiny = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
        "batch": {"micro_batch_size": 2, "global_batch_size": 4},
        "training": {"steps": 12, "precision": "fp32", "eval_interval": 6, "eval_samples": 8},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"save_interval": 0},
        "run": {"log_interval": 4},
    }
    (tmp_path / "configs/small.yaml").write_text(yaml.safe_dump(merge(small, tiny)))
    (tmp_path / "raw").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path / "raw" / f"{page.stem}.txt")
    return tmp_path


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(scratch):
    """Its commands and its Python, in order, with smaller numbers in configs/small.yaml."""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) >= 8
    bin = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = str(scratch / "cache")
    for language, block in blocks:
        command = ["bash", "-e", "-c", block] if language == "bash" else [sys.executable, "-c", block]
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-3000:])
    assert (scratch / "runs/small/loss.png").stat().st_size > 1000
    assert (scratch / "small-hf/model.safetensors").exists() and (scratch / "runs/continued").is_dir()
