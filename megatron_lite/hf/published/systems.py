"""The published systems as transformers has them: names of parameters, fields of config.json, classes.

Each system is one table that is read in both directions. A row joins modules of theirs to one of ours; which of its
parameters (weight, bias) exist follows from the model's options. conversion.py applies the tables.

Source: the modeling files of transformers 5.23, and NeoBERT's repository.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import FIXED
from megatron_lite.hf.files.published_form import ACTIVATIONS, TRANSPOSED, Field, Row, System, numbered
from megatron_lite.hf.published.glm4 import GLM4, GLM4_0414
from megatron_lite.hf.published.llama import LLAMAS
from megatron_lite.hf.published.modernbert import MODERNBERT, MODERNBERT_DECODER
from megatron_lite.hf.published.neobert import NEOBERT
from megatron_lite.hf.published.stacks import BART, MT5, T5
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
_ABSOLUTE = {"position_embedding_type": "absolute"}  # version 4 also had tables of distances
_ENCODER = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True, **_ABSOLUTE}


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
    skips_pad=True, written_twice=("lm_head.decoder.bias",),
)  # fmt: skip
XLM_ROBERTA = replace(
    ROBERTA, model_type="xlm-roberta", class_of=lambda config: "XLMRobertaForMaskedLM",
    classes={"XLMRobertaForMaskedLM": "xlm_roberta"},
)  # fmt: skip
CAMEMBERT = replace(
    ROBERTA, model_type="camembert", class_of=lambda config: "CamembertForMaskedLM",
    classes={"CamembertForMaskedLM": "camembert"},
)  # fmt: skip
ELECTRA = System(  # `replaced` is no part of one Transformer: see megatron_lite/models/electra
    model_type="electra", prefix="electra.",
    rows=(
        *_bert_rows(
            "electra.", ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"), None
        ),
        Row("embedding.projection", ("electra.embeddings_project",)),
        Row("replaced.dense", ("discriminator_predictions.dense",)),
        Row("replaced.classifier", ("discriminator_predictions.dense_prediction",)),
    ),
    fields=(
        *(_fixed(entry, FIXED["electra"]) for entry in _BERT_FIELDS),
        Field("embedding_size", "embedding_size", null_as="hidden_size"),
    ),
    class_of=lambda config: "ElectraForMaskedLM" if config.head_transform else "ElectraForPreTraining",
    classes={"ElectraForPreTraining": "electra", "ElectraForMaskedLM": "electra_generator"}, required=_ENCODER,
    ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)  # fmt: skip

_SELF, _TERMS = "deberta.encoder.layer.{i}.attention.self.", ["p2c", "c2p"]


def _deberta_rows(head: tuple[str, str, str]) -> tuple[Row, ...]:
    of_bert = _bert_rows("deberta.", head, None)
    return (
        *(
            replace(row, theirs=tuple(f"{x}_proj" for x in row.theirs))
            for row in of_bert
            if len(row.theirs) > 1
        ),
        *(row for row in of_bert if len(row.theirs) == 1),
        Row("layers.{i}.attention.position_query_key", (f"{_SELF}pos_query_proj", f"{_SELF}pos_key_proj")),
        Row("relative_bias", ("deberta.encoder.rel_embeddings",)),
        Row("relative_bias.layernorm", ("deberta.encoder.LayerNorm",)),
    )


DEBERTA = System(  # without the convolution of v2's sizes; the released files have the names of `legacy` false
    model_type="deberta-v2", prefix="deberta.",
    rows=_deberta_rows(("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head")),
    fields=(
        *_BERT_FIELDS,
        Field(
            "pos_att_type", "relative", writes=lambda *_: _TERMS,
            reads=lambda kinds, _: "disentangled" if sorted(kinds or ()) == sorted(_TERMS) else None,
        ),
        Field(
            "position_buckets", "position_buckets", writes=lambda count, _: count or -1,
            reads=lambda count, _: max(count or 0, 0),
        ),
        Field(
            "norm_rel_ebd", "position_norm", writes=lambda has_norm, _: "layer_norm" if has_norm else "none",
            reads=lambda kind, _: {"layer_norm": True, "none": False}.get(kind or "none"),
        ),
        Field(
            "share_att_key", "position_projections", writes=lambda is_own, _: not is_own,
            reads=lambda is_shared, _: not is_shared,
        ),
        Field("position_biased_input", "positions", {False: "none", True: "learned"}),
    ),
    class_of=lambda config: "DebertaV2ForMaskedLM" if config.head_transform else "DebertaV2Model",
    classes={"DebertaV2ForMaskedLM": "deberta_v3"},
    required={
        "relative_attention": True, "max_relative_positions": -1, "conv_kernel_size": 0, "tie_word_embeddings": True,
    },
    roles={"pad_token_id": "pad"},
    optional={"head_transform": "lm_predictions.lm_head.dense.weight", "head_bias": "lm_predictions.lm_head.bias"},
)  # fmt: skip
DEBERTA = replace(
    DEBERTA, legacy=replace(
        DEBERTA, is_legacy=True, rows=_deberta_rows(_CLS), ties=_cls_ties("deberta."),
        optional={"head_transform": f"{_CLS[0]}.weight", "head_bias": "cls.predictions.bias"},
    ),
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
    required={"num_hidden_groups": 1, "inner_group_num": 1, "tie_word_embeddings": True, **_ABSOLUTE},
    ties={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    optional={"sentence_classes": "sop_classifier.classifier.weight"},
    written_twice=("predictions.decoder.bias",),
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

PUBLISHED: dict[str, System] = {  # by the type in config.json
    system.model_type: system
    for system in (
        *(
            BERT,
            ROBERTA,
            XLM_ROBERTA,
            CAMEMBERT,
            ELECTRA,
            DEBERTA,
            ALBERT,
            ERNIE,
            GPT,
            GPT2,
            XLNET,
            BART,
            T5,
            MT5,
        ),
        *(*LLAMAS, NEOBERT, MODERNBERT, MODERNBERT_DECODER, GLM4, GLM4_0414),
    )
}
OF_MODEL: dict[str, System] = {  # by `model.system`
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm_roberta": XLM_ROBERTA,
    "camembert": CAMEMBERT,
    "spanbert": BERT,
    "electra": ELECTRA,
    "electra_generator": ELECTRA,
    "deberta_v3": DEBERTA,
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
    "t5_1_1": T5,
    "mt5": MT5,
    "glm4": GLM4,
    "glm4_0414": GLM4_0414,
    "modernbert_decoder": MODERNBERT_DECODER,
    **{system.model_type: system for system in (*LLAMAS, NEOBERT, MODERNBERT)},
}
