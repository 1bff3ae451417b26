#!/usr/bin/env python3
"""The same hours elsewhere: our GLM beside causal models and encoders, each with the best of equal trials.

    bash scripts/laptop.sh
    python benchmarks/same_hours.py --laptop laptop --work same_hours --blimp blimp/data --plot same_hours.png

Six systems: our GLM, our causal objective on the same body, and four classes of transformers in a plain loop. All have
the layers, width and heads of configs/laptop.yaml (gated FFNs its ffn_size too), no dropout, no average of weights, the
tokenizer and text of --laptop, batches of --rows rows of 128 tokens, the same precision, threads, weight decay, betas
and clipping, and a schedule of one form: warmup in 3 % of the steps, then constant, then a decay as 1 - sqrt in the
last 20 %. GLM trains without phases, so with long blanks alone.

1. Each system measures --micro-batches and keeps the fastest.
2. Trials: AdamW and Muon, each at each of --rates, each for a twelfth of --seconds. The best on sentences of the
   validation split is chosen.
3. --seeds runs of --seconds each with that choice; their steps follow from the speed of the trial. At --points of a run
   sentences of the test split are scored and, with --blimp, minimal pairs.

Systems take turns, the one with the fewest CPU seconds first, each turn in a process of its own, so a busy machine
slows all alike. Seconds are those of training alone: starts, scores and saves do not count.

Rows of causal peers are packed, documents joined by their end token; those of encoders are [CLS], 126 tokens, [SEP].
Muon makes the same matrices orthogonal in all systems, by the same function: those between hidden states, with fused
ones (Q, K and V; gate and up) split.

Nats per word are of sentences written from left to right: the same words for all, without the end. Encoders have only a
pseudo log likelihood, which sees both sides of a word: it chooses among their trials, and compares with nothing else.
Leads are taken before the decay, after equal tokens and after equal CPU seconds, where all rates are constant.

Everything is below --work, and the same command goes on after an interruption, or draws again what it has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import tokenizers

from benchmarks.arguments import check_at_least, check_once, write_json
from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import require_directory, require_named, require_writable, write_picture
from data_utils.common.setting_files import shown
from data_utils.common.untrusted import load_json
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.tasks.readers.minimal_pairs import read_minimal_pairs
from megatron_lite.config.tree import load_config

if TYPE_CHECKING:
    import torch

    from megatron_lite.config.sections import OptimizerConfig

ROOT = Path(__file__).resolve().parents[1]
LAPTOP_CONFIG = ROOT / "configs/laptop.yaml"
LABELS = {
    "glm": "GLM (this project)",
    "causal": "causal (this project)",
    "llama": "Llama (transformers)",
    "gpt2": "GPT-2 (transformers)",
    "modernbert": "ModernBERT (transformers)",
    "bert": "BERT (transformers)",
}
OURS = {"glm": (), "causal": ("objectives={causal: 1.0}", "model.block_positions=none")}
CAUSAL_PEERS, ENCODERS = ("llama", "gpt2"), ("modernbert", "bert")
OPTIMIZERS = ("adamw", "muon")
RATES = (6e-4, 1.5e-3, 4e-3, 1e-2)
LEADS = (  # what differs between two systems
    ("body", "gpt2", "llama"),
    ("implementation", "llama", "causal"),
    ("objective", "causal", "glm"),
    ("all of these", "gpt2", "glm"),
)
FUSED = {"c_attn": (3, 1), "Wqkv": (3, 0), "Wi": (2, 0)}  # matrices of peers: parts and axis
TRIAL_SHARE = 1 / 12  # of --seconds
FIRST_SEED = 1234
LENGTH = 128  # tokens of a row
WARM_UP, DECAY = 0.03, 0.2  # shares of the steps
MASKED_RATIO = 0.15  # encoders; 80 % of them become [MASK], 10 % a random token
CALIBRATION_STEPS = 5  # measured, after as many to warm up
SENTENCE_WORDS = (8, 25)
SCORE_ROWS = 128  # of a forward pass
PADDED_TARGET = -100
LIBRARIES = (  # of the forks, imported once
    "megatron_lite.engine.plain", "megatron_lite.finetune.harness", "megatron_lite.train.trainer",
    *(f"transformers.models.{name}.modeling_{name}" for name in (*CAUSAL_PEERS, *ENCODERS)),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training of a system, in a directory of its own."""

    system: str
    directory: Path
    optimizer: str
    rate: float
    micro_batch: int
    steps: int
    points: int  # at which it is scored
    seed: int
    is_trial: bool = False

    @property
    def warm_up(self) -> int:
        return max(1, round(WARM_UP * self.steps))

    @property
    def decay(self) -> int:
        return max(1, round(DECAY * self.steps))

    def rate_factor(self, step: int) -> float:
        """Of the peak learning rate, in a step counted from 1."""
        return min(step / self.warm_up, 1.0) * (
            1 - math.sqrt(max(0.0, (step - self.steps + self.decay) / self.decay))
        )

    @property
    def state(self) -> dict[str, Any]:
        path = self.directory / "state.json"
        if not path.exists():
            return {"step": 0, "seconds": 0.0, "points": []}
        found: dict[str, Any] = load_json(path, "state")
        return found

    def save(self, state: dict[str, Any]) -> None:
        write_json(self.directory / "state.json", state)

    @property
    def is_done(self) -> bool:
        return any(point["step"] == self.steps for point in self.state["points"])


