"""How much the vectors of a word differ between its contexts, in each layer (Ethayarajh, arXiv:1909.00512).

    self-similarity        mean cosine of the vectors of one word in two of its contexts
    intra-similarity       mean cosine of a text's words with their mean
    explained variance     share of the first singular value in the vectors of one word

Each has a baseline: what words at random, one of each of many texts, have, since all vectors of a layer may lie in a
narrow cone. A word whose vector never changes has self-similarity 1 and explained variance 1.
"""

# N vectors of one word, D hidden size, L + 1 layers

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_utils.common.random_streams import derive_seed


def self_similarity(vectors: torch.Tensor) -> torch.Tensor:
    """Mean cosine of two different rows. Args: vectors: [..., N, D], N at least 2. Returns: fp64 [...]."""
    count = vectors.shape[-2]
    total = _units(vectors).sum(-2).square().sum(-1)
    return (total - count) / (count * count - count)


def intra_similarity(vectors: torch.Tensor) -> torch.Tensor:
    """Mean cosine of rows with their mean. Args: vectors: [..., N, D]. Returns: fp64 [...]."""
    mean = vectors.double().mean(-2, keepdim=True)
    return (_units(vectors) * _units(mean)).sum(-1).mean(-1)


def explained_variance(vectors: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
    """First squared singular value over the sum of all. Args: vectors: [..., N, D]. Returns: fp64 [...]."""
    wide = vectors.double()
    if centred:
        wide = wide - wide.mean(-2, keepdim=True)
    squares = torch.linalg.svdvals(wide).square()
    return squares[..., 0] / squares.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)


def _units(vectors: torch.Tensor) -> torch.Tensor:
    wide = vectors.double()
    return wide / wide.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class Contextuality:
    """Means over words or texts, fp64 [L + 1], and the same of words at random.

    Args:
        by_word: word -> its self-similarity in each layer, less the baseline.
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
    """Measure two texts or more. None where no word has `least` contexts.

    Args:
        texts: the words of each. vectors: [words, L + 1, D] of each.
        samples: words at random, one of a text, for the baselines.
        centred: explained variance of vectors less their mean.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for number, words in enumerate(texts):
        for word in dict.fromkeys(words):  # its first occurrence: a context is a text
            places.setdefault(word, []).append((number, words.index(word)))
    chosen = {word: found for word, found in places.items() if len(found) >= least}
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
        own = torch.stack([vectors[number][place] for number, place in found], dim=1)
        by_word[word] = self_similarity(own)
        variances.append(explained_variance(own, centred=centred))
    whole = [each.transpose(0, 1) for each in vectors if len(each) > 1]
    measured = {
        "self_similarity": torch.stack(list(by_word.values())).mean(0),
        "intra_similarity": torch.stack([intra_similarity(each) for each in whole]).mean(0),
        "explained_variance": torch.stack(variances).mean(0),
    }
    adjusted = {word: values - cosine for word, values in by_word.items()}
    return Contextuality(measured, baseline, adjusted, {word: len(found) for word, found in chosen.items()})


def _random_words(vectors: Sequence[torch.Tensor], samples: int, seed: int) -> Iterator[torch.Tensor]:
    """[L + 1, D] of a word of each of `samples` texts, or of all."""
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "words at random")))
    for number in generator.permutation(len(vectors))[:samples]:
        yield vectors[number][generator.integers(len(vectors[number]))]
