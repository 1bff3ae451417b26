"""The number of parameters of a model, from its section of the configuration, without torch."""

from __future__ import annotations

from data_utils.objectives.registry import TASKS
from megatron_lite.config.sections import ModelConfig

VOCAB_MULTIPLE = 128  # the reference pads vocabularies to a multiple of this, which suits GPU matrix units
SPAN_PLACE_SIZE = 200  # width of the place embedding of SpanBERT's head


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int = 1) -> int:
    """Rows of the word embedding: `vocab_size` rounded up so that every shard has a multiple of 128 rows."""
    multiple = VOCAB_MULTIPLE * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def parameter_count(model: ModelConfig, padded: bool = True) -> int:
    """Trainable parameters, with or without the rows that pad the vocabulary. Needs model.vocab_size."""
    assert model.vocab_size is not None
    h, e = model.hidden_size, model.embedding_size or model.hidden_size
    words = padded_vocab_size(model.vocab_size) if padded else model.vocab_size
    tables = words + 2 * (model.max_position + 1) + model.segments
    tables += TASKS * model.task_embedding
    block = 12 * h * h + 13 * h  # QKV 3h(h+1), dense h(h+1), FFN 4h(h+1) + h(4h+1), two LayerNorms 4h
    heads = 0
    if model.embedding_size is not None:
        heads += (h * e + h) + (h * e + e + 2 * e)  # to the hidden size; back, with a LayerNorm
    if model.sentence_head:
        heads += h * (h + 1) + 2 * (h + 1)
    if model.span_boundary_places:
        place = SPAN_PLACE_SIZE
        heads += model.span_boundary_places * place + (2 * h + place) * h + h * h + 2 * 3 * h
    return tables * e + (1 if model.share_layers else model.num_layers) * block + 2 * h + heads
