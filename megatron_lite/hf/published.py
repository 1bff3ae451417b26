"""The published systems as transformers has them: names of parameters, fields of config.json, classes.

Each system is one table that is read in both directions. A row joins modules of theirs to one of ours; which of its
parameters (weight, bias) exist follows from the model's options. conversion.py applies the tables.

Source: the modeling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_lite.config.model import ModelConfig


@dataclass(frozen=True)
class Row:
    """Modules of theirs that are one module of ours. "{i}" in a name stands for the number of a layer."""

    ours: str
    theirs: tuple[str, ...]  # several: joined along the output features, as Q|K|V
    transposed: bool = False  # their weight is [in, out]
    # Relative sizes of `theirs` in ours; None: equal.
    shares: Callable[[ModelConfig], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Field:
    """A field of config.json that is an option of ours. Several options may have one field."""

    theirs: str  # "rope_parameters.rope_theta": a field within another
    ours: str
    names: Mapping[Any, Any] | None = None  # their value -> ours, where they differ
    counts_positions: bool = False  # theirs counts the rows of the table, ours is the largest position


@dataclass(frozen=True)
class System:
    """A published system."""

    model_type: str  # as in config.json
    prefix: str  # of the base model's parameters; files of the base model alone may lack it
    rows: tuple[Row, ...]
    fields: tuple[Field, ...]
    class_of: Callable[[ModelConfig], str]  # the class of transformers that has all heads of a model
    classes: Mapping[str, str]  # architecture in config.json -> `model.system`
    required: Mapping[str, Any]  # fields of config.json with the only value that we can express
    ties: Mapping[str, str] = field(default_factory=dict)  # their second name of a tensor -> the first
    skipped_positions: int = 0  # rows of their position table that no token uses, before the others
    is_causal: bool = False
    may_untie: bool = False  # whether `ties` only hold where config.json has tie_word_embeddings
    # Options of heads that a file may lack, and the parameter that tells.
    optional: Mapping[str, str] = field(default_factory=dict)
    set_fields: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that no option has


_ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _numbered(rows: list[Row], ours: str, theirs: str) -> tuple[Row, ...]:
    return tuple(
        replace(row, ours=f"{ours}{row.ours}", theirs=tuple(f"{theirs}{name}" for name in row.theirs))
        for row in rows
    )


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
        *_numbered(tables, "embedding.", f"{prefix}embeddings."),
        *_numbered(block, "layers.{i}.", f"{prefix}encoder.layer.{{i}}."),
        *rows,
    )


_BERT_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "ffn_size"),
    Field("max_position_embeddings", "max_position", counts_positions=True),
    Field("type_vocab_size", "segments"),
    Field("hidden_act", "activation", _ACTIVATIONS),
    Field("layer_norm_eps", "layernorm_epsilon"),
    Field("hidden_dropout_prob", "output_dropout"),
    Field("hidden_dropout_prob", "embedding_dropout"),
    Field("attention_probs_dropout_prob", "attention_dropout"),
    Field("initializer_range", "init_std"),
)
_CLS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
_ENCODER = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}


def _cls_ties(prefix: str) -> dict[str, str]:
    return {
        "cls.predictions.decoder.weight": f"{prefix}embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def _pretraining_or_masked(name: str) -> Callable[[ModelConfig], str]:
    return lambda config: f"{name}ForPreTraining" if config.sentence_classes else f"{name}ForMaskedLM"


BERT = System(
    model_type="bert",
    prefix="bert.",
    rows=_bert_rows("bert.", _CLS, ("bert.pooler.dense", "cls.seq_relationship")),
    fields=_BERT_FIELDS,
    class_of=_pretraining_or_masked("Bert"),
    classes={"BertForPreTraining": "bert", "BertForMaskedLM": "bert"},
    required=_ENCODER,
    ties=_cls_ties("bert."),
    optional={"sentence_classes": "cls.seq_relationship.weight"},
)
ERNIE = System(
    model_type="ernie",
    prefix="ernie.",
    rows=_bert_rows("ernie.", _CLS, ("ernie.pooler.dense", "cls.seq_relationship")),
    fields=(*_BERT_FIELDS, Field("task_type_vocab_size", "task_types")),
    class_of=_pretraining_or_masked("Ernie"),
    classes={"ErnieForPreTraining": "ernie", "ErnieForMaskedLM": "ernie"},
    required=_ENCODER,
    ties=_cls_ties("ernie."),
    optional={
        "sentence_classes": "cls.seq_relationship.weight",
        "task_types": "ernie.embeddings.task_type_embeddings.weight",
    },
)
ROBERTA = System(
    model_type="roberta",
    prefix="roberta.",
    rows=_bert_rows("roberta.", ("lm_head.dense", "lm_head.layer_norm", "lm_head"), None),
    fields=_BERT_FIELDS,
    class_of=lambda config: "RobertaForMaskedLM",
    classes={"RobertaForMaskedLM": "roberta"},
    required=_ENCODER,
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    skipped_positions=2,  # padding_idx 1 and the row before it
)

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
        *_numbered(
            [
                Row(
                    "attention.query_key_value",
                    ("attention.query", "attention.key", "attention.value"),
                ),
                Row("attention.dense", ("attention.dense",)),
                Row("post_attention_layernorm", ("attention.LayerNorm",)),
                Row("mlp.dense_h_to_4h", ("ffn",)),
                Row("mlp.dense_4h_to_h", ("ffn_output",)),
                Row("output_layernorm", ("full_layer_layer_norm",)),
            ],
            "layers.{i}.",
            _ALBERT_BLOCK,
        ),
        Row("heads.projection.dense", ("predictions.dense",)),
        Row("heads.projection.layernorm", ("predictions.LayerNorm",)),
        Row("heads", ("predictions",)),
        Row("heads.sentence.dense", ("albert.pooler",)),
        Row("heads.sentence.classifier", ("sop_classifier.classifier",)),
    ),
    fields=(*_BERT_FIELDS, Field("embedding_size", "embedding_size")),
    class_of=_pretraining_or_masked("Albert"),
    classes={"AlbertForPreTraining": "albert", "AlbertForMaskedLM": "albert"},
    required={"num_hidden_groups": 1, "inner_group_num": 1, "tie_word_embeddings": True},
    ties={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    optional={"sentence_classes": "sop_classifier.classifier.weight"},
)


def _gpt_rows(words: str, positions: str, norms: tuple[str, str], final: tuple[Row, ...]) -> tuple[Row, ...]:
    block = [
        Row("attention.query_key_value", ("attn.c_attn",), transposed=True),
        Row("attention.dense", ("attn.c_proj",), transposed=True),
        Row(norms[0], ("ln_1",)),
        Row("mlp.dense_h_to_4h", ("mlp.c_fc",), transposed=True),
        Row("mlp.dense_4h_to_h", ("mlp.c_proj",), transposed=True),
        Row(norms[1], ("ln_2",)),
    ]
    return (
        Row("embedding.word_embeddings", (f"transformer.{words}",)),
        Row("embedding.position_embeddings", (f"transformer.{positions}",)),
        *_numbered(block, "layers.{i}.", "transformer.h.{i}."),
        *final,
    )


_GPT_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("n_layer", "num_layers"),
    Field("n_embd", "hidden_size"),
    Field("n_head", "num_attention_heads"),
    Field("n_positions", "max_position", counts_positions=True),
    Field("layer_norm_epsilon", "layernorm_epsilon"),
    Field("resid_pdrop", "output_dropout"),
    Field("embd_pdrop", "embedding_dropout"),
    Field("attn_pdrop", "attention_dropout"),
    Field("initializer_range", "init_std"),
)
GPT = System(
    model_type="openai-gpt",
    prefix="transformer.",
    rows=_gpt_rows("tokens_embed", "positions_embed", ("post_attention_layernorm", "output_layernorm"), ()),
    # What they call "gelu" is the tanh form.
    fields=(*_GPT_FIELDS, Field("afn", "activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu"})),
    class_of=lambda config: "OpenAIGPTLMHeadModel",
    classes={"OpenAIGPTLMHeadModel": "gpt"},
    required={"tie_word_embeddings": True},
    ties={"lm_head.weight": "transformer.tokens_embed.weight"},
    is_causal=True,
)
GPT2 = System(
    model_type="gpt2",
    prefix="transformer.",
    rows=_gpt_rows(
        "wte",
        "wpe",
        ("input_layernorm", "post_attention_layernorm"),
        (Row("final_layernorm", ("transformer.ln_f",)),),
    ),
    fields=(
        *_GPT_FIELDS,
        Field("activation_function", "activation", _ACTIVATIONS),
        Field("n_inner", "ffn_size"),
    ),
    class_of=lambda config: "GPT2LMHeadModel",
    classes={"GPT2LMHeadModel": "gpt2"},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    ties={"lm_head.weight": "transformer.wte.weight"},
    is_causal=True,
)


def _glm4_rows(more_norms: bool) -> tuple[Row, ...]:
    def shares(config: ModelConfig) -> tuple[int, ...]:
        return config.num_attention_heads // config.key_value_heads, 1, 1

    block = [
        Row("input_layernorm", ("input_layernorm",)),
        Row(
            "attention.query_key_value",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            shares=shares,
        ),
        Row("attention.dense", ("self_attn.o_proj",)),
        Row("post_attention_layernorm", ("post_attention_layernorm",)),
        Row("mlp.dense_h_to_4h", ("mlp.gate_up_proj",)),
        Row("mlp.dense_4h_to_h", ("mlp.down_proj",)),
    ]
    if more_norms:
        block += [
            Row("attended_layernorm", ("post_self_attn_layernorm",)),
            Row("expanded_layernorm", ("post_mlp_layernorm",)),
        ]
    return (
        Row("embedding.word_embeddings", ("model.embed_tokens",)),
        *_numbered(block, "layers.{i}.", "model.layers.{i}."),
        Row("final_layernorm", ("model.norm",)),
        Row("heads.vocabulary", ("lm_head",)),
    )


_GLM4_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_key_value_heads", "num_key_value_heads"),
    Field("head_dim", "head_dim"),
    Field("intermediate_size", "ffn_size"),
    Field("max_position_embeddings", "max_position", counts_positions=True),
    Field("rope_parameters.rope_theta", "rotary_base"),
    Field("rope_parameters.partial_rotary_factor", "rotary_share"),
    Field("hidden_act", "activation", _ACTIVATIONS),
    Field("attention_bias", "biases", {True: "qkv", False: "none"}),
    Field("rms_norm_eps", "layernorm_epsilon"),
    Field("tie_word_embeddings", "tie_word_embeddings"),
    Field("attention_dropout", "attention_dropout"),
    Field("initializer_range", "init_std"),
)
GLM4 = System(
    model_type="glm",
    prefix="model.",
    rows=_glm4_rows(more_norms=False),
    fields=_GLM4_FIELDS,
    class_of=lambda config: "GlmForCausalLM",
    classes={"GlmForCausalLM": "glm4"},
    required={"rope_parameters.rope_type": "default"},
    ties={"lm_head.weight": "model.embed_tokens.weight"},
    is_causal=True,
    may_untie=True,
)
GLM4_0414 = replace(
    GLM4,
    model_type="glm4",
    rows=_glm4_rows(more_norms=True),
    class_of=lambda config: "Glm4ForCausalLM",
    classes={"Glm4ForCausalLM": "glm4_0414"},
)

PUBLISHED: dict[str, System] = {  # by the type in config.json
    system.model_type: system for system in (BERT, ROBERTA, ALBERT, ERNIE, GPT, GPT2, GLM4, GLM4_0414)
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
    "glm4": GLM4,
    "glm4_0414": GLM4_0414,
}
