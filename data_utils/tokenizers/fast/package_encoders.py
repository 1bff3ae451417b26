"""The encoder of the package gigatoken (BPE), which a build takes when it is named.

It reads the pipeline as a tokenizer.json and refuses what it does not know. Its own tables of Unicode may be of another
version than the library's. So encoders.py checks it with more characters than the compiled encoders, which ask the
library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import tokenizers

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import one_line
from data_utils.tokenizers.fast.library_encoders import Encoder, utf8

GIGATOKEN = "gigatoken"
# gigatoken remembers every word and cannot forget: up to 10 bytes for each byte of text, if no word occurs twice.
LOAD_AGAIN_BYTES = 2**28


def require_package(encoder: str) -> None:
    """Raise ConfigError for the encoder of the package where that is not installed. Loads nothing."""
    if encoder == GIGATOKEN and importlib.util.find_spec(GIGATOKEN) is None:
        raise ConfigError(
            "--encoder gigatoken needs the package gigatoken, which is not installed; pip install gigatoken, or choose "
            "--encoder auto."
        )


class GigatokenEncoder:
    """BPE over bytes, or of SentencePiece with byte fallback, with the pre-tokenizers of many published models."""

    def __init__(self, pipeline: str):
        """Args: pipeline: a tokenizer.json. Raises: what the package raises for one that it does not know."""
        import awkward  # gigatoken's arrays of ids
        import gigatoken

        self._awkward = awkward
        self._load = lambda: gigatoken.Tokenizer.from_json(pipeline)
        self._tokenizer = self._load()
        self._bytes_left = LOAD_AGAIN_BYTES

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [utf8(text) for text in texts]
        if self._bytes_left <= 0:
            self._tokenizer, self._bytes_left = self._load(), LOAD_AGAIN_BYTES
        self._bytes_left -= sum(map(len, encoded))
        # One thread, because the workers of a build are its parallelism.
        ids = self._tokenizer.encode_batch(encoded, parallel=False)
        flat, lengths = self._awkward.flatten(ids, axis=1), self._awkward.num(ids, axis=1)
        return np.array(flat, np.int32), np.array(lengths, np.int64)


def gigatoken_encoder(backend: tokenizers.Tokenizer) -> Encoder:
    """gigatoken for a pipeline of the `tokenizers` library, whose special tokens text cannot reach.

    Raises: ConfigError if the package is missing or cannot read the pipeline.
    """
    require_package(GIGATOKEN)
    pipeline: dict[str, Any] = orjson.loads(backend.to_str())
    # The package looks for special tokens in text; those that are text by intention stay.
    pipeline["added_tokens"] = [token for token in pipeline["added_tokens"] if not token["special"]]
    pipeline["post_processor"] = None
    try:
        return GigatokenEncoder(orjson.dumps(pipeline).decode())
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
            raise
        reason = one_line(str(error).splitlines()[0] if str(error) else error)
        raise ConfigError(
            f"--encoder gigatoken cannot be used with this tokenizer: {reason}; choose --encoder auto."
        ) from None
