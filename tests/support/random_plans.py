"""Random plans of phases: every token once in an epoch, and no step differs after stops and on other numbers of ranks.

    python tests/support/random_plans.py --first 0 --count 1000

A plan has up to five phases with other weights, lengths, batches and ramps over three corpora, of which some come
later, go and return. It is run in one go, and again with five stops: each start builds everything from the settings and
the step alone, on another number of ranks, and phases that it does not reach stand as another edit has them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, to_tree
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader import corpus_streams as streams
from data_utils.loader import mixture as mixture_module
from data_utils.loader.loader import phase_mixtures
from data_utils.loader.mixture import Mixture, batch_indices
from data_utils.loader.sampler import WindowIndex
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from megatron_lite.config.tree import Config

CORPORA = 3
STOPS = 5
SEED = 5
_MODEL = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 60000,
    "max_position": 200,
}

Text = tuple[int, bytes]  # of a sample: its corpus, its tokens


def corpora(directory: Path) -> list[WindowIndex]:
    """A dataset of documents of 1 to 60 tokens; every token is another number, so that it tells its place."""
    found = []
    for number in range(CORPORA):
        prefix = directory / f"corpus{number}"
        lengths = np.random.default_rng(number).integers(1, 60, 20 + 15 * number)
        with IndexedDatasetWriter(prefix, 60000) as writer:
            writer.add(np.arange(lengths.sum()), lengths)
            writer.finish({"eos": 0})
        found.append(WindowIndex(IndexedDataset(prefix), 32, DOCUMENT_OVERHEAD))
    return found


def _weights(draw: random.Random) -> dict[str, float]:
    chosen = [number for number in range(CORPORA) if draw.random() < 0.6] or [draw.randrange(CORPORA)]
    return {f"corpus{number}": round(draw.uniform(0.5, 3), 2) for number in chosen}


def _batch(draw: random.Random) -> dict[str, Any]:
    size = draw.choice((4, 8, 12, 24))
    batch: dict[str, Any] = {"micro_batch_size": draw.choice((1, 2)), "global_batch_size": size}
    if size > 4 and draw.random() < 0.3:
        batch["ramp"] = {"start": 4, "by": 4, "samples": draw.randint(1, 20)}
    return batch


def _phase(draw: random.Random, lengths: list[int]) -> dict[str, Any]:
    return {
        "steps": draw.randint(1, 8), "weights": _weights(draw), "sequence_length": draw.choice(lengths),
        "batch": _batch(draw),
    }  # fmt: skip


def accepted(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The first settings that are no mistake, such as a ramp that its phase does not end."""
    while True:
        with contextlib.suppress(ConfigError):
            return to_tree(build(Config, make()))


def drawn(draw: random.Random) -> dict[str, Any]:
    """The settings of a run."""
    lengths = draw.sample((32, 40, 48, 64), draw.choice((1, 2, 3)))
    phases = [_phase(draw, lengths) for _ in range(draw.randint(1, 5))]
    train = [{"prefix": f"corpus{number}"} for number in range(CORPORA)]
    region = draw.choice((0, 64, 150))
    return {
        "model": _MODEL, "data": {"train": train, "sequence_length": lengths[0], "region": region}, "phases": phases,
        "batch": {"micro_batch_size": 1, "global_batch_size": 4},
        "training": {"steps": sum(phase["steps"] for phase in phases), "seed": SEED},
    }  # fmt: skip


class Start:
    """A start of a run: everything is made of its settings."""

    def __init__(self, tree: dict[str, Any], indexes: list[WindowIndex]):
        self.config = build(Config, tree)
        self.phase_plan = self.config.phase_plan
        self._mixtures: list[Mixture] = phase_mixtures(indexes, SEED, self.phase_plan.samples)

    def texts(self, step: int, ranks: int) -> list[Text]:
        """The samples of a step as its ranks take them, in the order of their numbers."""
        self.phase_plan.require_ranks(ranks)
        config, size = self.phase_plan.config(step), self.phase_plan.batch_size(step)
        first = self.phase_plan.consumed(step + 1) - size
        phase = max(n for n, begin in enumerate(self.phase_plan.first_steps[:-1]) if begin <= step)
        found: dict[int, Text] = {}
        for rank in range(ranks):
            micro = config.batch.micro_batch_size
            numbers = batch_indices(
                first, global_batch_size=size, micro_batch_size=micro, dp_rank=rank, dp_size=ranks
            )
            for samples in numbers:
                found |= self._read(self._mixtures[phase], samples, config.data.sequence_length)
        assert sorted(found) == list(range(first, first + size)), "ranks share a step's samples"
        return [found[number] for number in sorted(found)]

    @staticmethod
    def _read(mixture: Mixture, samples: np.ndarray, length: int) -> dict[int, Text]:
        tokens, lengths, chunks = mixture.fetch(samples)
        costs = np.add.reduceat(lengths + DOCUMENT_OVERHEAD, np.cumsum(chunks) - chunks) - DOCUMENT_OVERHEAD
        assert chunks.min() >= 1 and costs.max() <= length, "every row has a text that fits"
        sizes = np.add.reduceat(lengths, np.cumsum(chunks) - chunks)
        texts = np.split(tokens, np.cumsum(sizes)[:-1])
        chosen, _ = mixture.deal(samples)
        return {
            int(number): (int(corpus), text.astype(np.int64).tobytes())
            for number, corpus, text in zip(samples, chosen, texts, strict=True)
        }


