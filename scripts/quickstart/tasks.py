"""Train two tasks whose best possible score is known: one by recall from nothing, one from a run and from nothing.

    python -m scripts.quickstart.tasks RUN_DIRECTORY OUTPUT

  recall  of two keys with a word each, the word of the key that is named again (recall.yaml beside this file). A 5-gram
          model of the same samples has not seen the words that it must repeat.
  votes   the majority of five words, each right with probability 0.7 (configs/tasks/noisy_votes.yaml), from the run and
          from initial weights of the same model

Prints one table, and writes it to OUTPUT/tasks.txt. Scores are of samples that no model was trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_directory, write_whole
from data_utils.common.setting_files import load_yaml
from data_utils.tasks.readers.synthetic import optimum, parsed, samples, synthetic_vocabulary
from scripts.quickstart.ngram import NGram

ROOT = Path(__file__).resolve().parents[2]
RECALL, VOTES = Path(__file__).with_name("recall.yaml"), ROOT / "configs/tasks/noisy_votes.yaml"
RIGHT = ("accuracy", "exact_match")  # the share of right answers, of a class or of words
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    require_directory(args.run, "give the directory of a run that has begun")
    args.output.mkdir(parents=True, exist_ok=True)
    vocabulary = args.output / "vocab.txt"
    write_whole(
        vocabulary, "".join(f"{w}\n" for w in [*_SPECIAL, *synthetic_vocabulary()]).encode(), "OUTPUT"
    )
    train, validation = _files(RECALL)
    votes = [f"task.train={_files(VOTES)[0]}", "optimizer.lr=1e-3", "finetune.epochs=2"]
    if args.smoke:
        train, votes[0] = "recall:pairs=2,samples=64,seed=1", "task.train=noisy_votes:samples=32,seed=1"
    runs = {
        "recall": [
            "--config",
            RECALL,
            "--task",
            RECALL,
            f"tokenizer.path={vocabulary}",
            f"task.train={train}",
        ],
        "votes": ["--checkpoint", args.run, "--task", VOTES, *votes],
        "votes_from_nothing": ["--config", args.run / "config.yaml", "--task", VOTES, *votes],
    }
    with ThreadPoolExecutor(2) as pool:  # of two cores
        scores = dict(
            zip(runs, pool.map(lambda name: _tuned(args.output / name, runs[name]), runs), strict=True)
        )
    shown = table(scores, ngram_recall(train, validation))
    write_whole(args.output / "tasks.txt", (shown + "\n").encode(), "OUTPUT")
    print(shown)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="a run of pretrain_glm.py")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory for the runs of the tasks")
    parser.add_argument("--smoke", action="store_true", help="few samples: checks that everything works")
    return parser.parse_args(arguments)


def _tuned(output: Path, arguments: Sequence[object]) -> float:
    """The share of right answers after scripts/finetune.py. Raises DataError with its last lines where it fails."""
    command = [
        sys.executable,
        ROOT / "scripts/finetune.py",
        "--output",
        output,
        *arguments,
        "run.tensorboard=false",
    ]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise DataError(f"training in {output} ended with status {done.returncode}: {done.stdout[-2000:]}")
    (found,) = json.loads((output / "results.json").read_text(encoding="utf-8"))["files"].values()
    (score,) = (found["mean"][name] for name in RIGHT if name in found["mean"])
    return float(score)


def ngram_recall(train: str, validation: str) -> float:
    """The share of last words that a 5-gram model finds likeliest. Args: descriptions, as `task.train`."""
    numbers = {word: number for number, word in enumerate(synthetic_vocabulary())}
    learnt, asked = (
        [_numbers(f"{fields['source']} {word}", numbers) for fields, word in samples(parsed(text))]
        for text in (train, validation)
    )
    model = NGram(np.concatenate(learnt), len(numbers))
    return float(np.mean([model.filled(text[:-1], 1) == text[-1:] for text in asked]))


def _numbers(text: str, numbers: Mapping[str, int]) -> list[int]:
    return [numbers[word] for word in text.split()]


def table(scores: Mapping[str, float], ngram: float) -> str:
    """Each task with its score, the best possible one, and another to compare it with."""
    best = {path: max(optimum(_files(path)[1]).values()) for path in (RECALL, VOTES)}
    rows = (
        ("the word of one of two keys, from nothing", scores["recall"], best[RECALL], f"5-gram {ngram:.3f}"),
        ("the majority of five words, from the run", scores["votes"], best[VOTES], "chance 0.500"),
        ("the same from nothing", scores["votes_from_nothing"], best[VOTES], "chance 0.500"),
    )
    lines = [f"{'':43}{'right':>7}{'best possible':>16}{'beside it':>16}"]
    return "\n".join(
        lines + [f"{name:43}{right:>7.3f}{most:>16.3f}{other:>16}" for name, right, most, other in rows]
    )


def _files(path: Path) -> tuple[str, str]:
    """The training and the validation samples of a task's file."""
    task = load_yaml(path)["task"]
    return task["train"], task["validation"][0]


if __name__ == "__main__":
    run_command(main)
