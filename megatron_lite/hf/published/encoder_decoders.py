"""The tables of the encoder-decoders BART, T5 and mT5 (see system_table.py).

T5's `tie_word_embeddings` means two things. In version 5 the classes tie the word embedding and the head, whatever its
value, unless the file has a head that differs (T5 1.1, mT5), and T5's class scales the input of the head where it is
true. In version 4 it decides both. So an export sets it to whether the model scales, and writes a head that is tied and
not scaled although it is a copy of the word embedding.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    VERSION_4,
    ConfigField,
    FormerField,
    PublishedSystem,
    TensorRule,
    prefixed,
)


def _both_stacks(rules: list[TensorRule], encoder: str, decoder: str) -> tuple[TensorRule, ...]:
    return prefixed(rules, "layers.{i}.", encoder) + prefixed(rules, "layers.{d}.", decoder)


BART = PublishedSystem(
    model_type="bart",
    prefix="model.",
    rules=(
        TensorRule("embedding.word_embeddings", ("model.shared",)),
        TensorRule("embedding.position_embeddings", ("model.encoder.embed_positions",)),
        TensorRule("embedding.layernorm", ("model.encoder.layernorm_embedding",)),
        TensorRule("decoder_embedding.position_embeddings", ("model.decoder.embed_positions",)),
        TensorRule("decoder_embedding.layernorm", ("model.decoder.layernorm_embedding",)),
        *_both_stacks(
            [
                TensorRule(
                    "attention.query_key_value",
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                TensorRule("attention.dense", ("self_attn.out_proj",)),
                TensorRule("post_attention_layernorm", ("self_attn_layer_norm",)),
                TensorRule("mlp.dense_h_to_4h", ("fc1",)),
                TensorRule("mlp.dense_4h_to_h", ("fc2",)),
                TensorRule("output_layernorm", ("final_layer_norm",)),
            ],
            "model.encoder.layers.{i}.",
            "model.decoder.layers.{i}.",
        ),
        *prefixed(
            [
                TensorRule("cross_attention.query", ("encoder_attn.q_proj",)),
                TensorRule("cross_attention.key_value", ("encoder_attn.k_proj", "encoder_attn.v_proj")),
                TensorRule("cross_attention.dense", ("encoder_attn.out_proj",)),
                TensorRule("cross_layernorm", ("encoder_attn_layer_norm",)),
            ],
            "layers.{d}.",
            "model.decoder.layers.{i}.",
        ),
    ),
    fields=(
        ConfigField("vocab_size", "vocab_size"), ConfigField("encoder_layers", "num_layers"),
        ConfigField("decoder_layers", "decoder_layers"), ConfigField("d_model", "hidden_size"),
        ConfigField("encoder_attention_heads", "num_attention_heads"),
        ConfigField("decoder_attention_heads", "num_attention_heads"),
        ConfigField("encoder_ffn_dim", "ffn_size"),
        ConfigField("decoder_ffn_dim", "ffn_size"),
        ConfigField("max_position_embeddings", "max_position", counts_positions=True),
        ConfigField("activation_function", "activation", ACTIVATIONS),
        ConfigField("scale_embedding", "scale_embedding"),
        ConfigField("dropout", "output_dropout"), ConfigField("dropout", "embedding_dropout"),
        ConfigField("attention_dropout", "attention_dropout"),
        ConfigField("activation_dropout", "activation_dropout"),
        ConfigField("init_std", "init_std"),
    ),
    pretraining_class=lambda config: "BartForConditionalGeneration",
    classes={"BartForConditionalGeneration": "bart"},
    required={
        "tie_word_embeddings": True,
        # Of its first releases, which read other systems with the class: today's ignores them.
        "normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False,
        "static_position_embeddings": False, "add_bias_logits": False, "extra_pos_embeddings": 2,
    },
    untrained=("encoder_layerdrop", "decoder_layerdrop"),
    ties={
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    },
    skipped_positions=2, counts_skipped=False, zeros={"final_logits_bias": 1}, forces_ends=True,
    is_encoder_decoder=True,
)  # fmt: skip
_T5_ATTENTION = [
    TensorRule(
        "attention.query_key_value",
        ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    ),
    TensorRule("attention.dense", ("layer.0.SelfAttention.o",)),
    TensorRule("input_layernorm", ("layer.0.layer_norm",)),
]


def _t5_ffn(layer: int) -> list[TensorRule]:
    ffn = f"layer.{layer}.DenseReluDense"
    return [
        TensorRule("mlp.dense_h_to_4h", (f"{ffn}.wi",), ffn="plain"),
        TensorRule("mlp.dense_h_to_4h", (f"{ffn}.wi_0", f"{ffn}.wi_1"), ffn="gated"),
        TensorRule("mlp.dense_4h_to_h", (f"{ffn}.wo",)),
        TensorRule("post_attention_layernorm", (f"layer.{layer}.layer_norm",)),
    ]


_T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"  # the first layer holds the table of all
_T5_FIELDS = (
    ConfigField("vocab_size", "vocab_size"), ConfigField("num_layers", "num_layers"),
    ConfigField("num_decoder_layers", "decoder_layers"), ConfigField("d_model", "hidden_size"),
    ConfigField("num_heads", "num_attention_heads"),
    ConfigField("d_kv", "head_dim"),
    ConfigField("d_ff", "ffn_size"),
    ConfigField("feed_forward_proj", "activation", {"relu": "relu", "gated-gelu": "gelu_tanh"}),
    ConfigField("feed_forward_proj", "ffn", {"relu": "plain", "gated-gelu": "gated"}),
    ConfigField("layer_norm_epsilon", "layernorm_epsilon"), ConfigField("dropout_rate", "output_dropout"),
    ConfigField("dropout_rate", "embedding_dropout"), ConfigField("dropout_rate", "attention_dropout"),
    ConfigField("dropout_rate", "activation_dropout"), ConfigField("dropout_rate", "final_dropout"),
)  # fmt: skip
T5 = PublishedSystem(
    model_type="t5",
    prefix="",
    rules=(
        TensorRule("embedding.word_embeddings", ("shared",)),
        TensorRule("relative_bias", (f"encoder.{_T5_BIAS}",)),
        TensorRule("decoder_relative_bias", (f"decoder.{_T5_BIAS}",)),
        *_both_stacks(_T5_ATTENTION, "encoder.block.{i}.", "decoder.block.{i}."),
        *prefixed(_t5_ffn(1), "layers.{i}.", "encoder.block.{i}."),
        *prefixed(
            [
                TensorRule("cross_attention.query", ("layer.1.EncDecAttention.q",)),
                TensorRule("cross_attention.key_value", ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")),
                TensorRule("cross_attention.dense", ("layer.1.EncDecAttention.o",)),
                TensorRule("cross_layernorm", ("layer.1.layer_norm",)), *_t5_ffn(2),
            ],
            "layers.{d}.",
            "decoder.block.{i}.",
        ),
        TensorRule("encoder_layernorm", ("encoder.final_layer_norm",)),
        TensorRule("final_layernorm", ("decoder.final_layer_norm",)),
        TensorRule("heads.vocabulary", ("lm_head",)),
    ),
    fields=(
        *_T5_FIELDS, ConfigField("scale_decoder_outputs", "scale_head", {True: True, False: False}),
    ),
    pretraining_class=lambda config: "T5ForConditionalGeneration",
    classes={"T5ForConditionalGeneration": "t5"},
    required={"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    ties={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    roles={"pad_token_id": "pad", "eos_token_id": "eos"}, is_encoder_decoder=True,
    optional={"tie_word_embeddings": "lm_head.weight"},
    former=(FormerField("tie_word_embeddings", "scale_head", VERSION_4, is_another_name=False),),
)  # fmt: skip
MT5 = replace(
    T5, model_type="mt5", fields=_T5_FIELDS, pretraining_class=lambda config: "MT5ForConditionalGeneration",
    classes={"MT5ForConditionalGeneration": "mt5"},
)  # fmt: skip
