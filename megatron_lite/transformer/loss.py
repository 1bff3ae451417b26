"""The loss of a language model: cross entropy over a vocabulary that ranks share, its additions, and its chunks.

`cross_entropy` saves the logits, the largest tensor of a step, and turns them into their gradient in place.

Where a vocabulary is large (`training.loss_rows`), only the logits of some predictions exist at a time: the forward
pass keeps the log-sum-exp of each prediction, the backward pass computes the logits once more and turns them into their
gradient at once. That is a third more of the head's products. The gradient of the weight is summed over the chunks in
fp32.

Shapes: K predictions of a token, E width of their vectors, V columns of a rank's vocabulary with padding; P and M as in
lm_head.py. `first` is the global id of a rank's first column, `valid` its columns that are no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite.parallel.collectives import SINGLE, Group, all_reduce
from megatron_lite.transformer.kernels.cross_entropy import log_sums_kernel, write_gradient_kernel
from megatron_lite.transformer.kernels.fused import has_kernels
from megatron_lite.transformer.lm_head import Heads
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.tensor_parallel import VocabParallelEmbedding, add_product, linear

_CHUNK_BYTES = 1 << 20  # fp32 bytes per chunk of rows: what a core's L2 cache holds


@dataclass
class LossTerms:
    """What label smoothing and z-loss add to the cross entropy of a prediction.

    Label smoothing: `smoothing` of a target's probability is spread evenly over all columns.
    z-loss: `z_loss` times the square of the log-sum-exp (arXiv:2204.02311).
    """

    smoothing: float
    columns: int  # of the whole vocabulary, padding left out
    z_loss: float = 0.0
    z_losses: torch.Tensor | None = None  # of each prediction, fp32 [K], of the last forward pass

    @property
    def smoothing_per_column(self) -> float:
        return self.smoothing / self.columns

    def additions(
        self, log_sums: torch.Tensor, target_logits: torch.Tensor, logit_sums: torch.Tensor | None
    ) -> torch.Tensor:
        """What is added to each cross entropy, all fp32 [K]. Args: as for `finish_losses`."""
        self.z_losses = self.z_loss * log_sums.square()
        if logit_sums is None:
            return self.z_losses
        return self.z_losses + self.smoothing * target_logits - self.smoothing_per_column * logit_sums

    def z_loss_slope(self, log_sums: torch.Tensor) -> torch.Tensor:
        """d z_loss / d log_sum, fp32 [K]."""
        return 2 * self.z_loss * log_sums

    def split_z_loss(self, losses: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """Weighted losses without z-loss, weights, and weighted z-loss, each [K + P + M]. Args: losses: weighted."""
        assert self.z_losses is not None
        # Predictions of classes follow those of tokens and have no z-loss.
        z_losses = torch.zeros_like(losses)
        z_losses[: len(self.z_losses)] = self.z_losses * weights[: len(self.z_losses)]
        return [losses - z_losses, weights, z_losses]

    def add_gradient(
        self,
        gradient: torch.Tensor,
        local_targets: torch.Tensor,
        is_local: torch.Tensor,
        grad: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> None:
        """Args:
        gradient: of the cross entropy, [K, valid], times 1 + `z_loss_slope` in all columns, the target's too.
        local_targets, is_local: see `find_local_targets`.
        grad: of the losses, [K].
        """
        if self.smoothing:
            gradient -= (self.smoothing_per_column * grad)[:, None].to(gradient.dtype)
        # The target's -1 must have neither the factor of the z-loss nor the smoothed share.
        correction = (self.smoothing + self.z_loss_slope(log_sums)) * grad
        correction = correction.masked_fill(~is_local, 0.0).to(gradient.dtype)
        gradient.scatter_add_(1, local_targets[:, None], correction[:, None])


def prediction_losses(
    logits: torch.Tensor | ChunkedLogits,
    classes: torch.Tensor,
    targets: torch.Tensor,
    embedding: VocabParallelEmbedding,
    terms: LossTerms | None = None,
) -> torch.Tensor:
    """Cross entropy in nats, fp32 [K + P + M], equal on all tensor-parallel ranks.

    Args: logits: [K + P, local V with padding], or `ChunkedLogits`. classes: [M, 2]. targets: int [K + P + M].
    """
    token_targets, class_targets = targets.split([len(logits), len(classes)])
    shard = embedding.parallel.group, embedding.first, embedding.local_vocab
    if isinstance(logits, torch.Tensor):
        losses = cross_entropy(logits, token_targets, *shard, terms)
    else:
        losses = logits.losses(token_targets, *shard, terms)
    if not len(classes):
        # No classes: adds 0, and gives a head that the batch does not use zeros as its gradient.
        return losses + classes.float().sum() if classes.requires_grad else losses
    class_losses = F.cross_entropy(classes.float(), class_targets.long(), reduction="none")
    return torch.cat([losses, class_losses])


def sum_losses(
    logits_and_classes: tuple[torch.Tensor | ChunkedLogits, torch.Tensor],
    batch: MicroBatch,
    embedding: VocabParallelEmbedding,
    num_losses: int,
    smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss sum, in evaluation of the cross entropy alone.

    And without gradient, fp64 [objectives, 2 or 3]: loss sum (without z-loss), weight and z-loss of each objective.

    Args:
        logits_and_classes: see `prediction_losses`.
        smoothing: part of a target token's probability that is spread over the vocabulary.
        z_loss: factor of the squared log-sum-exp of a token's logits.
    """
    terms, weights = None, batch.weights
    # In training only: evaluation reports the plain cross entropy, comparable between settings.
    if torch.is_grad_enabled() and (smoothing or z_loss):
        terms = LossTerms(smoothing, embedding.vocab_size, z_loss)
    weighted = prediction_losses(*logits_and_classes, batch.targets, embedding, terms) * weights
    columns = [weighted.detach(), weights]
    if terms is not None and z_loss:
        columns = terms.split_z_loss(*columns)
    sums = torch.zeros(num_losses, len(columns), dtype=torch.float64, device=weights.device)
    # [objectives, 2 or 3]: one launch for all objectives. It adds one prediction after another, so in fp64: in fp32 the
    # sum of 500,000 losses is off by up to 5e-3.
    sums.index_add_(0, batch.loss_positions.objectives, torch.stack(columns, dim=1).double())
    return weighted.sum(), sums


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = SINGLE,
    first: int = 0,
    valid: int | None = None,
    terms: LossTerms | None = None,
) -> torch.Tensor:
    """Cross entropy of each prediction in nats, without gathering the vocabulary.

    Args:
        logits: [K, columns of this rank's vocabulary], any float dtype. Overwritten by the backward pass: use it
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


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group, first, valid, terms):  # type: ignore[no-untyped-def]
        losses, log_sums = finish_losses(*local_sums(logits, targets, first, valid, terms), group, terms)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.columns, ctx.terms = (first, valid), terms
        return losses

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (logits, targets, log_sums), (first, valid) = ctx.saved_tensors, ctx.columns
        # Detached: autograd would watch a saved tensor for changes, and this one is used up.
        turn_into_gradient(logits.detach(), targets, log_sums, grad, first, valid, ctx.terms)
        return logits, None, None, None, None, None


def local_sums(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int, terms: LossTerms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """fp32 [K] of this rank's columns: log-sum-exps, targets' logits or 0, and sums of logits for smoothing."""
    logit_sums = None
    if terms is not None and terms.smoothing:
        logit_sums = logits[:, :valid].sum(-1, dtype=torch.float32)
    log_sums = log_sums_kernel if has_kernels(logits) else _log_sums_by_torch
    return *log_sums(logits, targets, first, valid), logit_sums


def finish_losses(
    log_sums: torch.Tensor,
    target_logits: torch.Tensor,
    logit_sums: torch.Tensor | None,
    group: Group,
    terms: LossTerms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and log-sum-exps of the whole vocabulary, fp32 [K], from `local_sums` of each rank."""
    if group.size > 1:
        # log-sum-exp over the ranks' shards, stable by their maximum; [K] numbers travel instead of [K, V] logits.
        largest = all_reduce(log_sums.clone(), group, dist.ReduceOp.MAX)
        log_sums = all_reduce((log_sums - largest).exp(), group).log() + largest
        for summed in (target_logits, logit_sums):
            if summed is not None:
                all_reduce(summed, group)
    losses = log_sums - target_logits
    if terms is not None:
        losses += terms.additions(log_sums, target_logits, logit_sums)
    return losses, log_sums


