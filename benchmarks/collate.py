"""How fast tokens become padded batches: sequences per second and core, one thread.

    python benchmarks/collate.py [--json] [--case TEXT]

Every number is the best of several rounds, in CPU time of this process, so that other work on the
machine disturbs it little. Compilation is outside the timing and reported apart. Two yardsticks:

- numpy: the same token-objective rows built per sample with Python and NumPy, in the usual manner of a
  collate function (lists of spans, concatenations, padding), with the four arrays GLM needs;
- floor: the time to write the bytes of a row once, at the bandwidth of `ndarray.fill` on a batch.

Target: a token of text costs at most TARGET times as much in every objective as in the token objective ("x token"),
whatever the length of the rows that come of it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np

from data_utils.common.batch_fields import FIELDS
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.loader.loader import collate
from data_utils.objectives import OBJECTIVES, make_one
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=104, gmask=105, sop=30522, eop=30523, eos=0, pad=0, unk=100, dblock=99
)
ROWS = 64  # per batch
VOCABULARY = 30000
SENTENCE_LENGTH = 20  # tokens, mean
WORDS_PER_TOKEN = 0.75
TARGET = 2.0

# name: (sequence length, document length or None for one document per sequence, config[, objective])
CASES = {
    "token": (512, None, {}),
    "token, reference placement": (512, None, {"placement": "reference"}),
    "token, block_mask_prob 0.1": (512, None, {"block_mask_prob": 0.1}),
    "sentence": (512, None, {"token_prob": 0.0, "sentence_prob": 1.0}),
    "document": (512, None, {"token_prob": 0.0}),
    "mixed 0.5/0.3/0.2": (512, None, {"token_prob": 0.5, "sentence_prob": 0.3, "document_min_ratio": 0.25}),
    "token, documents of 60": (512, 60, {}),
    "token, documents of 12": (512, 12, {}),
    "token, 2048": (2048, None, {}),
    "causal": (512, None, {}, "causal"),
    "prefix_lm": (512, None, {}, "prefix_lm"),
    "masked_lm": (512, None, {}, "masked_lm"),
    "masked_lm, whole words": (512, None, {"whole_words": True}, "masked_lm"),
    "masked_lm, documents of 60": (512, 60, {}, "masked_lm"),
    "spanbert": (512, None, {}, "spanbert"),
    "albert": (512, None, {}, "albert"),
    "ernie": (512, None, {}, "ernie"),
    "t5": (512, None, {}, "t5"),
    "bart": (512, None, {}, "bart"),
    "mass": (512, None, {}, "mass"),
    "unilm": (512, None, {}, "unilm"),
    "unilmv2": (512, None, {}, "unilmv2"),
    "xlnet": (512, None, {}, "xlnet"),
}


def source(sequence_length: int, document_length: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random text for a batch: tokens, chunk lengths, chunks per sample."""
    document = document_length or sequence_length - 4
    per_row = sequence_length // (document + 4)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1000, VOCABULARY, ROWS * per_row * document).astype(np.int32)
    tokens[document - 1 :: document] = SPECIAL.eos
    return tokens, np.full(ROWS * per_row, document), np.full(ROWS, per_row)


def best_seconds(run: Callable[[int], object], rounds: int = 12, calls: int = 20) -> float:
    """CPU seconds of one call, best round."""
    best, number = float("inf"), 0
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            run(number)
            number += 1
        best = min(best, (time.process_time() - start) / calls)
    return best


def make_vocabulary() -> Vocabulary:
    """Random word starts and sentence ends."""
    rng = np.random.default_rng(1)
    sentence_end = rng.random(VOCABULARY) < 1 / SENTENCE_LENGTH
    word_start = rng.random(VOCABULARY) < WORDS_PER_TOKEN
    sentinels = tuple(range(VOCABULARY - 1, VOCABULARY - 101, -1))
    return Vocabulary(SPECIAL, VOCABULARY, sentence_end, word_start, sentinels=sentinels)


def measure(name: str) -> dict:
    """One line of the table."""
    sequence_length, document_length, config, *objective = CASES[name]
    kind = objective[0] if objective else "blank_infilling"
    made = make_one(kind, OBJECTIVES[kind].config_class(**config), make_vocabulary(), 1, sequence_length)
    text = source(sequence_length, document_length)
    indices = np.arange(ROWS)
    out = collate(made, *text, indices)
    row_bytes = out.nbytes // ROWS
    padding = round(float((out[:, FIELDS.index("doc")] < 0).mean()), 3)
    # One buffer, as a loader with a ring of buffers has; a new array each time also pays for its pages.
    seconds = best_seconds(lambda i: collate(made, *text, indices + i * ROWS, out)) / ROWS
    fresh = best_seconds(lambda i: collate(made, *text, indices + i * ROWS)) / ROWS
    floor = best_seconds(out.fill) / ROWS
    return {
        "case": name,
        "rows_per_second": round(1 / seconds),
        "rows_per_second_new_array": round(1 / fresh),
        "source_tokens_per_second": round(len(text[0]) / ROWS / seconds),
        "microseconds_per_row": round(seconds * 1e6, 2),
        "row_bytes": row_bytes,
        "floor_microseconds_per_row": round(floor * 1e6, 2),
        "padding": padding,
    }


