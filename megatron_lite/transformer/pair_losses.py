"""Losses of text vectors: InfoNCE and CoSENT over the records of a global batch, and their gradients for the vectors.

A record is a query, its positive and H hard negatives. Each rank has the vectors of all ranks, computes the rows of its
own records, and the gradients of all vectors for these rows; their sum over ranks is the gradient of the batch.
Everything is fp32: a temperature of 0.05 multiplies rounding errors of similarities by 20.

Sources: InfoNCE arXiv:1807.03748; the denominators `symmetric` and `joint` as in arXiv:2103.00020 (CLIP) and
arXiv:2308.03281 (GTE, section 3.3); CoSENT kexue.fm/archives/8847; Matryoshka arXiv:2205.13147; the margin of false
negatives as in arXiv:2402.16829 (GISTEmbed), with the trained model as its own guide; a teacher's vectors
arXiv:2004.09813.

Shapes: N records of the global batch, k = 2 + H texts of each, D size of a vector, R rows of one computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron_lite.transformer.pooling import finished

_ROWS = 512  # of similarities in memory at a time
DENOMINATORS = ("query_to_document", "symmetric", "joint")


@dataclass(frozen=True)
class Records:
    """The records of a global batch, on all ranks alike."""

    texts: torch.Tensor  # int64 [N, k]: equal numbers are equal texts
    is_text: (
        torch.Tensor
    )  # bool [N, k]: False for negatives that a record lacks, and for records without vectors
    is_counted: torch.Tensor  # bool [N]: False for records that are left out of the batch
    scores: torch.Tensor | None = None  # fp32 [N], of CoSENT


@dataclass(frozen=True)
class InfoNce:
    """Mean over records of log Z - s(query, positive) / temperature, with the cosine similarity s.

    Args:
        denominator: what Z sums exp(s / temperature) over. query_to_document: the query with all documents.
            symmetric: the mean of log Z of this and of the positive with all queries. joint: the query with documents
            and other queries, and the positive with queries and the documents of other records.
        margin: documents that are more similar to the query than the positive plus this are left out of Z; None = none.
    """

    temperature: float
    denominator: str = "query_to_document"
    margin: float | None = None

    def weight(self, rows: np.ndarray, is_counted: np.ndarray) -> int:
        """The part of rows int64 [R] in the divisor of the loss. Args: is_counted: bool [N]."""
        return int(is_counted[rows].sum())

    def row_sum(self, vectors: torch.Tensor, row_numbers: np.ndarray, records: Records) -> torch.Tensor:
        """Sum of the losses of rows, fp32. Args: vectors: [N, k, D] of length 1. row_numbers: int64 [R], of records."""
        rows = torch.from_numpy(row_numbers).to(vectors.device)
        queries, documents = vectors[:, 0], vectors[:, 1:].flatten(0, 1)
        query, positive = queries[rows], vectors[rows, 1]
        own = torch.arange(len(queries), device=rows.device) == rows[:, None]  # [R, N]
        document_record = torch.arange(len(queries), device=rows.device).repeat_interleave(
            vectors.shape[1] - 1
        )
        of_own_record = document_record == rows[:, None]  # [R, N (k - 1)]
        is_positive = torch.zeros_like(of_own_record)
        is_positive[torch.arange(len(rows)), rows * (vectors.shape[1] - 1)] = True

        own_score = (query * positive).sum(1) / self.temperature
        to_documents = self._scores(query, documents, own_score)
        excluded = self._excluded(rows, records, slice(1, None))
        scores = [to_documents.masked_fill(excluded & ~is_positive, -torch.inf)]
        if self.denominator != "query_to_document":
            no_query = self._excluded(rows, records, slice(0, 1))
            scores.append(self._scores(positive, queries).masked_fill(no_query & ~own, -torch.inf))
        if self.denominator == "joint":
            scores.append(self._scores(query, queries).masked_fill(no_query | own, -torch.inf))
            scores.append(self._scores(positive, documents).masked_fill(excluded | of_own_record, -torch.inf))
            log_z = torch.cat(scores, dim=1).logsumexp(1)
        else:
            log_z = torch.stack([each.logsumexp(1) for each in scores]).mean(0)
        # `where`: a record that is left out has no finite denominator of its own.
        return torch.where(records.is_counted[rows], log_z - own_score, 0.0).sum()

    def _scores(
        self, rows: torch.Tensor, columns: torch.Tensor, own_score: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores [R, columns]; those above `own_score` and the margin are of false negatives and become -inf."""
        scores = rows @ columns.T / self.temperature
        if self.margin is None or own_score is None:
            return scores
        most = own_score.detach() + self.margin / self.temperature
        return scores.masked_fill(scores.detach() > most[:, None], -torch.inf)

    @staticmethod
    def _excluded(rows: torch.Tensor, records: Records, columns: slice) -> torch.Tensor:
        """Bool [R, N columns]: what is no negative of a row: a text equal to its query or positive, or no text."""
        texts = records.texts[:, columns].flatten()
        is_used = (records.is_text & records.is_counted[:, None])[:, columns].flatten()
        own_query, own_positive = records.texts[rows, 0], records.texts[rows, 1]
        return (texts == own_query[:, None]) | (texts == own_positive[:, None]) | ~is_used


