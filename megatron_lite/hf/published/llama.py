"""The tables of Llama, Mistral, Qwen and EuroBERT (see system_table.py).

Their rotary embedding pairs feature j with j + d/2 ("rotate_half"), ours 2j with 2j + 1, so the output features of
queries and keys are reordered (ROTATE_HALF).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lite.hf.common.system_table import (
    ROTATE_HALF,
    VERSION_4,
    ConfigField,
    FormerField,
    PublishedSystem,
    TensorRule,
)
from megatron_lite.hf.published.glm4 import DECODER_FIELDS, FORMER_BASE, GLM4, HEAD_WIDTH, decoder_rules

_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING = ConfigField(
    "rope_parameters.rope_type", "rotary_scaling", {"default": (), "llama3": None},
    numbers=tuple(f"rope_parameters.{name}" for name in _NUMBERS),
)  # fmt: skip


def _former_scaling(scaling: tuple[float, ...]) -> dict[str, Any] | None:
    if not scaling:
        return None
    *factors, length = scaling
    return {"rope_type": "llama3", **dict(zip(_NUMBERS, (*factors, int(length)), strict=True))}


_FIELDS = (*DECODER_FIELDS, _SCALING)
HEAD_NORMS = (
    TensorRule("attention.head_norms.query_layernorm", ("self_attn.q_norm",), ROTATE_HALF),
    TensorRule("attention.head_norms.key_layernorm", ("self_attn.k_norm",), ROTATE_HALF),
)


def _system(name: str, class_name: str, required: dict[str, Any], **changes: Any) -> PublishedSystem:
    """Args: name: the type in config.json, and `model.system`."""
    return replace(
        GLM4,
        model_type=name,
        rules=decoder_rules(("mlp.gate_proj", "mlp.up_proj"), ROTATE_HALF, HEAD_NORMS),
        pretraining_class=lambda config: class_name,
        classes={class_name: name},
        required=required,
        former=(FORMER_BASE, FormerField("rope_scaling", "rotary_scaling", VERSION_4, _former_scaling)),
        **{"fields": (*_FIELDS, HEAD_WIDTH), **changes},
    )


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_WITH_BOS = {"pad_token_id": "pad", "eos_token_id": "eos", "bos_token_id": "cls"}
LLAMA = _system("llama", "LlamaForCausalLM", _NO_BIASES, roles=_WITH_BOS, begin="cls")
MISTRAL = _system("mistral", "MistralForCausalLM", {"sliding_window": None}, roles=_WITH_BOS, begin="cls")
QWEN2 = _system("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}, fields=_FIELDS, begin="none")
QWEN3 = _system(
    "qwen3", "Qwen3ForCausalLM", {"use_sliding_window": False, "attention_bias": False}, begin="none"
)
EUROBERT = _system(
    "eurobert", "EuroBertForMaskedLM", _NO_BIASES, is_causal=False,
    roles={**_WITH_BOS, "mask_token_id": "mask"},
)  # fmt: skip
LLAMAS = (LLAMA, MISTRAL, QWEN2, QWEN3, EUROBERT)
