"""The ModelSpec of ERNIE (Tsinghua): how it is built and fed (interface: megatron_lite/transformer/build.py)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.seeds import derive_seed
from data_utils.dataset.vectors import Vectors
from data_utils.objectives.entities import EntitiesConfig
from data_utils.tasks.readers.marked import entity_count
from megatron_lite.config.tree import Config
from megatron_lite.models.ernie_thu.batch import EntitySamples, EntityTaskBatch, NoVectors, TaskSamples
from megatron_lite.models.ernie_thu.model import EntityTransformer
from megatron_lite.transformer.build import ModelSpec
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.task_batch import TaskBatch
from megatron_lite.transformer.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)


def section_of(config: Config) -> EntitiesConfig:
    """The section `entities` of a configuration with that objective."""
    (choice,) = config.objective_choices
    return choice.section


class ErnieSpec(ModelSpec):
    """A BERT with entity states. FLOPs count the tokens only: entity states are narrow and few."""

    huggingface = "megatron_lite.models.ernie_thu.huggingface"

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
        """As for one Transformer, and the layers whose entity states no later block reads."""
        kinds = section_of(config).layer_types_for(config.model.num_layers)
        last = max((layer for layer, kind in enumerate(kinds) if kind != "sim"), default=-1)
        # They have no gradient, and weight decay alone would change them.
        unused: tuple[str, ...] = (f"layers.{last}.entity_4h_to_h.", f"layers.{last}.entity_layernorm.")
        if config.task is not None:
            unused = (*unused, "entity_head.")
        return name.startswith(unused) or super().is_unused(name, config)

    def samples(self, config: Config, loader: Any, purpose: str) -> EntitySamples | TaskSamples:
        if config.task is not None:
            return TaskSamples(loader, _task_vectors(config))
        seed = derive_seed(config.training.seed, f"{purpose} entities")
        return EntitySamples(loader, section_of(config), _vectors(config), seed)

    def task_batches(self, config: Config) -> Callable[[TaskBatch], EntityTaskBatch]:
        vectors = _task_vectors(config)
        return lambda batch: EntityTaskBatch(batch, vectors)

    def check_same_data(self, config: Config, data: Sequence[Mapping[str, Any]], checkpoint: str) -> None:
        section = section_of(config)
        recorded = {entry.get("vectors_crc32") for entry in data}
        if section.vectors is not None and recorded - {None, Vectors(section.vectors, section.size).identity}:
            raise CheckpointError(
                f"entities.vectors {section.vectors} differ from the vectors that {checkpoint} was trained with; "
                "give those, or choose another run.directory."
            )


def _vectors(config: Config) -> Vectors:
    section = section_of(config)
    if section.vectors is None:
        raise ConfigError(
            "entities.vectors is null; give the .npy file with a vector for each entity of the corpora."
        )
    return _opened(section.vectors, section.size)


@functools.lru_cache(maxsize=1)
def _opened(path: str, size: int) -> Vectors:
    """The vectors of a file, whose checksum is computed once."""
    return Vectors(path, size)


def _task_vectors(config: Config) -> Vectors | NoVectors:
    """The vectors of a task's entities. Raises: DataError if there are fewer than entity ids; ConfigError."""
    of_tasks = {task.entity_ids for task in config.tasks or (config.task,) if task is not None} - {None}
    if not of_tasks:
        log.warning("task.entity_ids is null: the task's samples are read without entities")
        return NoVectors(section_of(config).size)
    vectors = _vectors(config)
    for path in sorted(filter(None, of_tasks)):
        vectors.require(entity_count(path), f"task.entity_ids {path}")
    return vectors


MODEL_SPEC = ErnieSpec()
