"""How many texts form a batch, from a bound on the memory of their sequences."""

from __future__ import annotations

from data_utils.common.errors import DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig

MAX_BYTES = 16 << 30  # of all sequences: cached keys and values, and logits
LOGIT_COPIES = 4  # logits, their log softmax, totals, and what topk sorts


def check_memory(model: ModelConfig, config: GenerationConfig, length: int) -> None:
    """Raise DataError if the beams of one text need too much memory. Args: length: tokens of text and completion."""
    beams, size = config.num_beams, _sequence_bytes(model, length)
    if config.strategy == "beam" and beams * size > MAX_BYTES:
        raise DataError(
            f"num_beams ({beams}) need {beams * size / 2**30:.3g} GiB for a text of {length} tokens with its "
            f"completion, more than {MAX_BYTES / 2**30:g} GiB; set it to {max(1, MAX_BYTES // size)} or "
            "less, or shorten the text."
        )


def max_texts(model: ModelConfig, config: GenerationConfig, length: int) -> int:
    """The largest batch of texts of this length. Args: length: tokens of text and completion."""
    rows = config.num_beams if config.strategy == "beam" else 1
    return max(1, MAX_BYTES // (rows * _sequence_bytes(model, length)))


def _sequence_bytes(model: ModelConfig, length: int) -> int:
    assert model.vocab_size is not None
    # A decoder's layers cache keys and values of its own tokens and of the encoder's.
    layers = model.num_layers + model.decoder_layers
    return 4 * (2 * layers * model.hidden_size * length + LOGIT_COPIES * model.vocab_size)
