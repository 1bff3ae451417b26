"""XLNet as transformers has it: see systems.py.

`mem_len` and `reuse_len` are kept with the rest of config.json; segment_memory.py reads a text in segments as the class
does.
"""

from __future__ import annotations

from megatron_lite.hf.files.published_form import (
    ACTIVATIONS,
    HEADS_SECOND,
    INTO_HEADS,
    OUT_OF_HEADS,
    ROW,
    Field,
    Row,
    System,
    numbered,
)

_ATTENTION = [
    Row("query_key_value.weight", ("q", "k", "v"), INTO_HEADS, is_tensor=True),
    Row("relative.weight", ("r",), INTO_HEADS, is_tensor=True),
    Row("dense.weight", ("o",), OUT_OF_HEADS, is_tensor=True),
    Row("relative.content_query", ("r_w_bias",), is_tensor=True),
    Row("relative.position_query", ("r_r_bias",), is_tensor=True),
    Row("relative.segment_query", ("r_s_bias",), is_tensor=True),
    Row("relative.segment_keys", ("seg_embed",), HEADS_SECOND, is_tensor=True),
]
_BLOCK = [
    Row("post_attention_layernorm", ("rel_attn.layer_norm",)),
    Row("mlp.dense_h_to_4h", ("ff.layer_1",)),
    Row("mlp.dense_4h_to_h", ("ff.layer_2",)),
    Row("output_layernorm", ("ff.layer_norm",)),
]
XLNET = System(
    model_type="xlnet",
    prefix="transformer.",
    rows=(
        Row("embedding.word_embeddings", ("transformer.word_embedding",)),
        Row("embedding.query_vector", ("transformer.mask_emb",), ROW, is_tensor=True),
        *numbered(_ATTENTION, "layers.{i}.attention.", "transformer.layer.{i}.rel_attn."),
        *numbered(_BLOCK, "layers.{i}.", "transformer.layer.{i}."), Row("heads", ("lm_loss",)),
    ),
    fields=(
        Field("vocab_size", "vocab_size"), Field("n_layer", "num_layers"), Field("d_model", "hidden_size"),
        Field("n_head", "num_attention_heads"), Field("d_inner", "ffn_size"),
        Field("ff_activation", "activation", ACTIVATIONS), Field("layer_norm_eps", "layernorm_epsilon"),
        Field("dropout", "output_dropout"), Field("dropout", "embedding_dropout"),
        Field("dropout", "attention_dropout"), Field("dropout", "activation_dropout"),
        Field("dropout", "final_dropout"), Field("initializer_range", "init_std"),
    ),
    class_of=lambda config: "XLNetLMHeadModel",
    classes={"XLNetLMHeadModel": "xlnet"},
    required={
        "attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False, "tie_word_embeddings": True,
    },
    ties={"lm_loss.weight": "transformer.word_embedding.weight"},
    padding_side="left",
)  # fmt: skip
