"""The tables of GPT and GPT-2 (see system_table.py). Their layers are stored transposed, [in, out]."""

from __future__ import annotations

from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    TRANSPOSED,
    ConfigField,
    PublishedSystem,
    TensorRule,
    prefixed,
)


def _gpt_rules(
    words: str, positions: str, norms: tuple[str, str], final: tuple[TensorRule, ...]
) -> tuple[TensorRule, ...]:
    """The rules of a decoder with GPT's modules.

    Args: words, positions: modules of the embeddings. norms: our names of a block's two norms. final: further rules.
    """
    block = [
        TensorRule("attention.query_key_value", ("attn.c_attn",), TRANSPOSED),
        TensorRule("attention.dense", ("attn.c_proj",), TRANSPOSED),
        TensorRule(norms[0], ("ln_1",)),
        TensorRule("mlp.dense_h_to_4h", ("mlp.c_fc",), TRANSPOSED),
        TensorRule("mlp.dense_4h_to_h", ("mlp.c_proj",), TRANSPOSED),
        TensorRule(norms[1], ("ln_2",)),
    ]
    return (
        TensorRule("embedding.word_embeddings", (f"transformer.{words}",)),
        TensorRule("embedding.position_embeddings", (f"transformer.{positions}",)),
        *prefixed(block, "layers.{i}.", "transformer.h.{i}."),
        *final,
    )


_GPT_FIELDS = (
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("n_layer", "num_layers"),
    ConfigField("n_embd", "hidden_size"),
    ConfigField("n_head", "num_attention_heads"),
    ConfigField("n_positions", "max_position", counts_positions=True),
    ConfigField("layer_norm_epsilon", "layernorm_epsilon"), ConfigField("resid_pdrop", "output_dropout"),
    ConfigField("embd_pdrop", "embedding_dropout"), ConfigField("attn_pdrop", "attention_dropout"),
    ConfigField("initializer_range", "init_std"),
)  # fmt: skip
GPT = PublishedSystem(
    model_type="openai-gpt",
    prefix="transformer.",
    rules=_gpt_rules("tokens_embed", "positions_embed", ("post_attention_layernorm", "output_layernorm"), ()),
    # OpenAIGPTModel's "gelu" is the tanh approximation.
    fields=(*_GPT_FIELDS, ConfigField("afn", "activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu"})),
    pretraining_class=lambda config: "OpenAIGPTLMHeadModel", classes={"OpenAIGPTLMHeadModel": "gpt"},
    required={"tie_word_embeddings": True}, ties={"lm_head.weight": "transformer.tokens_embed.weight"},
    is_causal=True, counts_real_tokens=False, roles={"pad_token_id": "pad", "eos_token_id": "eos"},
    unused_ids=("bos_token_id",),
)  # fmt: skip
GPT2 = PublishedSystem(
    model_type="gpt2",
    prefix="transformer.",
    rules=_gpt_rules(
        "wte", "wpe", ("input_layernorm", "post_attention_layernorm"),
        (TensorRule("final_layernorm", ("transformer.ln_f",)),),
    ),
    fields=(
        *_GPT_FIELDS,
        ConfigField("activation_function", "activation", ACTIVATIONS),
        ConfigField("n_inner", "ffn_size"),
    ),
    pretraining_class=lambda config: "GPT2LMHeadModel",
    classes={"GPT2LMHeadModel": "gpt2"},
    required={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    ties={"lm_head.weight": "transformer.wte.weight"},
    is_causal=True,
    roles={"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "eos"},
)  # fmt: skip
