"""The sections of a configuration that only OPTIMUS has."""

from __future__ import annotations

from data_utils.objectives.optimus import OptimusConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config


def latent_of(config: Config) -> OptimusConfig:
    """The section `optimus` of a configuration with that objective."""
    (section,) = [choice.section for choice in config.objective_choices if choice.name == "optimus"]
    return section


def decoder_of(config: Config) -> ModelConfig:
    """The decoder's Transformer, which a configuration with that objective has."""
    assert config.decoder is not None, "the configuration checks it"
    return config.decoder
