"""The tables of ModernBERT and of Ettin's decoder (see system_table.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    ROTATE_HALF,
    ROTATE_HALF_QKV,
    SAME,
    VERSION_4,
    ConfigField,
    FormerField,
    PublishedSystem,
    TensorRule,
    prefixed,
)


def _rules(attention: TensorRule, head: str) -> tuple[TensorRule, ...]:
    """The rules of both. Args: attention: of queries, keys and values. head: their head_transform."""
    block = [
        TensorRule("input_layernorm", ("attn_norm",)),
        attention,
        TensorRule("attention.dense", ("attn.Wo",)),
        TensorRule("post_attention_layernorm", ("mlp_norm",)),
        TensorRule("mlp.dense_h_to_4h", ("mlp.Wi",)),
        TensorRule("mlp.dense_4h_to_h", ("mlp.Wo",)),
    ]
    return (
        TensorRule("embedding.word_embeddings", ("model.embeddings.tok_embeddings",)),
        TensorRule("embedding.layernorm", ("model.embeddings.norm",)),
        *prefixed(block, "layers.{i}.", "model.layers.{i}."),
        TensorRule("final_layernorm", ("model.final_norm",)),
        TensorRule("heads.projection.dense", (f"{head}.dense",)),
        TensorRule("heads.projection.layernorm", (f"{head}.norm",)),
        TensorRule("heads", ("decoder",)),
    )


def _layer_types(every: int, layers: int) -> list[str]:
    return ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]


def _global_every(layer_types: Any, config: Any) -> int | None:
    """n, if layers 0, n, 2n, ... are global and no others are; None if there is no such n."""
    # In a stack of few layers several n fit: the field of older files decides.
    named = getattr(config, "global_attn_every_n_layers", None) or 3
    layers = len(layer_types)
    fitting = (
        every for every in (named, *range(2, 1 + layers)) if _layer_types(every, layers) == layer_types
    )
    return next(fitting, None)


def _window(counted: int) -> Any:
    """Reads local_attention, twice the window. Args: counted: tokens of each half that our window does not count."""
    return lambda value, _: value // 2 - counted if isinstance(value, int) else None


_QKV = "attention.query_key_value"
_THETA = "rope_parameters.{}_attention.rope_theta"
_FIELDS = (
    ConfigField("vocab_size", "vocab_size"), ConfigField("num_hidden_layers", "num_layers"),
    ConfigField("hidden_size", "hidden_size"), ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("intermediate_size", "ffn_size"),
    ConfigField("max_position_embeddings", "max_position", counts_positions=True),
    ConfigField("hidden_activation", "activation", ACTIVATIONS),
    ConfigField("classifier_activation", "activation", ACTIVATIONS),
    ConfigField("norm_eps", "layernorm_epsilon"), ConfigField("norm_bias", "norm_bias"),
    ConfigField("classifier_bias", "head_transform_bias"), ConfigField("decoder_bias", "head_bias"),
    ConfigField(_THETA.format("full"), "rotary_base"),
    ConfigField(_THETA.format("sliding"), "rotary_base_local"),
    ConfigField(
        "layer_types", "global_every", reads=_global_every,
        writes=lambda every, config: _layer_types(every, config.num_layers),
    ),
    ConfigField("embedding_dropout", "embedding_dropout"),
    ConfigField("attention_dropout", "attention_dropout"),
    ConfigField("mlp_dropout", "activation_dropout"), ConfigField("initializer_range", "init_std"),
    ConfigField("initializer_cutoff_factor", "init_cutoff"),
)  # fmt: skip
MODERNBERT = PublishedSystem(
    model_type="modernbert", prefix="model.",
    rules=_rules(TensorRule(_QKV, ("attn.Wqkv",), ROTATE_HALF_QKV), "head"),
    fields=(*_FIELDS, ConfigField("local_attention", "attention_window", reads=_window(0), writes=lambda w, _: 2 * w)),
    pretraining_class=lambda config: "ModernBertForMaskedLM", classes={"ModernBertForMaskedLM": "modernbert"},
    required={
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "rope_parameters.full_attention.rope_type": "default", "rope_parameters.sliding_attention.rope_type": "default",
    },
    ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    former=(
        FormerField("global_attn_every_n_layers", "global_every", VERSION_4),
        FormerField("global_rope_theta", "rotary_base", VERSION_4),
        FormerField("local_rope_theta", "rotary_base_local", VERSION_4),
    ),
    roles={
        "pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls", "cls_token_id": "cls",
        "sep_token_id": "eos",
    },
)  # fmt: skip
MODERNBERT_DECODER = replace(
    MODERNBERT, model_type="modernbert-decoder",
    rules=_rules(
        TensorRule(_QKV, ("attn.q_proj", "attn.k_proj", "attn.v_proj"), (ROTATE_HALF, ROTATE_HALF, SAME)), "lm_head"
    ),
    fields=(
        *_FIELDS,
        ConfigField("local_attention", "attention_window", reads=_window(1), writes=lambda w, _: 2 * w + 2),
    ),
    pretraining_class=lambda config: "ModernBertDecoderForCausalLM",
    classes={"ModernBertDecoderForCausalLM": "modernbert_decoder"}, is_causal=True, begin="cls",
)  # fmt: skip
