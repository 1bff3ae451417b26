"""The section `model.experts`: a mixture of experts in the FFN of the blocks, and the rules of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_utils.common.settings import REQUIRED, check, checked, setting

if TYPE_CHECKING:  # both import this module
    from megatron_lite.config.model import ModelConfig
    from megatron_lite.config.tree import Config

SCORES = ("sigmoid", "softmax")
OF_BALANCE = ("balance_loss", "z_loss", "bias_rate")  # settings of the training alone


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("model.experts")
class ExpertsConfig:
    count: int = setting(REQUIRED, "Routed experts of a block.", at_least=2)
    per_token: int = setting(REQUIRED, "Experts that compute each token.", at_least=1)
    width: int = setting(REQUIRED, "Inner size of an expert.", at_least=1)
    shared: int = setting(
        0,
        "Experts that compute every token, as one FFN of `shared` times the width (GLM-4.5: 1).",
        at_least=0,
    )
    dense_layers: int = setting(
        0, "First blocks that have the dense FFN of ffn_size instead (GLM-4.5-Air: 1).", at_least=0
    )
    scores: str = setting(
        "sigmoid",
        "Scores of the experts from the router's logits: sigmoid, each by itself (GLM-4.5), or softmax over all "
        "(Qwen3-MoE, OLMoE).",
        one_of=SCORES,
    )
    normalized: bool = setting(
        True, "Divide the chosen experts' scores by their sum (GLM-4.5, Qwen3-MoE; OLMoE: false)."
    )
    factor: float = setting(
        1.0, "Multiplies the weights of the routed experts' outputs (GLM-4.5: 2.5).", above=0
    )
    groups: int = setting(
        1, "Groups of experts: tokens choose among the experts of the best groups.", at_least=1
    )
    kept_groups: int = setting(1, "Groups among which a token chooses, by the two best of each.", at_least=1)
    biased: bool = setting(
        False,
        "A bias for each expert, added to its score for the choice alone; bias_rate moves it (GLM-4.5).",
    )
    bias_rate: float = setting(
        0.0,
        "After each step the bias of an expert with more tokens than the mean falls by this, that of one with fewer "
        "rises (arXiv:2408.15664: 0.001).",
        at_least=0,
    )
    balance_loss: float = setting(
        0.0,
        "Coefficient of the balance loss: of each sequence, sum over experts of its share of the tokens, times their "
        "number, times its mean score; 1 if balanced. Averaged over the sequences of the step (DeepSeek-V3: 0.0001).",
        at_least=0,
    )
    z_loss: float = setting(
        0.0,
        "Coefficient of the router's z-loss, the square of the logarithm of the sum of exp(logit): a mean over the "
        "tokens of each sequence, averaged over the sequences of the step (OLMoE: 0.001).",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check(
            self.per_token <= self.count,
            f"model.experts.per_token ({self.per_token}) exceeds model.experts.count ({self.count}); lower it.",
        )
        per_group = self.count // self.groups
        check(
            self.groups == 1
            or (
                self.count % self.groups == 0
                and per_group >= 2
                and self.kept_groups <= self.groups
                and self.kept_groups * per_group >= self.per_token
            ),
            f"model.experts.groups is {self.groups} with count {self.count}, kept_groups {self.kept_groups} and "
            f"per_token {self.per_token}; groups must divide count and have 2 experts or more, and kept_groups of them "
            "must have per_token experts: change one of these.",
        )
        check(
            self.groups > 1 or self.kept_groups == 1,
            f"model.experts.kept_groups is {self.kept_groups} with groups 1; set it to 1, or raise groups.",
        )
        check(
            self.scores == "sigmoid" or not self.biased,
            "model.experts.biased is true with scores softmax, but biases are of sigmoid scores; set biased to false.",
        )
        check(
            self.biased or not self.bias_rate,
            f"model.experts.bias_rate is {self.bias_rate}, but biased is false; set biased to true, or bias_rate to 0.",
        )


def check_experts(model: ModelConfig) -> None:
    """Raise ConfigError for options of a model that its experts do not support."""
    if model.experts is None:
        return
    check(
        model.experts.dense_layers < model.total_layers,
        f"model.experts.dense_layers ({model.experts.dense_layers}) leaves no block with experts: the model has "
        f"{model.total_layers}; lower it, or set model.experts to null.",
    )
    for name, is_supported, remedy in (
        ("share_layers", model.share_layers == "none", "none"),
        ("biases", not model.has_bias("mlp"), "qkv or none"),
        ("activation_dropout", not model.activation_dropout, "0"),
        ("init", not model.begins_by_width, "gpt2, plain or uniform"),
        ("mup", model.mup is None, "null"),
        ("lora", model.lora is None, "null"),
    ):
        check(
            is_supported,
            f"model.{name} is {getattr(model, name)} with model.experts, which do not support it; set it to {remedy}.",
        )


def check_run(config: Config) -> None:
    """Raise ConfigError for a run that cannot train experts."""
    experts, parallel = config.model.experts, config.parallel
    check(
        config.decoder is None or config.decoder.experts is None,
        "decoder.experts is set, but experts are of one Transformer; set it to null.",
    )
    ep = parallel.expert_parallel_size
    if experts is None:
        check(ep == 1, f"parallel.expert_parallel_size is {ep} without model.experts; set it to 1.")
        return
    check(
        experts.count % ep == 0,
        f"model.experts.count ({experts.count}) must be divisible by parallel.expert_parallel_size ({ep}); change one "
        "of them.",
    )
    check(
        parallel.zero_stage < 3,
        "parallel.zero_stage is 3 with model.experts, of which each step computes some only; set it to 1 or 2.",
    )
    tp = parallel.tensor_parallel_size
    check(
        experts.width % tp == 0,
        f"model.experts.width ({experts.width}) must be divisible by parallel.tensor_parallel_size ({tp}); change one "
        "of them.",
    )
    own = [choice.name for choice in config.objective_choices if choice.section.model_module is not None]
    check(
        not own,
        f"objectives has {', '.join(own)} with model.experts, but it trains a model of its own without experts; set "
        "model.experts to null.",
    )
