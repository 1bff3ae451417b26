"""Limits on the tokenizer files of a stranger's directory, before a library reads them.

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

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "added_tokens.json", "*.txt",
    "*.model",
)  # fmt: skip
_BYTES_PER_ROW = 512  # of a tokenizer.json with merges about 130
_FEW_BYTES = 1 << 20  # that any directory may have: options, special tokens without a row
_LONGEST = 256  # characters that a pipeline makes of one


def check_tokenizer_files(directory: Path, rows: int) -> None:
    """Raise CheckpointError for tokenizer files of more than any tokenizer of the weights has.

    Args: rows: of the longest table of the weights.
    """
    most = _FEW_BYTES + _BYTES_PER_ROW * rows
    for path in sorted({path for name in _FILES for path in directory.glob(name) if path.is_file()}):
        if (size := path.stat().st_size) > most:
            raise CheckpointError(
                f"{path} has {size:,} bytes, and a tokenizer of these weights ({rows:,} rows in the longest table) "
                f"{most:,} at most; fetch both from one model."
            )
    extra = _object(directory / "tokenizer_config.json").get("extra_ids")  # the library makes a name for each
    if isinstance(extra, int) and extra > most // _BYTES_PER_ROW:
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'} asks for {extra:,} extra_ids, and the longest table of the weights "
            f"has {rows:,} rows; fetch both from one model."
        )
    tree = _object(directory / "tokenizer.json")
    steps = _steps([tree.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")])
    longer = math.prod(_growth(step) for step in steps if step.get("type") == "Replace")
    if longer > _LONGEST:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} replaces characters in steps that together make a text {shown(longer)} "
            f"times as long, and at most {_LONGEST} can be imported; fetch it again."
        )


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none: the reader of the file says what is wrong."""
    try:
        tree = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return tree if isinstance(tree, dict) else {}


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
