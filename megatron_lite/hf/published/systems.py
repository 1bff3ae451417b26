"""The tables of the published systems: tensor names, fields of config.json and classes of transformers.

Each system is one table that is read in both directions. A rule maps one module of ours to one or several of theirs;
which of its parameters (weight, bias) exist follows from the model's options. tensor_map.py, read_config.py and
write_config.py apply the tables.

Source: the modeling files of transformers 5.23, and NeoBERT's repository.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.common.setting_files import shown
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import FIXED
from megatron_lite.hf.files.system_table import (
    ACTIVATIONS,
    TRANSPOSED,
    ConfigField,
    PublishedSystem,
    TensorRule,
    numbered,
)
from megatron_lite.hf.published.glm4 import GLM4, GLM4_0414
from megatron_lite.hf.published.llama import LLAMAS
from megatron_lite.hf.published.modernbert import MODERNBERT, MODERNBERT_DECODER
from megatron_lite.hf.published.neobert import NEOBERT
from megatron_lite.hf.published.stacks import BART, MT5, T5
from megatron_lite.hf.published.xlnet import XLNET


def _bert_rules(
    prefix: str, head: tuple[str, str, str], sentence: tuple[str, str] | None
) -> tuple[TensorRule, ...]:
    tables = [
        TensorRule("word_embeddings", ("word_embeddings",)),
        TensorRule("position_embeddings", ("position_embeddings",)),
        TensorRule("segment_embeddings", ("token_type_embeddings",)),
        TensorRule("task_embeddings", ("task_type_embeddings",)),
        TensorRule("layernorm", ("LayerNorm",)),
    ]
    block = [
        TensorRule(
            "attention.query_key_value",
            ("attention.self.query", "attention.self.key", "attention.self.value"),
        ),
        TensorRule("attention.dense", ("attention.output.dense",)),
        TensorRule("post_attention_layernorm", ("attention.output.LayerNorm",)),
        TensorRule("mlp.dense_h_to_4h", ("intermediate.dense",)),
        TensorRule("mlp.dense_4h_to_h", ("output.dense",)),
        TensorRule("output_layernorm", ("output.LayerNorm",)),
    ]
    dense, norm, bias_owner = head
    rules = [
        TensorRule("heads.projection.dense", (dense,)),
        TensorRule("heads.projection.layernorm", (norm,)),
        TensorRule("heads", (bias_owner,)),
    ]
    if sentence is not None:
        rules += [
            TensorRule("heads.sentence.dense", (sentence[0],)),
            TensorRule("heads.sentence.classifier", (sentence[1],)),
        ]
    return (
        *numbered(tables, "embedding.", f"{prefix}embeddings."),
        *numbered(block, "layers.{i}.", f"{prefix}encoder.layer.{{i}}."),
        *rules,
    )


_BERT_FIELDS = (
    ConfigField("vocab_size", "vocab_size"), ConfigField("num_hidden_layers", "num_layers"),
    ConfigField("hidden_size", "hidden_size"), ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("intermediate_size", "ffn_size"),
    ConfigField("max_position_embeddings", "max_position", counts_positions=True),
    ConfigField("type_vocab_size", "segments"), ConfigField("hidden_act", "activation", ACTIVATIONS),
    ConfigField("layer_norm_eps", "layernorm_epsilon"), ConfigField("hidden_dropout_prob", "output_dropout"),
    ConfigField("hidden_dropout_prob", "embedding_dropout"),
    ConfigField("attention_probs_dropout_prob", "attention_dropout"),
    ConfigField("initializer_range", "init_std"),
)  # fmt: skip
_CLS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
_ABSOLUTE = {"position_embedding_type": "absolute"}  # version 4 also had tables of distances
_ENCODER = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True, **_ABSOLUTE}


def _fixed(entry: ConfigField, values: Mapping[str, Any]) -> ConfigField:
    """A field with the values alone that every module of the class follows. Args: values: the only one of an option."""
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


BERT = PublishedSystem(
    model_type="bert", prefix="bert.",
    rules=_bert_rules("bert.", _CLS, ("bert.pooler.dense", "cls.seq_relationship")), fields=_BERT_FIELDS,
    pretraining_class=_pretraining_or_masked("Bert"), classes={"BertForPreTraining": "bert", "BertForMaskedLM": "bert"},
    required=_ENCODER, ties=_cls_ties("bert."), optional={"sentence_classes": "cls.seq_relationship.weight"},
)  # fmt: skip
ERNIE = PublishedSystem(
    model_type="ernie", prefix="ernie.",
    rules=_bert_rules("ernie.", _CLS, ("ernie.pooler.dense", "cls.seq_relationship")),
    fields=(*_BERT_FIELDS, ConfigField("task_type_vocab_size", "task_types")),
    pretraining_class=_pretraining_or_masked("Ernie"),
    classes={"ErnieForPreTraining": "ernie", "ErnieForMaskedLM": "ernie"}, required=_ENCODER,
    ties=_cls_ties("ernie."),
    optional={
        "sentence_classes": "cls.seq_relationship.weight",
        "task_types": "ernie.embeddings.task_type_embeddings.weight",
    },
)  # fmt: skip
ROBERTA = PublishedSystem(
    model_type="roberta", prefix="roberta.",
    rules=_bert_rules("roberta.", ("lm_head.dense", "lm_head.layer_norm", "lm_head"), None),
    fields=tuple(_fixed(entry, FIXED["roberta"]) for entry in _BERT_FIELDS),
    pretraining_class=lambda config: "RobertaForMaskedLM", classes={"RobertaForMaskedLM": "roberta"}, required=_ENCODER,
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    skipped_positions=2,  # pad_token_id is 1 in the class
    skips_pad=True, written_twice=("lm_head.decoder.bias",),
)  # fmt: skip
XLM_ROBERTA = replace(
    ROBERTA, model_type="xlm-roberta", pretraining_class=lambda config: "XLMRobertaForMaskedLM",
    classes={"XLMRobertaForMaskedLM": "xlm_roberta"},
)  # fmt: skip
CAMEMBERT = replace(
    ROBERTA, model_type="camembert", pretraining_class=lambda config: "CamembertForMaskedLM",
    classes={"CamembertForMaskedLM": "camembert"},
)  # fmt: skip
ELECTRA = PublishedSystem(  # `replaced` is no part of one Transformer: see megatron_lite/models/electra
    model_type="electra", prefix="electra.",
    rules=(
        *_bert_rules(
            "electra.", ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"), None
        ),
        TensorRule("embedding.projection", ("electra.embeddings_project",)),
        TensorRule("replaced.dense", ("discriminator_predictions.dense",)),
        TensorRule("replaced.classifier", ("discriminator_predictions.dense_prediction",)),
    ),
    fields=(
        *(_fixed(entry, FIXED["electra"]) for entry in _BERT_FIELDS),
        ConfigField("embedding_size", "embedding_size", null_as="hidden_size"),
    ),
    pretraining_class=lambda config: "ElectraForMaskedLM" if config.head_transform else "ElectraForPreTraining",
    classes={"ElectraForPreTraining": "electra", "ElectraForMaskedLM": "electra_generator"}, required=_ENCODER,
    ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)  # fmt: skip

_SELF, _TERMS = "deberta.encoder.layer.{i}.attention.self.", ["p2c", "c2p"]


def _deberta_rules(head: tuple[str, str, str]) -> tuple[TensorRule, ...]:
    bert_rules = _bert_rules("deberta.", head, None)
    return (
        *(
            replace(rule, theirs=tuple(f"{x}_proj" for x in rule.theirs))
            for rule in bert_rules
            if len(rule.theirs) > 1
        ),
        *(rule for rule in bert_rules if len(rule.theirs) == 1),
        TensorRule(
            "layers.{i}.attention.position_query_key", (f"{_SELF}pos_query_proj", f"{_SELF}pos_key_proj")
        ),
        TensorRule("relative_bias", ("deberta.encoder.rel_embeddings",)),
        TensorRule("relative_bias.layernorm", ("deberta.encoder.LayerNorm",)),
    )


DEBERTA = PublishedSystem(  # without the convolution of v2's sizes; the released files have the names of `legacy` false
    model_type="deberta-v2", prefix="deberta.",
    rules=_deberta_rules(
        ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head")
    ),
    fields=(
        *_BERT_FIELDS,
        ConfigField(
            "pos_att_type", "relative", writes=lambda *_: _TERMS,
            reads=lambda kinds, _: "disentangled" if sorted(kinds or ()) == sorted(_TERMS) else None,
        ),
        ConfigField(
            "position_buckets", "position_buckets", writes=lambda count, _: count or -1,
            reads=lambda count, _: max(count or 0, 0),
        ),
        ConfigField(
            "norm_rel_ebd", "position_norm", writes=lambda has_norm, _: "layer_norm" if has_norm else "none",
            reads=lambda kind, _: {"layer_norm": True, "none": False}.get(kind or "none"),
        ),
        ConfigField(
            "share_att_key", "position_projections", writes=lambda is_own, _: not is_own,
            reads=lambda is_shared, _: not is_shared,
        ),
        ConfigField("position_biased_input", "positions", {False: "none", True: "learned"}),
    ),
    pretraining_class=lambda config: "DebertaV2ForMaskedLM" if config.head_transform else "DebertaV2Model",
    classes={"DebertaV2ForMaskedLM": "deberta_v3"},
    required={
        "relative_attention": True, "max_relative_positions": -1, "conv_kernel_size": 0, "tie_word_embeddings": True,
    },
    roles={"pad_token_id": "pad"},
    optional={"head_transform": "lm_predictions.lm_head.dense.weight", "head_bias": "lm_predictions.lm_head.bias"},
)  # fmt: skip
DEBERTA = replace(
    DEBERTA, legacy=replace(
        DEBERTA, is_legacy=True, rules=_deberta_rules(_CLS), ties=_cls_ties("deberta."),
        optional={"head_transform": f"{_CLS[0]}.weight", "head_bias": "cls.predictions.bias"},
    ),
)  # fmt: skip

_ALBERT_BLOCK = "albert.encoder.albert_layer_groups.0.albert_layers.0."
ALBERT = PublishedSystem(
    model_type="albert",
    prefix="albert.",
    rules=(
        TensorRule("embedding.word_embeddings", ("albert.embeddings.word_embeddings",)),
        TensorRule("embedding.position_embeddings", ("albert.embeddings.position_embeddings",)),
        TensorRule("embedding.segment_embeddings", ("albert.embeddings.token_type_embeddings",)),
        TensorRule("embedding.layernorm", ("albert.embeddings.LayerNorm",)),
        TensorRule("embedding.projection", ("albert.encoder.embedding_hidden_mapping_in",)),
        *numbered(
            [
                TensorRule(
                    "attention.query_key_value",
                    ("attention.query", "attention.key", "attention.value"),
                ),
                TensorRule("attention.dense", ("attention.dense",)),
                TensorRule("post_attention_layernorm", ("attention.LayerNorm",)),
                TensorRule("mlp.dense_h_to_4h", ("ffn",)),
                TensorRule("mlp.dense_4h_to_h", ("ffn_output",)),
                TensorRule("output_layernorm", ("full_layer_layer_norm",)),
            ],
            "layers.{i}.",
            _ALBERT_BLOCK,
        ),
        TensorRule("heads.projection.dense", ("predictions.dense",)),
        TensorRule("heads.projection.layernorm", ("predictions.LayerNorm",)),
        TensorRule("heads", ("predictions",)),
        TensorRule("heads.sentence.dense", ("albert.pooler",)),
        TensorRule("heads.sentence.classifier", ("sop_classifier.classifier",)),
    ),
    fields=(
        *_BERT_FIELDS,
        ConfigField("embedding_size", "embedding_size"),
        ConfigField("classifier_dropout_prob", "sentence_dropout"),
    ),
    pretraining_class=_pretraining_or_masked("Albert"),
    classes={"AlbertForPreTraining": "albert", "AlbertForMaskedLM": "albert"},
    required={"num_hidden_groups": 1, "inner_group_num": 1, "tie_word_embeddings": True, **_ABSOLUTE},
    ties={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    optional={"sentence_classes": "sop_classifier.classifier.weight"},
    written_twice=("predictions.decoder.bias",),
)  # fmt: skip


def _gpt_rules(
    words: str, positions: str, norms: tuple[str, str], final: tuple[TensorRule, ...]
) -> tuple[TensorRule, ...]:
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
        *numbered(block, "layers.{i}.", "transformer.h.{i}."),
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
    # Their "gelu" is the tanh form.
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

PUBLISHED: dict[str, PublishedSystem] = {  # by the type in config.json
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
SYSTEMS_BY_NAME: dict[str, PublishedSystem] = {  # by `model.system`
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


def published_system(config: ModelConfig) -> PublishedSystem:
    """The table of a model. Raises: CheckpointError if it has none."""
    if config.system not in SYSTEMS_BY_NAME:
        raise CheckpointError(
            f"model.system is {shown(config.system)}; set it to one of {', '.join(SYSTEMS_BY_NAME)} to export the "
            "model of a published system."
        )
    return SYSTEMS_BY_NAME[config.system]
