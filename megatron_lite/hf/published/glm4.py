"""The table of GLM-4, and the rules and fields that it shares with Llama (see system_table.py)."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    SAME,
    VERSION_4,
    ConfigField,
    FormerField,
    PublishedSystem,
    TensorRule,
    WeightTransform,
    prefixed,
)


def _shares(config: ModelConfig) -> tuple[int, ...]:
    return config.num_attention_heads // config.key_value_heads, 1, 1


def decoder_rules(
    ffn: tuple[str, ...], transform: WeightTransform = SAME, more: tuple[TensorRule, ...] = ()
) -> tuple[TensorRule, ...]:
    """The rules of a decoder as Llama has it.

    Args: ffn: names of the gate and of what it multiplies, or of both in one. transform: of queries and keys.
        more: further rules of a block.
    """
    block = [
        TensorRule("input_layernorm", ("input_layernorm",)),
        TensorRule(
            "attention.query_key_value",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (transform, transform, SAME),
            shares=_shares,
        ),
        TensorRule("attention.dense", ("self_attn.o_proj",)),
        TensorRule("post_attention_layernorm", ("post_attention_layernorm",)),
        TensorRule("mlp.dense_h_to_4h", ffn),
        TensorRule("mlp.dense_4h_to_h", ("mlp.down_proj",)),
        *more,
    ]
    return (
        TensorRule("embedding.word_embeddings", ("model.embed_tokens",)),
        *prefixed(block, "layers.{i}.", "model.layers.{i}."),
        TensorRule("final_layernorm", ("model.norm",)),
        TensorRule("heads.vocabulary", ("lm_head",)),
    )


DECODER_FIELDS = (
    ConfigField("vocab_size", "vocab_size"), ConfigField("num_hidden_layers", "num_layers"),
    ConfigField("hidden_size", "hidden_size"), ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("num_key_value_heads", "num_key_value_heads"), ConfigField("intermediate_size", "ffn_size"),
    ConfigField("max_position_embeddings", "max_position", counts_positions=True),
    ConfigField("rope_parameters.rope_theta", "rotary_base"),
    ConfigField("hidden_act", "activation", ACTIVATIONS),
    ConfigField("rms_norm_eps", "layernorm_epsilon"),
    ConfigField("tie_word_embeddings", "tie_word_embeddings"),
    ConfigField("attention_dropout", "attention_dropout"), ConfigField("initializer_range", "init_std"),
)  # fmt: skip
HEAD_WIDTH = ConfigField("head_dim", "head_dim")
FORMER_BASE = FormerField("rope_theta", "rotary_base", VERSION_4)
GLM4 = PublishedSystem(
    model_type="glm", prefix="model.", rules=decoder_rules(("mlp.gate_up_proj",)),
    fields=(
        *DECODER_FIELDS, HEAD_WIDTH, ConfigField("rope_parameters.partial_rotary_factor", "rotary_share"),
        ConfigField("attention_bias", "biases", {True: "qkv", False: "none"}),
    ),
    pretraining_class=lambda config: "GlmForCausalLM", classes={"GlmForCausalLM": "glm4"},
    required={"rope_parameters.rope_type": "default"}, ties={"lm_head.weight": "model.embed_tokens.weight"},
    is_causal=True, may_untie=True, roles={"pad_token_id": "pad", "eos_token_id": "eos"},
    former=(FORMER_BASE, FormerField("partial_rotary_factor", "rotary_share", VERSION_4)),
)  # fmt: skip
GLM4_0414 = replace(
    GLM4,
    model_type="glm4",
    rules=decoder_rules(
        ("mlp.gate_up_proj",),
        more=(
            TensorRule("attended_layernorm", ("post_self_attn_layernorm",)),
            TensorRule("expanded_layernorm", ("post_mlp_layernorm",)),
        ),
    ),
    pretraining_class=lambda config: "Glm4ForCausalLM",
    classes={"Glm4ForCausalLM": "glm4_0414"},
)
