"""OPTIMUS as a ModelSpec of megatron_lite/model/build.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.common.random_streams import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.model.build import ModelSpec
from megatron_lite.model.flops import step_flops
from megatron_lite.model.init import initialize_parameters
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.model.trained_model import DECODER, ENCODER
from megatron_lite.models.optimus.batch import LatentSamples
from megatron_lite.models.optimus.model import LATENT, Optimus
from megatron_lite.models.optimus.sections import decoder_of, latent_of


class OptimusSpec(ModelSpec):
    """Two stacks and a latent vector between them."""

    def build(self, config: Config, num_losses: int, parallel: TensorParallel | None) -> Optimus:
        training, latent, decoder = config.training, latent_of(config), decoder_of(config)
        model = Optimus(
            *self.made_of(config)[1:], recompute=training.recompute, num_losses=num_losses, parallel=parallel
        )
        carried = _of_latent(decoder, latent.init_std, latent.decoder_from)
        stacks = {
            ENCODER: config.model,
            DECODER: decoder,
            f"{LATENT}posterior.": _of_latent(config.model, latent.init_std, latent.encoder_from),
            f"{LATENT}memory.": carried,
            f"{LATENT}embedding.": carried,
        }
        for prefix, stack in stacks.items():
            named = [pair for pair in model.named_parameters() if pair[0].startswith(prefix)]
            initialize_parameters(named, stack, training.seed)
        return model

    def made_of(self, config: Config) -> tuple[Any, ...]:
        return Optimus, config.model, decoder_of(config), latent_of(config)

    def flops(self, config: Config, *counts: int) -> float:
        """FLOPs of both stacks. The latent matrices, used once for each sentence, are left out."""
        tokens, loss_rows, visible_keys, targets, target_keys = counts
        encoder = step_flops(config.model, tokens - targets, 0, visible_keys - target_keys)
        return encoder + step_flops(decoder_of(config), targets, loss_rows, target_keys)

    def is_unused(self, name: str, config: Config) -> bool:
        """Whether a parameter is of a head that a stack brings and that has no part in the loss."""
        if latent_of(config).feature == "pooler" and name.startswith(f"{ENCODER}heads.sentence.dense."):
            return False
        return name.startswith((f"{ENCODER}heads.", f"{DECODER}heads.sentence."))

    def samples(self, config: Config, loader: Any, purpose: str) -> LatentSamples:
        latent = latent_of(config)
        seed = derive_seed(config.training.seed, f"{purpose} noise")
        return LatentSamples(loader, latent.latent_size, latent.memory, seed)

    def check_beginning(self, config: Config) -> None:
        from megatron_lite.models.optimus import begin_stacks

        begin_stacks.check(config)

    def begin(self, config: Config, engine: Any, context: Any) -> None:
        from megatron_lite.models.optimus import begin_stacks

        begin_stacks.load(config, engine, context)

    def check_continuation(self, config: Config, before: Mapping[str, Any], checkpoint: Path) -> None:
        feature, wanted = before.get("optimus", {}).get("feature"), latent_of(config).feature
        if feature != wanted:
            raise CheckpointError(
                f"optimus.feature is {wanted}, but {checkpoint} was trained with {feature}; set it to that, or choose "
                "another run.directory."
            )


SPEC = OptimusSpec()


def _of_latent(stack: ModelConfig, given: float | None, begins_with: str | None) -> ModelConfig:
    """The configuration of a stack, with the initial scale of the latent matrices beside it.

    A stack gives and takes vectors whose elements have a variance near 1 after LayerNorm, at any width: 1/sqrt(width)
    keeps that variance. The published 0.02 is nearly that at width 768, and at 64 it gives a mean of 0.16 under noise
    of 1, which nothing learns to read.
    """
    if given is None:
        given = stack.hidden_size**-0.5 if begins_with is None else stack.init_std
    return replace(stack, init_std=given)
