"""The table of XLNet (see system_table.py).

`mem_len` and `reuse_len` are kept with the rest of config.json; segment_memory.py reads a text in segments as the class
does.
"""

from __future__ import annotations

from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    FLATTENED,
    HEADS_SECOND,
    INTO_HEADS,
    OUT_OF_HEADS,
    ConfigField,
    PublishedSystem,
    TensorRule,
    prefixed,
)

_ATTENTION = [
    TensorRule("query_key_value.weight", ("q", "k", "v"), INTO_HEADS, is_tensor=True),
    TensorRule("relative.weight", ("r",), INTO_HEADS, is_tensor=True),
    TensorRule("dense.weight", ("o",), OUT_OF_HEADS, is_tensor=True),
    TensorRule("relative.content_query", ("r_w_bias",), is_tensor=True),
    TensorRule("relative.position_query", ("r_r_bias",), is_tensor=True),
    TensorRule("relative.segment_query", ("r_s_bias",), is_tensor=True),
    TensorRule("relative.segment_keys", ("seg_embed",), HEADS_SECOND, is_tensor=True),
]
_BLOCK = [
    TensorRule("post_attention_layernorm", ("rel_attn.layer_norm",)),
    TensorRule("mlp.dense_h_to_4h", ("ff.layer_1",)),
    TensorRule("mlp.dense_4h_to_h", ("ff.layer_2",)),
    TensorRule("output_layernorm", ("ff.layer_norm",)),
]
XLNET = PublishedSystem(
    model_type="xlnet",
    prefix="transformer.",
    rules=(
        TensorRule("embedding.word_embeddings", ("transformer.word_embedding",)),
        TensorRule("embedding.query_vector", ("transformer.mask_emb",), FLATTENED, is_tensor=True),
        *prefixed(_ATTENTION, "layers.{i}.attention.", "transformer.layer.{i}.rel_attn."),
        *prefixed(_BLOCK, "layers.{i}.", "transformer.layer.{i}."), TensorRule("heads", ("lm_loss",)),
    ),
    fields=(
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("n_layer", "num_layers"),
        ConfigField("d_model", "hidden_size"),
        ConfigField("n_head", "num_attention_heads"), ConfigField("d_inner", "ffn_size"),
        ConfigField("ff_activation", "activation", ACTIVATIONS),
        ConfigField("layer_norm_eps", "layernorm_epsilon"),
        ConfigField("dropout", "output_dropout"), ConfigField("dropout", "embedding_dropout"),
        ConfigField("dropout", "attention_dropout"), ConfigField("dropout", "activation_dropout"),
        ConfigField("dropout", "final_dropout"), ConfigField("initializer_range", "init_std"),
    ),
    pretraining_class=lambda config: "XLNetLMHeadModel",
    classes={"XLNetLMHeadModel": "xlnet"},
    required={
        "attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False, "tie_word_embeddings": True,
    },
    ties={"lm_loss.weight": "transformer.word_embedding.weight"},
    padding_side="left",
)  # fmt: skip
