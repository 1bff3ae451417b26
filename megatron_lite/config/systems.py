"""Model options of the published systems, filled in by `model.system`, and the objective that each is trained on.

What the configuration itself gives has precedence. Sizes are in configs/.
Sources: the transformers classes of these systems, and for UniLM, SpanBERT and ERNIE 2.0 the authors' public code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_utils.common.settings import merge

_BERT: dict[str, Any] = {
    "norm": "post", "embedding_norm": True, "layernorm_epsilon": 1e-12, "activation": "gelu_erf",
    "positions": "learned", "max_position": 511, "segments": 2, "head_transform": True, "head_bias": True,
    "sentence_classes": 2, "init": "plain",
}  # fmt: skip

_ELECTRA = {**_BERT, "sentence_classes": 0, "task_head": {"pooler_kind": "gelu"}}
_ROBERTA = {**_BERT, "layernorm_epsilon": 1e-5, "segments": 1, "sentence_classes": 0}

_GLM4: dict[str, Any] = {
    "rms_norm": True, "layernorm_epsilon": 1.5625e-7, "activation": "silu", "ffn": "gated", "positions": "rotary",
    "rotary_share": 0.5, "max_position": 131071, "num_key_value_heads": 2, "biases": "qkv",
    "tie_word_embeddings": False, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
    "init": "plain",
}  # fmt: skip

_LLAMA: dict[str, Any] = {
    **_GLM4, "layernorm_epsilon": 1e-5, "rotary_share": 1.0, "max_position": 4095, "num_key_value_heads": None,
    "biases": "none",
}  # fmt: skip

_QWEN = {**_LLAMA, "layernorm_epsilon": 1e-6, "rotary_base": 1e6, "max_position": 32767}

_GLM4_MOE: dict[str, Any] = {
    **_GLM4, "layernorm_epsilon": 1e-5, "rotary_base": 1e6, "num_key_value_heads": 8, "head_dim": 128,
    "experts": {"shared": 1, "dense_layers": 1, "biased": True},
}  # fmt: skip

_MODERNBERT: dict[str, Any] = {
    "embedding_norm": True, "first_norm": False, "norm_bias": False, "biases": "none", "activation": "gelu_erf",
    "ffn": "gated", "positions": "rotary", "rotary_base": 1.6e5, "rotary_base_local": 1e4, "attention_window": 64,
    "global_every": 3, "max_position": 8191, "head_transform": True, "head_transform_bias": False, "head_bias": True,
    "task_head": {"pooler_kind": "transform"}, "init_cutoff": 2.0, "embedding_dropout": 0.0, "attention_dropout": 0.0,
    "output_dropout": 0.0,
}  # fmt: skip

_BART: dict[str, Any] = {
    "norm": "post", "embedding_norm": True, "activation": "gelu_erf", "positions": "learned", "max_position": 1023,
    "init": "plain",
}  # fmt: skip

_T5: dict[str, Any] = {
    "rms_norm": True, "layernorm_epsilon": 1e-6, "biases": "none", "positions": "none", "relative": "buckets",
    "unscaled_scores": True, "init": "t5",
}  # fmt: skip
_T5_1_1 = {**_T5, "ffn": "gated", "tie_word_embeddings": False}

SYSTEMS: dict[str, dict[str, Any]] = {
    "glm": {},
    "glm130b": {
        "norm": "deepnorm", "embedding_norm": True, "activation": "gelu_erf", "ffn": "gated", "positions": "rotary",
        "max_position": 2047, "embedding_gradient_shrink": 0.1, "init": "deepnorm",
    },
    "glm4": _GLM4,
    "glm4_0414": {
        **_GLM4, "layernorm_epsilon": 1e-5, "max_position": 32767, "biases": "none", "sandwich_norm": True,
    },
    "glm4_moe": _GLM4_MOE,
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "rotary_base": 1e6, "max_position": 32767, "num_key_value_heads": 8},
    "qwen2": {**_QWEN, "biases": "qkv"},
    "qwen3": {**_QWEN, "head_dim": 128, "query_key_norm": True},
    "qwen3_moe": {
        **_QWEN, "num_key_value_heads": 4, "head_dim": 128, "query_key_norm": True, "experts": {"scores": "softmax"},
    },
    "olmoe": {
        **_LLAMA, "query_key_norm": True, "query_key_norm_over": "all",
        "experts": {"scores": "softmax", "normalized": False},
    },
    "eurobert": {**_LLAMA, "rotary_base": 2.5e5, "max_position": 8191},
    "neobert": {**_LLAMA, "head_bias": True, "init": "uniform"},
    "modernbert": _MODERNBERT,
    "modernbert_decoder": {**_MODERNBERT, "attention_window": 63},
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm_roberta", "camembert"), _ROBERTA),
    "spanbert": {**_BERT, "sentence_classes": 0, "span_boundary_places": 20},
    "electra_generator": _ELECTRA,
    "electra": {**_ELECTRA, "head_transform": False, "head_bias": False},
    "albert": {
        **_BERT, "activation": "gelu_tanh", "embedding_size": 128, "share_layers": "all", "sentence_dropout": 0.1,
    },
    "ernie": {**_BERT, "layernorm_epsilon": 1e-5, "activation": "relu", "max_position": 512},
    "ernie2": {**_BERT, "layernorm_epsilon": 1e-5, "segments": 4, "task_types": 16},
    "unilm": {**_BERT, "layernorm_epsilon": 1e-5, "segments": 6},
    "deberta_v3": {
        **_BERT, "layernorm_epsilon": 1e-7, "positions": "none", "segments": 0, "sentence_classes": 0,
        "relative": "disentangled", "position_buckets": 256, "position_norm": True,
        "task_head": {"pooler_kind": "gelu"},
    },
    "unilmv2": {**_BERT, "relative": "buckets", "sentence_classes": 0},
    "bart": _BART,
    "mass": {**_BART, "max_position": 511, "scale_embedding": True, "activation_dropout": 0.1},
    "t5": {**_T5, "activation": "relu", "scale_head": True},
    "t5_1_1": _T5_1_1,
    "mt5": _T5_1_1,
    "xlnet": {
        "norm": "post", "layernorm_epsilon": 1e-12, "activation": "gelu_erf", "biases": "mlp", "positions": "none",
        "relative": "xlnet", "head_bias": True, "activation_dropout": 0.1, "final_dropout": 0.1, "init": "plain",
    },
    "gpt": {"norm": "post", "positions": "learned", "max_position": 511, "init": "plain"},
    "gpt2": {"positions": "learned", "max_position": 1023},
}  # fmt: skip

# Systems that are not supported -> the reason, for the message.
_LSTM = (
    "not supported: an LSTM carries a state from batch to batch; docs/objectives.md says what is "
    "supported of it"
)
_NOT_DESCRIBED = "not supported: its sources do not describe it; see docs/objectives.md"
UNSUPPORTED = dict.fromkeys(("alum", "kbert", "t_cvae", "tinybert", "q_bert", "pkd", "xlm"), _NOT_DESCRIBED)
UNSUPPORTED |= dict.fromkeys(("elmo", "ulmfit", "siatl"), _LSTM)
# Options with the only value that a system's class of transformers computes: the heads of these classes compute
# gelu_erf, whatever hidden_act is.
_GELU_ERF_HEADS = ("roberta", "xlm_roberta", "camembert", "electra", "electra_generator")
FIXED: dict[str, dict[str, Any]] = {name: {"activation": "gelu_erf"} for name in _GELU_ERF_HEADS}

# Systems whose classes read a text from left to right.
CAUSAL = (
    "gpt", "gpt2", "llama", "mistral", "qwen2", "qwen3", "modernbert_decoder", "glm4", "glm4_0414",
    "glm4_moe", "qwen3_moe", "olmoe",
)  # fmt: skip
ENCODER_DECODERS = ("bart", "mass", "t5", "t5_1_1", "mt5")
_GLMS = ("glm", "glm130b")
# Objectives of systems that are neither causal nor plain masked language models.
_OBJECTIVES = {
    "albert": "albert", "electra": "electra", "ernie": "ernie", "ernie2": "ernie", "spanbert": "spanbert",
    "unilm": "unilm", "unilmv2": "unilmv2", "xlnet": "xlnet", "bart": "bart", "mass": "mass",
    **dict.fromkeys(("t5", "t5_1_1", "mt5"), "t5"), **dict.fromkeys(CAUSAL, "causal"),
}  # fmt: skip
# Settings in which a system's recipe differs from the objective's defaults.
_RECIPES: dict[str, dict[str, Any]] = {
    "modernbert": {"masked_ratio": 0.3},
    "neobert": {"masked_ratio": 0.2, "mask_token_prob": 1.0, "random_token_prob": 0.0},
    "bart": {"predict_cls": True},
}
# Objective -> its setting that turns on the labels of the head on CLS.
_SENTENCE_LABELS = {
    "masked_lm": "next_sentence", "ernie": "next_sentence", "unilm": "next_sentence", "albert": "sentence_order",
}  # fmt: skip


# The form of one text that is not BERT's, [CLS] x [SEP], by the objective that the model learnt.
_TEXT_FORMS = {
    "blank_infilling": "glm", "prefix_lm": "prefix", "ul2": "t5", **{name: name for name in ("t5", "bart", "xlnet")},
}  # fmt: skip
_WITH_FORM = ("contrastive", "tsdae")  # objectives that read texts so
_CAUSAL_FORMS = {"cls": "causal_cls", "none": "causal_none"}  # by what begins a text


def default_objective(system: str | None) -> str:
    """The objective on which a system's paper trains it; blank infilling without a system."""
    if system is None or system in _GLMS:
        return "blank_infilling"
    return _OBJECTIVES.get(system, "masked_lm")