@dataclass(frozen=True)
class CoSent:
    """log(1 + sum over records with scores y_i > y_j of exp((s_j - s_i) / temperature)), s of query and positive.

    One number for the batch, so the rank that has record 0 computes it.
    """

    temperature: float

    def weight(self, rows: np.ndarray, is_counted: np.ndarray) -> int:
        return int((rows == 0).any())

    def row_sum(self, vectors: torch.Tensor, row_numbers: np.ndarray, records: Records) -> torch.Tensor:
        """The loss if record 0 is among the rows, else 0."""
        if not (row_numbers == 0).any():
            return vectors.sum() * 0.0
        assert records.scores is not None
        similarity = (vectors[:, 0] * vectors[:, 1]).sum(1) / self.temperature
        is_used = records.is_counted & records.is_text[:, :2].all(1)
        is_ordered = records.scores[:, None] > records.scores
        is_ordered &= is_used[:, None] & is_used
        differences = (similarity - similarity[:, None]).masked_fill(~is_ordered, -torch.inf)
        return F.pad(differences.flatten(), (1, 0)).logsumexp(0)  # 0: the 1 in the logarithm


PairLoss = InfoNce | CoSent


def teacher_loss(
    vectors: torch.Tensor, targets: torch.Tensor, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over texts of the mean squared difference from a teacher's vectors, fp64 scalar; its gradient, fp32 [G, D].

    Args: vectors, targets: [G, D], the former as they were pooled. normalize: they have length 1 first.
    """
    leaf = vectors.detach().float().requires_grad_()
    with torch.enable_grad():
        loss = (finished(leaf, normalize) - targets).square().mean(1).sum()
        loss.backward()
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad


def loss_and_gradient(
    vectors: torch.Tensor,
    rows: np.ndarray,
    records: Records,
    loss: PairLoss,
    sizes: Sequence[tuple[int, float]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses of rows, fp64 scalar, and its gradient for all vectors, fp32 [N, k, D].

    Args:
        vectors: [N, k, D], as they were pooled, without gradient.
        rows: int64 [R], the records whose losses are summed.
        sizes: Matryoshka: the loss is the sum over (size, weight) of the loss of the first numbers of each vector.
    """
    vectors = vectors.float()
    gradient, total = torch.zeros_like(vectors), torch.zeros((), dtype=torch.float64, device=vectors.device)
    for size, weight in sizes or ((vectors.shape[2], 1.0),):
        cut = vectors[..., :size].detach().requires_grad_()
        with torch.enable_grad():
            unit = F.normalize(cut, dim=-1)
            # Similarities of few rows are in memory at a time, whatever the batch; their gradients meet here.
            leaf = unit.detach().requires_grad_()
            starts = range(0, len(rows), _ROWS if isinstance(loss, InfoNce) else max(1, len(rows)))
            for start in starts:
                some = rows[start : start + starts.step]
                row_sum = weight * loss.row_sum(leaf, some, records)
                row_sum.backward()
                total += row_sum.detach()
            if leaf.grad is not None:
                unit.backward(leaf.grad)
        if cut.grad is not None:
            gradient[..., :size] += cut.grad
    return total, gradient