# ---- text ----


def token_rows(options: argparse.Namespace, system: str) -> np.ndarray:
    """The training text as rows of LENGTH tokens, packed. int64 [rows, LENGTH]."""
    dataset, names = IndexedDataset(options.laptop / "data/corpus_train"), tokenizer_of(options)
    end = names.token_to_id("<|endoftext|>")
    documents = (np.append(dataset.document(i), end) for i in range(len(dataset)))
    text = np.concatenate(list(documents)).astype(np.int64)
    if system in CAUSAL_PEERS:
        return text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)
    inner = text[: len(text) // (LENGTH - 2) * (LENGTH - 2)].reshape(-1, LENGTH - 2)
    first, last = (np.full((len(inner), 1), names.token_to_id(name)) for name in ("[CLS]", "[SEP]"))
    return np.concatenate([first, inner, last], axis=1)


def tokenizer_of(options: argparse.Namespace) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(options.laptop / "tokenizer/tokenizer.json"))


def fits(names: tokenizers.Tokenizer, text: str) -> bool:
    """Whether each system can score a text, with its special tokens and a space before it."""
    return len(names.encode(text, add_special_tokens=False).ids) <= LENGTH - 5


def check_pairs(options: argparse.Namespace) -> None:
    """Raises: DataError for pairs that cannot be read or do not fit the models."""
    names = tokenizer_of(options)
    for pair in read_minimal_pairs(options.blimp, options.pairs):
        for text in (pair.good, pair.bad):
            if not fits(names, text):
                raise DataError(
                    f"--blimp {options.blimp}: paradigm {pair.paradigm}: {shown(text)} is longer than the rows of "
                    f"{LENGTH} tokens; leave the pair out."
                )


def held_out(options: argparse.Namespace, split: str) -> list[str]:
    """Sentences of a split, one of a document."""
    dataset, names = IndexedDataset(options.laptop / f"data/corpus_{split}"), tokenizer_of(options)
    found = []
    for number in range(len(dataset)):
        text = names.decode(dataset.document(number).tolist())
        for sentence in re.split(r"(?<=[.!?])\s+", text)[1:]:
            is_common = (
                SENTENCE_WORDS[0] <= len(sentence.split()) <= SENTENCE_WORDS[1] and sentence[0].isupper()
            )
            if is_common and fits(names, sentence):
                found.append(sentence)
                break
        if len(found) == options.sentences:
            break
    if not found:
        raise DataError(
            f"{options.laptop}/data/corpus_{split} has no sentence of 8 to 25 words; give more text."
        )
    return found


# ---- transformers' models ----


