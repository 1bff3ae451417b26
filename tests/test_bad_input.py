"""Mistakes of a user: one clear line, status 2, no traceback, nothing written, and an answer before torch is loaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import forked
from support.project import ROOT

from data_utils.common.settings import merge


def other_vocabulary(tmp_path, corpus):
    words = (corpus / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(words.replace("word7\n", "sword\n"))
    return {"tokenizer": {"path": str(tmp_path / "vocab.txt")}}


def damaged_corpus(tmp_path, corpus):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(corpus / f"corpus_train{suffix}", tmp_path)
    tokens = bytearray((tmp_path / "corpus_train.bin").read_bytes())
    tokens[len(tokens) // 2] ^= 1
    (tmp_path / "corpus_train.bin").write_bytes(tokens)
    return {"data": {"train": [{"prefix": str(tmp_path / "corpus_train")}]}}


MISTAKES = {
    "missing dataset": (lambda t, c: {"data": {"train": [{"prefix": str(t / "absent")}]}}, "absent"),
    "damaged dataset": (damaged_corpus, "corpus_train.bin is damaged"),
    "no training corpus": (lambda t, c: {"data": {"train": []}}, "data.train is empty"),
    "missing tokenizer": (lambda t, c: {"tokenizer": {"path": str(t / "none.txt")}}, "none.txt"),
    "another tokenizer": (other_vocabulary, "tokenizer"),
    "initial weights": (
        lambda t, c: {"checkpoint": {"initialize_from": str(t / "none")}},
        "none does not exist",
    ),
    "run directory": (
        lambda t, c: {"run": {"directory": str(c / "vocab.txt/run")}},
        "vocab.txt is not a directory; move it away, or choose another run.directory",
    ),
    "deepspeed option": (
        lambda t, c: {"deepspeed": {"zero_optimization": {"reduce_bucket_sise": 1}}},
        "the nearest valid key is deepspeed.zero_optimization.reduce_bucket_size",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_training_is_refused_with_one_line(settings, corpus, tmp_path, kind):
    change, message = MISTAKES[kind]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(merge(settings, change(tmp_path, corpus))))
    done = forked("pretrain_glm.py", "--config", str(config))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    said = [line for line in done.stdout.splitlines() if not line.endswith("; loading libraries")]
    assert said == [] and not Path(settings["run"]["directory"]).exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint", "absent", "--text", "a [MASK]"], "absent does not exist"),
        (["--checkpoint", "absent"], "no text given"),
        (["--checkpoint", "absent", "--text", "a [MASK]", "--text", "plain"], "text 'plain' has no blank"),
        (["--checkpoint", "absent", "--text", "a [MASK]", "--strategy", "best"], "must be one of greedy"),
        (["--checkpoint", "absent", "--input", "absent.txt"], "absent.txt: No such file"),
        (
            ["--checkpoint", "absent", "--strategy", "beam", "--num-beams", "100000"],
            "it must be at least 1 and at most 1024",
        ),
        (
            ["--checkpoint", "absent", "--top-p", "0.9"],
            "top_p is 0.9, but strategy is greedy, which does not use it; set strategy to sample",
        ),
        (["--checkpoint", "absent", "--strategy", "sample", "--num-beams", "8"], "set strategy to beam"),
    ],
)
def test_generation_is_refused_with_one_line(arguments, message):
    done = forked("scripts/generate.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.parametrize(
    "script",
    [path for folder in (".", "scripts", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))
     if "__main__" in path.read_text(encoding="utf-8") and path.stem != "reading"],  # which needs Python alone
    ids=lambda path: path.stem,
)  # fmt: skip
def test_a_python_without_the_requirements_is_answered_in_one_line(script):
    """-S leaves out site-packages: what a Python of the system has."""
    done = subprocess.run([sys.executable, "-S", "-E", str(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    remedy = (
        "activate the environment (source .venv/bin/activate), or install it: pip install -r requirements.txt"
    )
    # These need nothing but Python until they have read their arguments; gpu_day asks the whole Python for its GPUs.
    assert remedy in done.stderr or script.stem in ("gpu_day", "try")


EARLY_MISTAKES = {
    "scripts.generate": ["--checkpoint", "absent", "--text", "a [MASK]"],
    "scripts.quickstart.fill_examples": ["absent"],
    "scripts.checkpoints": ["list", "absent"],
    "scripts.convert_checkpoint": ["export", "--checkpoint", "absent", "--output", "new"],
    "scripts.report": ["absent"],
    "scripts.quickstart.unigram_baseline": ["absent"],
    "scripts.inspect_batch": ["--config", "absent"],
    "scripts.dataset": ["inspect", "absent"],
    "scripts.latent": ["sample", "--checkpoint", "absent"],
    "scripts.analyze": ["heads", "--checkpoint", "absent"],
}
RUN_ALL = """
import importlib, sys
from data_utils.common.errors import UserError
for module, arguments in {}.items():
    sys.argv = [module, *arguments]
    try:
        importlib.import_module(module).main()
    except UserError as error:
        print(module, 'torch' in sys.modules, error)
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("deepspeed.zero_optimisation={}", "unknown setting deepspeed.zero_optimisation"),
        ("tokenizer.path=absent", "absent"),
    ],
)
def test_training_is_refused_before_torch_is_loaded(settings, tmp_path, override, message):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL.format({"pretrain_glm": ["--config", str(config), override]})],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("pretrain_glm False ") and message in done.stdout, done.stderr


def test_mistakes_are_reported_before_torch_is_loaded(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL.format(EARLY_MISTAKES)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(EARLY_MISTAKES), done.stderr
    assert all(loaded == "False" and "absent" in message for _, loaded, message in lines), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_an_earlier_run_as_it_is(settings, tmp_path):
    run_directory = Path(settings["run"]["directory"])
    (run_directory / "checkpoints").mkdir(parents=True)
    (run_directory / "checkpoints/step_00000001").mkdir()  # no checkpoint: it has no manifest
    (run_directory / "config.yaml").write_text("earlier: 1")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    done = forked("pretrain_glm.py", "--config", str(config))
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert (run_directory / "config.yaml").read_text() == "earlier: 1"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "the launcher is ''; it must be deepspeed or torchrun"),
        (["mpirun"], {}, "the launcher is 'mpirun'"),
        (["deepspeed"], {}, "HOSTFILE is not set; it is the file"),
        (["torchrun"], {"NUM_NODES": "1", "RANKS_PER_NODE": "1"}, "NODE_RANK is not set; it is the number"),
        (
            ["torchrun"],
            dict.fromkeys(["NUM_NODES", "RANKS_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"], "1"),
            "there is no Python at /absent; set PYTHON",
        ),
    ],
)
def test_the_launcher_of_a_node_says_what_it_lacks(arguments, variables, message):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/launch_node.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "PYTHON": "/absent", **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
