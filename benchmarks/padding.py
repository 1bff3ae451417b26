#!/usr/bin/env python3
"""How much of a batch is padding, and how much text gives way to masks, per objective and length, on a real corpus.

    python benchmarks/padding.py --prefix quickstart/data/corpus_train

Samples come as in training: windows of the dataset in the shuffled order of an epoch, through collation. Word starts
and sentence ends are random, which matters for the sentence objective of blank infilling alone.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np

from benchmarks.arguments import check_at_least
from benchmarks.collate import SENTENCE_LENGTH, SPECIAL, WORDS_PER_TOKEN
from data_utils.common.batch_fields import DOC
from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.loader.loader import collate
from data_utils.loader.mixture import Mixture
from data_utils.loader.sampler import WindowIndex
from data_utils.loader.sentences import SentenceIndex
from data_utils.objectives import OBJECTIVES, make_one
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.objectives.own_corpora import TEXT_PAIRS
from data_utils.tokenizers.vocabulary import Vocabulary

# name: config of blank infilling, in addition to the objectives with their defaults
MORE_CASES = {
    "blank_infilling, sentence": {"token_prob": 0.0, "sentence_prob": 1.0},
    "blank_infilling, document": {"token_prob": 0.0},
    "blank_infilling, half document": {"token_prob": 0.5},
    "blank_infilling, as GLM-10B": {"token_prob": 0.5, "sentence_prob": 0.3, "document_min_ratio": 0.25},
}


def vocabulary_for(dataset: IndexedDataset) -> Vocabulary:
    """Special tokens that do not occur in the text, but for its eos."""
    size = dataset.manifest.get("vocab_size") or int(np.iinfo(dataset.dtype).max)
    eos = dataset.manifest.get("eos", SPECIAL.eos)
    names = [field.name for field in dataclasses.fields(SPECIAL)]
    special = type(SPECIAL)(**{name: size + i for i, name in enumerate(names)} | {"eos": eos})
    rng = np.random.default_rng(1)
    first = size + len(names)
    size = first + 100
    ends, starts = rng.random(size) < 1 / SENTENCE_LENGTH, rng.random(size) < WORDS_PER_TOKEN
    return Vocabulary(special, size, ends, starts, sentinels=tuple(range(first, size)))


def measure(
    dataset: IndexedDataset, name: str, sequence_length: int, samples: int
) -> tuple[int, float, float]:
    """Row length, padded share of the row tokens, and lost share of the text tokens."""
    kind = name.split(",")[0]
    section = OBJECTIVES[kind].config_class(**MORE_CASES.get(name, {}))
    index: WindowIndex | SentenceIndex = WindowIndex(dataset, sequence_length, DOCUMENT_OVERHEAD)
    if section.whole_documents:  # longer ones are left out, and lost to no row
        row_length = section.row_length_for(sequence_length)
        index = SentenceIndex(dataset, sequence_length, section.least_row_length(0), row_length)
    window = Mixture([(index, 1.0)], seed=1)
    indices = np.arange(min(samples, window.indexes[0].num_windows))
    arguments = (section, vocabulary_for(dataset), 1, sequence_length)
    usual = make_one(kind, *arguments)
    chunks = window.fetch(indices)
    batch = collate(usual, *chunks, indices)
    used = (batch[:, DOC] >= 0).sum()
    roomy = collate(make_one(kind, *arguments, 2 * usual.row_length), *chunks, indices)
    lost = (roomy[:, DOC] >= 0).sum() - used
    # These hold their text twice.
    copies = 2 if kind in ("bart", "optimus", "tsdae") else 1
    return usual.row_length, 1.0 - used / batch[:, DOC].size, lost / copies / len(chunks[0])


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--prefix", type=expanded_path, required=True, help="dataset path without .bin/.idx/.json")
    add("--lengths", nargs="+", type=int, default=[512, 2048], help="source tokens (default: 512 2048)")
    add("--case", default="", help="only objectives whose name contains this")
    add("--samples", type=int, default=2000, help="at most an epoch (default: 2000)")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "samples")
    check_at_least(options, 16, "lengths")
    # A record of a text pair is no window of text.
    of_text = [name for name in OBJECTIVES if OBJECTIVES[name].config_class.own_corpora != TEXT_PAIRS]
    names = [name for name in [*of_text, *MORE_CASES] if options.case in name]
    if not names:
        raise ConfigError(
            f"--case is {options.case!r}, which no objective's name contains; leave it out for all."
        )
    dataset = IndexedDataset(options.prefix)
    titles = "".join(f" {n}: row length | padding | text lost |" for n in options.lengths)
    print(f"| objective |{titles}\n|{'---|' * (1 + 3 * len(options.lengths))}")
    for name in names:
        cells = ""
        for length in options.lengths:
            row_length, padding, lost = measure(dataset, name, length, options.samples)
            cells += f" {row_length} | {padding:.2%} | {lost:.3%} |"
        print(f"| {name} |{cells}", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
