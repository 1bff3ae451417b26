"""The loss of a batch by a class of transformers, with plain torch: the reference for losses of imported models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.hf.published import xlnet_logits

from data_utils.common.batch_fields import (
    DOC,
    GRP,
    OBJECTIVE,
    ORD,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.objectives import LOSSES
from megatron_lite.hf.glm.configuration_glm import GLMConfig
from megatron_lite.hf.glm.verify import class_inputs
from megatron_lite.hf.published.systems import PUBLISHED
from megatron_lite.hf.published.verify_inputs import encoder_decoder_inputs, pad_texts, scatter_targets
from megatron_lite.transformer.attention_backends.layout import allowed

SENTENCE_LOSSES = [loss.number for loss in LOSSES if loss.sentence_level]


def trained_losses(
    model: Any,
    batches: Iterable[np.ndarray],
    lr: float,
    *,
    weight_decay: float,
    clip_grad_norm: float,
    eps: float,
    beta2: float,
) -> list[float]:
    """The losses of a class under torch's AdamW at a constant rate, a step for each batch, int32 [B, fields, S]."""
    named = dict(model.named_parameters())
    plain = [
        p for name, p in named.items() if name.endswith(".bias") or "norm" in name.lower() or ".ln_" in name
    ]
    decay = [p for p in named.values() if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), eps=eps)
    losses = []
    for fields in batches:
        loss = class_loss(model, fields)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def class_loss(model: Any, fields: np.ndarray) -> torch.Tensor:
    """The mean cross entropy of all positions with a loss, those of sentence labels included: a scalar in nats."""
    tensors = torch.from_numpy(fields.astype(np.int64))
    logits, inputs = outputs(model, fields)
    labelled = fields[:, WEIGHTS] != 0
    is_sentence = labelled & np.isin(fields[:, OBJECTIVE], SENTENCE_LOSSES)
    predicted = torch.from_numpy(labelled & ~is_sentence)
    loss = F.cross_entropy(logits[predicted], tensors[:, TARGETS][predicted], reduction="sum")
    if is_sentence.any():
        # A sequence can hold several texts, each with a CLS; the class looks at the first one only.
        loss = loss + sentence_loss(model, tensors, torch.from_numpy(is_sentence), inputs)
    return loss / int(labelled.sum())


def outputs(model, fields):
    """Logits of a batch in the places of its tokens [B, S, V], and the inputs of the class."""
    if model.config.model_type == GLMConfig.model_type:
        visible = torch.from_numpy(allowed(fields[:, DOC], fields[:, ORD], fields[:, GRP]))[:, None]
        return model(**class_inputs(fields) | {"attention_mask": visible}, use_cache=False).logits, {}
    if model.config.is_encoder_decoder:
        inputs = encoder_decoder_inputs(fields)
        return scatter_targets(model(**inputs).logits, fields), inputs
    if "perm_mask" in inspect.signature(model.forward).parameters:
        return xlnet_logits(model, fields)[0], {}
    if hasattr(model.config, "position_buckets"):
        return documents_alone(model, fields), {}
    tensors = torch.from_numpy(fields.astype(np.int64))
    visible = torch.from_numpy(allowed(fields[:, DOC], fields[:, ORD], fields[:, GRP]))
    sees_nothing = ~visible.any(-1, keepdim=True)  # padding, which may see itself
    visible |= torch.eye(visible.shape[1], dtype=torch.bool) & sees_nothing
    inputs = {
        "input_ids": tensors[:, TOKENS],
        "attention_mask": by_layers(visible[:, None], fields, model.config),
        "position_ids": tensors[:, POSITION_IDS] + skipped_positions(model.config),
    }
    if hasattr(model.config, "type_vocab_size"):  # GPT-2's class takes types as well, and adds a word of each
        inputs["token_type_ids"] = tensors[:, SEGMENT_IDS]
    out = model(**inputs)
    return (out["logits"] if "logits" in out else out["prediction_logits"]), inputs


def documents_alone(model, fields):
    """Logits of a class that takes no mask of pairs, whose texts are rows of their own: [B, S, V]."""
    texts = [
        (row, np.flatnonzero(documents == number))
        for row, documents in enumerate(fields[:, DOC])
        for number in set(documents[documents >= 0])
    ]
    ids, mask = pad_texts([fields[row, TOKENS, places] for row, places in texts], 0, "right")
    logits = model(input_ids=ids, attention_mask=mask).logits
    whole = logits.new_zeros(*fields[:, DOC].shape, logits.shape[-1])
    for (row, places), found in zip(texts, logits, strict=True):
        whole[row, places] = found[: len(places)]
    return whole


def by_layers(visible, fields, config):
    """The mask, bool [B, 1, S, S], or one for each kind of layer."""
    if not hasattr(config, "local_attention"):
        return visible
    position = torch.from_numpy(fields[:, None, POSITION_IDS].astype(np.int64))
    distance = position[..., None] - position[..., None, :]
    is_decoder = config.model_type == "modernbert-decoder"
    near = (distance.abs() <= config.local_attention // 2) & (
        distance < config.local_attention // 2 + (not is_decoder)
    )
    return {"full_attention": visible, "sliding_attention": visible & near}


def skipped_positions(config):
    return PUBLISHED[config.model_type].padded_with(config.pad_token_id).skipped_positions


def sentence_loss(model, tensors, is_sentence, inputs):
    hidden = model.bert(**inputs)[0][is_sentence]
    classes = model.cls.seq_relationship(torch.tanh(model.bert.pooler.dense(hidden)))
    return F.cross_entropy(classes, tensors[:, TARGETS][is_sentence], reduction="sum")