def can_mean(system: str | None, name: str, input_format: str) -> bool:
    """Whether a system's body reads texts as an objective does, so that its class means what was trained.

    Args: name, input_format: of the objective; the format of TextFormat.
    """
    if system is None or system in _GLMS or system in ENCODER_DECODERS:  # rules.py checks what decoders train
        return True
    if system in CAUSAL:
        return input_format == "causal" or reads_both_ways(system, name)
    return input_format in ("bert", "unilm", "unilmv2")


def reads_both_ways(system: str | None, name: str) -> bool:
    """Whether a causal system may be trained on an objective that is not: LLaDA is a Llama, GLM-4 was a GLM."""
    is_glm = system in ("glm4", "glm4_0414", "glm4_moe") and name == "blank_infilling"
    return is_glm or (system in CAUSAL and name == "masked_diffusion")


def text_form(tree: Mapping[str, Any], system: str | None) -> str:
    """How a run reads one text, a form of contrastive and tsdae: as its other objective, or its system's, does."""
    others = [name for name in tree["objectives"] if name not in _WITH_FORM]
    name = others[0] if others else default_objective(system)
    if name not in ("causal", "fill_in_middle"):
        return _TEXT_FORMS.get(name, "bert")
    section = tree.get(name)
    begin = section.get("begin") if isinstance(section, Mapping) else None
    return _CAUSAL_FORMS.get(begin, "causal") if isinstance(begin, str) else "causal"


