"""Stand-in tokenizers: one id for each UTF-8 byte, 256 for eos."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from support.waiting import slow_work

from data_utils.common.errors import DataError
from data_utils.tokenizers.special_tokens import NO_TOKEN


@dataclass(frozen=True)
class ByteTokenizerConfig:
    kind: str = "bytes"


class ByteTokenizer:
    config = ByteTokenizerConfig()
    special = SimpleNamespace(eos=256)
    vocab_size = 257
    fingerprint = "bytes-1"

    def use_fast_encoder(self):
        pass

    def encode_batch(self, texts):
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.int32)
        return ids, np.array([len(data) for data in encoded], np.int64)


class EndlessTokenizer(ByteTokenizer):
    """Has no token that ends a document, as GPT's."""

    special = SimpleNamespace(eos=NO_TOKEN)


class NarrowTokenizer(ByteTokenizer):
    """Claims fewer ids than it produces."""

    vocab_size = 100


class DyingTokenizer(ByteTokenizer):
    """Ends its process at certain texts, as the kernel or a library does when memory runs out."""

    def encode_batch(self, texts):
        for ends in (text.split()[1] for text in texts if text.startswith("die ")):
            if ends == "status":
                os._exit(9)
            os.kill(os.getpid(), getattr(signal, ends))
        return super().encode_batch(texts)


class HungryTokenizer(ByteTokenizer):
    """Asks for more memory than any machine has."""

    def encode_batch(self, texts):
        if any(text.startswith("hungry") for text in texts):
            np.empty(1 << 60, np.uint8)
        return super().encode_batch(texts)


class SilentTokenizer(ByteTokenizer):
    """Makes no token of any text."""

    def encode_batch(self, texts):
        return np.empty(0, np.int32), np.zeros(len(texts), np.int64)


class SlowTokenizer(ByteTokenizer):
    """Takes long enough for a test to interrupt the build."""

    def encode_batch(self, texts):
        slow_work(0.05)
        return super().encode_batch(texts)


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it is given."""

    texts = 0

    def encode_batch(self, texts):
        CountingTokenizer.texts += len(texts)
        return super().encode_batch(texts)


class OtherTokenizer(ByteTokenizer):
    """Gives the same ids, but says that it is another."""

    fingerprint = "bytes-2"


class MissingOnSecondRank(ByteTokenizer):
    """Cannot be loaded by the second MPI rank, as where one node lacks the files."""

    def __init__(self):
        if os.environ.get("PMI_RANK") == "1":
            raise DataError("tokenizer vocab.txt does not exist; copy it to this node.")
