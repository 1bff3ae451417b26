"""Two stacks and a latent vector, and batches of sentences for them, without text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, FIELDS, OBJECTIVE, ORD, POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.tree import Config
from megatron_lite.models.optimus.batch import LatentBatch
from megatron_lite.models.optimus.config import latent_of

VOCAB, OF_DECODER = 90, 70
SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position": 40,
    "embedding_dropout": 0.0,
    "attention_dropout": 0.0,
    "output_dropout": 0.0,
}


def latent_tree(**changes):
    """A configuration tree. Args: changes: sections, merged over it."""
    tree = {
        "model": {**SIZES, "system": "bert", "vocab_size": VOCAB},
        "decoder": {**SIZES, "system": "gpt2", "vocab_size": OF_DECODER, "num_layers": 3},
        "data": {"sequence_length": 24},
        "objectives": {"optimus": 1},
        "optimus": {"latent_size": 8},
        "training": {"steps": 20},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def corpus_tree(corpus: Path, directory: Path) -> dict[str, Any]:
    """A run of four steps on the sentences of a corpus, with its tokenizer for both stacks."""
    tree = latent_tree(
        tokenizer={"kind": "bert_wordpiece", "path": str(corpus / "vocab.txt")},
        batch={"micro_batch_size": 4, "global_batch_size": 4},
        training={"steps": 4, "precision": "fp32", "eval_samples": 8},
        schedule={"warmup_steps": 0},
        run={"directory": str(directory)},
    )
    tree["model"] = {**SIZES, "system": "bert"}
    tree["decoder"] = {**SIZES, "system": "gpt2", "num_layers": 3}
    tree["data"] = {
        "sequence_length": 24,
        "train": [{"prefix": str(corpus / "corpus_train")}],
        "validation": [{"prefix": str(corpus / "corpus_validation")}],
    }
    return tree


def latent_config(**changes):
    return build(Config, latent_tree(**changes))


def sentence_fields(
    sentences,
    *,
    memory: bool = True,
    length: int | None = None,
    vocab: int = VOCAB,
    of_decoder: int = OF_DECODER,
) -> np.ndarray:
    """int32 [rows, fields, length]: as the objective writes sentences, with CLS 1, SEP 2, BOS 3, EOS 4.

    Args: sentences: for each row a list of (encoder's tokens, decoder's tokens).
    """
    rows = [[_sentence(*pair, memory=memory) for pair in row] for row in sentences]
    length = length or max(sum(part.shape[1] for part in row) for row in rows)
    fields = np.zeros((len(rows), len(FIELDS), length), np.int32)
    fields[:, DOC] = -1
    for row, parts in enumerate(rows):
        end = 0
        for number, part in enumerate(parts):
            fields[row, :, end : end + part.shape[1]] = part
            fields[row, DOC, end : end + part.shape[1]] = number
            end += part.shape[1]
    fields[:, OBJECTIVE] = LOSS_NAMES.index("reconstruction")
    return fields


def _sentence(encoded, decoded, *, memory: bool) -> np.ndarray:
    read, written = [1, *encoded, 2], [3] * memory + [3, *decoded]
    part = np.zeros((len(FIELDS), len(read) + len(written)), np.int32)
    part[TOKENS] = read + written
    part[POSITION_IDS] = np.r_[np.arange(len(read)), np.arange(len(written))]
    part[ORD, len(read) :] = np.arange(1, len(written) + 1)
    predicted = slice(len(read) + memory, None)
    part[TARGETS, predicted] = [*decoded, 4]
    part[WEIGHTS, predicted] = np.float32(1.0).view(np.int32)
    return part


def random_sentences(seed: int, rows: int, per_row: int, longest: int = 9):
    rng = np.random.default_rng(seed)
    return [
        [
            (
                rng.integers(5, VOCAB, rng.integers(1, longest)),
                rng.integers(5, OF_DECODER, rng.integers(1, longest)),
            )
            for _ in range(per_row)
        ]
        for _ in range(rows)
    ]


def latent_batch(fields: np.ndarray, config: Config, samples=None, seed: int = 5) -> LatentBatch:
    samples = np.arange(len(fields)) if samples is None else np.asarray(samples)
    latent = latent_of(config)
    assert latent is not None
    return LatentBatch(fields, samples, seed, latent.latent_size, latent.memory)


class RandomSentences:
    """Samples of random sentences, each a pure function of its number."""

    def __init__(self, config: Config, seed: int = 0, per_row: int = 3):
        self._config, self._seed, self._per_row = config, seed, per_row

    def batch(self, indices: np.ndarray) -> LatentBatch:
        latent = latent_of(self._config)
        assert latent is not None
        rows = [random_sentences(self._seed + int(i), 1, self._per_row)[0] for i in indices]
        length = 2 * self._per_row * 12
        fields = sentence_fields(rows, memory=latent.memory, length=length)
        return latent_batch(fields, self._config, indices)

    def prefetch(self, indices: np.ndarray) -> None:
        pass

    def fingerprint(self) -> list[dict[str, object]]:
        return [{"seed": self._seed}]
