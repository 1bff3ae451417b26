"""A Transformer with entities as a kind of model, behind the interface of megatron_lite/model/trunk/build.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.base.errors import CheckpointError, ConfigError
from data_utils.base.random_streams import derive_seed
from data_utils.dataset.vectors import Vectors
from data_utils.objectives.entities import EntitiesConfig
from megatron_lite.checkpoint.existing import read_checkpoint
from megatron_lite.config.tree import Config
from megatron_lite.knowledge.batch import EntitySamples
from megatron_lite.knowledge.model import EntityTransformer
from megatron_lite.model.layers.tensor_parallel import TensorParallel
from megatron_lite.model.trunk.build import OneTransformer
from megatron_lite.model.trunk.initial_weights import initialize_parameters


def section_of(config: Config) -> EntitiesConfig:
    """The section `entities` of a configuration with that objective."""
    (choice,) = config.objective_choices
    return choice.section


class Kind(OneTransformer):
    """Tokens and entities. FLOPs are those of the tokens: the entities' stream is narrow and short."""

    def build(self, config: Config, num_losses: int, parallel: TensorParallel | None) -> EntityTransformer:
        training = config.training
        model = EntityTransformer(
            *self.made_of(config)[1:], recompute=training.recompute, num_losses=num_losses, parallel=parallel
        )
        initialize_parameters(model.named_parameters(), config.model, training.seed, model.parallel)
        return model

    def made_of(self, config: Config) -> tuple[Any, ...]:
        return EntityTransformer, config.model, section_of(config)

    def is_unused(self, name: str, config: Config) -> bool:
        """Besides those of one Transformer: what makes the states of entities that no later block reads."""
        kinds = section_of(config).kinds_of(config.model.num_layers)
        last = max((layer for layer, kind in enumerate(kinds) if kind != "sim"), default=-1)
        last_states = (f"layers.{last}.entity_4h_to_h.", f"layers.{last}.entity_layernorm.")
        return name.startswith(last_states) or super().is_unused(name, config)

    def samples(self, config: Config, loader: Any, purpose: str) -> EntitySamples:
        section = section_of(config)
        if section.vectors is None:
            raise ConfigError(
                "entities.vectors is null; give the .npy file with a vector for each entity of the corpora."
            )
        seed = derive_seed(config.training.seed, f"{purpose} entities")
        return EntitySamples(loader, section, Vectors(section.vectors, section.size), seed)

    def check_continuation(self, config: Config, before: Mapping[str, Any], checkpoint: Path) -> None:
        section = section_of(config)
        recorded = {
            entry.get("vectors_crc32") for entry in read_checkpoint(checkpoint).trainer_state().data or ()
        }
        if section.vectors is not None and recorded - {None, Vectors(section.vectors, section.size).identity}:
            raise CheckpointError(
                f"entities.vectors {section.vectors} are not those of {checkpoint}; give those, or choose another "
                "run.directory."
            )


KIND = Kind()
