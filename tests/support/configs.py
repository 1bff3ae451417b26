"""The smallest configuration that is complete, with overrides and with a DeepSpeed file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from data_utils.common.settings import build, merge, parse_override
from megatron_lite.config.tree import Config, load_config

TINY = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300},
    "training": {"steps": 100},
}


def tiny(*overrides: str) -> Config:
    """The configuration of a model of 2 layers, 300 tokens and 100 steps."""
    tree: dict[str, Any] = TINY
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return build(Config, tree)


def with_json(tmp_path: Path, given: Any, *overrides: str) -> Config:
    """The tiny configuration merged with a DeepSpeed file; a str is written as it is."""
    base, path = tmp_path / "base.yaml", tmp_path / "ds.json"
    base.write_text(yaml.safe_dump(TINY))
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return load_config([base], overrides, path)
