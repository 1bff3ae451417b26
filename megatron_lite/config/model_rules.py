"""Rules among the options of the section `model`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from data_utils.common.losses import CLASS_HEADS
from data_utils.common.settings import check

ModelConfig = Any  # that of model.py, which imports this file
# Options that leave a trained model as it is.
OF_TRAINING = frozenset(
    (
        "system", "embedding_dropout", "attention_dropout", "activation_dropout", "output_dropout", "final_dropout",
        "sentence_dropout", "task_dropout", "task_pooler", "init", "init_std", "init_cutoff", "init_words_std",
        "init_positions_std", "embedding_gradient_shrink",
    )
)  # fmt: skip
# These, and those that GLM's exported code knows.
_OF_GLM = OF_TRAINING | {
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position", "layernorm_epsilon", "activation",
    "positions", "block_positions", "rotary_share", "rotary_base", "task_head", "task_classes", "task_heads",
    "logit_soft_cap", "mup",
}  # fmt: skip


_WITHOUT_ROTARY = (("learned_blocks", "added"), ("learned", "added"), ("none", "added"), ("learned", "none"))


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for options that contradict each other."""
    check(
        model.head_dim is not None or model.hidden_size % model.num_attention_heads == 0,
        f"model.num_attention_heads ({model.num_attention_heads}) must divide model.hidden_size "
        f"({model.hidden_size}); choose a divisor of {model.hidden_size}, or set model.head_dim.",
    )
    check(
        model.num_attention_heads % model.key_value_heads == 0,
        f"model.num_key_value_heads ({model.num_key_value_heads}) must divide model.num_attention_heads "
        f"({model.num_attention_heads}); choose a divisor of {model.num_attention_heads}.",
    )
    check(
        model.positions == "rotary" or (model.positions, model.block_positions) in _WITHOUT_ROTARY,
        f"model.block_positions is {model.block_positions} with model.positions {model.positions}, but it is for "
        "rotary positions; set positions to rotary, or leave block_positions out.",
    )
    divisor, rule = (4, "a multiple of 4") if model.block_positions == "halves" else (2, "an even number")
    check(
        model.positions != "rotary" or (model.rotary_size > 0 and model.rotary_size % divisor == 0),
        f"model.rotary_share ({model.rotary_share}) of a head's {model.head_size} features is {model.rotary_size}; "
        f"rotary positions turn pairs of features: choose a share that gives {rule}.",
    )
    scaling = model.rotary_scaling
    check(
        not scaling or (len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2]),
        f"model.rotary_scaling is {list(scaling)}; it must be [] or four numbers above 0, the second below the third: "
        "factor, low and high frequency factor, original length.",
    )
    check(
        not model.decoder_layers or model.share_layers == "none",
        f"model.decoder_layers is {model.decoder_layers} with model.share_layers {model.share_layers}, but blocks of "
        "encoder and decoder differ; set share_layers to none.",
    )
    of_one_stack = {
        "positions": model.positions == "rotary",
        "relative": model.has_query_terms,
        "norm": model.norm == "deepnorm",
        "sandwich_norm": model.sandwich_norm,
        "attention_window": model.attention_window > 0,
        "first_norm": not model.first_norm,
        "num_key_value_heads": model.num_key_value_heads is not None,
        "query_key_norm": model.query_key_norm,
    }
    for name, is_chosen in of_one_stack.items():
        check(
            not (model.decoder_layers and is_chosen),
            f"model.{name} is {getattr(model, name)} with model.decoder_layers ({model.decoder_layers}), but "
            f"cross-attention does not have that; set decoder_layers to 0, or leave {name} out.",
        )
    check(
        model.sentence_classes != 1,
        "model.sentence_classes is 1; a head needs at least 2 classes: set it to 2, or to 0 for no head.",
    )
    _check_class_heads(model)
    _check_norms(model)
    _check_windows(model)
    _check_disentangled(model)
    _check_mup(model)
    has_classes = model.task_head in ("classes", "tags")
    check(
        has_classes == (model.task_classes > 0),
        f"model.task_classes is {model.task_classes} with model.task_head {model.task_head}; "
        + ("set it to the number of classes, 2 or more." if has_classes else "set it to 0."),
    )
    check(
        model.task_pool == "token" or model.task_pooler is None,
        f"model.task_pool is {model.task_pool} with model.task_pooler {model.task_pooler}; a pool has a layer of its "
        "own: leave task_pooler out.",
    )
    check(
        model.task_pooler_kind != "transform" or (model.head_transform and model.embedding_size is None),
        "model.task_pooler_kind is transform, but the model has no layer before its output projection that is as wide "
        "as its blocks (head_transform without embedding_size); set it to tanh or gelu.",
    )
    check(
        model.task_head == "none" or not model.decoder_layers,
        f"model.task_head is {model.task_head} with model.decoder_layers ({model.decoder_layers}), whose tokens are "
        "of two stacks; solve the task by predicting tokens, and leave task_head out.",
    )


