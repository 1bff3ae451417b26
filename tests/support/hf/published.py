"""Random models of published systems, and their directories as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.hf import neobert

from data_utils.common.batch_fields import DOC, GRP, ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from megatron_lite.transformer.attention_backends.layout import allowed

BERT = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192,
    "max_position_embeddings": 160,
}  # fmt: skip
ODD_BERT = {
    **BERT, "vocab_size": 131, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 50, "max_position_embeddings": 141,
}  # fmt: skip
GPT = {"vocab_size": 97, "n_positions": 160, "n_embd": 48, "n_layer": 3, "n_head": 4}
ODD_GPT = {"vocab_size": 131, "n_positions": 141, "n_embd": 36, "n_layer": 2, "n_head": 3}
GLM4 = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 160, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ODD_GLM4 = {
    **GLM4, "vocab_size": 131, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 10,
    "num_key_value_heads": 1, "intermediate_size": 50, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
LLAMA = {name: value for name, value in GLM4.items() if name != "head_dim"} | {"bos_token_id": 2}
WIDE_LLAMA = {**LLAMA, "head_dim": 16}
ODD_LLAMA = {
    **LLAMA, "vocab_size": 131, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "intermediate_size": 50,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
NARROW_LLAMA = {**ODD_LLAMA, "head_dim": 10}
SCALED = {  # in the lengths of a proof some wavelengths are kept, some divided, and some between
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GLM4_MOE = {
    **GLM4, "num_hidden_layers": 2, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 0, "attention_bias": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
QWEN3_MOE = {
    "num_hidden_layers": 2, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}  # fmt: skip
OLMOE = {"num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
FULL = {"sliding_window": None}
# Windows shorter than the texts of a proof.
MODERNBERT = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "local_attention": 16, "max_position_embeddings": 160, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "cls_token_id": 2, "sep_token_id": 1,
}  # fmt: skip
ODD_MODERNBERT = {
    **MODERNBERT, "vocab_size": 131, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 50,
    "local_attention": 10, "global_attn_every_n_layers": 2, "norm_bias": True, "hidden_activation": "gelu_new",
    "classifier_activation": "gelu_new",
}  # fmt: skip
OLD_MODERNBERT = {  # as version 4 of transformers writes it
    **ODD_MODERNBERT, "norm_bias": False, "num_hidden_layers": 2, "global_attn_every_n_layers": 3,
    "global_rope_theta": 500.0, "local_rope_theta": 77.0, "classifier_bias": True, "local_attention": 8,
}  # fmt: skip

BART = {
    "vocab_size": 97, "d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192, "max_position_embeddings": 160,
}  # fmt: skip
T5 = {
    "vocab_size": 97, "d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip

GATED_T5 = {**T5, "feed_forward_proj": "gated-gelu"}
ODD_T5 = {"d_model": 36, "d_kv": 9, "num_layers": 2, "vocab_size": 131}

NEOBERT = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "norm_eps": 1e-5, "max_length": 160, "pad_token_id": 0,
}  # fmt: skip
ODD_NEOBERT = {
    **NEOBERT, "vocab_size": 131, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 50, "max_length": 141,
}  # fmt: skip

DEBERTA = {  # distances beyond all buckets
    **BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 16, "type_vocab_size": 0, "legacy": False,
}  # fmt: skip

XLNET = {"vocab_size": 97, "d_model": 48, "n_layer": 3, "n_head": 4, "d_inner": 192}

# Name of the case -> class of transformers, its configuration.
CASES: dict[str, tuple[str, dict]] = {
    "bert": ("BertForPreTraining", BERT),
    "bert, masked LM": ("BertForMaskedLM", ODD_BERT),
    "unilm": ("BertForMaskedLM", {**BERT, "type_vocab_size": 6, "layer_norm_eps": 1e-5}),
    "roberta": ("RobertaForMaskedLM", {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta, odd": ("RobertaForMaskedLM", {**ODD_BERT, "type_vocab_size": 1}),
    "albert": (
        "AlbertForPreTraining",
        {**BERT, "embedding_size": 20, "hidden_act": "gelu_new"},
    ),
    "albert, odd": ("AlbertForMaskedLM", {**ODD_BERT, "embedding_size": 17, "hidden_act": "gelu"}),
    "electra_generator": ("ElectraForMaskedLM", {**BERT, "embedding_size": 20}),
    "electra_generator, odd": ("ElectraForMaskedLM", {**ODD_BERT, "embedding_size": 36}),
    "deberta_v3": ("DebertaV2ForMaskedLM", DEBERTA),
    "deberta_v3, odd": (
        "DebertaV2ForMaskedLM",
        {
            **DEBERTA,
            **ODD_BERT,
            "type_vocab_size": 2,
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "legacy": True,
        },
    ),
    "deberta_v3, another": (
        "DebertaV2ForMaskedLM",
        {
            **DEBERTA,
            **ODD_BERT,
            "position_buckets": -1,
            "position_biased_input": True,
            "hidden_act": "gelu_new",
        },
    ),
    "ernie": ("ErnieForPreTraining", {**BERT, "hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "ernie2": (
        "ErnieForPreTraining",
        {**ODD_BERT, "type_vocab_size": 4, "use_task_id": True, "task_type_vocab_size": 16},
    ),
    "gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt, odd": ("OpenAIGPTLMHeadModel", ODD_GPT),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "glm4": ("GlmForCausalLM", GLM4),
    "glm4, odd": ("GlmForCausalLM", ODD_GLM4),
    "glm4, tied": ("GlmForCausalLM", {**GLM4, "tie_word_embeddings": True, "hidden_act": "gelu_new"}),
    "glm4_0414": ("Glm4ForCausalLM", {**GLM4, "rms_norm_eps": 1e-5, "attention_bias": False}),
    "glm4_0414, odd": ("Glm4ForCausalLM", {**ODD_GLM4, "num_key_value_heads": 3, "attention_bias": True}),
    "xlnet": ("XLNetLMHeadModel", XLNET),
    "xlnet, odd": (
        "XLNetLMHeadModel",
        {**XLNET, "vocab_size": 131, "d_model": 36, "n_head": 3, "d_inner": 50, "ff_activation": "relu"},
    ),
    "bart": ("BartForConditionalGeneration", BART),
    "mass": (
        "BartForConditionalGeneration",
        {
            **BART,
            "encoder_layers": 2,
            "scale_embedding": True,
            "d_model": 36,
            "encoder_ffn_dim": 50,
            "decoder_ffn_dim": 50,
        },
    ),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5, odd": (
        "T5ForConditionalGeneration",
        {**T5, "d_model": 36, "d_kv": 9, "num_layers": 2, "vocab_size": 131},
    ),
    "t5_1_1": ("T5ForConditionalGeneration", {**GATED_T5, "tie_word_embeddings": False}),
    "t5_1_1, odd": ("T5ForConditionalGeneration", {**GATED_T5, **ODD_T5, "tie_word_embeddings": False}),
    "t5_1_1, scaled": ("T5ForConditionalGeneration", {**GATED_T5, "num_layers": 1, "d_ff": 37}),
    "mt5": ("MT5ForConditionalGeneration", GATED_T5),
    "mt5, odd": ("MT5ForConditionalGeneration", {**GATED_T5, **ODD_T5}),
    "mt5, tied": ("MT5ForConditionalGeneration", {**GATED_T5, "num_layers": 1, "d_ff": 37}),
    "xlm_roberta": ("XLMRobertaForMaskedLM", {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm_roberta, odd": ("XLMRobertaForMaskedLM", {**ODD_BERT, "type_vocab_size": 1}),
    "xlm_roberta, another": ("XLMRobertaForMaskedLM", {**ODD_BERT, "type_vocab_size": 2, "vocab_size": 53}),
    "camembert": ("CamembertForMaskedLM", {**BERT, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "camembert, odd": ("CamembertForMaskedLM", {**ODD_BERT, "type_vocab_size": 1}),
    "camembert, another": (
        "CamembertForMaskedLM",
        {**ODD_BERT, "type_vocab_size": 1, "num_attention_heads": 4},
    ),
    "llama": ("LlamaForCausalLM", WIDE_LLAMA),
    "llama, odd": ("LlamaForCausalLM", NARROW_LLAMA),
    "llama, tied": (
        "LlamaForCausalLM",
        {**LLAMA, **SCALED, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {**WIDE_LLAMA, **FULL}),
    "mistral, odd": ("MistralForCausalLM", {**NARROW_LLAMA, **FULL, "num_key_value_heads": 3}),
    "mistral, another": ("MistralForCausalLM", {**ODD_LLAMA, **FULL, "hidden_act": "gelu"}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2, odd": ("Qwen2ForCausalLM", ODD_LLAMA),
    "qwen2, tied": ("Qwen2ForCausalLM", {**ODD_LLAMA, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**WIDE_LLAMA, "head_dim": 24}),
    "qwen3, odd": ("Qwen3ForCausalLM", NARROW_LLAMA),
    "qwen3, tied": (
        "Qwen3ForCausalLM",
        {**NARROW_LLAMA, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "eurobert": ("EuroBertForMaskedLM", {**WIDE_LLAMA, "mask_token_id": 3}),
    "eurobert, odd": ("EuroBertForMaskedLM", {**NARROW_LLAMA, "mask_token_id": 3}),
    "eurobert, tied": (
        "EuroBertForMaskedLM",
        {**ODD_LLAMA, **SCALED, "mask_token_id": 3, "tie_word_embeddings": True},
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", GLM4_MOE),
    "glm4_moe, odd": (
        "Glm4MoeForCausalLM",
        {
            **GLM4_MOE,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": False,
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**WIDE_LLAMA, **QWEN3_MOE}),
    "qwen3_moe, odd": (
        "Qwen3MoeForCausalLM",
        {**NARROW_LLAMA, **QWEN3_MOE, "mlp_only_layers": [0], "norm_topk_prob": False},
    ),
    "olmoe": ("OlmoeForCausalLM", {**LLAMA, **OLMOE, "num_key_value_heads": 4}),
    "olmoe, odd": ("OlmoeForCausalLM", {**ODD_LLAMA, **OLMOE, "norm_topk_prob": True}),
    "neobert": ("NeoBERTLMHead", NEOBERT),
    "neobert, odd": ("NeoBERTLMHead", ODD_NEOBERT),
    "neobert, another": ("NeoBERTLMHead", {**ODD_NEOBERT, "hidden_size": 20, "num_attention_heads": 2}),
    **{
        f"{system}{case}": (class_name, sizes)
        for system, class_name in (
            ("modernbert", "ModernBertForMaskedLM"),
            ("modernbert_decoder", "ModernBertDecoderForCausalLM"),
        )
        for case, sizes in (("", MODERNBERT), (", odd", ODD_MODERNBERT), (", older", OLD_MODERNBERT))
    },
    "gpt2, odd": ("GPT2LMHeadModel", {**ODD_GPT, "n_inner": 50, "activation_function": "relu"}),
}


# T5's classes are made tied, whatever their configuration says; the released files hold another head.
UNTIED = ("t5_1_1", "mt5")
# Scores of T5 are not scaled: with larger weights the softmax is so steep that rounding in fp32 shows.
SMALLER_STD = {case: 0.1 if case.startswith(UNTIED) else 0.15 for case in CASES if "t5" in case}


def random_model(
    case: str, std: float | None = None, class_name: str | None = None, **changes: Any
) -> torch.nn.Module:
    """A model whose norms and biases differ from their initial values, without dropout.

    Args: class_name: another class with the case's sizes.
    """
    own, sizes = CASES[case]
    class_name = class_name or own
    cls = getattr(transformers, class_name, None) or getattr(neobert, class_name)
    config = cls.config_class(**sizes | changes)
    for name in config.to_dict():
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    config._experts_implementation = "eager"  # of experts: the default has no fp64
    torch.manual_seed(0)
    std = SMALLER_STD.get(case, 0.25) if std is None else std
    model = cls(config)
    if case.partition(",")[0] in UNTIED and not case.endswith(("tied", "scaled")):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=std)
    return model.eval()


def as_in_files(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a class by name, as its files have them: each expert by itself."""
    found = {}
    for name, tensor in named.items():
        before, joined, last = name.rpartition("experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if not joined or parts is None:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{before}experts.{number}.{part}.weight"] = rows
    return found


