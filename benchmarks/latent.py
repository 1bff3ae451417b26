#!/usr/bin/env python3
"""Does OPTIMUS's latent vector carry sentences, and are they changed through it? On a grammar of known entropy.

    python benchmarks/latent.py --json latent.json             # four ways to initialise, three seeds each

A sentence has five slots of six words each and fixed words between them, so that no model can need fewer than
5 ln 6 = 8.959 nats for one. A decoder is trained on the grammar alone until it has that, without a latent vector. Then
OPTIMUS is trained from it, for equal numbers of steps (RUNS):

    plain       beta 1 from the first step, no free bits: what makes the divergence vanish
    0.02        one cycle of 50 % at 0, 25 % rising, 25 % at 1; 0.5 nats of each component are free. The latent matrices
                begin as published, at 0.02
    default     the same, but 1/sqrt(width) for the posterior, whose stack begins with nothing
    quiet       the same, 1/sqrt(width) for all three, and no noise in the part at 0

Measured on sentences of another seed: bound, ELBO, divergence, mutual information, active units; the share of slots
that are reconstructed; analogies that exchange one slot (by chance 1 in 6); a linear probe for a slot's word, after one
label of each word. The table has each run, and for each way to begin the mean of its seeds and their deviation.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
import yaml

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.settings import merge
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus import generation
from megatron_lite.models.optimus.bounds import measure, posteriors, summarize
from megatron_lite.models.optimus.inputs import Sampling
from megatron_lite.models.optimus.interface import LatentModel
from megatron_lite.models.optimus.open_run import open_latent
from megatron_lite.models.optimus.probe import accuracies

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ANNEALED: dict[str, Any] = {"zero_share": 0.5, "rise_share": 0.25, "free_bits": 0.5}
# Name -> settings of the section `optimus`.
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"zero_share": 0.0, "rise_share": 0.0, "free_bits": 0.0},
    "0.02": {**_ANNEALED, "init_std": 0.02},
    "default": _ANNEALED,
    "quiet": {**_ANNEALED, "init_std": 64**-0.5, "noise_free": True},
}
BATCH = 64  # sentences of a forward pass when measuring


@dataclass(frozen=True)
class Grammar:
    """Sentences of a template, whose slots are filled with words that are equally likely and independent."""

    template: str  # {} stands for a slot
    slots: tuple[tuple[str, ...], ...]

    @property
    def entropy(self) -> float:
        """Of a sentence, in nats."""
        return sum(math.log(len(words)) for words in self.slots)

    @property
    def length(self) -> int:
        return len(self.template.split())

    @property
    def words(self) -> list[str]:
        fixed = dict.fromkeys(word for word in self.template.split() if word != "{}")
        return [*fixed, *(word for words in self.slots for word in words)]

    def draw(self, seed: int, count: int) -> np.ndarray:
        """For each sentence the numbers of its words, [count, slots]."""
        sizes = [len(words) for words in self.slots]
        return np.random.default_rng(seed).integers(0, sizes, (count, len(sizes)))

    def sentence(self, numbers: Sequence[int]) -> str:
        return self.template.format(*(words[i] for words, i in zip(self.slots, numbers, strict=True)))

    def sentences(self, seed: int, count: int) -> list[str]:
        return [self.sentence(numbers) for numbers in self.draw(seed, count)]

    def filled(self, text: str) -> list[str]:
        """The words at the slots; "" where the text is too short."""
        words = re.findall(r"\w+|[^\w\s]", text)  # a tokenizer writes no space before a full stop
        places = self.template.split()
        slots = [place for place, word in enumerate(places) if word == "{}"]
        return [words[place] if place < len(words) else "" for place in slots]


GRAMMAR = Grammar(
    "the {} {} {} the {} in the big {} .",
    (
        ("old", "young", "tall", "small", "happy", "quiet"),
        ("cat", "dog", "girl", "boy", "king", "farmer"),
        ("sees", "finds", "buys", "sells", "paints", "carries"),
        ("ball", "book", "chair", "lamp", "hat", "boat"),
        ("house", "garden", "street", "market", "forest", "harbour"),
    ),
)


@dataclass(frozen=True)
class Setup:
    """Corpus, stacks and runs in one directory."""

    work: Path
    grammar: Grammar = GRAMMAR
    latent_size: int = 16
    rows: int = 12  # packed sequences of a step of OPTIMUS; each has six sentences
    # A pre-norm encoder learns in fewer steps.
    encoder: dict[str, Any] = field(default_factory=lambda: {"norm": "pre"})
    stack: dict[str, Any] = field(
        default_factory=lambda: {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "max_position": 32,
            "embedding_dropout": 0.0,
            "attention_dropout": 0.0,
            "output_dropout": 0.0,
        }
    )

    def write_corpus(self, sentences: int) -> None:
        """vocab.txt, and the datasets corpus_train and corpus_validation."""
        (self.work / "vocab.txt").write_text("\n".join([*SPECIAL, *self.grammar.words]) + "\n")
        with (self.work / "text.jsonl").open("w") as file:
            file.writelines(
                json.dumps({"text": text}) + "\n" for text in self.grammar.sentences(0, sentences)
            )
        tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(self.work / "vocab.txt"))
        inputs, output = [str(self.work / "text.jsonl")], str(self.work / "corpus")
        config = BuildConfig(inputs=inputs, output=output, split="train=0.95,validation=0.05")
        build_corpus(config, lambda: load_tokenizer(tokenizer))

    def _tree(self, name: str, steps: int, seed: int, rows: int) -> dict[str, Any]:
        corpora = {part: [{"prefix": str(self.work / f"corpus_{part}")}] for part in ("train", "validation")}
        return {
            "training": {
                "steps": steps,
                "precision": "fp32",
                "seed": seed,
                "eval_interval": 0,
                "eval_samples": 32,
            },
            "batch": {"micro_batch_size": rows, "global_batch_size": rows},
            "optimizer": {"lr": 1e-3, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
            "schedule": {"kind": "linear", "warmup_steps": 50, "decay_steps": steps, "min_lr_ratio": 0.05},
            "tokenizer": {"kind": "bert_wordpiece", "path": str(self.work / "vocab.txt")},
            "data": {**corpora, "sequence_length": 16},
            "checkpoint": {"save_interval": 0},
            "run": {
                "directory": str(self.work / name),
                "log_interval": 50,
                "tensorboard": False,
                "peak_tflops": 1.0,
            },
        }

    def causal(self, steps: int) -> dict[str, Any]:
        """The decoder that knows the grammar. A sentence of eleven words fills one sequence."""
        own = {"model": {**self.stack, "system": "gpt2"}, "objectives": {"causal": 1}}
        return merge(self._tree("causal", steps, 1, 16), own)

    def optimus(self, run: str, steps: int, seed: int, begin: str | None = "causal") -> dict[str, Any]:
        latent = {
            "latent_size": self.latent_size,
            "feature": "cls",  # the pooler's tanh makes learning several times slower in a model as small as this
            "decoder_from": begin and str(self.work / begin),
            **RUNS[run],
        }
        own = {
            "model": {**self.stack, "system": "bert", **self.encoder},
            "decoder": {**self.stack, "system": "gpt2"},
            "objectives": {"optimus": 1},
            "optimus": latent,
        }
        return merge(self._tree(f"{run}_{seed}", steps, seed, self.rows), own)

    def is_trained(self, name: str, steps: int) -> bool:
        """Whether a run has reached its last step."""
        return (self.work / name / f"checkpoints/step_{steps:08}").exists()

    def decoder_nats(self) -> float:
        """What the decoder alone needs for a sentence and its end, when its training ends."""
        records = map(json.loads, (self.work / "causal/metrics.jsonl").read_text().splitlines())
        losses = [record["loss"] for record in records if record["kind"] == "train"]
        return losses[-1] * (self.grammar.length + 1)


def train(settings: dict[str, Any]) -> None:
    """A run through the command that users start."""
    directory = Path(settings["run"]["directory"])
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "pretrain_glm.py", "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise DataError(
            f"the run {directory.name} ended with status {done.returncode}; its last words: {output}"
        )


def means_of(model: LatentModel, texts: Sequence[str]) -> torch.Tensor:
    return posteriors(model, model.read(texts), BATCH)[0]


def written(model: LatentModel, z: torch.Tensor) -> list[str]:
    return generation.decode_texts(model, z, GenerationConfig(max_length=20), BATCH)


def reconstructed(model: LatentModel, grammar: Grammar, count: int) -> float:
    """Share of the slots that have their word again."""
    texts = grammar.sentences(2, count)
    found = written(model, means_of(model, texts))
    pairs = [
        zip(grammar.filled(a), grammar.filled(b), strict=True) for a, b in zip(texts, found, strict=True)
    ]
    return statistics.mean(a == b for pair in pairs for a, b in pair)


def analogies(model: LatentModel, grammar: Grammar, count: int) -> tuple[float, float]:
    """A and B differ in one slot, in which C is as A. Shares: that slot becomes B's; the other slots stay C's."""
    rng = np.random.default_rng(3)
    triples: list[str] = []
    slots, expected = [], []
    for number, (a, c) in enumerate(zip(grammar.draw(4, count), grammar.draw(5, count), strict=True)):
        slot = number % len(grammar.slots)
        size = len(grammar.slots[slot])
        b, c, d = a.copy(), c.copy(), c.copy()
        b[slot] = d[slot] = (a[slot] + rng.integers(1, size)) % size
        c[slot] = a[slot]
        triples += [grammar.sentence(numbers) for numbers in (a, b, c)]
        slots.append(slot)
        expected.append(grammar.filled(grammar.sentence(d)))
    mu = means_of(model, triples).view(count, 3, -1)
    found = written(model, torch.cat([generation.analogy(three) for three in mu]))
    wanted, kept = [], []
    for slot, right, text in zip(slots, expected, found, strict=True):
        same = [a == b for a, b in zip(right, grammar.filled(text), strict=True)]
        wanted.append(same.pop(slot))
        kept += same
    return statistics.mean(wanted), statistics.mean(kept)


def probes(model: LatentModel, grammar: Grammar, count: int) -> dict[str, float]:
    """Accuracy for a slot's word after one label of each, over all slots: of mu, and of the untrained feature."""
    texts = grammar.sentences(6, count)
    untrained = model.untrained().features(model.read(texts)).cpu()
    probed = {"probe_mu": means_of(model, texts), "probe_untrained": untrained}
    labels = list(zip(*map(grammar.filled, texts), strict=True))
    return {
        name: statistics.mean(x for slot in labels for x in accuracies(values, slot, per_class=1, trials=3))
        for name, values in probed.items()
    }


