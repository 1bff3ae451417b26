"""Losses of text vectors against sentence-transformers' classes and plain loops, over ranks, and what is left out."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer import losses

from megatron_lite.transformer.pair_losses import CoSent, InfoNce, Records, loss_and_gradient

N, K, D = 12, 4, 8
DIRECTIONS = {
    "query_to_document": (("query_to_doc",), "joint"),
    "symmetric": (("query_to_doc", "doc_to_query"), "per_direction"),
    "joint": (("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "joint"),
}


def vectors_of(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, K, D, generator=generator)


def records_of(**changes) -> Records:
    texts = torch.arange(N * K).view(N, K)
    whole = torch.ones(N, K, dtype=torch.bool)
    return Records(**{"texts": texts, "is_text": whole, "is_counted": whole[:, 0]} | changes)


def all_rows() -> np.ndarray:
    return np.arange(N)


def gradient_of(vectors: torch.Tensor, compute) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = vectors.clone().requires_grad_()
    loss = compute(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("denominator", DIRECTIONS)
def test_info_nce_is_sentence_transformers_class(denominator):
    directions, mode = DIRECTIONS[denominator]
    theirs = losses.MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale=20.0, directions=directions, partition_mode=mode
    )
    vectors = vectors_of()
    expected, gradient = gradient_of(
        vectors, lambda x: theirs.compute_loss_from_embeddings([x[:, i] for i in range(K)], None)
    )
    total, ours = loss_and_gradient(vectors, all_rows(), records_of(), InfoNce(0.05, denominator))
    assert total / N == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(ours / N, gradient, rtol=1e-5, atol=1e-6)


def test_cosent_is_sentence_transformers_class():
    vectors, scores = vectors_of()[:, :2], torch.rand(N, generator=torch.Generator().manual_seed(1))
    scores[3] = scores[5]  # neither is above the other
    theirs = losses.CoSENTLoss(torch.nn.Identity(), scale=20.0)
    expected, gradient = gradient_of(
        vectors, lambda x: theirs.compute_loss_from_embeddings([x[:, 0], x[:, 1]], scores)
    )
    texts = torch.arange(N * 2).view(N, 2)
    records = records_of(texts=texts, is_text=torch.ones(N, 2, dtype=torch.bool), scores=scores)
    total, ours = loss_and_gradient(vectors, all_rows(), records, CoSent(0.05))
    assert total == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-6)


def test_matryoshka_is_sentence_transformers_class():
    """A cut vector is normalized anew."""
    inner = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=20.0)
    vectors, sizes = vectors_of(), ((8, 1.0), (3, 0.5))

    def expected(x: torch.Tensor) -> torch.Tensor:
        cut = {size: F.normalize(x[..., :size], dim=-1) for size, _ in sizes}
        return sum(
            weight * inner.compute_loss_from_embeddings([cut[size][:, i] for i in range(K)], None)
            for size, weight in sizes
        )

    loss, gradient = gradient_of(vectors, expected)
    total, ours = loss_and_gradient(vectors, all_rows(), records_of(), InfoNce(0.05), sizes)
    assert total / N == pytest.approx(float(loss), rel=1e-6)
    torch.testing.assert_close(ours / N, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [InfoNce(0.05, name) for name in DIRECTIONS] + [CoSent(0.05)], ids=str)
def test_rows_of_ranks_add_up(loss, monkeypatch):
    """Unequal numbers of rows, and few rows in memory at a time."""
    records = records_of(scores=torch.rand(N))
    whole, gradient = loss_and_gradient(vectors_of(), all_rows(), records, loss)
    monkeypatch.setattr("megatron_lite.transformer.pair_losses._ROWS", 2)
    parts = [loss_and_gradient(vectors_of(), rows, records, loss) for rows in np.split(all_rows(), [1, 4])]
    assert sum(part for part, _ in parts) == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(sum(part for _, part in parts), gradient, rtol=1e-5, atol=1e-6)
    assert sum(
        loss.weight(rows, records.is_counted.numpy()) for rows in np.split(all_rows(), [1, 4])
    ) == loss.weight(all_rows(), records.is_counted.numpy())


@pytest.mark.parametrize("margin", [None, 0.1])
def test_texts_that_are_no_negatives_are_left_out(margin):
    """Against plain loops: equal texts, negatives that a record lacks, records that are left out, a margin."""
    vectors, records = vectors_of(), records_of()
    texts, is_text, is_counted = records.texts, records.is_text, records.is_counted.clone()
    texts[4, 1] = texts[7, 1]  # one positive of two queries, of which the later record is counted too
    texts[2, 3] = texts[9, 0]  # a negative that is another record's query
    is_text[5, 3] = is_text[8, 2] = False
    is_counted[6] = False
    unit, expected = F.normalize(vectors, dim=-1), 0.0
    for i in (i for i in range(N) if is_counted[i]):
        score = unit[i, 0] @ unit[i, 1]
        terms = [score / 0.05]
        for j, c in itertools.product(range(N), range(1, K)):
            is_own = texts[j, c] in (texts[i, 0], texts[i, 1])
            similarity = unit[i, 0] @ unit[j, c]
            is_near = margin is not None and similarity > score + margin
            if (j, c) != (i, 1) and is_counted[j] and is_text[j, c] and not is_own and not is_near:
                terms.append(similarity / 0.05)
        expected += math.log(sum(math.exp(term) for term in terms)) - terms[0]
    records = SimpleNamespace(texts=texts, is_text=is_text, is_counted=is_counted, scores=None)
    loss = InfoNce(0.05, margin=margin)
    total, gradient = loss_and_gradient(vectors, all_rows(), records, loss)
    assert total == pytest.approx(float(expected), rel=1e-5)
    assert loss.weight(all_rows(), is_counted.numpy()) == N - 1
    assert gradient[6].abs().max() == gradient[5, 3].abs().max() == 0
    assert gradient.isfinite().all()
