#!/usr/bin/env python3
"""Train every objective for some steps with the real launcher and compare it with a unigram model of its targets.

    python benchmarks/objectives.py [--quickstart DIRECTORY] [--objective NAME ...] [--layout NAME ...] [--steps N]

Takes tokenizer and corpora that scripts/quickstart.sh made. The model is small (2 blocks of 96) and gets whatever head
and embedding the objective asks for. Prints a Markdown table: validation loss of each layout, nats per predicted token,
with the unigram model's; exit status 1 if a loss is not below it. (Sentence-level labels are shown but do not decide:
guessing costs ln 2 = 0.693 nats, and telling neighbours apart takes longer than these runs.)
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import yaml
from tqdm import tqdm

from benchmarks.arguments import check_at_least
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.objectives import OBJECTIVES, SENTENCE_LEVEL
from megatron_lite.config.tree import load_config
from megatron_lite.metrics.records import last_validation
from scripts.quickstart.unigram_baseline import unigram_losses

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {
    "DP1": (1, {}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "PP2": (2, {"pipeline_parallel_size": 2}),
}
# What a recipe adds to the model; ALBERT's shared layers allow no pipeline and have tests of their own.
ADDITIONS: dict[str, dict[str, Any]] = {
    "masked_lm": {"model": {"sentence_classes": 2, "segments": 2}, "masked_lm": {"next_sentence": True}},
    "spanbert": {"model": {"span_boundary_places": 20}},
    "albert": {"model": {"sentence_classes": 2, "segments": 2, "embedding_size": 64}},
    "unilm": {"model": {"sentence_classes": 2, "segments": 6}},
    "ernie": {"model": {"task_types": 64}},
}


def configuration(
    name: str, quickstart: Path, steps: int, parallel: dict[str, Any], run: Path
) -> dict[str, Any]:
    """A configuration tree."""
    additions = ADDITIONS.get(name, {})
    dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "output_dropout"), 0.0)
    sizes = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "max_position": 140}
    return {
        **additions,
        "model": {**sizes, **dropout, **additions.get("model", {})},
        "tokenizer": {"kind": "hf_json", "path": str(quickstart / "tokenizer/tokenizer.json")},
        "data": {
            "train": [{"prefix": str(quickstart / "data/corpus_train")}],
            "validation": [{"prefix": str(quickstart / "data/corpus_validation")}],
            "sequence_length": 128,
        },
        "objectives": {name: 1},
        "parallel": parallel,
        "batch": {"micro_batch_size": 8, "global_batch_size": 16},
        "optimizer": {"lr": 4e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 20},
        "training": {
            "steps": steps,
            "eval_interval": steps,
            "eval_samples": 128,
            "loss_normalization": "per_objective"
            if additions.get("model", {}).get("sentence_classes")
            else "global_tokens",
        },
        "checkpoint": {"save_interval": 0},
        "run": {"directory": str(run), "log_interval": 50, "tensorboard": False, "peak_tflops": 1.0},
    }


def train(name: str, layout: str, quickstart: Path, steps: int, directory: Path) -> tuple[Path, float]:
    """Run the launcher; returns the configuration file and the seconds it took. Raises DataError if the run fails."""
    processes, parallel = LAYOUTS[layout]
    run = directory / f"{name}-{layout}"
    file = directory / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(configuration(name, quickstart, steps, parallel, run)), encoding="utf-8")
    with socket.socket() as probe:  # not the launcher's own port, on which another run may listen
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes)]
    command += ["--master_port", str(port)]
    command += [str(ROOT / "pretrain_glm.py"), "--config", str(file)]
    start = time.perf_counter()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise DataError(
            f"{name} in layout {layout} failed: {' '.join((result.stdout + result.stderr).split())[-800:]}"
        )
    return file, time.perf_counter() - start


def rows_of(name: str, layouts: list[str], quickstart: Path, steps: int, directory: Path, progress: tqdm):
    """[(loss, unigram, {layout: model's}, is judged)] of one objective, and seconds by layout."""
    found, seconds, unigram = {}, {}, {}
    for layout in layouts:
        progress.set_postfix_str(f"{name} {layout}")
        file, seconds[layout] = train(name, layout, quickstart, steps, directory)
        found[layout] = last_validation(directory / f"{name}-{layout}")
        unigram = unigram or unigram_losses(load_config([file]))
        progress.update()
    rows = []
    for key in (key for key in unigram if key.startswith("loss/")):
        loss = key.removeprefix("loss/")
        rows.append((loss, unigram[key], {la: found[la][key] for la in layouts}, loss not in SENTENCE_LEVEL))
    return rows, seconds


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quickstart", type=Path, default=ROOT / "quickstart", help="directory of scripts/quickstart.sh"
    )
    parser.add_argument("--objective", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    check_at_least(args, 1, "steps")
    if not (args.quickstart / "tokenizer/tokenizer.json").exists():
        raise DataError(f"{args.quickstart} holds no tokenizer and corpora; run scripts/quickstart.sh first.")
    print(f"| objective | loss | unigram | {' | '.join(args.layout)} | seconds |")
    print("|---|---|---" + "|---" * len(args.layout) + "|---|", flush=True)
    all_below = True
    with (
        tempfile.TemporaryDirectory() as directory,
        tqdm(total=len(args.objective) * len(args.layout), disable=None) as progress,
    ):
        for name in args.objective:
            rows, seconds = rows_of(
                name, args.layout, args.quickstart.resolve(), args.steps, Path(directory), progress
            )
            for loss, unigram, models, judged in rows:
                values = " | ".join(f"{models[layout]:.3f}" for layout in args.layout)
                took = ", ".join(f"{seconds[layout]:.0f}" for layout in args.layout)
                print(f"| {name} | {loss} | {unigram:.3f} | {values} | {took} |", flush=True)
                all_below &= not judged or all(value < unigram for value in models.values())
    return 0 if all_below else 1


if __name__ == "__main__":
    run_command(main)
