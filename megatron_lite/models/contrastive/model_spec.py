"""The ModelSpec of contrastive learning: one Transformer, fed with text pairs (interface: transformer/build.py)."""

from __future__ import annotations

from typing import Any

from megatron_lite.config.tree import Config
from megatron_lite.models.contrastive.batch import PairSamples
from megatron_lite.transformer.batch import Samples
from megatron_lite.transformer.build import ModelSpec


class ContrastiveSpec(ModelSpec):
    """A Transformer whose loss is of the vectors of texts."""

    def samples(self, config: Config, loader: Any, purpose: str) -> Samples:
        section = next(choice.section for choice in config.objective_choices if choice.name == "contrastive")
        return PairSamples(loader, section)


MODEL_SPEC = ContrastiveSpec()
