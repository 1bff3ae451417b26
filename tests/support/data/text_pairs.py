"""Corpora of text pairs for tests, of words of the small vocabulary."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer


def random_records(rng, count, negatives=2, words=40, longest=9):
    """Records of random texts, some of them equal, with up to `negatives` negatives."""

    def text():
        return " ".join(f"word{i}" for i in rng.integers(0, words, rng.integers(1, longest)))

    return [
        {
            "query": text(),
            "positive": text(),
            "negatives": [text() for _ in range(rng.integers(0, negatives + 1))],
            "score": float(np.float32(rng.random())),
        }
        for _ in range(count)
    ]


def write_text_pairs(prefix: Path, vocabulary: Path | TokenizerConfig, records, **options) -> str:
    """Build a corpus of text pairs. Args: vocabulary: a vocab.txt, or any tokenizer. options: of BuildConfig."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    source = Path(f"{prefix}.jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = vocabulary
    if isinstance(vocabulary, Path):
        tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(vocabulary))
    config = BuildConfig(inputs=[str(source)], output=str(prefix), text_pairs=True, **options)
    build_corpus(config, partial(load_tokenizer, tokenizer))
    return str(prefix)
