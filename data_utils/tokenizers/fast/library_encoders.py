"""The interface of encoders, and the encoders that hand texts to the libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import sentencepiece
import tokenizers


class Encoder(Protocol):
    """Texts to ids."""

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts in one int32 array, and the number of ids of each as int64."""
        ...


class LibraryEncoder:
    """A pipeline of the `tokenizers` library: the reference for the other encoders."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        clean = [without_lone_surrogates(text) for text in texts]
        encodings = self._backend.encode_batch_fast(clean, add_special_tokens=False)
        return flatten([np.array(encoding.ids, np.int32) for encoding in encodings])


class SentencePieceEncoder:
    """A SentencePiece model, in one thread. The library returns arrays, so no list of ids is made."""

    def __init__(self, model: sentencepiece.SentencePieceProcessor):
        self._model = model

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        clean = [without_lone_surrogates(text) for text in texts]
        return flatten(self._model.encode(clean, return_type="numpy", num_threads=1))


def flatten(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of several texts as one int32 array, and their int64 lengths."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return (np.concatenate(ids) if len(ids) else np.empty(0, np.int32)), lengths


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD for each surrogate, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def utf8(text: str) -> bytes:
    """`text` in UTF-8, with U+FFFD for each surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return without_lone_surrogates(text).encode()
