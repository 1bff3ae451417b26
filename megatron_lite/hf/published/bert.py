"""The tables of encoders with BERT's modules: BERT, ERNIE, RoBERTa, ELECTRA, DeBERTa, ALBERT (see system_table.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.systems import FIXED
from megatron_lite.hf.common.system_table import (
    ACTIVATIONS,
    ConfigField,
    PublishedSystem,
    TensorRule,
    prefixed,
)


def _bert_rules(
    prefix: str, head: tuple[str, str, str], sentence: tuple[str, str] | None
) -> tuple[TensorRule, ...]:
    """The rules of an encoder with BERT's modules.

    Args:
        prefix: of the body's tensors.
        head: the modules that hold the head's dense layer, its norm and its bias.
        sentence: the modules of the pooler and of the classifier of sentence pairs; None: the class has none.
    """
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
        *prefixed(tables, "embedding.", f"{prefix}embeddings."),
        *prefixed(block, "layers.{i}.", f"{prefix}encoder.layer.{{i}}."),
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
# The classes of version 4 also had relative positions, which the field turns on.
_ABSOLUTE = {"position_embedding_type": "absolute"}
_ENCODER = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True, **_ABSOLUTE}


def _restricted(entry: ConfigField, values: Mapping[str, Any]) -> ConfigField:
    """A field that accepts only the value in `values` (option -> value), which the class's heads compute anyway."""
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
    """The class with the sentence head where a model has one. Args: name: the start of the class names."""
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
    fields=tuple(_restricted(entry, FIXED["roberta"]) for entry in _BERT_FIELDS),
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
# `replaced` is the discriminator's head, which megatron_lite/models/electra adds to the Transformer.
ELECTRA = PublishedSystem(
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
        *(_restricted(entry, FIXED["electra"]) for entry in _BERT_FIELDS),
        ConfigField("embedding_size", "embedding_size", null_as="hidden_size"),
    ),
    pretraining_class=lambda config: "ElectraForMaskedLM" if config.head_transform else "ElectraForPreTraining",
    classes={"ElectraForPreTraining": "electra", "ElectraForMaskedLM": "electra_generator"}, required=_ENCODER,
    ties={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)  # fmt: skip

_DEBERTA_ATTENTION = "deberta.encoder.layer.{i}.attention.self."
_DEBERTA_TERMS = ["p2c", "c2p"]  # position to content, content to position


def _deberta_rules(head: tuple[str, str, str]) -> tuple[TensorRule, ...]:
    """BERT's rules, with other names of Q, K and V, and the tensors of relative positions."""
    bert_rules = _bert_rules("deberta.", head, None)
    return (
        *(
            replace(rule, theirs=tuple(f"{name}_proj" for name in rule.theirs))
            for rule in bert_rules
            if len(rule.theirs) > 1
        ),
        *(rule for rule in bert_rules if len(rule.theirs) == 1),
        TensorRule(
            "layers.{i}.attention.position_query_key",
            (f"{_DEBERTA_ATTENTION}pos_query_proj", f"{_DEBERTA_ATTENTION}pos_key_proj"),
        ),
        TensorRule("relative_bias", ("deberta.encoder.rel_embeddings",)),
        TensorRule("relative_bias.layernorm", ("deberta.encoder.LayerNorm",)),
    )


# Without the convolution of DeBERTa-v2's sizes. Released files have the names of the head that `legacy: false` means.
DEBERTA = PublishedSystem(
    model_type="deberta-v2", prefix="deberta.",
    rules=_deberta_rules(
        ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head")
    ),
    fields=(
        *_BERT_FIELDS,
        ConfigField(
            "pos_att_type", "relative", writes=lambda *_: _DEBERTA_TERMS,
            reads=lambda terms, _: "disentangled" if sorted(terms or ()) == sorted(_DEBERTA_TERMS) else None,
        ),
        ConfigField(
            "position_buckets", "position_buckets", writes=lambda count, _: count or -1,
            reads=lambda count, _: max(count or 0, 0),
        ),
        ConfigField(
            "norm_rel_ebd", "position_norm", writes=lambda has_norm, _: "layer_norm" if has_norm else "none",
            reads=lambda norm, _: {"layer_norm": True, "none": False}.get(norm or "none"),
        ),
        ConfigField(
            "share_att_key", "position_projections", writes=lambda is_separate, _: not is_separate,
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
        *prefixed(
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
