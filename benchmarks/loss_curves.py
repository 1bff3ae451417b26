#!/usr/bin/env python3
"""Losses of short fp32 runs to the last bit, to show that a change of the code changes no number.

    python benchmarks/loss_curves.py --output before.json [--project CHECKOUT]
    python benchmarks/loss_curves.py --output after.json --compare before.json

Trains 20 steps each of configs/tiny.yaml's model, GLM on 2 x 2 tensor- and pipeline-parallel ranks with dropout, BERT
and XLNet, on a corpus of words drawn with a fixed seed, through the commands of the checkout that --project names.
Records the loss of every step and the commit; with --compare the exit status is 1 unless all losses are equal. Compare
runs of one machine with one number of threads: sums of other kernels differ in the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np

from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_writable

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
WORDS = [f"word{i}" for i in range(200)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": "null"}
# The corpus is made with GLM's tokens, for all runs alike.
PUBLISHED = {**{f"model.{name}": value for name, value in SMALL.items()}, "tokenizer.added_tokens": "glm"}
# name -> (processes, configuration file, settings on top)
RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tiny": (1, "tiny.yaml", {"model.max_position": 128}),
    "glm tp2 x pp2": (
        4,
        "glm-base.yaml",
        {
            **{f"model.{name}": value for name, value in SMALL.items()},
            "parallel.tensor_parallel_size": 2,
            "parallel.pipeline_parallel_size": 2,
            "blank_infilling.token_prob": 0.5,
        },
    ),
    "bert": (1, "bert-base.yaml", {**PUBLISHED, "phases": "[]"}),
    "xlnet": (1, "xlnet-large.yaml", PUBLISHED),
}


def make_corpus(project: Path, work: Path) -> None:
    """vocab.txt and the datasets corpus_train, corpus_validation in `work`, with the project's own command."""
    (work / "vocab.txt").write_text("\n".join([*SPECIAL, ".", *WORDS]) + "\n")
    rng = np.random.default_rng(0)
    with (work / "text.jsonl").open("w") as file:
        for length in rng.integers(1, 300, 1000):
            words = rng.choice(WORDS, length)
            words[rng.random(length) < 0.1] = "."
            file.write(json.dumps({"text": " ".join([*words, "."])}) + "\n")
    command = [sys.executable, "scripts/preprocess_data.py", "--input", str(work / "text.jsonl")]
    command += ["--output", str(work / "corpus"), "--split", "train=0.9,validation=0.1"]
    command += ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", str(work / "vocab.txt")]
    subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)


def settings_of(work: Path, run: Path, name: str) -> dict[str, Any]:
    """Settings of a run on top of its file."""
    return {
        "tokenizer.kind": "bert_wordpiece",
        "tokenizer.path": work / "vocab.txt",
        "data.train": f"[{{prefix: {work / 'corpus_train'}}}]",
        "data.validation": "[]",
        "data.sequence_length": 128,
        "batch.micro_batch_size": 4,
        "batch.global_batch_size": 8,
        "training.precision": "fp32",
        "training.steps": STEPS,
        "schedule.warmup_steps": 5,
        "schedule.decay_steps": STEPS,
        "run.log_interval": 1,
        "run.tensorboard": "false",
        "run.peak_tflops": 1,
        "run.directory": run,
        **RUNS[name][2],
    }


def losses(project: Path, work: Path, name: str) -> list[float]:
    """The loss of every step of a run that is made now, or was made before in `work`."""
    processes, file, _ = RUNS[name]
    run = work / name.replace(" ", "_")
    settings = settings_of(work, run, name)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    command = [*(launcher if processes > 1 else [sys.executable]), "pretrain_glm.py"]
    command += ["--config", f"configs/{file}", *(f"{key}={value}" for key, value in settings.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise DataError(f"the run {name} ended with status {done.returncode}; its last words: {output}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def commit_of(project: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True).stdout.strip() or "unknown"


def read_record(path: Path) -> dict[str, Any]:
    """An earlier --output. Raises DataError."""
    try:
        record = json.loads(path.read_text())
        return {"commit": record["commit"], "losses": record["losses"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"--compare {path} is not a file that --output wrote; give one.") from None


def differences(before: dict[str, list[float]], after: dict[str, list[float]]) -> list[str]:
    """One line for each run of which a loss differs, or that only one of them has."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, []), after.get(name, [])
        if old != new:
            pairs = enumerate(zip(old, new, strict=False), start=1)
            first = next((f"step {n}: {x!r} and {y!r}" for n, (x, y) in pairs if x != y), "their lengths")
            lines.append(f"{name} differs, first in {first}")
    return lines


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the losses")
    parser.add_argument("--project", type=Path, default=ROOT, help="the checkout to run; this one by default")
    parser.add_argument("--compare", type=Path, help="an earlier --output")
    parser.add_argument(
        "--work", type=Path, help="directory that keeps corpus and runs; else a temporary one"
    )
    arguments = parser.parse_args()
    project = arguments.project.resolve()
    require_writable(arguments.output, "--output")
    before = None if arguments.compare is None else read_record(arguments.compare)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        make_corpus(project, work)
        curves = {}
        for name in RUNS:
            curves[name] = losses(project, work, name)
            print(f"{name}: {len(curves[name])} steps, last loss {curves[name][-1]!r}", flush=True)
    record = {"commit": commit_of(project), "losses": curves}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    if before is None:
        return 0
    lines = differences(before["losses"], curves)
    print("\n".join(lines) or f"{record['commit']} equals {before['commit']} in every loss")
    return 1 if lines else 0


if __name__ == "__main__":
    run_command(main)