def _check_class_heads(model: ModelConfig) -> None:
    heads = dict(head.partition(":")[::2] for head in model.class_heads)
    fit = all(name in CLASS_HEADS and n.isdecimal() and 1 < int(n) < 10_000 for name, n in heads.items())
    check(
        fit and len(heads) == len(model.class_heads),
        f"model.class_heads is {list(model.class_heads)}; each must be NAME:CLASSES, once, with 2 classes or more and "
        f"a name of {', '.join(CLASS_HEADS)}.",
    )
    check(
        model.sentence_classes > 0 or not model.class_heads,
        f"model.class_heads is {list(model.class_heads)} without sentence_classes, whose layer these heads read; set "
        "sentence_classes to 2.",
    )


def _check_norms(model: ModelConfig) -> None:
    check(
        model.first_norm or (model.norm == "pre" and model.share_layers != "all"),
        f"model.first_norm is false with model.norm {model.norm} and model.share_layers {model.share_layers}, but it "
        "is for norm pre and blocks of their own; leave first_norm out.",
    )
    check(
        model.norm_bias or not model.rms_norm,
        "model.norm_bias is false with model.rms_norm, which has none; leave one of them out.",
    )


def _check_windows(model: ModelConfig) -> None:
    check(
        (model.attention_window > 0) == (model.global_every > 1),
        f"model.attention_window is {model.attention_window} with model.global_every {model.global_every}; local "
        "layers need a window above 0 and every second layer or fewer global: set both, or leave both out.",
    )
    check(
        model.rotary_base_local is None or (model.attention_window > 0 and model.positions == "rotary"),
        f"model.rotary_base_local is {model.rotary_base_local}, but it is for rotary positions of local layers; set "
        "positions to rotary and attention_window, or leave it out.",
    )
    check(
        not model.attention_window or model.relative == "none",
        f"model.relative is {model.relative} with model.attention_window ({model.attention_window}), whose local "
        "layers take no bias of the scores; leave one of them out.",
    )


def _check_disentangled(model: ModelConfig) -> None:
    """Rules of relative positions with queries and keys of their own."""
    is_chosen, half = model.relative == "disentangled", model.position_buckets // 2
    for name, usual in (("position_buckets", 0), ("position_projections", False), ("position_norm", False)):
        value = getattr(model, name)
        check(
            is_chosen or value == usual,
            f"model.{name} is {value} with model.relative {model.relative}; set relative to disentangled, or leave "
            f"{name} out.",
        )
    check(
        not model.position_buckets or (model.position_buckets == 2 * half and 2 <= half < model.max_position),
        f"model.position_buckets is {model.position_buckets} with model.max_position ({model.max_position}); it must "
        "be even, and half of it 2 or more and below max_position: choose another, or 0 for one of each distance.",
    )
    others = {
        "positions": model.positions == "rotary",
        "num_key_value_heads": model.key_value_heads != model.num_attention_heads,
        "query_key_norm": model.query_key_norm,
    }
    for name, is_other in others.items():
        check(
            not (is_chosen and is_other),
            f"model.{name} is {getattr(model, name)} with model.relative disentangled, whose buckets have no such "
            "queries and keys; leave one of them out.",
        )


def _check_mup(model: ModelConfig) -> None:
    not_covered = {
        "init": model.begins_by_width,
        "embedding_size": model.embedding_size is not None,
        "relative": model.has_query_terms,
        "unscaled_scores": model.unscaled_scores,
        "scale_head": model.scale_head,
        "scale_embedding": model.scale_embedding,
    }
    for name, is_chosen in not_covered.items():
        check(
            not (model.mup and is_chosen),
            f"model.{name} is {getattr(model, name)} with model.mup, whose rules do not cover that; leave one of them "
            "out.",
        )


def is_plain(model: ModelConfig) -> bool:
    """See `ModelConfig.is_plain`."""
    others = (field for field in fields(model) if field.name not in _OF_GLM)
    is_default = all(getattr(model, field.name) == field.default for field in others)
    has_its_head = model.task_head in ("none", "classes", "values") and not model.has_task_pooler
    is_known = model.activation.startswith("gelu") and model.positions in ("learned_blocks", "rotary")
    return is_default and is_known and has_its_head