def turn_into_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
    terms: LossTerms | None,
) -> None:
    """Overwrites logits [K, columns of this rank] by the gradient of sum(grad * losses)."""
    # d loss / d logit = softmax (1 + z_loss_slope) - one-hot. The kernel multiplies both by `grad_log_sums`;
    # `add_gradient` corrects the one-hot.
    grad_log_sums = grad if terms is None else grad * (1 + terms.z_loss_slope(log_sums))
    write_gradient = write_gradient_kernel if has_kernels(logits) else _write_gradient_by_torch
    write_gradient(logits, targets, log_sums, grad_log_sums.contiguous(), first, valid)
    # `valid` 0: a rank whose columns are all padding has nothing to smooth.
    if terms is not None and valid:
        terms.add_gradient(logits[:, :valid], *find_local_targets(targets, first, valid), grad, log_sums)


def _log_sums_by_torch(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the operator `log_sums`."""
    # In chunks that stay in the L2 cache: an fp32 copy of all logits would be the largest tensor of the step.
    real = logits[:, :valid]
    chunks = real.split(max(1, _CHUNK_BYTES // (4 * logits.shape[1])))
    log_sums = torch.cat([chunk.float().logsumexp(-1) for chunk in chunks])
    target_logits = torch.zeros_like(log_sums)
    if valid:  # the last ranks of a small vocabulary may hold nothing but padding
        local_targets, is_local = find_local_targets(targets, first, valid)
        target_logits = real.gather(1, local_targets[:, None]).squeeze(1).float().masked_fill(~is_local, 0.0)
    return log_sums, target_logits


def _write_gradient_by_torch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
) -> None:
    """As the operator `write_gradient`."""
    # The logits become their own gradient; columns of padding get none, so that their weights stay zero.
    logits[:, valid:] = 0.0
    if not valid:
        return
    local_targets, is_local = find_local_targets(targets, first, valid)
    chunk_size = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(logits), chunk_size):
        chunk = slice(start, start + chunk_size)
        probabilities = (logits[chunk, :valid].float() - log_sums[chunk, None]).exp_()
        probabilities.scatter_add_(1, local_targets[chunk, None], -is_local[chunk, None].float())
        logits[chunk, :valid] = probabilities.mul_(grad[chunk, None]).to(logits.dtype)


def find_local_targets(targets: torch.Tensor, first: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' columns on this rank, and whether they are here; column 0 stands for those that are not. [K]"""
    local = targets.long() - first
    is_local = (local >= 0) & (local < valid)
    return local.masked_fill(~is_local, 0), is_local


def loss_logits(
    heads: Heads, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int
) -> torch.Tensor | ChunkedLogits:
    """`Heads.vocabulary_logits` for `prediction_losses`; where `loss_rows` says so, computed there, in chunks."""
    if not 0 < heads.loss_rows < len(vectors):
        return heads.vocabulary_logits(vectors, embedding, boundaries)
    biases = heads.bias, heads.boundary_bias
    operands = heads.operands(vectors, embedding)
    return ChunkedLogits(*operands, biases, boundaries, heads.soft_cap, heads.loss_rows)


@dataclass(frozen=True)
class ChunkedLogits:
    """Vectors, weight and biases that make logits [K, V], which are never computed all at once."""

    vectors: torch.Tensor  # [K, E]
    weight: torch.Tensor  # [V, E]
    biases: tuple[torch.Tensor | None, torch.Tensor | None]  # [V], of tokens and of boundaries
    boundaries: int  # the last predictions, which have the second bias
    soft_cap: float | None
    chunk_size: int  # predictions

    def __len__(self) -> int:
        return len(self.vectors)

    def losses(
        self, targets: torch.Tensor, group: Group, first: int, valid: int, terms: LossTerms | None
    ) -> torch.Tensor:
        """`cross_entropy` of the logits, fp32 [K]."""
        chunks = _Chunks(len(self) - self.boundaries, self.soft_cap, self.chunk_size, first, valid, terms)
        # The function takes two biases; where boundaries have none, the tokens' stands in for it.
        biases = self.biases if self.biases[1] is not None else (self.biases[0], self.biases[0])
        losses: torch.Tensor = _ChunkedCrossEntropy.apply(
            self.vectors, self.weight, *biases, targets, group, chunks
        )
        return losses


@dataclass(frozen=True)
class _Chunks:
    tokens: int  # predictions before those of boundaries
    soft_cap: float | None
    size: int
    first: int
    valid: int
    terms: LossTerms | None

    def slices(self, count: int) -> Iterator[tuple[slice, int]]:
        """The predictions of each chunk, and which bias they have: 0 or 1. Args: count: K."""
        for bias_index, begin, end in ((0, 0, self.tokens), (1, self.tokens, count)):
            for start in range(begin, end, self.size):
                yield slice(start, min(start + self.size, end)), bias_index

    def logits(
        self, vectors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits, and their derivative by the product where they are capped."""
        logits = linear(vectors, weight, bias)
        if self.soft_cap is None:
            return logits, None
        bent = torch.tanh(logits / self.soft_cap)
        return self.soft_cap * bent, 1 - bent.square()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors, weight, bias, boundary_bias, targets, group, chunks):  # type: ignore[no-untyped-def]
        biases, sums = (bias, boundary_bias), []
        for chunk, bias_index in chunks.slices(len(vectors)):
            logits, _ = chunks.logits(vectors[chunk], weight, biases[bias_index])
            sums.append(local_sums(logits, targets[chunk], chunks.first, chunks.valid, chunks.terms))
        # Collectives after the loop: one for all predictions, not one for each chunk.
        log_sums, target_logits, *logit_sums = (
            torch.cat(each) for each in zip(*sums, strict=True) if each[0] is not None
        )
        losses, log_sums = finish_losses(
            log_sums, target_logits, logit_sums[0] if logit_sums else None, group, chunks.terms
        )
        ctx.save_for_backward(vectors, weight, bias, boundary_bias, targets, log_sums)
        ctx.chunks = chunks
        return losses

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        vectors, weight, *biases, targets, log_sums = ctx.saved_tensors
        chunks, grad_vectors = ctx.chunks, torch.empty_like(vectors)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        grad_biases = [
            None if bias is None else torch.zeros_like(bias, dtype=torch.float32) for bias in biases
        ]
        for chunk, bias_index in chunks.slices(len(vectors)):
            logits, slope = chunks.logits(vectors[chunk], weight, biases[bias_index])
            turn_into_gradient(
                logits, targets[chunk], log_sums[chunk], grad[chunk], chunks.first, chunks.valid, chunks.terms
            )
            if slope is not None:
                logits *= slope
            grad_vectors[chunk] = linear(logits, weight.T)
            # Summed in fp32 over the chunks: half precision would lose the small terms.
            add_product(grad_weight, logits, vectors[chunk], begun=chunk.start > 0)
            if (grad_bias := grad_biases[bias_index]) is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
        grads = [None if total is None else total.to(weight.dtype) for total in (grad_weight, *grad_biases)]
        return grad_vectors, *grads, None, None, None