def peer(options: argparse.Namespace, system: str, seed: int) -> torch.nn.Module:
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = options.config.model
    own = {
        "llama": {"intermediate_size": sizes.ffn_size},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "modernbert": {"intermediate_size": sizes.ffn_size},
        "bert": {
            "intermediate_size": 4 * sizes.hidden_size, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
    }[system]  # fmt: skip
    config = transformers.AutoConfig.for_model(
        system, vocab_size=tokenizer_of(options).get_vocab_size(), hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers, num_attention_heads=sizes.num_attention_heads,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, pad_token_id=None, **own,
    )  # fmt: skip
    head = transformers.AutoModelForMaskedLM if system in ENCODERS else transformers.AutoModelForCausalLM
    model: torch.nn.Module = head.from_config(config)
    return model


def peer_batch(
    system: str, rows: np.ndarray, size: int, step: int, seed: int, mask: int, words: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int64 [size, LENGTH]: a shuffled pass over the text after the other."""
    numbers = np.arange(step * size, (step + 1) * size)
    ids = np.empty((size, LENGTH), np.int64)
    for epoch in np.unique(numbers // len(rows)):
        own = numbers // len(rows) == epoch
        ids[own] = rows[np.random.default_rng([seed, epoch]).permutation(len(rows))[numbers[own] % len(rows)]]
    if system in CAUSAL_PEERS:
        return ids, ids  # the class shifts them
    draw = np.random.default_rng([seed, step, 1])
    chosen, kind = draw.random(ids.shape) < MASKED_RATIO, draw.random(ids.shape)
    chosen[:, [0, -1]] = False  # [CLS], [SEP]
    inputs = np.where(chosen & (kind < 0.8), mask, ids)
    inputs = np.where(chosen & (kind >= 0.9), draw.integers(0, words, ids.shape), inputs)
    return inputs, np.where(chosen, ids, PADDED_TARGET)


def make_optimizers(model: torch.nn.Module, kind: str, settings: OptimizerConfig, exact: bool) -> list[Any]:
    """AdamW; of kind muon only for what is no matrix between hidden states, beside Muon. As our own optimizers.

    torch.optim.Muon computes the same, but in bf16 on any CPU, and with fused matrices as one.
    """
    import torch

    from megatron_lite.optim.muon import ADAMW_RMS, orthogonal

    dtype = torch.float32 if exact else torch.bfloat16

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                (weight,), rate = group["params"], group["lr"]
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - settings.momentum)
                direction = weight.grad.lerp(momentum, settings.momentum).to(dtype)
                parts = orthogonal(direction.chunk(group["parts"], group["axis"]))
                size = ADAMW_RMS * math.sqrt(max(parts[0].shape))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.sub_(torch.cat(parts, group["axis"]), alpha=rate * size)

    embeddings = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    matrices, others, vectors = [], [], []
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            vectors.append(weight)
        elif kind == "adamw" or id(weight) in embeddings:
            others.append(weight)
        else:
            parts, axis = FUSED.get(name.split(".")[-2], (1, 0))
            matrices.append({"params": [weight], "parts": parts, "axis": axis})
    decay, betas = settings.weight_decay, (settings.beta1, settings.beta2)
    groups = [{"params": others, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[Any] = [torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.eps, fused=True)]
    return [*optimizers, Muon(matrices, {"lr": 0.0, "weight_decay": decay})] if matrices else optimizers


class Peer:
    """A model of transformers with its optimizers, on the rows of its system."""

    def __init__(self, options: argparse.Namespace, run: Run):
        import torch

        self.run, self.torch, self.settings = run, torch, options.config.optimizer
        self.size, self.exact = options.rows, options.precision == "fp32"
        self.model, self.rows = peer(options, run.system, run.seed), token_rows(options, run.system)
        names = tokenizer_of(options)
        self.mask, self.words = names.token_to_id("[MASK]"), names.get_vocab_size()
        self.optimizers = make_optimizers(self.model, run.optimizer, self.settings, self.exact)

    def train(self, step: int) -> None:
        """A step, counted from 0."""
        torch, run = self.torch, self.run
        inputs, targets = peer_batch(run.system, self.rows, self.size, step, run.seed, self.mask, self.words)
        counted = int((targets != PADDED_TARGET).sum())
        for start in range(0, self.size, run.micro_batch):
            ids, labels = (torch.from_numpy(x[start : start + run.micro_batch]) for x in (inputs, targets))
            with torch.autocast("cpu", torch.bfloat16, enabled=not self.exact):
                loss = self.model(input_ids=ids, labels=labels).loss
            # The class gives the mean over the micro-batch; the step's is over the batch.
            (loss * int((labels != PADDED_TARGET).sum()) / counted).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = run.rate * run.rate_factor(step + 1)
            optimizer.step()
            optimizer.zero_grad()

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.torch.save({"model": self.model.state_dict(), "optimizers": states}, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        state = self.torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)


def peer_scorer(options: argparse.Namespace, trained: Peer) -> Callable[[Sequence[str]], list[float]]:
    """Sentences -> log probability, or pseudo log likelihood by word of an encoder (arXiv:2305.10588), in nats."""
    import torch

    names, model = tokenizer_of(options), trained.model.eval()
    is_causal = trained.run.system in CAUSAL_PEERS
    end, first, last, mask = (
        names.token_to_id(name) for name in ("<|endoftext|>", "[CLS]", "[SEP]", "[MASK]")
    )

    def variants(text: str) -> Iterator[tuple[list[int], dict[int, int]]]:
        """Inputs of a sentence, and the token to predict at each place of interest."""
        encoded = names.encode(text, add_special_tokens=False)
        ids, words = encoded.ids, encoded.word_ids
        if is_causal:
            yield [end, *ids], dict(enumerate(ids))
            return
        for place, token in enumerate(ids):
            masked = [
                mask if i >= place and words[i] == words[place] else other for i, other in enumerate(ids)
            ]
            yield [first, *masked, last], {place + 1: token}

    @torch.no_grad()
    def score(texts: Sequence[str]) -> list[float]:
        space = " " if is_causal else ""
        rows = [(number, *one) for number, text in enumerate(texts) for one in variants(space + text)]
        totals = [0.0] * len(texts)
        rows.sort(key=lambda row: len(row[1]))
        for start in range(0, len(rows), SCORE_ROWS):
            some = rows[start : start + SCORE_ROWS]
            longest = max(len(ids) for _, ids, _ in some)
            ids = torch.tensor([row[1] + [0] * (longest - len(row[1])) for row in some])
            seen = torch.tensor([[1] * len(row[1]) + [0] * (longest - len(row[1])) for row in some])
            asked = [(i, place, token) for i, row in enumerate(some) for place, token in row[2].items()]
            where = torch.tensor(asked)
            logits = model(input_ids=ids, attention_mask=seen).logits[where[:, 0], where[:, 1]].float()
            found = logits.log_softmax(-1).gather(1, where[:, 2:]).squeeze(1).tolist()
            for (i, _, _), nats in zip(asked, found, strict=True):
                totals[some[i][0]] += nats
        return totals

    return score


def train_peer(options: argparse.Namespace, run: Run, stop: int) -> None:
    """Train from the saved state to a step; save weights and state."""
    trained, state = Peer(options, run), run.state
    old = state["step"]
    if old:
        trained.load(run.directory / f"{old}.pt")
    times = [time.process_time()]
    for step in range(old, stop):
        trained.train(step)
        times.append(time.process_time())
    recent = times[-1 - CALIBRATION_STEPS :]
    state |= {
        "step": stop, "seconds": state["seconds"] + times[-1] - times[0],
        "seconds_per_step": (recent[-1] - recent[0]) / (len(recent) - 1),
        "parameters": sum(weight.numel() for weight in trained.model.parameters()),
    }  # fmt: skip
    trained.save(run.directory / f"{stop}.pt")
    run.save(state)
    if old:
        (run.directory / f"{old}.pt").unlink(missing_ok=True)


# ---- ours, with the project's command ----


def quoted(path: Path) -> str:
    """A path as text of YAML."""
    return json.dumps(str(path), ensure_ascii=False)


def our_settings(options: argparse.Namespace, run: Run, stop: int) -> list[str]:
    """The recipe of configs/laptop.yaml on rows of one length, with the optimizer of the run."""
    parts = [
        f"{{kind: linear, steps: {run.warm_up}, start: 0, end: 1}}",
        f"{{kind: constant, steps: {max(1, run.steps - run.warm_up - run.decay)}}}",
        f"{{kind: 1-sqrt, steps: {run.decay}, end: 0}}",
    ]
    return [
        f"tokenizer.path={quoted(options.laptop / 'tokenizer/tokenizer.json')}",
        f"data.train=[{{prefix: {quoted(options.laptop / 'data/corpus_train')}}}]",
        "data.validation=[]", f"data.sequence_length={LENGTH}", "phases=[]", f"schedule.parts=[{', '.join(parts)}]",
        f"optimizer.kind={run.optimizer}", f"optimizer.lr={run.rate}", "ema.decay=null", "ema.use=false",
        f"training.steps={run.steps}", f"training.precision={options.precision}", f"training.seed={run.seed}",
        f"training.stop_after_step={stop}", f"batch.micro_batch_size={run.micro_batch}",
        f"batch.global_batch_size={options.rows}", f"run.directory={quoted(run.directory / 'run')}",
        "run.tensorboard=false", "run.peak_tflops=1", f"run.log_interval={CALIBRATION_STEPS}",
        "checkpoint.save_interval=0", "checkpoint.keep_last=1", *options.set, *OURS[run.system],
    ]  # fmt: skip


def pretrain(options: argparse.Namespace, run: Run, stop: int) -> None:
    import pretrain_glm

    os.chdir(ROOT)
    sys.argv = ["pretrain_glm.py", "--config", str(LAPTOP_CONFIG), *our_settings(options, run, stop)]
    pretrain_glm.command()


def train_ours(options: argparse.Namespace, run: Run, stop: int) -> None:
    in_a_process(options, run.directory, pretrain, run, stop)
    lines = (run.directory / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    by_step = {0: 0.0} | {one["step"]: one["cpu_seconds"] for one in records if one["kind"] == "train"}
    before, last = sorted(by_step)[-2:]
    state = {
        "step": stop, "seconds": sum(by_step.values()), "seconds_per_step": by_step[last] / (last - before),
        "parameters": next(one["parameters"] for one in records if "parameters" in one),
    }  # fmt: skip
    run.save(run.state | state)


# ---- turns ----


def in_a_process(
    options: argparse.Namespace, directory: Path, function: Callable[..., None], *given: Any
) -> None:
    """function(options, *given) in a fork, which has imported the libraries; its output goes to a file."""
    directory.mkdir(parents=True, exist_ok=True)

    def begin() -> None:
        import torch

        torch.set_num_threads(options.threads)
        with (directory / "log.txt").open("w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        function(options, *given)

    sys.stdout.flush()
    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    process.join()
    if process.exitcode:
        said = " ".join((directory / "log.txt").read_text(errors="replace").split())
        raise DataError(f"{directory} failed: {said[-800:]}")


def train(options: argparse.Namespace, run: Run, stop: int) -> None:
    if run.system in OURS:
        train_ours(options, run, stop)
    else:
        in_a_process(options, run.directory, train_peer, run, stop)


def score(options: argparse.Namespace, run: Run) -> None:
    """Add what the system knows at this step to its points."""
    state = run.state
    if run.system in OURS:
        scored = scorer_of_ours(run.directory / "run")
    else:
        trained = Peer(options, run)
        trained.load(run.directory / f"{state['step']}.pt")
        scored = peer_scorer(options, trained)
    point = {
        "step": state["step"],
        "seconds": state["seconds"],
        "tokens": state["step"] * options.rows * LENGTH,
    }
    point |= knowledge(options, scored, run.is_trial)
    run.save(state | {"points": [*state["points"], point]})


def scorer_of_ours(run: Path) -> Callable[[Sequence[str]], list[float]]:
    """Sentences -> log probability, written from left to right, in nats."""
    from megatron_lite.finetune import minimal_pairs
    from megatron_lite.finetune.harness import Harness
    from megatron_lite.inference.open_run import load_run

    harness = Harness(load_run(run), size=SCORE_ROWS)
    return lambda texts: minimal_pairs.scored(harness, texts, "left-to-right")


def knowledge(
    options: argparse.Namespace, scored: Callable[[Sequence[str]], list[float]], is_trial: bool = False
) -> dict[str, Any]:
    """Nats per word of held-out sentences, of the validation split for a trial, else with the share of right pairs."""
    from megatron_lite.finetune import minimal_pairs

    texts = held_out(options, "validation" if is_trial else "test")
    found = {"nats_per_word": -sum(scored(texts)) / sum(len(text.split()) for text in texts)}
    if is_trial or options.blimp is None:
        return found
    pairs = read_minimal_pairs(options.blimp, options.pairs)
    paradigms: dict[str, minimal_pairs.Paradigm] = {}
    values = scored([text for pair in pairs for text in (pair.good, pair.bad)])
    for pair, good, bad in zip(pairs, values[::2], values[1::2], strict=True):
        own = paradigms.setdefault(pair.paradigm, minimal_pairs.Paradigm(pair.paradigm, pair.phenomenon))
        own.right.append(good > bad or pair.is_one_sentence)  # as in lm_eval
    return found | {"blimp": minimal_pairs.mean(list(paradigms.values()))[0]}


def take_turn(options: argparse.Namespace, run: Run) -> None:
    """Train to the next point and score it."""
    state = run.state
    if state["step"] == (state["points"] or [{"step": 0}])[-1]["step"]:  # else it was trained and not scored
        train(options, run, min(run.steps, state["step"] + math.ceil(run.steps / run.points)))
    in_a_process(options, run.directory, score, run)
    point = run.state["points"][-1]
    blimp = f", BLiMP {100 * point['blimp']:.1f} %" if "blimp" in point else ""
    print(
        f"{run.system} {run.directory.name}: {point['seconds']:.0f} CPU seconds, step {point['step']} of {run.steps}, "
        f"{point['nats_per_word']:.3f} nats per word{blimp}",
        flush=True,
    )
    if run.is_trial:  # the weights of all trials would fill a disk
        shutil.rmtree(run.directory / "run", ignore_errors=True)
        (run.directory / f"{run.steps}.pt").unlink(missing_ok=True)


def in_turns(options: argparse.Namespace, runs: Sequence[Run]) -> None:
    """The run with the fewest seconds first, until all are done."""
    while left := [run for run in runs if not run.is_done]:
        take_turn(options, min(left, key=lambda run: run.state["seconds"]))


def calibration(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """The fastest micro-batch of a system, and CPU seconds of its steps with each optimizer; measured once."""
    path = options.work / system / "calibration.json"
    if not path.exists():

        def seconds_per_step(optimizer: str, micro_batch: int) -> float:
            directory, steps = options.work / system / "calibration", 2 * CALIBRATION_STEPS
            shutil.rmtree(directory, ignore_errors=True)
            run = Run(system, directory, optimizer, options.rates[0], micro_batch, steps, 1, FIRST_SEED)
            train(options, run, steps)
            found: float = run.state["seconds_per_step"]
            shutil.rmtree(directory)
            return found

        adamw = {size: seconds_per_step("adamw", size) for size in options.micro_batches}
        best = min(adamw, key=lambda size: adamw[size])
        write_json(path, {"micro_batch": best, "adamw": adamw[best], "muon": seconds_per_step("muon", best)})
    found: dict[str, Any] = load_json(path, "calibration")
    return found


def trials(options: argparse.Namespace, system: str) -> list[Run]:
    """The same for all systems: each optimizer at each rate, for the same seconds."""
    measured = calibration(options, system)
    return [
        Run(
            system, options.work / system / f"{optimizer}_{rate}", optimizer, rate, measured["micro_batch"],
            max(10, round(TRIAL_SHARE * options.seconds / measured[optimizer])), 1, FIRST_SEED, is_trial=True,
        )
        for optimizer in OPTIMIZERS
        for rate in options.rates
    ]  # fmt: skip


def loss_of(trial: Run) -> float:
    nats: float = trial.state["points"][-1]["nats_per_word"]
    return nats if math.isfinite(nats) else math.inf


def runs_of(options: argparse.Namespace, system: str) -> list[Run]:
    """The runs of a system, a seed each, with the choice of its trials, at the speed of the chosen trial."""
    best = min(trials(options, system), key=loss_of)
    steps = max(10, round(options.seconds * best.steps / best.state["seconds"]))
    return [
        Run(
            system, options.work / system / f"seed_{seed}", best.optimizer, best.rate, best.micro_batch, steps,
            options.points, seed,
        )
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds)
    ]  # fmt: skip


def check_setup(options: argparse.Namespace) -> None:
    """Raises: ConfigError where --work was begun with other options."""
    free = ("laptop", "work", "systems", "seeds", "json", "plot", "config")
    now = {name: value for name, value in vars(options).items() if name not in free}
    now["blimp"] = options.blimp is not None
    path = options.work / "setup.json"
    if not path.exists():
        write_json(path, now)
    if (begun := load_json(path, "setup")) != now:
        raise ConfigError(f"{options.work} was begun with {begun}, not {now}; give another --work.")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that --work lacks; what was found of each system."""
    check_setup(options)
    in_turns(options, [trial for system in options.systems for trial in trials(options, system)])
    by_system = {system: runs_of(options, system) for system in options.systems}
    for same_seed in zip(*by_system.values(), strict=True):
        in_turns(options, same_seed)

    def record(system: str, runs: Sequence[Run]) -> dict[str, Any]:
        names = ("optimizer", "rate", "micro_batch", "seed", "steps", "decay")
        tried, done = (
            [{name: getattr(one, name) for name in names} | one.state for one in some]
            for some in (trials(options, system), runs)
        )
        return {"trials": tried, "runs": done}

    return {system: record(system, runs) for system, runs in by_system.items()}


# ---- results ----


def before_decay(found: dict[str, Any], axis: str) -> dict[str, list[float]]:
    """Nats per word of each causal run after the most tokens (or seconds) that all have before their decay.

    Between two points they follow the logarithm. A comparison at the end would favour the slower: it has decayed.
    Empty where the runs have no such points in common.
    """
    curves = {
        system: [
            [
                (math.log(point[axis]), point["nats_per_word"])
                for point in run["points"]
                if point["step"] <= run["steps"] - run["decay"]
            ]
            for run in one["runs"]
        ]
        for system, one in found.items()
        if system not in ENCODERS
    }
    each = [one for own in curves.values() for one in own]
    if not each or not all(each):
        return {}
    common = min(one[-1][0] for one in each)
    if common < max(one[0][0] for one in each):
        return {}
    return {
        system: [float(np.interp(common, *zip(*one, strict=True))) for one in own]
        for system, own in curves.items()
    }


def mean_text(values: Sequence[float], form: str = ".3f") -> str:
    """Mean and deviation."""
    if not values:
        return "-"
    text = f"{statistics.mean(values):{form}}"
    return f"{text} \N{PLUS-MINUS SIGN} {statistics.stdev(values):{form}}" if len(values) > 1 else text


def table(found: dict[str, Any]) -> str:
    """Means and deviations over the seeds, what Muon gains in the trials, and leads by their causes."""
    levels = {axis: before_decay(found, axis) for axis in ("tokens", "seconds")}
    lines = [
        "| system | parameters | best trial | CPU seconds | tokens per CPU s | nats per word | after equal tokens | "
        "after equal CPU s | BLiMP |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for system, one in found.items():
        run, last = one["runs"][0], [run["points"][-1] for run in one["runs"]]
        nats = [] if system in ENCODERS else [point["nats_per_word"] for point in last]
        columns = [
            LABELS[system], f"{run['parameters'] / 1e6:.1f} M", f"{run['optimizer']} {run['rate']:g}",
            mean_text([point["seconds"] for point in last], ",.0f"),
            mean_text([point["tokens"] / point["seconds"] for point in last], ",.0f"),
            mean_text(nats), *(mean_text(level.get(system, [])) for level in levels.values()),
            mean_text([100 * point["blimp"] for point in last if "blimp" in point], ".1f"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(columns)} |")
    lines += ["", "| Muon instead of AdamW, nats of the best trials | gain |", "|---|---|"]
    for system, one in found.items():
        adamw, muon = (
            min(trial["points"][-1]["nats_per_word"] for trial in one["trials"] if trial["optimizer"] == kind)
            for kind in OPTIMIZERS
        )
        lines.append(f"| {LABELS[system]} | {adamw - muon:.3f} |")
    lines += [
        "", "| lead before the decay, in nats | from | to | after equal tokens | after equal CPU s | by speed |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for cause, worse, better in LEADS:
        if all(worse in level and better in level for level in levels.values()):
            leads = [
                [a - b for a, b in zip(level[worse], level[better], strict=True)] for level in levels.values()
            ]
            speed = [b - a for a, b in zip(*leads, strict=True)]
            columns = [cause, LABELS[worse], LABELS[better], *map(mean_text, (*leads, speed))]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Nats per word and BLiMP over the CPU seconds, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for system, one in found.items():
        for number, run in enumerate(one["runs"]):
            style = {
                "color": f"C{list(LABELS).index(system)}", "marker": ".", "linewidth": 1,
                "label": "" if number else LABELS[system],
            }  # fmt: skip
            minutes = [point["seconds"] / 60 for point in run["points"]]
            if system not in ENCODERS:  # which see both sides of a word, so that their nats are no comparison
                left.plot(minutes, [point["nats_per_word"] for point in run["points"]], **style)
            percent = [100 * point.get("blimp", math.nan) for point in run["points"]]
            right.plot(minutes, percent, **style)
    left.set_ylabel("held-out sentences, nats per word")
    right.set_ylabel("minimal pairs, percent right")
    right.axhline(50, color="gray", linestyle=":")
    for axes in (left, right):
        axes.set_xlabel("CPU minutes of training")
    right.legend(fontsize=8)
    write_picture(path, figure, "--plot", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--laptop", type=Path, required=True, help="directory of scripts/laptop.sh: tokenizer and data")
    add("--work", type=Path, required=True, help="directory of the runs and their points")
    add("--blimp", type=Path, help="BLiMP's files; without them only the loss is measured")
    add("--pairs", type=int, default=20, help="minimal pairs of each paradigm at each point (default: 20)")
    add("--sentences", type=int, default=200, help="held-out sentences at each point (default: 200)")
    add("--seconds", type=float, default=2400, help="CPU seconds of each run (default: 2400)")
    add("--seeds", type=int, default=3, help="runs of each system (default: 3)")
    add("--points", type=int, default=8, help="scores of each run (default: 8)")
    add("--rates", nargs="+", type=float, default=list(RATES), help="peak learning rates of the trials")
    add("--rows", type=int, default=32, help="rows of a batch (default: 32)")
    add("--micro-batches", nargs="+", type=int, default=[8, 16, 32], metavar="ROWS")
    add("--systems", nargs="+", choices=tuple(LABELS), default=list(LABELS))
    add("--threads", type=int, default=1, help="of each system (default: 1)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="of all systems (default: bf16)")
    add("--set", nargs="+", default=[], metavar="model.key=value", help="our body, and the sizes of all")
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "pairs", "sentences", "threads", "seeds", "points", "rows", "micro_batches")
    check_at_least(options, 0.1, "seconds")
    check_at_least(options, 1e-6, "rates")
    check_once(options, "systems", "rates", "micro_batches")
    for size in options.micro_batches:
        if options.rows % size:
            raise ConfigError(f"--micro-batches {size} does not divide the {options.rows} --rows of a batch.")
    for setting in options.set:
        if not setting.startswith("model."):
            raise ConfigError(f"--set {setting} is not of model, and all else is equal for all; remove it.")
    require_writable(options.work / "file", "--work")
    options.laptop, options.work = options.laptop.resolve(), options.work.resolve()
    for name in ("tokenizer", "data"):
        require_directory(options.laptop / name, "run scripts/laptop.sh, or give --laptop its directory")
    options.config = load_config([LAPTOP_CONFIG], options.set)
    if options.blimp is not None:
        check_pairs(options)  # a mistake now, not after an hour of trials
    if options.plot is not None:
        require_named(options.plot, "--plot")
    if options.json is not None:
        require_writable(options.json, "--json")
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"}
    for name in LIBRARIES:
        importlib.import_module(name)

    found = measure(options)
    print(table(found))
    if options.json is not None:
        write_json(options.json, found)
    if options.plot is not None:
        draw(found, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
