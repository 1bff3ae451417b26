"""The model of a configuration: what training, checkpoints and reports ask of it.

A configuration trains one Transformer, unless its objective names a module with a model of its own
(`ObjectiveConfig.model_module`), whose `MODEL_SPEC` answers instead. `build_model` and the functions below are the
questions, so that no caller needs to know which model it is.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_lite.config.tree import Config
from megatron_lite.transformer.batch import Samples
from megatron_lite.transformer.flops import active_count, shapes_of, step_flops, trained_count
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.trained_model import TrainedModel
from megatron_lite.transformer.transformer import Transformer


class ModelSpec:
    """What training, checkpoints and reports ask of a model: here one Transformer, and the base of other models."""

    # The module whose HUGGINGFACE_FORMAT exports and imports the model (megatron_lite/hf/common/model_format.py);
    # None = one Transformer, which megatron_lite/hf exports and imports itself.
    huggingface: str | None = None

    def build(self, config: Config, num_losses: int, parallel: TensorParallel | None) -> TrainedModel:
        """The initialized fp32 model; DeepSpeed casts it to the training precision."""
        training = config.training
        model = Transformer(
            config.model, recompute=training.recompute, num_losses=num_losses, parallel=parallel,
            label_smoothing=training.label_smoothing, z_loss=training.z_loss, loss_rows=training.loss_rows,
            has_memory=config.has_memory,
        )  # fmt: skip
        # In fp32 and before DeepSpeed sees the model, so that initial weights do not depend on engine or precision.
        initialize_parameters(model.named_parameters(), config.model, training.seed, model.parallel)
        return model

    def made_of(self, config: Config) -> tuple[Any, ...]:
        """The class of the model, and what tells its shapes: the first arguments."""
        return Transformer, config.model

    def shapes(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, without padding rows, as checkpoints hold them."""
        return dict(shapes_of(*self.made_of(config))[1])

    def count(self, config: Config) -> int:
        """Parameters, with the rows that pad vocabularies."""
        return sum(map(math.prod, shapes_of(*self.made_of(config))[0].values()))

    def described_count(self, config: Config) -> str:
        """The number of parameters; with experts of those that compute a token, with LoRA of those that are trained."""
        count = f"{self.count(config):,}"
        if config.model.experts is not None:
            return f"{count} (active: {active_count(config.model):,})"
        if config.model.lora is None:
            return count
        return f"{count} (trained: {trained_count(config.model):,})"

    def flops(self, config: Config, *counts: int) -> float:
        """FLOPs of a training step. Args: counts: tokens, loss rows, ... of `step_flops`, in its order."""
        return step_flops(config.model, *counts)

    def is_unused(self, name: str, config: Config) -> bool:
        """Whether a parameter has no part in the loss. It has no gradient, and stays as it is."""
        if config.task is None:
            return name.startswith("heads.sentence.") and not config.has_sentence_labels
        pooler = {"transform": "heads.projection."}.get(
            config.model.task_head.pooler_kind, "heads.sentence.dense."
        )
        if config.model.has_task_pooler and name.startswith(pooler):
            return False
        if name.startswith("heads.sentence."):
            return True
        is_of_tokens = name.startswith("heads.") and not name.startswith("heads.task.")
        all_headed = config.model.task_head.type != "none" or 0 < len(config.tasks) == len(
            config.model.task_head.heads
        )
        if config.finetune.lm_weight:
            return False  # the tokens of the samples' texts are predicted as well
        return is_of_tokens and (all_headed or "bound" in name)

    def samples(self, config: Config, loader: Any, purpose: str) -> Samples:
        """The samples of a loader, or of a task, as the model reads them. Args: purpose: "train" or "validation"."""
        return loader

    def task_batches(self, config: Config) -> Callable[[Any], Any]:
        """The function that makes a TaskBatch one that the model reads."""
        return lambda batch: batch

    def check_start(self, config: Config) -> None:
        """Raise CheckpointError unless a new run can begin as its objective's section says."""

    def load_start(self, config: Config, engine: Any, context: Any) -> None:
        """Load what a new run starts with, by its objective's section; called by every rank after `check_start`."""

    def check_same_data(self, config: Config, data: Sequence[Mapping[str, Any]], checkpoint: str) -> None:
        """Raise CheckpointError unless what the model reads beside the corpora is what it was trained on.

        Args: data: fingerprints of the corpora of a checkpoint; checkpoint: its name.
        """


def model_spec(config: Config) -> ModelSpec:
    """The model that a configuration trains."""
    modules = {choice.section.model_module for choice in config.objective_choices} - {None}
    # Imported by name: the model package does not know the packages of objectives, which import it.
    return importlib.import_module(modules.pop()).MODEL_SPEC if modules else ModelSpec()


def build_model(config: Config, num_losses: int, parallel: TensorParallel | None = None) -> TrainedModel:
    """The initialized fp32 model of a configuration."""
    return model_spec(config).build(config, num_losses, parallel)
