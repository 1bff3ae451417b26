"""The loss of tokens, some rows of logits at a time: `training.loss_rows`.

Where a vocabulary is large, the logits of all loss rows are the largest tensor of a step. Here no more than some rows
of them exist: the forward pass keeps the log-sum-exp of each row, the backward pass computes the logits once more and
turns them into their gradient at once. That is a third more of the head's products. The gradient of the weight is
summed over the parts in fp32.

Shapes: K rows, E their width, V columns of a rank's vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_lite.model.lm_head import Heads, finish_losses, sums_of_rows, turn_into_gradient
from megatron_lite.model.loss_terms import Terms
from megatron_lite.model.tensor_parallel import VocabParallelEmbedding, add_product, linear
from megatron_lite.parallel.collectives import Group


def loss_logits(
    heads: Heads, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int
) -> torch.Tensor | LogitsInParts:
    """`Heads.vocabulary_logits` for `row_losses`: where `loss_rows` says so, computed there, some rows at a time."""
    if not 0 < heads.loss_rows < len(vectors):
        return heads.vocabulary_logits(vectors, embedding, boundaries)
    biases = heads.bias, heads.boundary_bias
    operands = heads.operands(vectors, embedding)
    return LogitsInParts(*operands, biases, boundaries, heads.soft_cap, heads.loss_rows)


@dataclass(frozen=True)
class LogitsInParts:
    """Vectors, weight and biases that make logits [K, V]."""

    vectors: torch.Tensor  # [K, E]
    weight: torch.Tensor  # [V, E]
    biases: tuple[torch.Tensor | None, torch.Tensor | None]  # [V], of tokens and of borders
    boundaries: int  # the last rows, which have the second bias
    soft_cap: float | None
    rows: int  # at a time

    def __len__(self) -> int:
        return len(self.vectors)

    def losses(
        self, targets: torch.Tensor, group: Group, first: int, valid: int, terms: Terms | None
    ) -> torch.Tensor:
        """Those of `cross_entropy` for the logits, fp32 [K]."""
        form = _Form(len(self) - self.boundaries, self.soft_cap, self.rows, first, valid, terms)
        biases = self.biases if self.biases[1] is not None else (self.biases[0], self.biases[0])
        found: torch.Tensor = _Losses.apply(self.vectors, self.weight, *biases, targets, group, form)
        return found


@dataclass(frozen=True)
class _Form:
    tokens: int  # rows before those of borders
    soft_cap: float | None
    rows: int
    first: int
    valid: int
    terms: Terms | None

    def parts(self, rows: int) -> Iterator[tuple[slice, int]]:
        """Rows of each part, and whose bias they have: 0 or 1."""
        for which, begin, end in ((0, 0, self.tokens), (1, self.tokens, rows)):
            for start in range(begin, end, self.rows):
                yield slice(start, min(start + self.rows, end)), which

    def logits(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """And their growth with the product, where they are capped."""
        logits = linear(rows, weight, bias)
        if self.soft_cap is None:
            return logits, None
        bent = torch.tanh(logits / self.soft_cap)
        return self.soft_cap * bent, 1 - bent.square()


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors, weight, bias, border_bias, targets, group, form):  # type: ignore[no-untyped-def]
        columns, biases = (form.first, form.valid), (bias, border_bias)
        found = []
        for part, which in form.parts(len(vectors)):
            logits, _ = form.logits(vectors[part], weight, biases[which])
            found.append(sums_of_rows(logits, targets[part], *columns, form.terms))
        log_sums, picked, *sums = (
            torch.cat(given) for given in zip(*found, strict=True) if given[0] is not None
        )
        losses, log_sums = finish_losses(log_sums, picked, sums[0] if sums else None, group, form.terms)
        ctx.save_for_backward(vectors, weight, bias, border_bias, targets, log_sums)
        ctx.form = form
        return losses

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        vectors, weight, *biases, targets, log_sums = ctx.saved_tensors
        form, of_vectors = ctx.form, torch.empty_like(vectors)
        of_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        of_biases = [None if bias is None else torch.zeros_like(bias, dtype=torch.float32) for bias in biases]
        for part, which in form.parts(len(vectors)):
            rows = vectors[part]
            logits, growth = form.logits(rows, weight, biases[which])
            given = targets[part], log_sums[part], grad[part], form.first, form.valid
            turn_into_gradient(logits, *given, form.terms)
            if growth is not None:
                logits *= growth
            of_vectors[part] = linear(logits, weight.T)
            add_product(of_weight, logits, rows, begun=part.start > 0)
            if (of_bias := of_biases[which]) is not None:
                of_bias += logits.sum(0, dtype=torch.float32)
        found = [None if total is None else total.to(weight.dtype) for total in (of_weight, *of_biases)]
        return of_vectors, *found, None, None, None
