"""The output side: from the last block's hidden state to the losses.

Models predict tokens through their word embedding, after the final norm of pre-norm models. Options replace that by a
matrix of its own (GLM-4), and add a layer before it (BERT; to the smaller embedding in ALBERT) and a bias, BERT's
sentence head (classes at CLS), and SpanBERT's boundary head (a span's tokens from the tokens around it). The plane
`objective` decides which head predicts a token: `find_loss_rows`.

Heads compute only the loss rows: the tokens that have a loss. Under tensor parallelism all ranks hold all loss rows;
what is not split over the vocabulary is computed by each rank, with equal results and equal gradients.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised), V vocabulary; K loss rows that predict their
token, P of them once more from the borders of their span, M loss rows of CLS that predict a class.

`cross_entropy` saves the logits, the largest tensor of a step, and turns them into their gradient in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.model.kernels import fused
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.kernels.fused import Biased
from megatron_lite.model.model_input import LossRows, ModelInput
from megatron_lite.model.tensor_parallel import (
    Partition,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    sharded,
)
from megatron_lite.parallel.collectives import SINGLE, Group, all_reduce, gather_tokens

if TYPE_CHECKING:
    from megatron_lite.model.dense import Transform
    from megatron_lite.model.loss_terms import Terms
    from megatron_lite.model.task_heads import SentenceHead, SpanBoundaryHead, TaskHead, TaskHeads

_CHUNK_BYTES = 1 << 20  # fp32 bytes per chunk of rows: what a core's L2 cache holds


def _token_biases(config: ModelConfig, parallel: TensorParallel) -> nn.Parameter:
    """A number for each token of this rank's vocabulary."""
    assert config.vocab_size is not None
    rows = padded_vocab_size(config.vocab_size, parallel.group.size) // parallel.group.size
    return sharded(nn.Parameter(torch.empty(rows)), Partition(dim=0, rows=config.vocab_size))


