"""Entities beside tokens, ERNIE of Tsinghua (arXiv:1905.07129): masked tokens, next sentences, and denoised entities.

Rows are BERT's (masked_text.py). The first token of a mention has its entity, in the field block_position_ids, from 1
on. What the model reads of them is drawn in the same way for each sample (megatron_lite/models/ernie_thu/batch.py):
another entity of the Example, none, or the entity itself; what it predicts at all of them is the entity, among those of
the Example and none.

The published code's candidates are the entities of the micro-batch; those of the Example do not depend on ranks. It
drops samples with fewer than five entities; windows of a corpus are all read here. Source: thunlp/ERNIE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.losses import ENTITIES, MASKED, NEXT_SENTENCE_LOSS
from data_utils.common.setting_files import shown
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masked_text import MaskedTextConfig, NumberedText, Pairing
from data_utils.objectives.own_model import NO_OPTIONS, require, require_alone
from data_utils.objectives.registry import register

LAYERS = ("sim", "mix", "norm")
# Options of the model, and the value that each must have.
_FIXED = {
    "norm": "post", "positions": "learned", "relative": "none", "ffn": "plain", "biases": "all", "decoder_layers": 0,
    "adapter_size": 0, "mup": None, "share_layers": "none", "sandwich_norm": False, "attention_window": 0,
    "span_boundary_places": 0, "task_types": 0, "tie_word_embeddings": True,
}  # fmt: skip
_PARALLEL = {"pipeline_parallel_size": 1, "sequence_parallel": False}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("entities")
class EntitiesConfig(MaskedTextConfig):
    """Entity states in addition to those of tokens."""

    vectors: str | None = setting(
        None,
        ".npy file of float32 entity vectors, one row per entity, written by scripts/dataset.py vectors.",
        is_path=True,
    )
    size: int = setting(100, "Size of the entity vectors and of the entity hidden states.", at_least=1)
    heads: int = setting(4, "Attention heads over entities; must divide size.", at_least=1)
    layer_types: tuple[str, ...] = setting(
        (),
        "Type of each block: sim (tokens only), mix (entities are fused in) or norm (entities also attend "
        "to each other); [] = half sim, one mix, the rest norm, as published.",
    )
    replaced_ratio: float = fraction(
        0.05, "Probability that an entity is replaced by another entity of the sample."
    )
    removed_ratio: float = fraction(0.15, "Probability that an entity is dropped.")
    next_sentence: bool = setting(True, "Two segments per sample and a next-sentence label on CLS.")

    model_module = "megatron_lite.models.ernie_thu.model_spec"
    model_files = ("ernie_config.json",)
    own_model_advice = (
        "reads entities with its tokens; it can be trained, fine-tuned on tasks and evaluated, but cannot generate "
        "text."
    )
    solves_tasks = True
    token_annotation = "entities"

    @property
    def pairing(self) -> Pairing:
        return Pairing.NEXT_SENTENCE if self.next_sentence else Pairing.NO_PAIR

    def layer_types_for(self, layers: int) -> tuple[str, ...]:
        """The type of each block of a model with this number of layers."""
        token_blocks = (layers - 1) // 2
        return self.layer_types or (*["sim"] * token_blocks, "mix", *["norm"] * (layers - 1 - token_blocks))

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless the rest is as a model with hidden states of tokens and of entities needs it."""
        stands = "entities have a stream of their own in the model, and the objective stands"
        require_alone(config, stands, solves_tasks=True)
        layers = config.model.num_layers
        check(
            len(self.layer_types_for(layers)) == layers and set(self.layer_types) <= set(LAYERS),
            f"entities.layer_types is {shown(list(self.layer_types))}; it needs {layers} entries "
            f"(model.num_layers), each one of {', '.join(LAYERS)}.",
        )
        check(
            self.size % self.heads == 0,
            f"entities.heads ({self.heads}) does not divide entities.size ({self.size}); choose a divisor.",
        )
        total = self.replaced_ratio + self.removed_ratio
        check(
            total <= 1,
            f"entities.replaced_ratio and entities.removed_ratio sum to {total:g}; their sum must be at most 1.",
        )
        fixed = {**_FIXED, "sentence_classes": 2 * self.next_sentence}
        require(config.model, "model", fixed, "which a model with entities cannot have")
        require(
            config.parallel,
            "parallel",
            _PARALLEL,
            "but the hidden states of entities are not split, neither in tensor nor in pipeline parallelism",
        )
        require(config.training, "training", NO_OPTIONS, "which is not defined for entities")
        if config.task is not None:
            require(config.finetune, "finetune", {"lm_weight": 0.0}, "which is not defined for entities")
            return
        wanted = {"loss_normalization": "per_objective"}
        require(config.training, "training", wanted, "but entities sums the means of its losses")


@register
class Entities(NumberedText):
    """See the top of this file. The loss `entities` is of every token at which an entity begins."""

    name = "entities"
    config_class = EntitiesConfig
    losses = (MASKED, NEXT_SENTENCE_LOSS, ENTITIES)
    text_format = TextFormat("bert")