def numbers_of(model: LatentModel, grammar: Grammar, count: int, samples: int = 20) -> dict[str, float]:
    """A row of the table. Args: count: sentences. samples: of each, for the bound."""
    measured = measure(
        model, model.read(grammar.sentences(1, count)), Sampling(samples=samples, chunk=5, batch=BATCH)
    )
    found = summarize(measured)
    del found["divergence_by_component"]
    wanted, kept = analogies(model, grammar, count)
    return {
        **found,
        "bound_error": float(measured.bound.std()) / count**0.5,
        "slots_reconstructed": reconstructed(model, grammar, count),
        "analogy_slot": wanted,
        "analogy_others": kept,
        **probes(model, grammar, 2 * count),
    }


def require_no_leak(name: str, numbers: dict[str, float], entropy: float) -> None:
    """Raises: DataError where sentences seem likelier than the grammar makes them, by 3 standard errors."""
    if -numbers["bound"] < entropy - 3 * numbers["bound_error"]:
        raise DataError(
            f"{name}: {-numbers['bound']:.3f} nats for a sentence are fewer than the grammar's {entropy:.3f}: it "
            "sees what it predicts. Do not trust these numbers."
        )


COLUMNS = {
    "negative_elbo": "-ELBO",
    "bound": "L_20",
    "reconstruction": "rec",
    "divergence": "KL",
    "mutual_information": "MI",
    "active_units": "AU",
    "slots_reconstructed": "slots",
    "analogy_slot": "analogy",
    "analogy_others": "others",
    "probe_mu": "probe",
    "probe_untrained": "untrained",
}


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """Each run by its seeds, then its mean and the deviation of the seeds."""
    lines = [f"| run | seed | {' | '.join(COLUMNS.values())} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    means = []
    for run, found in rows.items():
        columns = [[numbers[name] for numbers in found] for name in COLUMNS]
        for seed, cells in enumerate(zip(*columns, strict=True), start=1):
            lines.append(f"| {run} | {seed} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
        cells = [f"{statistics.mean(column):.2f} ± {deviation(column):.2f}" for column in columns]
        means.append(f"| {run} | mean | {' | '.join(cells)} |")
    return "\n".join([*lines, *means])


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="(default: all)")
    add("--steps", type=int, default=1200, help="of each run of OPTIMUS (default 1200)")
    add("--decoder-steps", type=int, default=400, help="of the decoder alone (default 400)")
    add("--seeds", type=int, default=3, help="runs of each initialisation (default 3)")
    add("--sentences", type=int, default=512, help="that are measured (default 512)")
    add("--processes", type=int, default=2, help="runs at a time, with one thread each (default 2)")
    add("--work", type=Path, help="an existing directory that keeps corpus and runs, and goes on after an "
        "interruption; else a temporary one")  # fmt: skip
    add("--json", type=Path, help="write the table there")
    options = parser.parse_args()
    check_at_least(options, 1, "steps", "decoder_steps", "seeds", "processes")
    check_at_least(options, 16, "sentences")
    check_places(options.work, options.json)
    with tempfile.TemporaryDirectory() as temporary:
        setup = Setup((options.work or Path(temporary)).resolve())
        if not setup.is_trained("causal", options.decoder_steps):
            setup.write_corpus(20_000)
            train(setup.causal(options.decoder_steps))
        entropy = setup.grammar.entropy
        print(
            f"decoder alone: {setup.decoder_nats():.3f} nats for a sentence, of at least {entropy:.3f}",
            flush=True,
        )

        def numbers(job: tuple[int, str]) -> dict[str, float]:
            seed, run = job
            name = f"{run}_{seed}"
            if not setup.is_trained(name, options.steps):
                train(setup.optimus(run, options.steps, seed))
            model = open_latent(setup.work / name, device=torch.device("cpu"))
            found = numbers_of(model, setup.grammar, options.sentences)
            print(f"{name}: " + ", ".join(f"{COLUMNS[key]} {found[key]:.3f}" for key in COLUMNS), flush=True)
            require_no_leak(name, found, entropy)
            return found

        jobs = [(seed, run) for seed in range(1, options.seeds + 1) for run in options.runs]
        with ThreadPoolExecutor(options.processes) as pool:
            found = dict(zip(jobs, pool.map(numbers, jobs), strict=True))
        rows = {run: [found[seed, run] for seed in range(1, options.seeds + 1)] for run in options.runs}
        print(table(rows))
        if options.json is not None:
            write_json(options.json, {"entropy": entropy, "decoder": setup.decoder_nats(), "rows": rows})


if __name__ == "__main__":
    run_command(main)
