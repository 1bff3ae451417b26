"""Model options of the published systems, filled in by `model.system`.

An option that the configuration itself gives has precedence. Sizes are in configs/.
Sources: the transformers classes of these systems, and for UniLM, SpanBERT and ERNIE 2.0 the authors' public code.
"""

from __future__ import annotations

from typing import Any

_BERT: dict[str, Any] = {
    "norm": "post", "embedding_norm": True, "layernorm_epsilon": 1e-12, "activation": "gelu_erf",
    "positions": "learned", "max_position": 511, "segments": 2, "head_transform": True, "head_bias": True,
    "sentence_classes": 2, "init": "plain",
}  # fmt: skip

_GLM4: dict[str, Any] = {
    "rms_norm": True, "layernorm_epsilon": 1.5625e-7, "activation": "silu", "ffn": "gated", "positions": "rotary",
    "rotary_share": 0.5, "max_position": 131071, "num_key_value_heads": 2, "biases": "qkv",
    "tie_word_embeddings": False, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
    "init": "plain",
}  # fmt: skip

_BART: dict[str, Any] = {
    "norm": "post", "embedding_norm": True, "activation": "gelu_erf", "positions": "learned", "max_position": 1023,
    "init": "plain",
}  # fmt: skip

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
    "bert": _BERT,
    "roberta": {**_BERT, "layernorm_epsilon": 1e-5, "segments": 1, "sentence_classes": 0},
    "spanbert": {**_BERT, "sentence_classes": 0, "span_boundary_places": 20},
    "albert": {
        **_BERT, "activation": "gelu_tanh", "embedding_size": 128, "share_layers": True, "sentence_dropout": 0.1,
    },
    "ernie": {**_BERT, "layernorm_epsilon": 1e-5, "activation": "relu", "max_position": 512},
    "ernie2": {**_BERT, "layernorm_epsilon": 1e-5, "segments": 4, "task_types": 16},
    "unilm": {**_BERT, "layernorm_epsilon": 1e-5, "segments": 6},
    "unilmv2": {**_BERT, "relative": "buckets", "sentence_classes": 0},
    "bart": _BART,
    "mass": {**_BART, "max_position": 511, "scale_embedding": True, "activation_dropout": 0.1},
    "t5": {
        "rms_norm": True, "layernorm_epsilon": 1e-6, "activation": "relu", "biases": "none", "positions": "none",
        "relative": "buckets", "unscaled_scores": True, "scale_head": True, "init": "t5",
    },
    "xlnet": {
        "norm": "post", "layernorm_epsilon": 1e-12, "activation": "gelu_erf", "biases": "mlp", "positions": "none",
        "relative": "xlnet", "head_bias": True, "activation_dropout": 0.1, "final_dropout": 0.1, "init": "plain",
    },
    "gpt": {"norm": "post", "positions": "learned", "max_position": 511, "init": "plain"},
    "gpt2": {"positions": "learned", "max_position": 1023},
}  # fmt: skip

# Options that the system's class of transformers does not have: RoBERTa's head computes the erf form, whatever the
# configuration says of the blocks.
FIXED: dict[str, dict[str, Any]] = {"roberta": {"activation": "gelu_erf"}}
