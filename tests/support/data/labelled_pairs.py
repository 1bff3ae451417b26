"""Corpora of labelled pairs for tests, of words of the small vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer


def write_pairs(
    prefix: Path, vocabulary: Path, pairs: Iterable[tuple[str, str, int]], labels: int = 3
) -> str:
    """Build a corpus of pairs: A, B and a number below `labels`. Args: vocabulary: a vocab.txt."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    source, names = Path(f"{prefix}.jsonl"), Path(f"{prefix}.txt")
    lines = [json.dumps({"text": first, "second": second, "label": label}) for first, second, label in pairs]
    source.write_text("\n".join(lines) + "\n")
    names.write_text("".join(f"label{number}\n" for number in range(labels)))
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(vocabulary))
    options = {"second_key": "second", "labels": str(names), "overwrite": True}
    config = BuildConfig(inputs=[str(source)], output=str(prefix), **options)
    build_corpus(config, partial(load_tokenizer, tokenizer))
    return str(prefix)
