"""Compares the tokenizer files of a stranger's directory with the tables of its weights, before a library reads them.

A library takes minutes for a vocabulary of millions of tokens, and for ever where each of several replacements makes a
text longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown

# Bytes that a token takes at most: of a tokenizer.json with merges about 130, of others 25.
_BYTES = {
    "tokenizer.json": 512, "tokenizer_config.json": 512, "special_tokens_map.json": 512, "vocab.json": 128,
    "added_tokens.json": 128, "merges.txt": 256, "vocab.txt": 64,
}  # fmt: skip
_BYTES_OF_PIECES = 64  # in *.model
_FEW_BYTES, _FEW = 1 << 20, 1000  # that any directory may have: options, special tokens without a row
_MULTIPLE = 4  # tokens, or merges, of which Gemma has 580,604 for 262,144 tokens
_MOST_STEPS, _LONGEST = 64, 256  # of a pipeline: its steps, and the characters that it makes of one
_NO_COUNTS = ("max", "length", "stride")  # parts of names of options that are no numbers of tokens


def check_tokenizer_sizes(directory: Path, rows: int) -> None:
    """Raise CheckpointError for tokenizer files of more tokens than the weights can have rows for.

    Args: rows: of the longest table of the weights.
    """
    limit = _MULTIPLE * rows + _FEW
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        each = _BYTES_OF_PIECES if path.suffix == ".model" else _BYTES.get(path.name)
        if each is None or not path.is_file():
            continue
        size, most = path.stat().st_size, _FEW_BYTES + each * rows
        if size > most:
            raise CheckpointError(
                f"{path} has {size:,} bytes, and a tokenizer of these weights ({rows:,} rows in the longest table) "
                f"{most:,} at most; fetch both from one model."
            )
        count = path.read_bytes().count(b"\n") if path.suffix == ".txt" else _largest(path)
        if count > limit:
            raise CheckpointError(
                f"{path} has {count:,} tokens or merges, and the longest table of the weights {rows:,} rows; fetch "
                "both from one model."
            )


def _largest(path: Path) -> int:
    """The largest number of tokens that a JSON file of a tokenizer lists or asks for, or of merges."""
    if path.suffix == ".model":
        return 0
    try:
        tree = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        return 0  # the reader says what is wrong
    if not isinstance(tree, dict):
        return 0
    if path.name == "tokenizer.json":
        _check_pipeline(path, tree)
    asked = [value for name, value in tree.items() if not any(part in name for part in _NO_COUNTS)]
    model = tree.get("model")
    lists = [tree, *asked, *(model.values() if isinstance(model, Mapping) else ())]
    numbers = [value for value in asked if type(value) is int]
    return max([*numbers, *(len(each) for each in lists if isinstance(each, (list, Mapping)))], default=0)


def _check_pipeline(path: Path, tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a pipeline of many steps, or of replacements that multiply the length of a text."""
    steps = list(
        _steps([tree.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")])
    )
    if len(steps) > _MOST_STEPS:
        raise CheckpointError(
            f"{path} treats a text in {len(steps)} steps, and at most {_MOST_STEPS} can be imported; fetch it again."
        )
    longer = math.prod(_growth(step) for step in steps if step.get("type") == "Replace")
    if longer > _LONGEST:
        raise CheckpointError(
            f"{path} replaces characters in steps that together make a text {shown(longer)} times as long, and at most "
            f"{_LONGEST} can be imported; fetch it again."
        )


def _growth(step: Mapping[str, Any]) -> int:
    """How many characters a replacement makes of one; where nothing is replaced as well, those come on top."""
    content, pattern = step.get("content"), step.get("pattern")
    is_sure = isinstance(pattern, Mapping) and bool(pattern.get("String"))
    return max(1, len(content) if isinstance(content, str) else 1) + (not is_sure)


def _steps(tree: Any) -> Iterator[Mapping[str, Any]]:
    """All objects with a type, at any depth."""
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            if "type" in each:
                yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
