#!/usr/bin/env python3
"""Recall over distance: a model that goes on with longer texts, with the rotary base that it had and with a larger one.

    python benchmarks/long_context.py --work DIR --json long_context.json

A text is fillers and pairs of a key and its value, such as `k7 k7v3`, in random order; a key has one value in a text. A
small ModernBERT learns masked tokens of short texts, then of texts eight times as long, once with the rotary base
--base in its global layers and once with --raised; samples, masks, rates and tokens of a batch are equal, and the local
layer keeps its base. Then the exported models read long texts in transformers. One value is masked, and its key has it
at one other place, at each distance; the likeliest token is right or not. A model that knows the key alone is right in
one of four. Everything goes through the project's commands and lies below --work; the same command goes on after an
interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import yaml

from benchmarks.arguments import check_at_least, write_json
from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import require_writable, write_whole
from megatron_lite.telemetry.version import describe, program

ROOT = Path(__file__).resolve().parents[1]
KEYS, VALUES, FILLERS, PLACES = 16, 4, 4, 4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK = (SPECIAL.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
FIRST_FILLER = len(SPECIAL)
FIRST_KEY = FIRST_FILLER + FILLERS
FIRST_VALUE = FIRST_KEY + KEYS
SHORT = 128
LENGTHS = {"short": SHORT, "long": 8 * SHORT}
BORDER = 4  # positions that a document costs besides its tokens: so each is a whole sample
DISTANCES = (16, 32, 64, 128, 256, 512, 896)


def vocabulary() -> list[str]:
    """The tokens: special ones, fillers, keys, and the values of each key."""
    keys = [f"k{key}" for key in range(KEYS)]
    values = [f"{key}v{value}" for key in keys for value in range(VALUES)]
    return [*SPECIAL, *(f"w{filler}" for filler in range(FILLERS)), *keys, *values]


def text(rng: np.random.Generator, length: int, distance: int | None = None) -> tuple[list[int], int]:
    """A text of `length` tokens, and where its last value of the first key is.

    Args: distance: from this value to the only other one of its key; None: the key has PLACES values anywhere, as
        others have.
    """
    keys = rng.permutation(KEYS)[: length // 10]
    values = rng.integers(VALUES, size=KEYS)

    def pair(key: int) -> list[int]:
        return [FIRST_KEY + key, FIRST_VALUE + VALUES * key + values[key]]

    paired = np.repeat(keys if distance is None else keys[1:], PLACES)
    rest = length - 2 * len(paired) - (0 if distance is None else 4)
    units = [pair(key) for key in paired] + [
        [FIRST_FILLER + each] for each in rng.integers(FILLERS, size=rest)
    ]
    tokens = [token for unit in rng.permutation(np.array(units, object)) for token in unit]
    if distance is None:
        return tokens, max(i for i, token in enumerate(tokens) if token == pair(keys[0])[1])
    borders = {i for i, token in enumerate(tokens) if token < FIRST_VALUE}  # a value stays with its key
    first = rng.choice(sorted(i for i in borders if i + distance - 2 in borders))
    second = first + distance - 2
    own = pair(keys[0])
    return [*tokens[:first], *own, *tokens[first:second], *own, *tokens[second:]], second + 3


def run(script: str, *arguments: object) -> None:
    """One of the project's commands. Raises: DataError if it fails."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{script} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def write_datasets(options: argparse.Namespace) -> None:
    """The vocabulary, and a dataset of each length."""
    words, work = vocabulary(), options.work
    write_whole(work / "vocab.txt", "".join(f"{word}\n" for word in words).encode(), "--work")
    for name, length in LENGTHS.items():
        if (work / f"{name}.json").exists():
            continue
        rng = np.random.default_rng([options.seed, length])
        texts = (
            text(rng, length - BORDER)[0] for _ in range(options.steps[name == "long"] * 16 * SHORT // length)
        )
        lines = (json.dumps({"text": " ".join(words[token] for token in each)}) + "\n" for each in texts)
        write_whole(work / f"{name}.jsonl", "".join(lines).encode(), "--work")
        run(
            "scripts/preprocess_data.py", "--input", work / f"{name}.jsonl", "--output", work / name,
            "--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", work / "vocab.txt", "--added-tokens", "none",
        )  # fmt: skip


def settings(options: argparse.Namespace, raised: float | None) -> dict[str, Any]:
    """The configuration of a run. Args: raised: the base in the second phase; None: as in the first."""
    short, long = options.steps
    longer = {"steps": long, "weights": {"long": 1}} | ({} if raised is None else {"rotary_base": raised})
    batch = {"micro_batch_size": 16, "global_batch_size": 16}
    return {
        "model": {
            "system": "modernbert", "num_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "ffn_size": 128,
            "global_every": 2, "attention_window": 16, "rotary_base": options.base, "init_std": 0.1,
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(options.work / "vocab.txt"), "added_tokens": "none"},
        "data": {
            "train": [{"name": name, "prefix": str(options.work / name)} for name in LENGTHS],
            "sequence_length": LENGTHS["long"],
        },
        "objectives": {"masked_lm": 1.0},
        "masked_lm": {"masked_ratio": 0.2},
        "phases": [{"steps": short, "sequence_length": SHORT, "weights": {"short": 1}, "batch": batch}, longer],
        "batch": {"micro_batch_size": 2, "global_batch_size": 2},
        "optimizer": {"kind": "muon", "lr": 0.01, "beta2": 0.98, "weight_decay": 0.0},
        "schedule": {
            "parts": [
                {"kind": "linear", "steps": short // 10, "start": 0.0, "end": 1.0},
                {"kind": "linear", "steps": short - short // 10, "end": 0.3},
                {"kind": "linear", "steps": long, "end": 0.0},
            ],
        },
        "training": {"steps": short + long, "precision": "fp32", "seed": options.seed, "eval_interval": 0},
        "checkpoint": {"save_interval": 0},
        "run": {"tensorboard": False, "peak_tflops": 1.0},
    }  # fmt: skip


def train(options: argparse.Namespace) -> dict[str, Path]:
    """Exported models: after the short texts, and after the long ones with each base."""
    work, exports = options.work, {}
    branch = f"checkpoint.initialize_from={work / 'short_run'}"
    for name, raised, changes in (
        ("short", None, [f"training.stop_after_step={options.steps[0]}"]),
        ("kept", None, [branch, "checkpoint.initialize=all"]),
        ("raised", options.raised, [branch, "checkpoint.initialize=all"]),
    ):
        path, directory, exports[name] = work / f"{name}.yaml", work / f"{name}_run", work / f"{name}_export"
        content = yaml.safe_dump(settings(options, raised), sort_keys=False)
        if path.exists() and path.read_text("utf-8") != content:
            raise DataError(f"--work {work} has {path.name} of other options; choose another --work.")
        write_whole(path, content.encode(), "--work")
        if not exports[name].exists():
            run("pretrain_glm.py", "--config", path, f"run.directory={directory}", *changes)
            run(
                "scripts/convert_checkpoint.py",
                "export",
                "--checkpoint",
                directory,
                "--output",
                exports[name],
            )
    return exports


def recall(model: Any, distance: int, options: argparse.Namespace) -> float:
    """The share of texts of the long length whose masked value is the model's likeliest token."""
    import torch

    rng, right = np.random.default_rng([options.seed, distance]), 0
    for _ in range(options.texts):
        tokens, place = text(rng, LENGTHS["long"] - BORDER, distance)
        ids = torch.tensor([[CLS, *tokens, SEP]])
        ids[0, place + 1] = MASK
        with torch.no_grad():
            right += int(model(input_ids=ids).logits[0, place + 1].argmax()) == tokens[place]
    return right / options.texts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory of texts and runs")
    add("--base", type=float, default=640.0, help="rotary base of the short texts (default: %(default)g)")
    add(
        "--raised",
        type=float,
        default=10240.0,
        help="the larger one of the long texts (default: %(default)g)",
    )
    add(
        "--steps", type=int, nargs=2, default=[300, 300], help="of short and of long texts (default: 300 300)"
    )
    add("--texts", type=int, default=100, help="texts for each distance (default: %(default)s)")
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "texts")
    check_at_least(options, 10, "steps")
    check_at_least(options, 0, "seed")
    if not 1 < options.base < options.raised:
        raise ConfigError(
            f"--base is {options.base:g} and --raised {options.raised:g}; give 1 < base < raised."
        )
    options.work = options.work.resolve()
    require_writable(options.work / "file", "--work")
    if options.json is not None:
        require_writable(options.json, "--json")
    options.work.mkdir(parents=True, exist_ok=True)
    write_datasets(options)
    exports = train(options)
    from transformers import AutoModelForMaskedLM  # heavy: a refused command must not pay for it

    models = {name: AutoModelForMaskedLM.from_pretrained(export).eval() for name, export in exports.items()}
    titles = ["short texts alone", f"base kept, {options.base:g}", f"base raised, {options.raised:g}"]
    print(f"| distance | {' | '.join(titles)} |\n|{'---|' * (1 + len(titles))}")
    rows = []
    for distance in DISTANCES:
        found = {name: recall(model, distance, options) for name, model in models.items()}
        rows.append({"distance": distance, **found})
        print(f"| {distance} | {' | '.join(f'{share:.2f}' for share in found.values())} |", flush=True)
    if options.json is not None:
        given = {name: getattr(options, name) for name in ("base", "raised", "steps", "texts", "seed")}
        now = datetime.now(UTC).date().isoformat()
        write_json(
            options.json, {"date": now, "program": describe(program()), "options": given, "rows": rows}
        )
    return 0


if __name__ == "__main__":
    run_command(main)
