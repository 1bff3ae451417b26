"""The tables of GLM-4.5, Qwen3-MoE and OLMoE, whose FFN is a mixture of experts (see system_table.py).

Files hold each expert by itself, as our checkpoints do; the classes of transformers 5 join them when they load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_lite.hf.common.system_table import (
    ROTATE_HALF,
    ConfigField,
    PublishedSystem,
    TensorRule,
    prefixed,
)
from megatron_lite.hf.published.glm4 import DECODER_FIELDS, GLM4, HEAD_WIDTH, decoder_rules
from megatron_lite.hf.published.llama import HEAD_NORMS, QWEN3


def _of_experts(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of a decoder, with those of its experts; which of them a layer has follows from its parameters."""
    mixture = [
        TensorRule("mlp.router.weight", ("mlp.gate.weight",), is_tensor=True),
        TensorRule("mlp.router.bias", ("mlp.gate.e_score_correction_bias",), is_tensor=True),
    ]
    for ours, theirs in (("mlp.experts.{e}", "mlp.experts.{e}"), ("mlp.shared", "mlp.shared_experts")):
        mixture += [
            TensorRule(f"{ours}.dense_h_to_4h", (f"{theirs}.gate_proj", f"{theirs}.up_proj")),
            TensorRule(f"{ours}.dense_4h_to_h", (f"{theirs}.down_proj",)),
        ]
    return (*rules, *prefixed(mixture, "layers.{i}.", "model.layers.{i}."))


def _field(
    theirs: str, reads: Callable[[Any], dict[str, Any] | None], writes: Callable[[Any], Any]
) -> ConfigField:
    """A field of config.json that says something of the experts, which all of them together describe."""
    return ConfigField(
        theirs, "experts", reads=lambda _, config: reads(config), writes=lambda experts, _: writes(experts)
    )


def _fields(
    reads: Callable[[Any], dict[str, Any] | None], names: dict[str, Callable[[Any], Any]]
) -> tuple[ConfigField, ...]:
    return tuple(_field(theirs, reads, writes) for theirs, writes in names.items())


def _glm(config: Any) -> dict[str, Any]:
    return {
        "count": config.n_routed_experts, "per_token": config.num_experts_per_tok,
        "width": config.moe_intermediate_size, "shared": config.n_shared_experts,
        "dense_layers": config.first_k_dense_replace, "scores": "sigmoid", "normalized": config.norm_topk_prob,
        "factor": config.routed_scaling_factor, "groups": config.n_group, "kept_groups": config.topk_group,
        "biased": True,
    }  # fmt: skip


def _qwen(config: Any) -> dict[str, Any] | None:
    dense = sorted(config.mlp_only_layers or ())
    if dense != list(range(len(dense))):  # only the first blocks can be dense here
        return None
    return {
        "count": config.num_experts, "per_token": config.num_experts_per_tok, "width": config.moe_intermediate_size,
        "dense_layers": len(dense), "scores": "softmax", "normalized": config.norm_topk_prob,
    }  # fmt: skip


def _olmoe(config: Any) -> dict[str, Any]:
    return {
        "count": config.num_experts, "per_token": config.num_experts_per_tok, "width": config.intermediate_size,
        "scores": "softmax", "normalized": config.norm_topk_prob,
    }  # fmt: skip


_SHARED_FIELDS: dict[str, Callable[[Any], Any]] = {
    "num_experts_per_tok": lambda e: e.per_token,
    "moe_intermediate_size": lambda e: e.width,
    "norm_topk_prob": lambda e: e.normalized,
}
# Of the layer after the last, which the class ignores.
_FURTHER_TOKENS = (
    TensorRule("embedding_layernorm", ("enorm",)), TensorRule("hidden_layernorm", ("hnorm",)),
    TensorRule("projection", ("eh_proj",)), TensorRule("final_layernorm", ("shared_head.norm",)),
)  # fmt: skip
GLM4_MOE: PublishedSystem = replace(
    GLM4,
    model_type="glm4_moe",
    rules=_of_experts(
        decoder_rules(("mlp.gate_proj", "mlp.up_proj"), ROTATE_HALF, (*HEAD_NORMS, *_FURTHER_TOKENS))
    ),
    fields=(
        *DECODER_FIELDS, HEAD_WIDTH, ConfigField("rope_parameters.partial_rotary_factor", "rotary_share"),
        ConfigField("attention_bias", "biases", {True: "qkv", False: "none"}),
        ConfigField("use_qk_norm", "query_key_norm"),
        ConfigField(
            "num_nextn_predict_layers", "mtp_layers", reads=lambda n, _: {None: 0, 0: 0, 1: 1}.get(n),
            writes=lambda n, _: n,
        ),
        *_fields(
            _glm,
            {
                **_SHARED_FIELDS, "n_routed_experts": lambda e: e.count, "n_shared_experts": lambda e: e.shared,
                "first_k_dense_replace": lambda e: e.dense_layers, "routed_scaling_factor": lambda e: e.factor,
                "n_group": lambda e: e.groups, "topk_group": lambda e: e.kept_groups,
            },
        ),
    ),
    pretraining_class=lambda config: "Glm4MoeForCausalLM", classes={"Glm4MoeForCausalLM": "glm4_moe"},
    begin="none",
    further_copies={"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"},
)  # fmt: skip
QWEN3_MOE: PublishedSystem = replace(
    QWEN3,
    model_type="qwen3_moe",
    rules=_of_experts(decoder_rules(("mlp.gate_proj", "mlp.up_proj"), ROTATE_HALF, HEAD_NORMS)),
    fields=(
        *QWEN3.fields,
        *_fields(
            _qwen,
            {
                **_SHARED_FIELDS, "num_experts": lambda e: e.count,
                "mlp_only_layers": lambda e: list(range(e.dense_layers)),
            },
        ),
    ),
    required={**QWEN3.required, "decoder_sparse_step": 1},
    pretraining_class=lambda config: "Qwen3MoeForCausalLM", classes={"Qwen3MoeForCausalLM": "qwen3_moe"},
)  # fmt: skip
# The norms of its queries and keys are over all heads, whose features are reordered as those of the products.
OLMOE: PublishedSystem = replace(
    QWEN3,
    model_type="olmoe",
    rules=QWEN3_MOE.rules,
    fields=(
        *(field for field in QWEN3.fields if field.ours not in ("ffn_size", "head_dim")),
        *_fields(
            _olmoe,
            {
                "num_experts_per_tok": lambda e: e.per_token, "intermediate_size": lambda e: e.width,
                "norm_topk_prob": lambda e: e.normalized, "num_experts": lambda e: e.count,
            },
        ),
    ),
    required={"attention_bias": False, "clip_qkv": None, "rope_parameters.rope_type": "default"},
    pretraining_class=lambda config: "OlmoeForCausalLM", classes={"OlmoeForCausalLM": "olmoe"},
)  # fmt: skip