def with_objective(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of settings with the objective of `model.system` and that objective's section, if it names none.

    An objective whose texts every system reads in a form of its own gets that form, if it names none.
    """
    found = tree.get("model")
    model: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    system = model.get("system")
    objectives = tree.get("objectives")
    if isinstance(objectives, Mapping) and (system is None or system in SYSTEMS):
        form = {name: {"form": text_form(tree, system)} for name in _WITH_FORM if objectives.get(name)}
        tree = merge(form, tree)
    if tree.get("objectives", {}) != {} or not isinstance(system, str) or system not in SYSTEMS:
        return dict(tree)
    if system in _GLMS:
        return dict(tree)
    name = default_objective(system)
    section = dict(_RECIPES.get(system, {}))
    has_label = False
    if name in _SENTENCE_LABELS:
        classes = model.get("sentence_classes", SYSTEMS[system].get("sentence_classes", 0))
        has_label = classes != 0
        section[_SENTENCE_LABELS[name]] = has_label
    chosen: dict[str, Any] = {"objectives": {name: 1.0}, name: section}
    # The label weighs as much as all masked tokens, as in the class's loss.
    if has_label and not tree.get("task"):
        chosen["training"] = {"loss_normalization": "per_objective"}
    return merge(chosen, {key: value for key, value in tree.items() if key != "objectives"})
