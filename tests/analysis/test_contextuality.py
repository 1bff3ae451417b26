"""Measures of contextuality against loops over pairs, and what the vectors of words are."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lite.analysis.contextuality import (
    explained_variance,
    intra_similarity,
    measure,
    self_similarity,
)


def cosine(a, b):
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def test_measures_equal_loops_over_pairs():
    vectors = torch.randn(9, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    pairs = [cosine(a, b) for a, b in itertools.permutations(vectors, 2)]
    assert self_similarity(vectors).item() == pytest.approx(np.mean(pairs), abs=1e-9)
    mean = vectors.double().mean(0)
    expected = np.mean([cosine(mean, each) for each in vectors])
    assert intra_similarity(vectors).item() == pytest.approx(expected, abs=1e-9)
    eigenvalues = np.linalg.eigvalsh(vectors.double().numpy() @ vectors.double().numpy().T)
    assert explained_variance(vectors).item() == pytest.approx(eigenvalues[-1] / eigenvalues.sum(), abs=1e-9)
    centred = vectors.double().numpy() - mean.numpy()
    squares = np.linalg.svd(centred, compute_uv=False) ** 2
    assert explained_variance(vectors, centred=True).item() == pytest.approx(
        squares[0] / squares.sum(), abs=1e-9
    )


def test_a_word_is_counted_once_in_a_text_and_baselines_are_words_at_random():
    """Layer 0: a vector for each word. Layer 1: a vector for each text."""
    rng = torch.Generator().manual_seed(1)
    words = {word: torch.randn(8, generator=rng) for word in "abcdef"}
    texts = [["a", "b", "a"], ["c", "a"], ["a", "d"], ["b", "e"], ["f", "b"]]
    of_texts = [torch.randn(8, generator=rng) for _ in texts]
    vectors = [
        torch.stack([torch.stack([words[word], own]) for word in text])
        for text, own in zip(texts, of_texts, strict=True)
    ]
    found = measure(texts, vectors, least=3, samples=5)
    assert found is not None and found.contexts == {"a": 3, "b": 3}
    assert found.measured["self_similarity"][0].item() == pytest.approx(1.0)
    assert found.measured["explained_variance"][0].item() == pytest.approx(1.0)
    contexts = {"a": (0, 1, 2), "b": (0, 3, 4)}
    expected = [
        np.mean([cosine(of_texts[i], of_texts[j]) for i, j in itertools.permutations(numbers, 2)])
        for numbers in contexts.values()
    ]
    assert found.measured["self_similarity"][1].item() == pytest.approx(np.mean(expected))
    assert found.measured["intra_similarity"][1].item() == pytest.approx(1.0)
    between = np.mean([cosine(a, b) for a, b in itertools.permutations(of_texts, 2)])
    assert found.baseline["self_similarity"][1].item() == pytest.approx(between)
    assert found.by_word["a"][1].item() == pytest.approx(expected[0] - between)
    assert measure(texts, vectors, least=4) is None
