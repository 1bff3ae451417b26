"""Sizes of an import that fit the model: steps, length of samples, batch and warm-up.

Settings of the user override them. Settings of a recipe that the directory does not contain come from configs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.common.settings import build, check, merge
from megatron_lite.config.sections import BatchConfig
from megatron_lite.config.tree import Config

STEPS = 1000
LONGEST = 2048  # positions: rotary models have many more, but longer samples make a first run slow
MICRO_BATCH_TOKENS = 4096  # the default batch: 8 samples of 512 tokens


def with_sizes(path: Path, model: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with steps, samples that fit the positions, a batch for their length, and a warm-up of a tenth.

    Args: path, model: the imported directory, and what it says of the section `model`.
    Raises: ConfigError for a length that the positions do not hold.
    """
    tree = merge({"training": {"steps": STEPS}}, tree)
    # Without a limit on positions, so that every other mistake is reported before the length is chosen.
    config = build(Config, merge(tree, {"model": {"max_position": 1 << 30}}))
    length = _length(path, model.get("max_position"), config, tree)
    sizes: dict[str, Any] = {"data": {"sequence_length": length}}
    batch = tree.get("batch") or {}
    if not batch.keys() & {"micro_batch_size", "ramp"}:
        sizes["batch"] = {"micro_batch_size": _micro_batch(length, config.batch)}
    if not tree.get("schedule"):
        sizes["schedule"] = {"warmup_steps": config.training.steps // 10}
    return merge(tree, sizes)


def _length(path: Path, last: Any, config: Config, tree: Mapping[str, Any]) -> int:
    """Tokens of a sample: all that fit the positions and the objective's special tokens, 512 without positions."""
    data, length = tree.get("data") or {}, config.data.sequence_length
    needed = max(choice.section.max_position_needed(length) for choice in config.objective_choices)
    if not isinstance(last, int) or config.model.positions == "none":
        return length
    check(
        "sequence_length" not in data or needed <= last,
        f"data.sequence_length ({length}) needs position ids up to {needed}, but the tables of {path} end at {last}; "
        f"set data.sequence_length={length - (needed - last)}, or leave it out.",
    )
    if "sequence_length" in data:
        return length
    longest = min(last, LONGEST - 1)
    if data.keys() & {"row_length", "region"}:  # both must hold a sample
        longest = min(longest, needed)
    return length - (needed - longest)


def _micro_batch(length: int, batch: BatchConfig) -> int:
    """Samples of a micro-batch: 8, or fewer of longer ones, and a divisor of the batch."""
    sizes = (size for size in (8, 4, 2) if size * length <= MICRO_BATCH_TOKENS)
    return next((size for size in sizes if batch.global_batch_size % size == 0), 1)
