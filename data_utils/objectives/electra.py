"""ELECTRA (arXiv:2003.10555): a generator fills masked tokens, a discriminator finds those that it replaced.

A row is masked as in masked_lm.py; 85 % of the chosen tokens become [MASK], the rest stays. The generator predicts the
chosen ones. What it draws at each of them, in the same pass and without a gradient, is what the discriminator reads.
The discriminator says of every token whether it is the text's.

The published code chooses tokens with replacement, so that a token that is chosen twice counts once; here each is
chosen once. Source: google-research/electra, run_pretraining and pretrain_helpers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_utils.common.losses import MASKED, REPLACED
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig
from data_utils.objectives.own_model import NO_OPTIONS, require, require_alone
from data_utils.objectives.registry import register

# Options of the discriminator that it cannot have, and the value that it must.
_FIXED = {
    "decoder_layers": 0, "adapter_size": 0, "mup": None, "sentence_classes": 0,
    "head_transform": False, "head_bias": False, "tie_word_embeddings": True, "scale_head": False,
    "logit_soft_cap": None, "span_boundary_places": 0, "task_types": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("electra")
class ElectraConfig(MaskedTextConfig):
    """`model` is the discriminator. The generator has its depth, its embeddings, and a part of its width."""

    mask_token_prob: float = fraction(0.85, "Probability that a selected token becomes [MASK].")
    random_token_prob: float = fraction(
        0.0, "Probability that a selected token becomes a random token; otherwise it is kept."
    )
    generator_size: float = setting(
        0.25, "Generator hidden_size as a fraction of model.hidden_size.", above=0, at_most=1
    )
    generator_heads: int | None = setting(
        None, "Attention heads of the generator; null = generator hidden_size / 64, at least 1.", at_least=1
    )
    generator_layers: int | None = setting(
        None,
        "Blocks of the generator (DeBERTa-v3: half the discriminator's); null = as the discriminator.",
        at_least=1,
    )
    embeddings: str = setting(
        "shared",
        "shared = generator and discriminator share one word embedding; detached = the discriminator reads "
        "the generator's without gradient, plus an embedding that starts at 0 (DeBERTa-v3).",
        one_of=("shared", "detached"),
    )

    model_module = "megatron_lite.models.electra.model_spec"
    model_files = ("generator/", "discriminator/")
    own_model_advice = (
        "trains a generator and a discriminator; tune the latter with scripts/finetune.py, or export both with "
        "scripts/convert_checkpoint.py."
    )

    def generator_width(self, width: int) -> int:
        """hidden_size of the generator. Args: width: hidden_size of the discriminator."""
        return max(1, round(self.generator_size * width))

    def num_generator_heads(self, width: int) -> int:
        return self.generator_heads or max(1, width // 64)

    def further_head_sizes(self, hidden_size: int) -> Mapping[str, int]:
        width = self.generator_width(hidden_size)
        return {
            "the generator's hidden_size over electra.generator_heads": width
            // self.num_generator_heads(width)
        }

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless the rest is as two stacks with common embeddings need it."""
        require_alone(config, "electra trains two Transformers and stands")
        require(config.model, "model", _FIXED, "which the discriminator of electra cannot have")
        model, layers = config.model, self.generator_layers or 1
        check(
            model.relative in ("none", "disentangled"),
            f"model.relative is {model.relative}, which the discriminator of electra cannot have; set it to none or to "
            "disentangled.",
        )
        check(
            layers <= model.num_layers,
            f"electra.generator_layers ({layers}) is above model.num_layers ({model.num_layers}); choose fewer.",
        )
        check(
            self.embeddings == "shared" or (model.positions in ("none", "rotary") and not model.segments),
            f"electra.embeddings is detached, but model.positions is {model.positions} and model.segments is "
            f"{model.segments}; only word embeddings can be detached: set positions to none and segments to 0.",
        )
        width = self.generator_width(config.model.hidden_size)
        heads = self.num_generator_heads(width)
        check(
            width % heads == 0,
            f"electra.generator_size ({self.generator_size:g}) gives a width of {width}, which is not divisible by "
            f"{heads} heads; set electra.generator_heads to a divisor of it.",
        )
        self._check_training(config, heads)

    def _check_training(self, config: Any, heads: int) -> None:
        training, parallel = config.training, config.parallel
        why = "but the discriminator's input depends on the generator's samples"
        require(parallel, "parallel", {"pipeline_parallel_size": 1}, why)
        ranks = parallel.tensor_parallel_size
        check(
            heads % ranks == 0,
            f"parallel.tensor_parallel_size ({ranks}) must divide the {heads} heads of the generator; set "
            "electra.generator_heads to a multiple of it.",
        )
        check(
            training.loss_normalization == "per_objective",
            f"training.loss_normalization is {training.loss_normalization}, but electra averages one loss over the "
            "masked tokens and one over all tokens; set it to per_objective, and training.loss_weights={replaced: "
            "50}.",
        )
        for loss in (MASKED, REPLACED):
            weight = training.loss_weights.get(loss.name, 1.0)
            check(
                weight > 0,
                f"training.loss_weights.{loss.name} is {weight:g}; electra trains both losses; set it above 0.",
            )
        require(training, "training", NO_OPTIONS, "which is not defined for electra")


@register
class Electra(MaskedText):
    """See the top of this file. The loss `replaced` is of every token, chosen or not."""

    name = "electra"
    config_class = ElectraConfig
    losses = (MASKED, REPLACED)