def numpy_row(text: np.ndarray, weights: list[float], rng: random.Random) -> list[np.ndarray]:
    """A token-objective row, sample by sample: tokens, targets, loss mask, the two position ids."""
    text = np.concatenate([[SPECIAL.cls], text])
    lengths: list[int] = []
    while sum(lengths) < int(0.15 * len(text)):
        lengths.append(rng.choices(range(1, 40), weights=weights)[0])
    free = len(text) - 2 - sum(lengths) - len(lengths) + 1
    offsets = sorted(rng.randrange(free + 1) for _ in lengths)
    spans, shift = [], 1
    for offset, length in zip(offsets, lengths, strict=True):
        spans.append((offset + shift, offset + shift + length))
        shift += length + 1
    context, context_positions, last, position = [], [], 0, 0
    mask_position = {}
    for start, end in spans:
        context += [text[last:start], [SPECIAL.mask]]
        position += start - last
        mask_position[start] = position
        position += 1
        last = end
    context.append(text[last:])
    size = position + len(text) - last
    context_positions.append(np.arange(size))
    rng.shuffle(spans)
    inputs, answers, positions, block_positions = [], [], [], []
    for start, end in spans:
        inputs += [[SPECIAL.sop], text[start:end]]
        answers += [text[start:end], [SPECIAL.eop]]
        positions.append(np.full(end - start + 1, mask_position[start]))
        block_positions.append(np.arange(1, end - start + 2))
    tokens = np.concatenate(context + inputs)
    return [
        tokens,
        np.concatenate([np.zeros(size, np.int64), *answers]),
        np.concatenate([np.zeros(size, np.int64), np.ones(len(tokens) - size, np.int64)]),
        np.concatenate(context_positions + positions),
        np.concatenate([np.zeros(size, np.int64), *block_positions]),
    ]


def measure_numpy() -> float:
    """Seconds per row of per-sample collation on the "token" case."""
    sequence_length, document_length, *_ = CASES["token"]
    texts = source(sequence_length, document_length)[0].reshape(ROWS, -1)
    weights = list(np.cumprod(3.0 / np.arange(1, 40)))
    rng = random.Random(0)

    def batch(_: int) -> np.ndarray:
        rows = [numpy_row(text, weights, rng) for text in texts]
        longest = max(len(row[0]) for row in rows)
        padded = np.zeros((ROWS, 5, longest), np.int64)
        for i, row in enumerate(rows):
            for j, field in enumerate(row):
                padded[i, j, : len(field)] = field
        return padded

    return best_seconds(batch, rounds=4, calls=4) / ROWS


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    parser.add_argument("--case", default="", help="only cases whose name contains this, and token")
    arguments = parser.parse_args()
    start = time.perf_counter()
    collate(
        BlankInfilling(BlankInfillingConfig(), Vocabulary(SPECIAL, 3000), 1, 64),
        np.arange(60),
        [60],
        [1],
        [0],
    )
    first_call = time.perf_counter() - start
    results = [measure(name) for name in CASES if name == "token" or arguments.case in name]
    numpy_seconds = measure_numpy()
    ratio = results[0]["rows_per_second"] * numpy_seconds
    print(f"{ROWS} rows per batch, one thread, CPU time")
    print(f"first call {first_call:.1f} s (compiles, or loads what an earlier process compiled)")
    for line in results:
        line["times_floor"] = line["microseconds_per_row"] / line["floor_microseconds_per_row"]
        line["times_token"] = results[0]["source_tokens_per_second"] / line["source_tokens_per_second"]
    titles = f"{'us/row':>8} {'floor us':>9} {'x floor':>8} {'x token':>8} {'padding':>8}"
    print(f"{'case':28} {'rows/s':>9} {'new array':>10} {titles}")
    for line in results:
        print(
            f"{line['case']:28} {line['rows_per_second']:9,} {line['rows_per_second_new_array']:10,} "
            f"{line['microseconds_per_row']:8.2f} {line['floor_microseconds_per_row']:9.2f} {line['times_floor']:8.1f} "
            f"{line['times_token']:8.2f} "
            f"{line['padding']:8.1%}"
        )
    print(f"{'token, numpy per sample':28} {1 / numpy_seconds:9,.0f} {'':10} {numpy_seconds * 1e6:8.2f}")
    print(f"compiled / numpy: {ratio:.0f} x")
    slow = [line["case"] for line in results if line["times_token"] > TARGET]
    print(f"beyond {TARGET:g} x token: {', '.join(slow) or 'none'}")
    if arguments.json:
        summary = {
            "first_call_seconds": round(first_call, 2),
            "numpy_rows_per_second": round(1 / numpy_seconds),
        }
        print(json.dumps(summary | {"compiled_over_numpy": round(ratio, 1), "cases": results}))
    return 0


if __name__ == "__main__":
    run_command(main)
