"""A small DeBERTa, and rows for it."""

from __future__ import annotations

import numpy as np

from data_utils.common.batch_fields import DOC, FIELDS, PADDING_DOC, POSITION_IDS, TOKENS, WEIGHTS
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

SIZES = {
    "system": "deberta_v3", "num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 97,
    "max_position": 19, "position_buckets": 8, "init_std": 0.3,
}  # fmt: skip


def small_model(**options):
    config = build(ModelConfig, {**SIZES, "embedding_dropout": 0, "attention_dropout": 0, **options})
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), config, 3)
    return model


def packed(lengths, row_length):
    """int32 [1, fields, row_length]: documents of these lengths, one after another, whose every token has a loss."""
    fields = np.zeros((1, len(FIELDS), row_length), np.int32)
    fields[:, DOC] = PADDING_DOC
    ends = np.cumsum(lengths)
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        places = slice(end - length, end)
        fields[0, TOKENS, places] = np.random.default_rng(number).integers(1, 97, length)
        fields[0, DOC, places], fields[0, POSITION_IDS, places] = number, np.arange(length)
    fields[0, WEIGHTS, : ends[-1]] = np.float32(1).view(np.int32)
    return fields
