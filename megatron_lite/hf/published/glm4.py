"""GLM-4 as transformers has it, and the rows and fields that it shares with Llama: see systems.py."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.files.published_form import (
    ACTIVATIONS,
    SAME,
    VERSION_4,
    Field,
    Form,
    Former,
    Row,
    System,
    numbered,
)


def _shares(config: ModelConfig) -> tuple[int, ...]:
    return config.num_attention_heads // config.key_value_heads, 1, 1


def decoder_rows(ffn: tuple[str, ...], form: Form = SAME, more: tuple[Row, ...] = ()) -> tuple[Row, ...]:
    """Args: ffn: their gate and what it multiplies, or both in one. form: of queries and keys. more: of a block."""
    block = [
        Row("input_layernorm", ("input_layernorm",)),
        Row(
            "attention.query_key_value",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (form, form, SAME),
            shares=_shares,
        ),
        Row("attention.dense", ("self_attn.o_proj",)),
        Row("post_attention_layernorm", ("post_attention_layernorm",)),
        Row("mlp.dense_h_to_4h", ffn),
        Row("mlp.dense_4h_to_h", ("mlp.down_proj",)),
        *more,
    ]
    return (
        Row("embedding.word_embeddings", ("model.embed_tokens",)),
        *numbered(block, "layers.{i}.", "model.layers.{i}."),
        Row("final_layernorm", ("model.norm",)),
        Row("heads.vocabulary", ("lm_head",)),
    )


DECODER_FIELDS = (
    Field("vocab_size", "vocab_size"), Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"), Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_key_value_heads"), Field("intermediate_size", "ffn_size"),
    Field("max_position_embeddings", "max_position", counts_positions=True),
    Field("rope_parameters.rope_theta", "rotary_base"), Field("hidden_act", "activation", ACTIVATIONS),
    Field("rms_norm_eps", "layernorm_epsilon"), Field("tie_word_embeddings", "tie_word_embeddings"),
    Field("attention_dropout", "attention_dropout"), Field("initializer_range", "init_std"),
)  # fmt: skip
HEAD_WIDTH = Field("head_dim", "head_dim")
FORMER_BASE = Former("rope_theta", "rotary_base", VERSION_4)
GLM4 = System(
    model_type="glm", prefix="model.", rows=decoder_rows(("mlp.gate_up_proj",)),
    fields=(
        *DECODER_FIELDS, HEAD_WIDTH, Field("rope_parameters.partial_rotary_factor", "rotary_share"),
        Field("attention_bias", "biases", {True: "qkv", False: "none"}),
    ),
    class_of=lambda config: "GlmForCausalLM", classes={"GlmForCausalLM": "glm4"},
    required={"rope_parameters.rope_type": "default"}, ties={"lm_head.weight": "model.embed_tokens.weight"},
    is_causal=True, may_untie=True, roles={"pad_token_id": "pad", "eos_token_id": "eos"},
    former=(FORMER_BASE, Former("partial_rotary_factor", "rotary_share", VERSION_4)),
)  # fmt: skip
GLM4_0414 = replace(
    GLM4,
    model_type="glm4",
    rows=decoder_rows(
        ("mlp.gate_up_proj",),
        more=(
            Row("attended_layernorm", ("post_self_attn_layernorm",)),
            Row("expanded_layernorm", ("post_mlp_layernorm",)),
        ),
    ),
    class_of=lambda config: "Glm4ForCausalLM",
    classes={"Glm4ForCausalLM": "glm4_0414"},
)
