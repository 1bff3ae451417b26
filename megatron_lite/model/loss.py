"""The loss of a language model: cross entropy over a vocabulary that ranks share, its additions, and its chunks.

`cross_entropy` saves the logits, the largest tensor of a step, and turns them into their gradient in place.

Where a vocabulary is large (`training.loss_rows`), no more than some rows of logits exist at a time: the forward pass
keeps the log-sum-exp of each row, the backward pass computes the logits once more and turns them into their gradient
at once. That is a third more of the head's products. The gradient of the weight is summed over the parts in fp32.

Shapes: K rows, E their width, V columns of a rank's vocabulary with padding; P and M as in lm_head.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite.model.kernels.cross_entropy import log_sums_kernel, write_gradient_kernel
from megatron_lite.model.kernels.fused import has_kernels
from megatron_lite.model.lm_head import Heads
from megatron_lite.model.micro_batch import MicroBatch
from megatron_lite.model.tensor_parallel import VocabParallelEmbedding, add_product, linear
from megatron_lite.parallel.collectives import SINGLE, Group, all_reduce

_CHUNK_BYTES = 1 << 20  # fp32 bytes per chunk of rows: what a core's L2 cache holds


@dataclass
class Terms:
    """Label smoothing: `smoothing` of a target's probability goes to all columns, `share` to each.

    z-loss: `z_loss` times the square of the log-sum-exp (arXiv:2204.02311).
    """

    smoothing: float
    columns: int  # of the whole vocabulary, padding left out
    z_loss: float = 0.0
    of_z: torch.Tensor | None = None  # z-loss of each row, fp32 [K], of the last forward pass

    @property
    def share(self) -> float:
        return self.smoothing / self.columns

    def of_rows(
        self, log_sums: torch.Tensor, picked: torch.Tensor, sums: torch.Tensor | None
    ) -> torch.Tensor:
        """The addition to each row's loss, all fp32 [K]. Args: as `finish_losses` has them."""
        self.of_z = self.z_loss * log_sums.square()
        return self.of_z if sums is None else self.of_z + self.smoothing * picked - self.share * sums

    def growth(self, log_sums: torch.Tensor) -> torch.Tensor:
        """By how much z-loss changes with the log-sum-exp."""
        return 2 * self.z_loss * log_sums

    def apart(self, losses: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """Weighted losses without z-loss, weights, and weighted z-loss, each [K and rows of other heads]."""
        assert self.of_z is not None
        # Rows of other heads (classes) follow those of the vocabulary and have no z-loss.
        of_z = torch.zeros_like(losses)
        of_z[: len(self.of_z)] = self.of_z * weights[: len(self.of_z)]
        return [losses - of_z, weights, of_z]

    def add_gradient(
        self,
        gradient: torch.Tensor,
        local: torch.Tensor,
        is_here: torch.Tensor,
        grad: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> None:
        """Args:
        gradient: of the cross entropy, [K, valid columns], each row times 1 + `growth` but for the target's part.
        local, is_here: the targets' columns, and whether they are here.
        """
        if self.smoothing:
            gradient -= (self.share * grad)[:, None].to(gradient.dtype)
        back = (self.smoothing + self.growth(log_sums)) * grad
        back = back.masked_fill(~is_here, 0.0).to(gradient.dtype)
        gradient.scatter_add_(1, local[:, None], back[:, None])


def row_losses(
    logits: torch.Tensor | ChunkedLogits,
    classes: torch.Tensor,
    targets: torch.Tensor,
    embedding: VocabParallelEmbedding,
    terms: Terms | None = None,
) -> torch.Tensor:
    """Cross entropy in nats, fp32 [K + P + M], equal on all tensor-parallel ranks.

    Args: logits: [K + P, local V with padding], or `ChunkedLogits`. classes: [M, 2]. targets: int [K + P + M].
    """
    vocabulary, sentence = targets.split([len(logits), len(classes)])
    of_rank = embedding.parallel.group, embedding.first, embedding.local_vocab
    if isinstance(logits, torch.Tensor):
        losses = cross_entropy(logits, vocabulary, *of_rank, terms)
    else:
        losses = logits.losses(vocabulary, *of_rank, terms)
    if not len(classes):
        return losses + classes.float().sum() if classes.requires_grad else losses  # zeros for an unused head
    return torch.cat([losses, F.cross_entropy(classes.float(), sentence.long(), reduction="none")])


def sum_losses(
    rows: tuple[torch.Tensor | ChunkedLogits, torch.Tensor],
    batch: MicroBatch,
    embedding: VocabParallelEmbedding,
    num_losses: int,
    smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss sum, in evaluation of the cross entropy alone.

    And without gradient, fp32 [objectives, 2 or 3]: loss sum (without z-loss), weight and z-loss of each objective.

    Args:
        rows: logits and classes, see `row_losses`.
        smoothing: part of a target token's probability that is spread over the vocabulary.
        z_loss: factor of the squared log-sum-exp of a token's logits.
    """
    terms, weights = None, batch.weights
    # In training only: evaluation reports the plain cross entropy, comparable between settings.
    if torch.is_grad_enabled() and (smoothing or z_loss):
        terms = Terms(smoothing, embedding.vocab_size, z_loss)
    weighted = row_losses(*rows, batch.targets, embedding, terms) * weights
    columns = [weighted.detach(), weights]
    if terms is not None and z_loss:
        columns = terms.apart(*columns)
    sums = torch.zeros(num_losses, len(columns), device=weights.device)
    # [objectives, 2 or 3]: one launch for all objectives.
    sums.index_add_(0, batch.loss_positions.objectives, torch.stack(columns, dim=1))
    return weighted.sum(), sums


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, first, valid, terms):  # type: ignore[no-untyped-def]
        found = sums_of_rows(logits, targets, first, valid, terms)
        losses, log_sums = finish_losses(*found, group, terms)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.columns, ctx.terms = (first, valid), terms
        return losses

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (logits, targets, log_sums), (first, valid) = ctx.saved_tensors, ctx.columns
        # Detached: autograd would watch a saved tensor for changes, and this one is used up.
        turn_into_gradient(logits.detach(), targets, log_sums, grad, first, valid, ctx.terms)
        return logits, None, None, None, None, None


def sums_of_rows(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int, terms: Terms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """fp32 [K] of this rank's columns: log-sum-exps, targets' logits or 0, and sums for smoothing."""
    sums = logits[:, :valid].sum(-1, dtype=torch.float32) if terms is not None and terms.smoothing else None
    return *_functions(logits)[0](logits, targets, first, valid), sums


def finish_losses(
    log_sums: torch.Tensor, picked: torch.Tensor, sums: torch.Tensor | None, group: Group, terms: Terms | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and log-sum-exps of the whole vocabulary, fp32 [K], from `sums_of_rows` of each rank."""
    if group.size > 1:
        # log-sum-exp over the ranks' shards, stable by their maximum; [K] numbers travel instead of [K, V] logits.
        most = all_reduce(log_sums.clone(), group, dist.ReduceOp.MAX)
        log_sums = all_reduce((log_sums - most).exp(), group).log() + most
        for summed in (picked, sums):
            if summed is not None:
                all_reduce(summed, group)
    losses = log_sums - picked
    if terms is not None:
        losses += terms.of_rows(log_sums, picked, sums)
    return losses, log_sums


def turn_into_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
    terms: Terms | None,
) -> None:
    """Overwrites logits [K, columns of this rank] by the gradient of sum(grad * losses)."""
    # d loss / d logit = softmax (1 + growth) - one-hot. The kernel multiplies both by `of_sums`; `add_gradient` gives
    # the one-hot its part back.
    of_sums = grad if terms is None else grad * (1 + terms.growth(log_sums))
    _functions(logits)[1](logits, targets, log_sums, of_sums.contiguous(), first, valid)
    # `valid` 0: a rank whose columns are all padding has nothing to smooth.
    if terms is not None and valid:
        terms.add_gradient(logits[:, :valid], *local_columns(targets, first, valid), grad, log_sums)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = SINGLE,
    first: int = 0,
    valid: int | None = None,
    terms: Terms | None = None,
) -> torch.Tensor:
    """Per-row cross entropy in nats, without gathering the vocabulary.

    Args:
        logits: [K rows, columns of this rank's vocabulary], any float dtype. Overwritten by the backward pass: use it
            nowhere else.
        targets: int labels [K], global ids, equal on all ranks of the group.
        group: the ranks whose shards make up the vocabulary.
        first: global id of this rank's first column.
        valid: columns that are no padding; None = all.
    Returns: fp32 [K], equal on all ranks of the group.
    Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    valid = logits.shape[1] if valid is None else valid
    return _CrossEntropy.apply(logits, targets, group, first, valid, terms)


def _functions(logits):  # type: ignore[no-untyped-def]
    """Those that sum, and that write the gradient."""
    if not has_kernels(logits):
        return _sums_by_torch, _gradient_by_torch
    return log_sums_kernel, write_gradient_kernel


def _sums_by_torch(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # In chunks that stay in the L2 cache: an fp32 copy of all logits would be the largest tensor of the step.
    real = logits[:, :valid]
    chunks = real.split(max(1, _CHUNK_BYTES // (4 * logits.shape[1])))
    sums = torch.cat([chunk.float().logsumexp(-1) for chunk in chunks])
    picked = torch.zeros_like(sums)
    if valid:  # the last ranks of a small vocabulary may hold nothing but padding
        local, is_here = local_columns(targets, first, valid)
        picked = real.gather(1, local[:, None]).squeeze(1).float().masked_fill(~is_here, 0.0)
    return sums, picked


def _gradient_by_torch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
) -> None:
    # The logits become their own gradient; columns of padding get none, so that their weights stay zero.
    logits[:, valid:] = 0.0
    if not valid:
        return
    local, is_here = local_columns(targets, first, valid)
    rows = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        probabilities = (logits[part, :valid].float() - log_sums[part, None]).exp_()
        probabilities.scatter_add_(1, local[part, None], -is_here[part, None].float())
        logits[part, :valid] = probabilities.mul_(grad[part, None]).to(logits.dtype)


def local_columns(targets: torch.Tensor, first: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' columns, and whether they are here; column 0 stands for those that are not."""
    local = targets.long() - first
    is_here = (local >= 0) & (local < valid)
    return local.masked_fill(~is_here, 0), is_here


def loss_logits(
    heads: Heads, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int
) -> torch.Tensor | ChunkedLogits:
    """`Heads.vocabulary_logits` for `row_losses`: where `loss_rows` says so, computed there, some rows at a time."""
    if not 0 < heads.loss_rows < len(vectors):
        return heads.vocabulary_logits(vectors, embedding, boundaries)
    biases = heads.bias, heads.boundary_bias
    operands = heads.operands(vectors, embedding)
    return ChunkedLogits(*operands, biases, boundaries, heads.soft_cap, heads.loss_rows)


@dataclass(frozen=True)
class ChunkedLogits:
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
        form = _Chunks(len(self) - self.boundaries, self.soft_cap, self.rows, first, valid, terms)
        # The function takes two biases; where borders have none of their own, the tokens' stands in for it.
        biases = self.biases if self.biases[1] is not None else (self.biases[0], self.biases[0])
        found: torch.Tensor = _Losses.apply(self.vectors, self.weight, *biases, targets, group, form)
        return found


@dataclass(frozen=True)
class _Chunks:
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
        # Collectives after the loop: one for all rows, not one for each chunk.
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
            # Summed in fp32 over the chunks: half precision would lose the small terms.
            add_product(of_weight, logits, rows, begun=part.start > 0)
            if (of_bias := of_biases[which]) is not None:
                of_bias += logits.sum(0, dtype=torch.float32)
        found = [None if total is None else total.to(weight.dtype) for total in (of_weight, *of_biases)]
        return of_vectors, *found, None, None, None