class Heads(nn.Module):
    """Everything after the final LayerNorm except the word embedding, which belongs to the input side."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, loss_rows: int = 0):
        super().__init__()
        self.parallel = parallel
        self.loss_rows = loss_rows  # see chunked_loss.py
        self.sentence: SentenceHead | None = None
        self.span_boundary: SpanBoundaryHead | None = None
        self.task: TaskHead | TaskHeads | None = None
        if config.sentence_classes or config.span_boundary_places or config.task_outputs or config.task_heads:
            from megatron_lite.model.task_heads import SentenceHead, SpanBoundaryHead, task_head

            self.sentence = SentenceHead(config) if config.sentence_classes else None
            self.span_boundary = SpanBoundaryHead(config) if config.span_boundary_places else None
            self.task = task_head(config, parallel)
        size = config.embedding_size or config.hidden_size
        self.projection: Transform | None = None
        if config.head_transform or config.embedding_size is not None:
            from megatron_lite.model.dense import Transform

            self.projection = Transform(config.hidden_size, size, config)
        # Its weight is the output projection, where that is not the word embedding.
        self.vocabulary = None if config.tie_word_embeddings else VocabParallelEmbedding(config, parallel)
        self.dropout, self.sentence_dropout = config.final_dropout, config.sentence_dropout
        self.scale = config.hidden_size**-0.5 if config.scale_head else 1 / config.width_ratio
        self.soft_cap = config.logit_soft_cap
        self.bias = _token_biases(config, parallel) if config.head_bias else None
        # SpanBERT's tokens that are predicted from their span's borders have biases of their own.
        has_borders = config.head_bias and config.span_boundary_places
        self.boundary_bias = _token_biases(config, parallel) if has_borders else None

    def forward(
        self,
        hidden: torch.Tensor,
        loss_rows: LossRows,
        final_layernorm: nn.Module,
        dropout: Dropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last block's [T, D] -> the vectors that predict tokens, [K + P, E], and class logits [M, 2].

        Args: dropout: of all rows of `hidden`.
        """
        if self.parallel.sequence_parallel:
            hidden = gather_tokens(hidden, self.parallel.group)
        rows = final_layernorm(hidden.index_select(0, loss_rows.tokens))
        last = None if dropout is None else dropout.features(self.dropout, -1, "final")
        if last is not None:
            rows = fused.add(None, Biased(rows), last.of_rows(loss_rows.tokens))
        if self.projection is not None:
            rows = self.projection(rows)
        if self.span_boundary is not None:
            *borders, places = loss_rows.borders.unbind(1)
            before, after = (final_layernorm(hidden.index_select(0, border)) for border in borders)
            rows = torch.cat([rows, self.span_boundary(before, after, places)])
        classes = rows.new_empty(0, 2)
        if self.sentence is not None:
            labelled = final_layernorm(hidden.index_select(0, loss_rows.sentences))
            # The embedding has no MLP: the salt of that place is free.
            dropped = None if dropout is None else dropout.features(self.sentence_dropout, -1, "expanded")
            if dropped is not None:
                dropped = dropped.of_rows(loss_rows.sentences)
            classes = self.sentence(labelled, dropped, loss_rows.objectives)
        return rows, classes

    def vocabulary_logits(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int = 0
    ) -> torch.Tensor:
        """[..., E] -> [..., local V with padding]: so the rows of all products begin at 16 bytes.

        Args: boundaries: P, the last rows, which are predicted from the borders of their span.
        """
        vectors, weight = self.operands(vectors, embedding)
        if self.boundary_bias is None:
            return self._capped(linear(vectors, weight, self.bias))
        tokens, borders = vectors.split([len(vectors) - boundaries, boundaries])
        parts = (tokens, self.bias), (borders, self.boundary_bias)
        return self._capped(torch.cat([linear(rows, weight, bias) for rows, bias in parts]))

    def operands(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors and weight of the product that makes logits."""
        weight = embedding.weight if self.vocabulary is None else self.vocabulary.weight
        return self.parallel.copy(vectors if self.scale == 1.0 else vectors * self.scale), weight

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def logits(self, normed: torch.Tensor, embedding: VocabParallelEmbedding) -> torch.Tensor:
        """The final LayerNorm's [..., D] -> [..., local V]."""
        rows = normed if self.projection is None else self.projection(normed)
        return self.vocabulary_logits(rows, embedding)[..., : embedding.local_vocab]


def row_losses(
    logits: Any,
    classes: torch.Tensor,
    targets: torch.Tensor,
    embedding: VocabParallelEmbedding,
    terms: Terms | None = None,
) -> torch.Tensor:
    """Cross entropy in nats, fp32 [K + P + M], equal on all tensor-parallel ranks.

    Args: logits: [K + P, local V with padding], or see chunked_loss.py. classes: [M, 2]. targets: int [K + P + M].
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
    rows: tuple[Any, torch.Tensor],
    batch: ModelInput,
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
    if torch.is_grad_enabled() and (smoothing or z_loss):
        from megatron_lite.model.loss_terms import Terms

        terms = Terms(smoothing, embedding.vocab_size, z_loss)
    weighted = row_losses(*rows, batch.targets, embedding, terms) * weights
    columns = [weighted.detach(), weights]
    if terms is not None and z_loss:
        columns = terms.apart(*columns)
    sums = torch.zeros(num_losses, len(columns), device=weights.device)
    sums.index_add_(0, batch.loss_rows.objectives, torch.stack(columns, dim=1))
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
    of_sums = grad if terms is None else grad * (1 + terms.growth(log_sums))
    _functions(logits)[1](logits, targets, log_sums, of_sums.contiguous(), first, valid)
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
    if not fused.has_kernels(logits):
        return _sums_by_torch, _gradient_by_torch
    from megatron_lite.model.kernels.cross_entropy import log_sums_kernel, write_gradient_kernel

    return log_sums_kernel, write_gradient_kernel


def _sums_by_torch(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
