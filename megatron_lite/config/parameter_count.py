"""The number of parameters of a model, from its section of the configuration, without torch."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig

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
    position_tables = {"learned_blocks": 2, "learned": 1, "none": 0}[model.positions]
    tables = words + position_tables * (model.max_position + 1) + model.segments + model.task_types
    norm = 1 if model.rms_norm else 2  # vectors of a norm
    attention, inner = model.attention_size, model.inner_size
    block = h * (3 * attention + attention + 2 * inner) + 2 * norm * h
    block += 3 * attention * model.has_bias("qkv") + h * model.has_bias("attention")
    block += (inner + h) * model.has_bias("mlp")
    total = tables * e + (1 if model.share_layers else model.num_layers) * block
    total += norm * h * (model.norm == "pre") + norm * e * model.embedding_norm
    if model.embedding_size is not None:
        total += h * e + h  # to the hidden size
    if model.embedding_size is not None or model.head_transform:
        total += h * e + e + norm * e
    if model.sentence_classes:
        total += h * (h + 1) + model.sentence_classes * (h + 1)
    if model.span_boundary_places:
        place = SPAN_PLACE_SIZE
        total += model.span_boundary_places * place + (2 * h + place) * h + h + norm * h  # inner layer
        total += h * e + e + norm * e  # outer layer
    output_biases = model.head_bias * (1 + (model.span_boundary_places > 0))
    return total + output_biases * words
