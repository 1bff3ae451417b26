"""ModernBERT and Ettin's decoder as transformers has them: see systems.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lite.hf.files.published_form import (
    ACTIVATIONS,
    SAME,
    TURNED,
    TURNED_THIRDS,
    VERSION_4,
    Field,
    Former,
    Row,
    System,
    numbered,
)


def _rows(attention: Row, head: str) -> tuple[Row, ...]:
    """Args: attention: of queries, keys and values. head: their module before the output projection."""
    block = [
        Row("input_layernorm", ("attn_norm",)),
        attention,
        Row("attention.dense", ("attn.Wo",)),
        Row("post_attention_layernorm", ("mlp_norm",)),
        Row("mlp.dense_h_to_4h", ("mlp.Wi",)),
        Row("mlp.dense_4h_to_h", ("mlp.Wo",)),
    ]
    return (
        Row("embedding.word_embeddings", ("model.embeddings.tok_embeddings",)),
        Row("embedding.layernorm", ("model.embeddings.norm",)),
        *numbered(block, "layers.{i}.", "model.layers.{i}."),
        Row("final_layernorm", ("model.final_norm",)),
        Row("heads.projection.dense", (f"{head}.dense",)),
        Row("heads.projection.layernorm", (f"{head}.norm",)),
        Row("heads", ("decoder",)),
    )


def _layer_types(every: int, layers: int) -> list[str]:
    return ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]


def _global_every(kinds: Any, config: Any) -> int | None:
    """n, where layers 0, n, 2n, ... are global; None = they are others. Short stacks take the number of older files."""
    named = getattr(config, "global_attn_every_n_layers", None) or 3
    found = (
        every for every in (named, *range(2, 1 + len(kinds))) if _layer_types(every, len(kinds)) == kinds
    )
    return next(found, None)


def _window(others: int) -> Any:
    """Half of their window less the others that the half counts."""
    return lambda value, _: value // 2 - others if isinstance(value, int) else None


_QKV = "attention.query_key_value"
_THETA = "rope_parameters.{}_attention.rope_theta"
_FIELDS = (
    Field("vocab_size", "vocab_size"), Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"), Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "ffn_size"), Field("max_position_embeddings", "max_position", counts_positions=True),
    Field("hidden_activation", "activation", ACTIVATIONS), Field("classifier_activation", "activation", ACTIVATIONS),
    Field("norm_eps", "layernorm_epsilon"), Field("norm_bias", "norm_bias"),
    Field("classifier_bias", "head_transform_bias"), Field("decoder_bias", "head_bias"),
    Field(_THETA.format("full"), "rotary_base"), Field(_THETA.format("sliding"), "rotary_base_local"),
    Field(
        "layer_types", "global_every", reads=_global_every,
        writes=lambda every, config: _layer_types(every, config.num_layers),
    ),
    Field("embedding_dropout", "embedding_dropout"), Field("attention_dropout", "attention_dropout"),
    Field("mlp_dropout", "activation_dropout"), Field("initializer_range", "init_std"),
    Field("initializer_cutoff_factor", "init_cutoff"),
)  # fmt: skip
MODERNBERT = System(
    model_type="modernbert", prefix="model.",
    rows=_rows(Row(_QKV, ("attn.Wqkv",), TURNED_THIRDS), "head"),
    fields=(*_FIELDS, Field("local_attention", "attention_window", reads=_window(0), writes=lambda w, _: 2 * w)),
    class_of=lambda config: "ModernBertForMaskedLM", classes={"ModernBertForMaskedLM": "modernbert"},
    required={
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "rope_parameters.full_attention.rope_type": "default", "rope_parameters.sliding_attention.rope_type": "default",
    },
    ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    former=(
        Former("global_attn_every_n_layers", "global_every", VERSION_4),
        Former("global_rope_theta", "rotary_base", VERSION_4),
        Former("local_rope_theta", "rotary_base_local", VERSION_4),
    ),
    roles={
        "pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls", "cls_token_id": "cls",
        "sep_token_id": "eos",
    },
)  # fmt: skip
MODERNBERT_DECODER = replace(
    MODERNBERT, model_type="modernbert-decoder",
    rows=_rows(Row(_QKV, ("attn.q_proj", "attn.k_proj", "attn.v_proj"), (TURNED, TURNED, SAME)), "lm_head"),
    fields=(*_FIELDS, Field("local_attention", "attention_window", reads=_window(1), writes=lambda w, _: 2 * w + 2)),
    class_of=lambda config: "ModernBertDecoderForCausalLM",
    classes={"ModernBertDecoderForCausalLM": "modernbert_decoder"}, is_causal=True, begin="cls",
)  # fmt: skip
