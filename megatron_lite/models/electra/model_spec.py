"""The ModelSpec of ELECTRA: how it is built, counted and fed (interface: megatron_lite/transformer/build.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data_utils.common.seeds import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.models.electra.batch import ElectraSamples
from megatron_lite.models.electra.config import generator_of, is_detached
from megatron_lite.models.electra.model import SHARED, Electra, ReplacedHead
from megatron_lite.transformer.build import ModelSpec
from megatron_lite.transformer.flops import parameter_shapes, step_flops
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.tensor_parallel import TensorParallel

GENERATOR, REPLACED_HEAD = "generator.", "replaced."
TABLES = tuple(f"embedding.{name}." for name in SHARED)


class ElectraSpec(ModelSpec):
    """A generator and a discriminator."""

    huggingface = "megatron_lite.models.electra.huggingface"

    def build(self, config: Config, num_losses: int, parallel: TensorParallel | None) -> Electra:
        generator, training = generator_of(config), config.training
        model = Electra(
            *self.made_of(config)[1:], recompute=training.recompute, num_losses=num_losses, parallel=parallel
        )
        # Each stack by its own configuration: initial scales follow from width and depth.
        for prefix, stack in ((GENERATOR, generator), ("", config.model)):
            named = [
                pair for pair in model.named_parameters() if pair[0].startswith(GENERATOR) == bool(prefix)
            ]
            initialize_parameters(named, stack, training.seed, parallel)
        # The discriminator's table is a difference to the generator's: at the start both read the same words.
        if is_detached(config):
            nn.init.zeros_(model.encoder.embedding.word_embeddings.weight)
        return model

    def made_of(self, config: Config) -> tuple[Any, ...]:
        return Electra, config.model, generator_of(config), is_detached(config)

    def flops(self, config: Config, *counts: int) -> float:
        """FLOPs of both stacks; the discriminator's head, one matrix for all tokens, is not counted."""
        tokens, loss_tokens, visible_keys, *_ = counts
        generator = generator_of(config)
        found = step_flops(config.model, tokens, 0, visible_keys)
        return found + step_flops(generator, tokens, loss_tokens, visible_keys)

    def is_unused(self, name: str, config: Config) -> bool:
        return False

    def samples(self, config: Config, loader: Any, purpose: str) -> ElectraSamples:
        return ElectraSamples(loader, derive_seed(config.training.seed, f"{purpose} replacements"))


MODEL_SPEC = ElectraSpec()


def discriminator_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of its parameters without a prefix: a Transformer that predicts no tokens, and its head."""
    with torch.device("meta"):
        head = ReplacedHead(model)
    body = {name: x for name, x in parameter_shapes(model).items() if not name.startswith("heads.")}
    return {**body, **{f"{REPLACED_HEAD}{name}": tuple(p.shape) for name, p in head.named_parameters()}}