def xlnet_inputs(fields: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """What the class takes for rows of the objective: content without the query stream, its mask, and the targets.

    Returns: its inputs, and bool [B, S]: our rows of the query stream, whose logits it gives one after another.
    """
    is_content = (fields[:, DOC] >= 0) & (fields[:, ORD] >= 0)
    is_query = (fields[:, DOC] >= 0) & (fields[:, ORD] < 0)
    rows, width, targets = len(fields), is_content.sum(1).max(), is_query.sum(1).max()
    tokens, segments = np.zeros((2, rows, width), np.int64)
    hidden, mapping = np.ones((rows, width, width), np.float32), np.zeros((rows, targets, width), np.float32)
    seen = allowed(fields[:, DOC], fields[:, ORD], fields[:, GRP])
    for row, content, query in zip(range(rows), is_content, is_query, strict=True):
        places = np.flatnonzero(content)
        size = len(places)
        tokens[row, :size], segments[row, :size] = fields[row][[TOKENS, SEGMENT_IDS]][:, places]
        hidden[row, :size, :size] = ~seen[row][np.ix_(places, places)]
        for number, at in enumerate(np.flatnonzero(query)):
            of_document = fields[row, DOC, places] == fields[row, DOC, at]
            same = np.flatnonzero(
                of_document & (fields[row, POSITION_IDS, places] == fields[row, POSITION_IDS, at])
            )
            (target,) = same
            mapping[row, number, target] = 1.0
            hidden[row, target, :size] = ~seen[
                row, at, places
            ]  # its content sees itself besides, in the class
    arrays = {"input_ids": tokens, "token_type_ids": segments, "perm_mask": hidden, "target_mapping": mapping}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, is_query


def xlnet_logits(model: torch.nn.Module, fields: np.ndarray, mems: Any = None) -> tuple[torch.Tensor, Any]:
    """Logits of the class for the rows of the query stream, in the places of our rows: [B, S, V]; and its memories."""
    inputs, is_query = xlnet_inputs(fields)
    out = model(**inputs, mems=mems, use_mems=True)
    logits = out.logits
    whole = logits.new_zeros(*fields[:, 0].shape, logits.shape[-1])
    for row, query in enumerate(is_query):
        whole[row, np.flatnonzero(query)] = logits[row, : query.sum()]
    return whole, out.mems


def write_random(case: str, directory: Path) -> torch.nn.Module:
    """The model of `random_model`, also as a directory."""
    model = random_model(case)
    model.save_pretrained(directory)
    return model
