#!/usr/bin/env python3
"""The same hours elsewhere: our GLM compared with transformers' GPT-2 and BERT on equal text and equal CPU seconds.

    bash scripts/laptop.sh
    python benchmarks/same_hours.py --laptop laptop --work same_hours --blimp blimp/data --plot same_hours.png

All three have the layers, width and heads of configs/laptop.yaml, no dropout, the tokenizer and training text of
--laptop, rows of 128 tokens, batches of 32 rows, the same precision and number of threads. They take turns in one
command: the system with the fewest CPU seconds trains for the next --slice of them, in a separate process, and is
scored. So a busy machine slows all of them. Seconds are those of training alone: starts, scores and saves do not count.

The peers train in a plain loop with torch's fused AdamW: transformers' Trainer runs the same operations and adds its
own records. Documents are packed: a row of GPT-2 has no padding, and documents are joined by their end token; a row of
BERT is [CLS], 126 tokens, [SEP]. Before the first slice each system measures micro-batches of 8, 16 and 32 rows and
keeps the fastest. From its speed follow the steps that its seconds allow, and so its schedule, which has the same form
for all: warm-up in 3 % of the steps, then constant, then a decay as 1 - sqrt in the last 20 %.

Each point has the nats per word of held-out sentences and, with --blimp, the percentage of right minimal pairs. GLM
and GPT-2 write the sentence from left to right, so that their nats compare: the same words, without the end. BERT has
only a pseudo log likelihood, which sees both sides of a word. GLM trains without phases, so with long blanks alone.

Everything is below --work, and the same command goes on after an interruption, or draws again what it has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = ("glm", "gpt2", "bert")
LENGTH = 128  # tokens of a row
ROWS = 32  # of a batch
MICRO_BATCHES = (8, 16, 32)
WARM_UP, DECAY = 0.03, 0.2  # shares of the steps
MASKED_RATIO = 0.15  # BERT; 80 % of them become [MASK], 10 % a random token
CALIBRATION_STEPS = 6
SENTENCE_WORDS = (8, 25)
SCORE_ROWS = 128  # of a forward pass
LABELS = {"glm": "GLM (this project)", "gpt2": "GPT-2 (transformers)", "bert": "BERT (transformers)"}
PADDED_TARGET = -100


# ---- text ----


def token_rows(options: argparse.Namespace, system: str) -> np.ndarray:
    """The training text as rows of LENGTH tokens, packed. int64 [rows, LENGTH]."""
    dataset, names = IndexedDataset(options.laptop / "data/corpus_train"), tokenizer_of(options)
    end = names.token_to_id("<|endoftext|>")
    documents = (np.append(dataset.document(i), end) for i in range(len(dataset)))
    text = np.concatenate(list(documents)).astype(np.int64)
    if system == "gpt2":
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


def held_out(options: argparse.Namespace) -> list[str]:
    """Sentences of the test split, one of a document."""
    dataset, names = IndexedDataset(options.laptop / "data/corpus_test"), tokenizer_of(options)
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
            f"{options.laptop}/data/corpus_test has no sentence of 8 to 25 words; give more text."
        )
    return found


# ---- transformers' models ----


def peer(options: argparse.Namespace, system: str) -> torch.nn.Module:
    import torch
    import transformers

    torch.manual_seed(options.seed)
    sizes, words = options.config.model, tokenizer_of(options).get_vocab_size()
    if system == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=words, n_positions=LENGTH, n_embd=sizes.hidden_size, n_layer=sizes.num_layers,
                n_head=sizes.num_attention_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=words, hidden_size=sizes.hidden_size, num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_attention_heads, intermediate_size=4 * sizes.hidden_size,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def peer_batch(
    system: str, rows: np.ndarray, step: int, seed: int, mask: int, words: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step, int64 [ROWS, LENGTH]: a shuffled pass over the text after the other."""
    numbers = np.arange(step * ROWS, (step + 1) * ROWS)
    ids = np.empty((ROWS, LENGTH), np.int64)
    for epoch in np.unique(numbers // len(rows)):
        own = numbers // len(rows) == epoch
        ids[own] = rows[np.random.default_rng([seed, epoch]).permutation(len(rows))[numbers[own] % len(rows)]]
    if system == "gpt2":
        return ids, ids  # the class shifts them
    draw = np.random.default_rng([seed, step, 1])
    chosen, kind = draw.random(ids.shape) < MASKED_RATIO, draw.random(ids.shape)
    chosen[:, [0, -1]] = False  # [CLS], [SEP]
    inputs = np.where(chosen & (kind < 0.8), mask, ids)
    inputs = np.where(chosen & (kind >= 0.9), draw.integers(0, words, ids.shape), inputs)
    return inputs, np.where(chosen, ids, PADDED_TARGET)


def rate_factor(step: int, steps: int) -> float:
    """Of the peak learning rate, in a step counted from 1."""
    warm_up, decay = max(1, round(WARM_UP * steps)), max(1, round(DECAY * steps))
    return min(step / warm_up, 1.0) * (1 - math.sqrt(max(0.0, (step - steps + decay) / decay)))


class Peer:
    """A model of transformers with its optimizer, on the rows of its system."""

    def __init__(self, options: argparse.Namespace, system: str):
        import torch

        self.options, self.system, self.torch = options, system, torch
        self.model, self.rows = peer(options, system), token_rows(options, system)
        names = tokenizer_of(options)
        self.mask, self.words = names.token_to_id("[MASK]"), names.get_vocab_size()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.peer_lr, betas=(0.9, 0.95), fused=True)

    def train(self, step: int, steps: int, micro_batch: int) -> None:
        """A step, counted from 0."""
        torch = self.torch
        inputs, targets = peer_batch(
            self.system, self.rows, step, self.options.seed, self.mask, self.words
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.peer_lr * rate_factor(step + 1, steps)
        counted = int((targets != PADDED_TARGET).sum())
        for start in range(0, ROWS, micro_batch):
            ids, labels = (torch.from_numpy(x[start : start + micro_batch]) for x in (inputs, targets))
            with torch.autocast("cpu", torch.bfloat16, enabled=self.options.precision == "bf16"):
                loss = self.model(input_ids=ids, labels=labels).loss
            # The class gives the mean over the micro-batch; the step's is over the batch.
            (loss * int((labels != PADDED_TARGET).sum()) / counted).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        self.torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        state = self.torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def peer_scorer(options: argparse.Namespace, trained: Peer) -> Callable[[Sequence[str]], list[float]]:
    """Sentences -> log probability (GPT-2) or pseudo log likelihood by word (BERT, arXiv:2305.10588), in nats."""
    import torch

    names, model = tokenizer_of(options), trained.model.eval()
    end, first, last, mask = (
        names.token_to_id(name) for name in ("<|endoftext|>", "[CLS]", "[SEP]", "[MASK]")
    )

    def variants(text: str) -> Iterator[tuple[list[int], dict[int, int]]]:
        """Inputs of a sentence, and the token to predict at each place of interest."""
        encoded = names.encode(text, add_special_tokens=False)
        ids, words = encoded.ids, encoded.word_ids
        if trained.system == "gpt2":
            yield [end, *ids], dict(enumerate(ids))
            return
        for place, token in enumerate(ids):
            masked = [
                mask if i >= place and words[i] == words[place] else other for i, other in enumerate(ids)
            ]
            yield [first, *masked, last], {place + 1: token}

    @torch.no_grad()
    def score(texts: Sequence[str]) -> list[float]:
        space = " " if trained.system == "gpt2" else ""
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


# ---- slices, each in a separate process ----


def calibrate_peer(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """CPU seconds per step of each micro-batch, and the fastest."""
    trained, seconds = Peer(options, system), {}
    for micro_batch in MICRO_BATCHES:
        trained.train(0, 100, micro_batch)
        start = time.process_time()
        for step in range(CALIBRATION_STEPS):
            trained.train(step, 100, micro_batch)
        seconds[micro_batch] = (time.process_time() - start) / CALIBRATION_STEPS
    best = min(seconds, key=lambda size: seconds[size])
    parameters = sum(p.numel() for p in trained.model.parameters())
    return {"micro_batch": best, "seconds_per_step": seconds[best], "parameters": parameters}


def train_peer(options: argparse.Namespace, system: str, plan: dict[str, Any], state: dict[str, Any]) -> None:
    """Train for a slice from the state, which is changed and saved with the weights."""
    trained, directory = Peer(options, system), options.work / system
    if state["step"]:
        trained.load(directory / f"{state['step']}.pt")
    old, start, step = state["step"], time.process_time(), state["step"]
    while step < plan["steps"] and time.process_time() - start < options.slice:
        trained.train(step, plan["steps"], plan["micro_batch"])
        step += 1
    state |= {"step": step, "seconds": state["seconds"] + time.process_time() - start}
    trained.save(directory / f"{step}.pt")
    write_json(directory / "state.json", state)
    if old != step:
        (directory / f"{old}.pt").unlink(missing_ok=True)


def scores(options: argparse.Namespace, system: str, state: dict[str, Any]) -> dict[str, Any]:
    """What the system knows at this point."""
    from megatron_lite.finetune import minimal_pairs

    texts = held_out(options)
    pairs = read_minimal_pairs(options.blimp, options.pairs) if options.blimp is not None else []
    if system == "glm":
        from megatron_lite.finetune.harness import Harness
        from megatron_lite.inference.open_run import load_run

        harness = Harness(load_run(options.work / "glm/run"), size=SCORE_ROWS)

        def score(some: Sequence[str]) -> list[float]:
            return minimal_pairs.scored(harness, some, "left-to-right")
    else:
        trained = Peer(options, system)
        trained.load(options.work / system / f"{state['step']}.pt")
        score = peer_scorer(options, trained)
    words = sum(len(text.split()) for text in texts)
    found: dict[str, Any] = {"nats_per_word": -sum(score(texts)) / words}
    if pairs:
        paradigms: dict[str, minimal_pairs.Paradigm] = {}
        values = score([text for pair in pairs for text in (pair.good, pair.bad)])
        for pair, good, bad in zip(pairs, values[::2], values[1::2], strict=True):
            own = paradigms.setdefault(pair.paradigm, minimal_pairs.Paradigm(pair.paradigm, pair.phenomenon))
            own.right.append(good > bad or pair.is_one_sentence)  # as in lm_eval
        accuracy, error = minimal_pairs.mean(list(paradigms.values()))
        found |= {"blimp": accuracy, "blimp_error": None if math.isnan(error) else error}
    return found


# ---- ours, with the project's command ----


def quoted(path: Path) -> str:
    """A path as text of YAML."""
    return json.dumps(str(path), ensure_ascii=False)


def glm_command(options: argparse.Namespace, run: Path, micro_batch: int, steps: int, *more: str) -> None:
    """pretrain_glm.py with the recipe of configs/laptop.yaml on rows of one length. Raises DataError."""
    warm_up, decay = max(1, round(WARM_UP * steps)), max(1, round(DECAY * steps))
    parts = [
        f"{{kind: linear, steps: {warm_up}, start: 0, end: 1}}",
        f"{{kind: constant, steps: {max(1, steps - warm_up - decay)}}}",
        f"{{kind: 1-sqrt, steps: {decay}, end: 0}}",
    ]
    settings = [
        f"tokenizer.path={quoted(options.laptop / 'tokenizer/tokenizer.json')}",
        f"data.train=[{{prefix: {quoted(options.laptop / 'data/corpus_train')}}}]",
        "data.validation=[]", f"data.sequence_length={LENGTH}", "phases=[]", f"schedule.parts=[{', '.join(parts)}]",
        f"training.steps={steps}", f"training.precision={options.precision}", f"training.seed={options.seed}",
        f"batch.micro_batch_size={micro_batch}", f"batch.global_batch_size={ROWS}", f"run.directory={quoted(run)}",
        "run.tensorboard=false", "run.peak_tflops=1", "checkpoint.save_interval=0", "checkpoint.keep_last=1",
        *options.set, *more,
    ]  # fmt: skip
    command = [sys.executable, "pretrain_glm.py", "--config", str(options.laptop_config), *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment(options), capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{run} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def train_records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "train"]


def calibrate_glm(options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[int, float] = {}
    for micro_batch in MICRO_BATCHES:
        run = options.work / f"glm/calibration_{micro_batch}"
        if not (run / "metrics.jsonl").exists() or len(train_records(run)) < 2:
            # The first interval has what is compiled at the first steps.
            interval = f"run.log_interval={CALIBRATION_STEPS}"
            glm_command(options, run, micro_batch, 2 * CALIBRATION_STEPS, interval)
        seconds[micro_batch] = train_records(run)[1]["cpu_seconds"] / CALIBRATION_STEPS
    best = min(seconds, key=lambda size: seconds[size])
    lines = (options.work / f"glm/calibration_{best}/metrics.jsonl").read_text("utf-8").splitlines()
    parameters = next(record["parameters"] for line in lines if "parameters" in (record := json.loads(line)))
    return {"micro_batch": best, "seconds_per_step": seconds[best], "parameters": parameters}


def train_glm(options: argparse.Namespace, plan: dict[str, Any], state: dict[str, Any]) -> None:
    run = options.work / "glm/run"
    steps = max(1, round(options.slice / plan["seconds_per_step"]))
    stop = min(plan["steps"], state["step"] + steps)
    glm_command(
        options, run, plan["micro_batch"], plan["steps"], f"training.stop_after_step={stop}", "run.log_interval=10"
    )  # fmt: skip
    by_step = {record["step"]: record["cpu_seconds"] for record in train_records(run)}
    state |= {"step": stop, "seconds": sum(by_step.values())}
    write_json(options.work / "glm/state.json", state)


# ---- turns ----


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"}


def child(options: argparse.Namespace, task: str, system: str) -> None:
    """This script in a separate process, which writes its result below --work."""
    command = [sys.executable, str(Path(__file__).resolve()), *options.command, "--child", task, system]
    done = subprocess.run(command, env=environment(options), capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{task} of {system} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def run_child(options: argparse.Namespace, task: str, system: str) -> None:
    import torch

    torch.set_num_threads(options.threads)
    directory = options.work / system
    if task == "calibrate":
        write_json(directory / "calibration.json", calibrate_peer(options, system))
    elif task == "train":
        plan, state = (load_json(directory / f"{name}.json", name) for name in ("plan", "state"))
        train_peer(options, system, plan, state)
    else:
        state = load_json(directory / "state.json", "state")
        write_json(directory / "scores.json", scores(options, system, state))


def planned(options: argparse.Namespace, system: str) -> dict[str, Any]:
    """Micro-batch, seconds per step and steps of a system; measured once."""
    directory = options.work / system
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "plan.json").exists():
        if system == "glm":
            found = calibrate_glm(options)
        else:
            child(options, "calibrate", system)
            found = load_json(directory / "calibration.json", "calibration")
        found |= {"steps": max(10, round(options.seconds / found["seconds_per_step"])), "of": setup(options)}
        write_json(directory / "plan.json", found)
        write_json(directory / "state.json", {"step": 0, "seconds": 0.0, "points": []})
    plan: dict[str, Any] = load_json(directory / "plan.json", "plan")
    if plan["of"] != setup(options):
        raise ConfigError(
            f"{directory} was begun with other options ({plan['of']}, now {setup(options)}); give another --work."
        )
    points = load_json(directory / "state.json", "state")["points"]
    if points and ("blimp" in points[0]) != (options.blimp is not None):
        raise ConfigError(
            f"{directory} was begun with{'' if 'blimp' in points[0] else 'out'} --blimp; give it as then, or another "
            "--work."
        )
    return plan


def setup(options: argparse.Namespace) -> dict[str, Any]:
    """What must not change while --work goes on."""
    names = ("seconds", "precision", "threads", "seed", "peer_lr", "pairs", "sentences", "set")
    return {name: getattr(options, name) for name in names}


def take_turn(options: argparse.Namespace, system: str, plan: dict[str, Any]) -> None:
    """Train a slice and score it."""
    directory = options.work / system
    state = load_json(directory / "state.json", "state")
    points = state["points"]
    scored_step = points[-1]["step"] if points else 0
    if scored_step == state["step"]:  # else a slice was trained, and the command ended before its score
        if system == "glm":
            train_glm(options, plan, state)
        else:
            child(options, "train", system)
            state = load_json(directory / "state.json", "state")
    child(options, "score", system)
    point = {
        "step": state["step"], "seconds": state["seconds"], "tokens": state["step"] * ROWS * LENGTH,
        **load_json(directory / "scores.json", "scores"),
    }  # fmt: skip
    state["points"] = [*points, point]
    write_json(directory / "state.json", state)
    blimp = f", BLiMP {100 * point['blimp']:.1f} %" if "blimp" in point else ""
    print(
        f"{system}: {point['seconds']:.0f} CPU seconds, step {point['step']} of {plan['steps']}, "
        f"{point['nats_per_word']:.3f} nats per word{blimp}",
        flush=True,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    plans = {system: planned(options, system) for system in options.systems}

    def state(system: str) -> dict[str, Any]:
        return load_json(options.work / system / "state.json", "state")

    def open_systems() -> list[str]:
        """With work left, the one with the fewest seconds first."""
        states = {system: state(system) for system in options.systems}
        left = [
            system
            for system, own in states.items()
            if own["step"] < plans[system]["steps"] or own["points"][-1:] == []
        ]
        return sorted(left, key=lambda system: states[system]["seconds"])

    while left := open_systems():
        take_turn(options, left[0], plans[left[0]])
    return {system: {**plans[system], **state(system)} for system in options.systems}


def table(found: dict[str, Any]) -> str:
    lines = [
        "| system | parameters | micro-batch | CPU seconds | tokens per CPU s | nats per word | BLiMP |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, one in found.items():
        last = one["points"][-1]
        error = last.get("blimp_error")
        blimp = f"{100 * last['blimp']:.1f}" if "blimp" in last else "-"
        blimp += "" if error is None else f" \N{PLUS-MINUS SIGN} {100 * error:.1f}"
        lines.append(
            f"| {LABELS[system]} | {one['parameters'] / 1e6:.1f} M | {one['micro_batch']} | {last['seconds']:,.0f} | "
            f"{last['tokens'] / last['seconds']:,.0f} | {last['nats_per_word']:.3f} | {blimp} |"
        )
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Nats per word and BLiMP over the CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for system, one in found.items():
        seconds = [point["seconds"] / 60 for point in one["points"]]
        color = f"C{SYSTEMS.index(system)}"
        if system != "bert":  # it sees both sides of a word, so its nats are no comparison
            nats = [point["nats_per_word"] for point in one["points"]]
            left.plot(seconds, nats, marker=".", color=color)
        if all("blimp" in point for point in one["points"]):
            percent = [100 * point["blimp"] for point in one["points"]]
            errors = [100 * (point["blimp_error"] or 0.0) for point in one["points"]]
            right.errorbar(seconds, percent, errors, marker=".", capsize=2, color=color, label=LABELS[system])
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
    add("--seconds", type=float, default=7200, help="CPU seconds of training of each system (default: 7200)")
    add("--slice", type=float, default=300, help="CPU seconds of a turn (default: 300)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--threads", type=int, default=1, help="of each system (default: 1)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="of all systems (default: bf16)")
    add("--peer-lr", type=float, default=1e-3, help="peak learning rate of the peers (default: 0.001)")
    add("--seed", type=int, default=1234)
    add("--set", nargs="+", default=[], metavar="section.key=value", help="settings of our run and its sizes")
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    add("--child", nargs=2, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    options.command = given
    check_at_least(options, 1, "pairs", "sentences", "threads")
    check_at_least(options, 0.1, "seconds", "slice")
    check_at_least(options, 0, "seed")
    check_once(options, "systems")
    require_writable(options.work / "file", "--work")
    options.laptop, options.work = options.laptop.resolve(), options.work.resolve()
    options.laptop_config = ROOT / "configs/laptop.yaml"
    for name in ("tokenizer", "data"):
        require_directory(options.laptop / name, "run scripts/laptop.sh, or give --laptop its directory")
    options.config = load_config([options.laptop_config], options.set)
    if options.child is not None:
        run_child(options, *options.child)
        return 0
    if options.blimp is not None:
        check_pairs(options)  # a mistake now, not after a turn of training
    if options.plot is not None:
        require_named(options.plot, "--plot")
    if options.json is not None:
        require_writable(options.json, "--json")
    found = measure(options)
    print(table(found))
    if options.json is not None:
        write_json(options.json, found)
    if options.plot is not None:
        draw(found, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
