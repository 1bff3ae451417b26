"""The section of ELECTRA, its generator, and a configuration of the discriminator alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from data_utils.objectives.electra import ElectraConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config

_PAIR_SECTIONS = ("objectives", "electra")


def section_of(config: Config) -> ElectraConfig:
    """The section `electra` of a configuration with that objective."""
    (section,) = [choice.section for choice in config.objective_choices if choice.name == "electra"]
    return section


def is_detached(config: Config) -> bool:
    """Whether the discriminator adds its own word table to the generator's."""
    return section_of(config).embeddings == "detached"


def generator_of(config: Config) -> ModelConfig:
    """The generator's Transformer, with embeddings of the discriminator's width; its FFN has 4 times its own."""
    model, section = config.model, section_of(config)
    embedding, width = model.embedding_size or model.hidden_size, section.generator_width(model.hidden_size)
    return replace(
        model,
        system="electra_generator" if model.system == "electra" else model.system,
        num_layers=section.generator_layers or model.num_layers,
        hidden_size=width,
        num_attention_heads=section.num_generator_heads(width),
        num_key_value_heads=None,
        head_dim=None,
        ffn_size=4 * width,
        embedding_size=None if embedding == width else embedding,
        head_transform=True,
        head_bias=True,
    )


def discriminator_alone(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration tree of the discriminator alone, as a BERT that reads text without masks."""
    kept = {name: value for name, value in tree.items() if name not in _PAIR_SECTIONS}
    training = {name: x for name, x in tree["training"].items() if not name.startswith("loss_")}
    return {**kept, "training": training, "objectives": {"masked_lm": 1}}
