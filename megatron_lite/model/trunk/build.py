"""The model of a configuration: one Transformer, or OPTIMUS's two stacks; its parameters and its costs."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from data_utils.objectives.optimus import OptimusConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.model.layers.tensor_parallel import TensorParallel
from megatron_lite.model.optimus import DECODER, ENCODER, LATENT, LatentLayers, Optimus
from megatron_lite.model.trunk.counts import Shapes, parameter_count, parameter_shapes, step_flops
from megatron_lite.model.trunk.glm import GLM, initialize_parameters


def build_model(config: Config, num_losses: int, parallel: TensorParallel | None = None) -> GLM | Optimus:
    """The initialised fp32 model; DeepSpeed casts it to the training precision."""
    training = config.training
    if config.decoder is not None:
        return _build_optimus(config, config.decoder, num_losses, parallel)
    model = GLM(
        config.model,
        recompute=training.recompute,
        num_losses=num_losses,
        parallel=parallel,
        label_smoothing=training.label_smoothing,
        has_memory=config.has_memory,
    )
    initialize_parameters(model.named_parameters(), config.model, training.seed, model.parallel)
    return model


def _build_optimus(
    config: Config, decoder: ModelConfig, num_losses: int, parallel: TensorParallel | None
) -> Optimus:
    training, latent = config.training, config.latent
    assert latent is not None, "the configuration checks it"
    model = Optimus(
        config.model,
        decoder,
        latent,
        recompute=training.recompute,
        num_losses=num_losses,
        parallel=parallel,
    )
    posterior = _of_latent(config.model, latent.init_std, latent.encoder_from)
    carried = _of_latent(decoder, latent.init_std, latent.decoder_from)
    stacks = {
        ENCODER: config.model,
        DECODER: decoder,
        f"{LATENT}posterior.": posterior,
        f"{LATENT}memory.": carried,
        f"{LATENT}embedding.": carried,
    }
    for prefix, stack in stacks.items():
        named = [pair for pair in model.named_parameters() if pair[0].startswith(prefix)]
        initialize_parameters(named, stack, training.seed)
    return model


def _of_latent(stack: ModelConfig, given: float | None, begins_with: str | None) -> ModelConfig:
    """A stack with the scale of the latent matrices beside it.

    A stack gives and takes vectors whose elements have a variance near 1 after LayerNorm, at any width: 1/sqrt(width)
    keeps that variance. The published 0.02 is nearly that at width 768, and at 64 it gives a mean of 0.16 under noise
    of 1, which nothing learns to read.
    """
    if given is None:
        given = stack.hidden_size**-0.5 if begins_with is None else stack.init_std
    return replace(stack, init_std=given)


@functools.lru_cache(maxsize=16)
def _latent_shapes(encoder: ModelConfig, decoder: ModelConfig, config: OptimusConfig) -> Shapes:
    with torch.device("meta"):
        layers = LatentLayers(encoder, decoder, config)
    return {f"{LATENT}{name}": tuple(parameter.shape) for name, parameter in layers.named_parameters()}


def model_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """As `parameter_shapes`, of the whole model of a configuration."""
    encoder = parameter_shapes(config.model)
    if config.decoder is None or config.latent is None:
        return encoder
    decoder = parameter_shapes(config.decoder)
    return {
        **{f"{ENCODER}{name}": shape for name, shape in encoder.items()},
        **{f"{DECODER}{name}": shape for name, shape in decoder.items()},
        **_latent_shapes(config.model, config.decoder, config.latent),
    }


def model_count(config: Config) -> int:
    """As `parameter_count`, of the whole model."""
    if config.decoder is None or config.latent is None:
        return parameter_count(config.model)
    latent = sum(map(math.prod, _latent_shapes(config.model, config.decoder, config.latent).values()))
    return parameter_count(config.model) + parameter_count(config.decoder) + latent


def model_flops(
    config: Config, tokens: int, loss_rows: int, visible_keys: int, targets: int, target_keys: int
) -> float:
    """As `step_flops`, of the whole model. The latent matrices, used once for each sentence, are left out."""
    if config.decoder is None:
        return step_flops(config.model, tokens, loss_rows, visible_keys, targets, target_keys)
    encoder = step_flops(config.model, tokens - targets, 0, visible_keys - target_keys)
    return encoder + step_flops(config.decoder, targets, loss_rows, target_keys)
