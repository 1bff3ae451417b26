"""How much the vectors of a word differ between its contexts, in each layer (Ethayarajh, arXiv:1909.00512).

    self-similarity        mean cosine of the vectors of one word in two of its contexts
    intra-similarity       mean cosine of a text's words with their mean
    explained variance     share of the first singular value in the vectors of one word

Each is compared with a baseline, the same measure over random words, one from each of many texts: all vectors of a
layer may lie in a narrow cone. A word whose vector never changes has self-similarity 1 and explained variance 1.

Shapes: N vectors of one word, D hidden size, L + 1 layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_utils.common.seeds import derive_seed


def self_similarity(vectors: torch.Tensor) -> torch.Tensor:
    """Mean cosine of two different vectors. Args: vectors: [..., N, D], N at least 2. Returns: fp64 [...]."""
    count = vectors.shape[-2]
    # |sum of unit vectors|^2 is the sum of all N^2 cosines, N of which are 1: no matrix of pairs is needed.
    total = _units(vectors).sum(-2).square().sum(-1)
    return (total - count) / (count * count - count)


def intra_similarity(vectors: torch.Tensor) -> torch.Tensor:
    """Mean cosine of vectors with their mean. Args: vectors: [..., N, D]. Returns: fp64 [...]."""
    mean = vectors.double().mean(-2, keepdim=True)
    return (_units(vectors) * _units(mean)).sum(-1).mean(-1)


def explained_variance(vectors: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
    """First squared singular value over the sum of all. Args: vectors: [..., N, D]. Returns: fp64 [...]."""
    vectors = vectors.double()
    if centred:
        vectors = vectors - vectors.mean(-2, keepdim=True)
    squares = torch.linalg.svdvals(vectors).square()
    return squares[..., 0] / squares.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)


def _units(vectors: torch.Tensor) -> torch.Tensor:
    vectors = vectors.double()
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class Contextuality:
    """Means over words or texts, by measure, fp64 [L + 1] each.

    Args:
        baseline: the same measures of random words.
        by_word: word -> its self-similarity in each layer, minus the baseline.
        contexts: word -> number of its contexts.
    """

    measured: Mapping[str, torch.Tensor]
    baseline: Mapping[str, torch.Tensor]
    by_word: Mapping[str, torch.Tensor]
    contexts: Mapping[str, int]


def measure(
    texts: Sequence[Sequence[str]],
    vectors: Sequence[torch.Tensor],
    *,
    least: int = 5,
    samples: int = 1000,
    centred: bool = False,
    seed: int = 0,
) -> Contextuality | None:
    """Measure two or more texts. None if no word has `least` contexts.

    Args:
        texts: the words of each text. vectors: [words, L + 1, D] of each text.
        samples: number of random words, one from each text, for the baselines.
        centred: subtract the mean of the vectors before explained variance.
    """
    occurrences: dict[str, list[tuple[int, int]]] = {}  # word -> (text, index in the text)
    for number, words in enumerate(texts):
        for word in dict.fromkeys(words):  # the first occurrence only: a context is a text
            occurrences.setdefault(word, []).append((number, words.index(word)))
    chosen = {word: found for word, found in occurrences.items() if len(found) >= least}
    if not chosen:
        return None
    random = torch.stack(list(_random_words(vectors, samples, seed)), dim=1)  # [L + 1, samples, D]
    cosine = self_similarity(random)
    baseline = {
        "self_similarity": cosine,
        "intra_similarity": cosine,
        "explained_variance": explained_variance(random, centred=centred),
    }
    by_word, variances = {}, []
    for word, found in chosen.items():
        contexts = torch.stack([vectors[number][index] for number, index in found], dim=1)  # [L + 1, N, D]
        by_word[word] = self_similarity(contexts)
        variances.append(explained_variance(contexts, centred=centred))
    several = [each.transpose(0, 1) for each in vectors if len(each) > 1]  # the mean of one word is the word
    measured = {
        "self_similarity": torch.stack(list(by_word.values())).mean(0),
        "intra_similarity": torch.stack([intra_similarity(each) for each in several]).mean(0),
        "explained_variance": torch.stack(variances).mean(0),
    }
    adjusted = {word: values - cosine for word, values in by_word.items()}
    return Contextuality(measured, baseline, adjusted, {word: len(found) for word, found in chosen.items()})


def _random_words(vectors: Sequence[torch.Tensor], samples: int, seed: int) -> Iterator[torch.Tensor]:
    """The vectors, [L + 1, D], of one word from each of `samples` texts, or of all texts if there are fewer."""
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "words at random")))
    for number in generator.permutation(len(vectors))[:samples]:
        yield vectors[number][generator.integers(len(vectors[number]))]