def _ranks(start: Start, draw: random.Random) -> int:
    """A number of ranks that suits every batch."""
    fitting = []
    for ranks in range(1, 9):
        try:
            start.phase_plan.require_ranks(ranks)
            fitting.append(ranks)
        except ConfigError:
            continue
    return draw.choice(fitting)


def _edited(tree: dict[str, Any], draw: random.Random, step: int) -> dict[str, Any]:
    """The settings with other phases in place of those that begin after `step`, for as many steps."""
    begins = np.cumsum([0, *(phase["steps"] for phase in tree["phases"])])
    lengths = [phase["sequence_length"] for phase in tree["phases"]]
    phases = [
        phase if begin <= step else {**_phase(draw, lengths), "steps": phase["steps"]}
        for begin, phase in zip(begins, tree["phases"], strict=False)
    ]
    return {**tree, "phases": phases}


def check_plan(number: int, indexes: list[WindowIndex]) -> tuple[int, int]:
    """Raises AssertionError. Returns how many changes of length there are, and epochs that ended."""
    draw = random.Random(number)
    tree = accepted(lambda: drawn(draw))
    steps = tree["training"]["steps"]
    whole = Start(tree, indexes)
    once = [whole.texts(step, 1) for step in range(steps)]
    stops = sorted(draw.randrange(steps) for _ in range(STOPS))
    for begin, end in zip([0, *stops], [*stops, steps], strict=True):
        settings = tree if end == steps else accepted(functools.partial(_edited, tree, draw, end))
        start = Start(settings, indexes)
        ranks = _ranks(start, draw)
        for step in range(begin, end):
            assert start.texts(step, ranks) == once[step], f"step {step} on {ranks} ranks differs"
    ended = 0
    for corpus, index in enumerate(indexes):
        read = [text for texts in once for its, text in texts if its == corpus]
        tokens = np.frombuffer(b"".join(read), np.int64)
        size = index.dataset.num_tokens
        for place in range(0, len(tokens), size):
            part = np.sort(tokens[place : place + size])
            assert np.all(np.diff(part) > 0), f"a token of corpus {corpus} twice in an epoch"
        ended += len(tokens) // size
    lengths = [phase["sequence_length"] for phase in tree["phases"]]
    return sum(one != other for one, other in itertools.pairwise(lengths)), ended


def check_plans(first: int, count: int, directory: Path) -> tuple[int, int]:
    """As `check_plan`, for plans of these numbers, in small blocks. The message of an error names the plan."""
    before = mixture_module.BLOCK_SIZE, streams._SMALLEST_BLOCK, streams._LARGEST_BLOCK
    mixture_module.BLOCK_SIZE, streams._SMALLEST_BLOCK, streams._LARGEST_BLOCK = 16, 8, 8
    changes = ended = 0
    try:
        indexes = corpora(directory)
        for number in range(first, first + count):
            try:
                found = check_plan(number, indexes)
            except AssertionError as error:
                raise AssertionError(f"plan {number}: {error}") from error
            changes, ended = changes + found[0], ended + found[1]
    finally:
        mixture_module.BLOCK_SIZE, streams._SMALLEST_BLOCK, streams._LARGEST_BLOCK = before
    return changes, ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first plan (default: 0)")
    parser.add_argument("--count", type=int, default=1000, help="plans (default: 1000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        changes, ended = check_plans(options.first, options.count, Path(directory))
    print(
        f"{options.count} plans, {STOPS} stops each, {changes} changes of length, {ended} epochs that ended: all exact"
    )


if __name__ == "__main__":
    main()
