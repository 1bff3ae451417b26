"""The sections of a configuration that only OPTIMUS has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_utils.common.settings import merge
from data_utils.objectives.optimus import OptimusConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config

_PAIR_SECTIONS = ("decoder", "decoder_tokenizer", "objectives", "optimus")


def latent_of(config: Config) -> OptimusConfig:
    """The section `optimus` of a configuration with that objective."""
    (section,) = [choice.section for choice in config.objective_choices if choice.name == "optimus"]
    return section


def decoder_of(config: Config) -> ModelConfig:
    """The decoder's Transformer, which a configuration with that objective has."""
    assert config.decoder is not None, "the configuration checks it"
    return config.decoder


def encoder_alone(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration tree of the encoder alone, as a BERT; task heads read the feature of the posterior."""
    kept = {name: value for name, value in tree.items() if name not in _PAIR_SECTIONS}
    is_pooled = tree["optimus"]["feature"] == "pooler"
    kept["data"] = {**tree["data"], "train": [], "validation": []}  # pairs of encoder and decoder text
    model = merge(tree["model"], {"task_head": {"pooler": is_pooled}})
    return {**kept, "objectives": {"masked_lm": 1}, "model": model}
