"""The number of texts computed together, from a bound on the memory of their rows."""

from __future__ import annotations

from data_utils.common.errors import DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.model import ModelConfig

MAX_BYTES = 16 << 30  # of all rows: cached keys and values, and logits
LOGIT_COPIES = 4  # logits, their log softmax, totals, and what topk sorts


def require_memory(model: ModelConfig, config: GenerationConfig, length: int) -> None:
    """Raise DataError if the beams of one text need too much. Args: length: of a text with its answer, tokens."""
    beams, size = config.num_beams, _row_bytes(model, length)
    if config.strategy == "beam" and beams * size > MAX_BYTES:
        raise DataError(
            f"num_beams ({beams}) need {beams * size / 2**30:.3g} GiB for a text of {length} tokens with its answer, "
            f"more than {MAX_BYTES / 2**30:g}; set it to {max(1, MAX_BYTES // size)} or less, or shorten the text."
        )


def most_texts(model: ModelConfig, config: GenerationConfig, length: int) -> int:
    """Texts of this length, their answers counted, that may be computed together."""
    rows = config.num_beams if config.strategy == "beam" else 1
    return max(1, MAX_BYTES // (rows * _row_bytes(model, length)))


def _row_bytes(model: ModelConfig, length: int) -> int:
    assert model.vocab_size is not None
    # A decoder's layers keep the keys and values of both its rows and the encoder's.
    layers = model.num_layers + model.decoder_layers
    return 4 * (2 * layers * model.hidden_size * length + LOGIT_COPIES * model.vocab_size)
