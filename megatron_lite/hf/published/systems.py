"""The published systems as transformers has them: names of parameters, fields of config.json, classes.

Each system is one table that is read in both directions. A row joins modules of theirs to one of ours; which of its
parameters (weight, bias) exist follows from the model's options. conversion.py applies the tables.

Source: the modeling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import FIXED
from megatron_lite.hf.files.published_form import ACTIVATIONS, TRANSPOSED, Field, Row, System, numbered
from megatron_lite.hf.published.glm4 import GLM4, GLM4_0414
from megatron_lite.hf.published.xlnet import XLNET


def _bert_rows(prefix: str, head: tuple[str, str, str], sentence: tuple[str, str] | None) -> tuple[Row, ...]:
    tables = [
        Row("word_embeddings", ("word_embeddings",)),
        Row("position_embeddings", ("position_embeddings",)),
        Row("segment_embeddings", ("token_type_embeddings",)),
        Row("task_embeddings", ("task_type_embeddings",)),
        Row("layernorm", ("LayerNorm",)),
    ]
    block = [
        Row(
            "attention.query_key_value",
            ("attention.self.query", "attention.self.key", "attention.self.value"),
        ),
        Row("attention.dense", ("attention.output.dense",)),
        Row("post_attention_layernorm", ("attention.output.LayerNorm",)),
        Row("mlp.dense_h_to_4h", ("intermediate.dense",)),
        Row("mlp.dense_4h_to_h", ("output.dense",)),
        Row("output_layernorm", ("output.LayerNorm",)),
    ]
    dense, norm, bias_owner = head
    rows = [
        Row("heads.projection.dense", (dense,)),
        Row("heads.projection.layernorm", (norm,)),
        Row("heads", (bias_owner,)),
    ]
    if sentence is not None:
        rows += [
            Row("heads.sentence.dense", (sentence[0],)),
            Row("heads.sentence.classifier", (sentence[1],)),
        ]
    return (
        *numbered(tables, "embedding.", f"{prefix}embeddings."),
        *numbered(block, "layers.{i}.", f"{prefix}encoder.layer.{{i}}."),
        *rows,
    )


_BERT_FIELDS = (
    Field("vocab_size", "vocab_size"), Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"), Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "ffn_size"), Field("max_position_embeddings", "max_position", counts_positions=True),
    Field("type_vocab_size", "segments"), Field("hidden_act", "activation", ACTIVATIONS),
    Field("layer_norm_eps", "layernorm_epsilon"), Field("hidden_dropout_prob", "output_dropout"),
    Field("hidden_dropout_prob", "embedding_dropout"), Field("attention_probs_dropout_prob", "attention_dropout"),
    Field("initializer_range", "init_std"),
)  # fmt: skip
_CLS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
_ENCODER = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}


def _fixed(entry: Field, values: Mapping[str, Any]) -> Field:
    """A field with the values alone that every part of the class follows. Args: values: the only one of an option."""
    if entry.ours not in values or entry.names is None:
        return entry
    names = {theirs: ours for theirs, ours in entry.names.items() if ours == values[entry.ours]}
    return replace(entry, names=names)


def _cls_ties(prefix: str) -> dict[str, str]:
    return {
        "cls.predictions.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def _pretraining_or_masked(name: str) -> Callable[[ModelConfig], str]:
    return lambda config: f"{name}ForPreTraining" if config.sentence_classes else f"{name}ForMaskedLM"


BERT = System(
    model_type="bert", prefix="bert.",
    rows=_bert_rows("bert.", _CLS, ("bert.pooler.dense", "cls.seq_relationship")), fields=_BERT_FIELDS,
    class_of=_pretraining_or_masked("Bert"), classes={"BertForPreTraining": "bert", "BertForMaskedLM": "bert"},
    required=_ENCODER, ties=_cls_ties("bert."), optional={"sentence_classes": "cls.seq_relationship.weight"},
)  # fmt: skip
ERNIE = System(
    model_type="ernie", prefix="ernie.",
    rows=_bert_rows("ernie.", _CLS, ("ernie.pooler.dense", "cls.seq_relationship")),
    fields=(*_BERT_FIELDS, Field("task_type_vocab_size", "task_types")), class_of=_pretraining_or_masked("Ernie"),
    classes={"ErnieForPreTraining": "ernie", "ErnieForMaskedLM": "ernie"}, required=_ENCODER,
    ties=_cls_ties("ernie."),
    optional={
        "sentence_classes": "cls.seq_relationship.weight",
        "task_types": "ernie.embeddings.task_type_embeddings.weight",
    },
)  # fmt: skip
ROBERTA = System(
    model_type="roberta", prefix="roberta.",
    rows=_bert_rows("roberta.", ("lm_head.dense", "lm_head.layer_norm", "lm_head"), None),
    fields=tuple(_fixed(entry, FIXED["roberta"]) for entry in _BERT_FIELDS),
    class_of=lambda config: "RobertaForMaskedLM", classes={"RobertaForMaskedLM": "roberta"}, required=_ENCODER,
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    skipped_positions=2,  # pad_token_id is 1 in the class
    skips_pad=True,
)  # fmt: skip

_ALBERT_BLOCK = "albert.encoder.albert_layer_groups.0.albert_layers.0."
ALBERT = System(
    model_type="albert",
    prefix="albert.",
    rows=(
        Row("embedding.word_embeddings", ("albert.embeddings.word_embeddings",)),
        Row("embedding.position_embeddings", ("albert.embeddings.position_embeddings",)),
        Row("embedding.segment_embeddings", ("albert.embeddings.token_type_embeddings",)),
        Row("embedding.layernorm", ("albert.embeddings.LayerNorm",)),
        Row("embedding.projection", ("albert.encoder.embedding_hidden_mapping_in",)),
        *numbered(
            [
                Row(
                    "attention.query_key_value",
                    ("attention.query", "attention.key", "attention.value"),
                ),
                Row("attention.dense", ("attention.dense",)),
                Row("post_attention_layernorm", ("attention.LayerNorm",)), Row("mlp.dense_h_to_4h", ("ffn",)),
                Row("mlp.dense_4h_to_h", ("ffn_output",)), Row("output_layernorm", ("full_layer_layer_norm",)),
            ],
            "layers.{i}.",
            _ALBERT_BLOCK,
        ),
        Row("heads.projection.dense", ("predictions.dense",)),
        Row("heads.projection.layernorm", ("predictions.LayerNorm",)), Row("heads", ("predictions",)),
        Row("heads.sentence.dense", ("albert.pooler",)),
        Row("heads.sentence.classifier", ("sop_classifier.classifier",)),
    ),
    fields=(
        *_BERT_FIELDS,
        Field("embedding_size", "embedding_size"),
        Field("classifier_dropout_prob", "sentence_dropout"),
    ),
    class_of=_pretraining_or_masked("Albert"),
    classes={"AlbertForPreTraining": "albert", "AlbertForMaskedLM": "albert"},
    required={"num_hidden_groups": 1, "inner_group_num": 1, "tie_word_embeddings": True},
    ties={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    optional={"sentence_classes": "sop_classifier.classifier.weight"},
)  # fmt: skip


def _gpt_rows(words: str, positions: str, norms: tuple[str, str], final: tuple[Row, ...]) -> tuple[Row, ...]:
    block = [
        Row("attention.query_key_value", ("attn.c_attn",), TRANSPOSED),
        Row("attention.dense", ("attn.c_proj",), TRANSPOSED),
        Row(norms[0], ("ln_1",)),
        Row("mlp.dense_h_to_4h", ("mlp.c_fc",), TRANSPOSED),
        Row("mlp.dense_4h_to_h", ("mlp.c_proj",), TRANSPOSED),
        Row(norms[1], ("ln_2",)),
    ]
    return (
        Row("embedding.word_embeddings", (f"transformer.{words}",)),
        Row("embedding.position_embeddings", (f"transformer.{positions}",)),
        *numbered(block, "layers.{i}.", "transformer.h.{i}."),
        *final,
    )


_GPT_FIELDS = (
    Field("vocab_size", "vocab_size"), Field("n_layer", "num_layers"), Field("n_embd", "hidden_size"),
    Field("n_head", "num_attention_heads"), Field("n_positions", "max_position", counts_positions=True),
    Field("layer_norm_epsilon", "layernorm_epsilon"), Field("resid_pdrop", "output_dropout"),
    Field("embd_pdrop", "embedding_dropout"), Field("attn_pdrop", "attention_dropout"),
    Field("initializer_range", "init_std"),
)  # fmt: skip
GPT = System(
    model_type="openai-gpt",
    prefix="transformer.",
    rows=_gpt_rows("tokens_embed", "positions_embed", ("post_attention_layernorm", "output_layernorm"), ()),
    # Their "gelu" is the tanh form.
    fields=(*_GPT_FIELDS, Field("afn", "activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu"})),
    class_of=lambda config: "OpenAIGPTLMHeadModel", classes={"OpenAIGPTLMHeadModel": "gpt"},
    required={"tie_word_embeddings": True}, ties={"lm_head.weight": "transformer.tokens_embed.weight"},
    is_causal=True, counts_real_tokens=False, roles={"pad_token_id": "pad", "eos_token_id": "eos"},
    unused_ids=("bos_token_id",),
)  # fmt: skip
GPT2 = System(
    model_type="gpt2",
    prefix="transformer.",
    rows=_gpt_rows(
        "wte", "wpe", ("input_layernorm", "post_attention_layernorm"),
        (Row("final_layernorm", ("transformer.ln_f",)),),
    ),
    fields=(
        *_GPT_FIELDS,
        Field("activation_function", "activation", ACTIVATIONS),
        Field("n_inner", "ffn_size"),
    ),
    class_of=lambda config: "GPT2LMHeadModel",
    classes={"GPT2LMHeadModel": "gpt2"},
    required={
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    ties={"lm_head.weight": "transformer.wte.weight"},
    is_causal=True,
    roles={"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "eos"},
)  # fmt: skip


def _both_stacks(rows: list[Row], encoder: str, decoder: str) -> tuple[Row, ...]:
    return numbered(rows, "layers.{i}.", encoder) + numbered(rows, "layers.{d}.", decoder)


BART = System(
    model_type="bart",
    prefix="model.",
    rows=(
        Row("embedding.word_embeddings", ("model.shared",)),
        Row("embedding.position_embeddings", ("model.encoder.embed_positions",)),
        Row("embedding.layernorm", ("model.encoder.layernorm_embedding",)),
        Row("decoder_embedding.position_embeddings", ("model.decoder.embed_positions",)),
        Row("decoder_embedding.layernorm", ("model.decoder.layernorm_embedding",)),
        *_both_stacks(
            [
                Row(
                    "attention.query_key_value",
                    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ),
                Row("attention.dense", ("self_attn.out_proj",)),
                Row("post_attention_layernorm", ("self_attn_layer_norm",)), Row("mlp.dense_h_to_4h", ("fc1",)),
                Row("mlp.dense_4h_to_h", ("fc2",)), Row("output_layernorm", ("final_layer_norm",)),
            ],
            "model.encoder.layers.{i}.",
            "model.decoder.layers.{i}.",
        ),
        *numbered(
            [
                Row("cross_attention.query", ("encoder_attn.q_proj",)),
                Row("cross_attention.key_value", ("encoder_attn.k_proj", "encoder_attn.v_proj")),
                Row("cross_attention.dense", ("encoder_attn.out_proj",)),
                Row("cross_layernorm", ("encoder_attn_layer_norm",)),
            ],
            "layers.{d}.",
            "model.decoder.layers.{i}.",
        ),
    ),
    fields=(
        Field("vocab_size", "vocab_size"), Field("encoder_layers", "num_layers"),
        Field("decoder_layers", "decoder_layers"), Field("d_model", "hidden_size"),
        Field("encoder_attention_heads", "num_attention_heads"),
        Field("decoder_attention_heads", "num_attention_heads"), Field("encoder_ffn_dim", "ffn_size"),
        Field("decoder_ffn_dim", "ffn_size"),
        Field("max_position_embeddings", "max_position", counts_positions=True),
        Field("activation_function", "activation", ACTIVATIONS), Field("scale_embedding", "scale_embedding"),
        Field("dropout", "output_dropout"), Field("dropout", "embedding_dropout"),
        Field("attention_dropout", "attention_dropout"), Field("activation_dropout", "activation_dropout"),
        Field("init_std", "init_std"),
    ),
    class_of=lambda config: "BartForConditionalGeneration",
    classes={"BartForConditionalGeneration": "bart"},
    required={"tie_word_embeddings": True},
    ties={
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    },
    skipped_positions=2, counts_skipped=False, zeros={"final_logits_bias": 1}, forces_ends=True,
    is_encoder_decoder=True,
)  # fmt: skip
_T5_ATTENTION = [
    Row(
        "attention.query_key_value",
        ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    ),
    Row("attention.dense", ("layer.0.SelfAttention.o",)),
    Row("input_layernorm", ("layer.0.layer_norm",)),
]


def _t5_ffn(layer: int) -> list[Row]:
    return [
        Row("mlp.dense_h_to_4h", (f"layer.{layer}.DenseReluDense.wi",)),
        Row("mlp.dense_4h_to_h", (f"layer.{layer}.DenseReluDense.wo",)),
        Row("post_attention_layernorm", (f"layer.{layer}.layer_norm",)),
    ]


_T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"  # the first layer holds the table of all
T5 = System(
    model_type="t5",
    prefix="",
    rows=(
        Row("embedding.word_embeddings", ("shared",)), Row("relative_bias", (f"encoder.{_T5_BIAS}",)),
        Row("decoder_relative_bias", (f"decoder.{_T5_BIAS}",)),
        *_both_stacks(_T5_ATTENTION, "encoder.block.{i}.", "decoder.block.{i}."),
        *numbered(_t5_ffn(1), "layers.{i}.", "encoder.block.{i}."),
        *numbered(
            [
                Row("cross_attention.query", ("layer.1.EncDecAttention.q",)),
                Row("cross_attention.key_value", ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")),
                Row("cross_attention.dense", ("layer.1.EncDecAttention.o",)),
                Row("cross_layernorm", ("layer.1.layer_norm",)), *_t5_ffn(2),
            ],
            "layers.{d}.",
            "decoder.block.{i}.",
        ),
        Row("encoder_layernorm", ("encoder.final_layer_norm",)),
        Row("final_layernorm", ("decoder.final_layer_norm",)),
    ),
    fields=(
        Field("vocab_size", "vocab_size"), Field("num_layers", "num_layers"),
        Field("num_decoder_layers", "decoder_layers"), Field("d_model", "hidden_size"),
        Field("num_heads", "num_attention_heads"), Field("d_kv", "head_dim"), Field("d_ff", "ffn_size"),
        Field("feed_forward_proj", "activation", {"relu": "relu"}),
        Field("layer_norm_epsilon", "layernorm_epsilon"), Field("dropout_rate", "output_dropout"),
        Field("dropout_rate", "embedding_dropout"), Field("dropout_rate", "attention_dropout"),
        Field("dropout_rate", "activation_dropout"), Field("dropout_rate", "final_dropout"),
    ),
    class_of=lambda config: "T5ForConditionalGeneration",
    classes={"T5ForConditionalGeneration": "t5"},
    required={
        "scale_decoder_outputs": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    ties={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    roles={"pad_token_id": "pad", "eos_token_id": "eos"},
    is_encoder_decoder=True,
)  # fmt: skip

PUBLISHED: dict[str, System] = {  # by the type in config.json
    system.model_type: system
    for system in (BERT, ROBERTA, ALBERT, ERNIE, GPT, GPT2, XLNET, BART, T5, GLM4, GLM4_0414)
}
OF_MODEL: dict[str, System] = {  # by `model.system`
    "bert": BERT,
    "roberta": ROBERTA,
    "spanbert": BERT,
    "albert": ALBERT,
    "ernie": ERNIE,
    "ernie2": ERNIE,
    "unilm": BERT,
    "gpt": GPT,
    "gpt2": GPT2,
    "xlnet": XLNET,
    "bart": BART,
    "mass": BART,
    "t5": T5,
    "glm4": GLM4,
    "glm4_0414": GLM4_0414,
}
