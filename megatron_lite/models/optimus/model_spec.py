"""The ModelSpec of OPTIMUS: how it is built, counted and fed (interface: megatron_lite/transformer/build.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_utils.common.seeds import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.models.optimus.batch import LatentSamples
from megatron_lite.models.optimus.config import decoder_of, latent_of
from megatron_lite.models.optimus.model import LATENT, Optimus
from megatron_lite.transformer.build import ModelSpec
from megatron_lite.transformer.flops import step_flops
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.trained_model import DECODER, ENCODER


class OptimusSpec(ModelSpec):
    """Encoder, decoder and the latent vector between them."""

    huggingface = "megatron_lite.models.optimus.huggingface"

    def build(self, config: Config, num_losses: int, parallel: TensorParallel | None) -> Optimus:
        training, latent, decoder = config.training, latent_of(config), decoder_of(config)
        model = Optimus(
            *self.made_of(config)[1:], recompute=training.recompute, num_losses=num_losses, parallel=parallel
        )
        from_latent = _latent_init(decoder, latent.init_std, latent.decoder_from)
        stacks = {
            ENCODER: config.model,
            DECODER: decoder,
            f"{LATENT}posterior.": _latent_init(config.model, latent.init_std, latent.encoder_from),
            f"{LATENT}memory.": from_latent,
            f"{LATENT}embedding.": from_latent,
        }
        for prefix, stack in stacks.items():
            named = [pair for pair in model.named_parameters() if pair[0].startswith(prefix)]
            initialize_parameters(named, stack, training.seed)
        return model

    def made_of(self, config: Config) -> tuple[Any, ...]:
        return Optimus, config.model, decoder_of(config), latent_of(config)

    def flops(self, config: Config, *counts: int) -> float:
        """FLOPs of both stacks. The latent matrices, used once a sentence, are not counted."""
        tokens, loss_tokens, visible_keys, decoder_tokens, decoder_keys = counts
        encoder = step_flops(config.model, tokens - decoder_tokens, 0, visible_keys - decoder_keys)
        return encoder + step_flops(decoder_of(config), decoder_tokens, loss_tokens, decoder_keys)

    def is_unused(self, name: str, config: Config) -> bool:
        """Whether a parameter is in a head of a stack that the loss does not use."""
        if latent_of(config).feature == "pooler" and name.startswith(f"{ENCODER}heads.sentence.dense."):
            return False
        return name.startswith((f"{ENCODER}heads.", f"{DECODER}heads.sentence."))

    def samples(self, config: Config, loader: Any, purpose: str) -> LatentSamples:
        latent = latent_of(config)
        seed = derive_seed(config.training.seed, f"{purpose} noise")
        return LatentSamples(loader, latent.latent_size, latent.memory, seed)

    def check_start(self, config: Config) -> None:
        from megatron_lite.models.optimus import pretrained_stacks

        pretrained_stacks.check(config)

    def load_start(self, config: Config, engine: Any, context: Any) -> None:
        from megatron_lite.models.optimus import pretrained_stacks

        pretrained_stacks.load(config, engine, context)


MODEL_SPEC = OptimusSpec()


def _latent_init(stack: ModelConfig, init_std: float | None, pretrained: str | None) -> ModelConfig:
    """The configuration of a stack with the initial scale of the latent matrices next to it.

    A stack outputs and reads vectors whose elements have a variance near 1 after LayerNorm, at any width: 1/sqrt(width)
    keeps that variance. The published 0.02 is nearly that at width 768, and at 64 it gives a mean of 0.16 under noise
    of 1, which nothing learns to read.
    """
    if init_std is None:
        init_std = stack.hidden_size**-0.5 if pretrained is None else stack.init_std
    return replace(stack, init_std=init_std)
