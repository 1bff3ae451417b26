"""Rules of a configuration with the objective `optimus`: two stacks, `model` and `decoder`, and a latent vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from data_utils.base.errors import ConfigError
from data_utils.base.setting_files import shown
from data_utils.base.settings import check
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.optimus import OptimusConfig
from data_utils.samples.config import DataConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import CheckpointConfig, ParallelConfig, TrainingConfig


class Sections(Protocol):
    """What the rules read of a `Config`."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def decoder(self) -> ModelConfig | None: ...
    @property
    def decoder_tokenizer(self) -> Any: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def task(self) -> Any: ...
    @property
    def latent(self) -> OptimusConfig | None: ...
    @property
    def objective_choices(self) -> Sequence[ObjectiveChoice]: ...


def check_latent(config: Sections) -> None:
    """Raise ConfigError unless the rest is as two stacks and a latent vector need it."""
    latent, decoder = config.latent, config.decoder
    if latent is None or decoder is None:
        check(
            latent is None,
            "objectives has optimus, but decoder is null; describe there the Transformer that decodes, as model "
            "describes the one that encodes.",
        )
        for name in ("decoder", "decoder_tokenizer"):
            check(
                getattr(config, name) is None,
                f"{name} is set without the objective optimus; set it to null, or objectives to {{optimus: 1}}.",
            )
        return
    names = [choice.name for choice in config.objective_choices]
    check(
        len(names) == 1,
        f"objectives has {', '.join(names)}; optimus has samples of its own kind and stands alone.",
    )
    _check_run(config, latent)
    needed = latent.max_position_needed(config.data.sequence_length)
    for key, stack in (("model", config.model), ("decoder", decoder)):
        refused = {
            "decoder_layers": stack.decoder_layers > 0,
            "share_layers": stack.share_layers,
            "embedding_size": stack.embedding_size is not None,
            "relative": stack.relative != "none",
            "adapter_size": stack.adapter_size > 0,
        }
        for option in (name for name, is_set in refused.items() if is_set):
            raise ConfigError(
                f"{key}.{option} is {shown(getattr(stack, option))}, which the stacks of optimus cannot have; "
                "leave it out."
            )
        check(
            needed <= stack.max_position or stack.positions == "none",
            f"data.sequence_length ({config.data.sequence_length}) needs position ids up to {needed}, but "
            f"{key}.max_position is {stack.max_position}; set it to {needed}, or a shorter data.sequence_length.",
        )
    check(
        latent.feature != "pooler" or config.model.sentence_classes > 0,
        "optimus.feature is pooler, but model.sentence_classes is 0, so that the encoder has no pooler; set "
        "model.sentence_classes=2, or optimus.feature=cls.",
    )


def _check_run(config: Sections, latent: OptimusConfig) -> None:
    parallel, training = config.parallel, config.training
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, name)
        check(
            size == 1,
            f"parallel.{name} is {size}, but optimus runs with data parallelism and ZeRO only; set it to 1.",
        )
    check(
        latent.cycles <= training.steps,
        f"optimus.cycles is {latent.cycles}, more than training.steps ({training.steps}); lower it.",
    )
    whole, stack = config.checkpoint.initialize_from, latent.encoder_from or latent.decoder_from
    check(
        whole is None or stack is None,
        f"checkpoint.initialize_from is {whole} and a stack is to begin with {stack}; set checkpoint.initialize_from, "
        "or optimus.encoder_from and decoder_from, to null.",
    )
    for name, value, usual in (
        ("label_smoothing", training.label_smoothing, 0.0),
        ("eval_fillings", training.eval_fillings, 0),
        ("loss_normalization", training.loss_normalization, "global_tokens"),
    ):
        check(
            value == usual,
            f"training.{name} is {value} with the objective optimus, whose loss is a bound of each sentence's "
            f"likelihood; set it to {usual}.",
        )
    check(
        config.task is None,
        "decoder is set with a task, which trains one Transformer; set decoder and objectives to null.",
    )
