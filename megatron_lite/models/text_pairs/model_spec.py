"""The ModelSpec of contrastive learning: one Transformer, fed with text pairs (interface: transformer/build.py)."""

from __future__ import annotations

from typing import Any

from data_utils.common.errors import DataError
from data_utils.objectives.own_corpora import TEXT_PAIRS
from megatron_lite.config.tree import Config
from megatron_lite.models.text_pairs.batch import PairSamples
from megatron_lite.transformer.build import ModelSpec, Samples


class TextPairSpec(ModelSpec):
    """A Transformer whose loss is of the vectors of texts, beside those of other objectives; a task replaces all."""

    def samples(self, config: Config, loader: Any, purpose: str) -> Samples:
        if config.task is not None:
            return super().samples(config, loader, purpose)
        section = next(c.section for c in config.objective_choices if c.section.own_corpora == TEXT_PAIRS)
        size = config.model.hidden_size
        for index in loader.mixtures[0].indexes:  # of all phases
            vectors = getattr(index, "vectors", None)
            if vectors is not None and vectors.shape[1] != size:
                raise DataError(
                    f"the teacher's vectors of {index.dataset.prefix} have {vectors.shape[1]} numbers, but "
                    f"model.hidden_size is {size}; write them with scripts/embed.py --dimensions {size}, or reduce "
                    "them by PCA."
                )
        return PairSamples(loader, section, config.embedding)

    def is_unused(self, name: str, config: Config) -> bool:
        has_others = any(c.section.own_corpora != TEXT_PAIRS for c in config.objective_choices)
        if has_others or config.task is not None:
            return super().is_unused(name, config)
        of_decoder = ("decoder_embedding.", "decoder_relative_bias.", "final_layernorm.")
        if not config.model.decoder_layers:
            return name.startswith("heads.")
        layer = name.removeprefix("layers.").split(".")[0]
        is_decoders = layer.isdecimal() and int(layer) >= config.model.num_layers
        return is_decoders or name.startswith(("heads.", *of_decoder))


MODEL_SPEC = TextPairSpec()
