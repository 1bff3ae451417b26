"""The output side: from the last block's hidden state to the losses.

Models predict tokens through their word embedding, after the final norm of pre-norm models. Options replace that by a
matrix of its own (GLM-4), and add a layer before it (BERT; to the smaller embedding in ALBERT) and a bias, BERT's
sentence head (classes at CLS), and SpanBERT's boundary head (a span's tokens from the tokens around it). The plane
`objective` decides which head predicts a token: `find_loss_rows`.

Heads compute only the loss rows: the tokens that have a loss. Under tensor parallelism all ranks hold all loss rows;
what is not split over the vocabulary is computed by each rank, with equal results and equal gradients.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised), V vocabulary; K loss rows that predict their
token, P of them once more from the borders of their span, M loss rows of CLS that predict a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.model.input.model_input import LossRows, ModelInput
from megatron_lite.model.kernels import fused
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.kernels.fused import Biased
from megatron_lite.model.layers.tensor_parallel import (
    Partition,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    sharded,
)
from megatron_lite.model.trunk.cross_entropy import cross_entropy
from megatron_lite.parallel.collectives import gather_tokens

if TYPE_CHECKING:
    from megatron_lite.model.input.task_batch import Parts
    from megatron_lite.model.layers.dense import Transform
    from megatron_lite.model.trunk.loss_in_parts import LogitsInParts
    from megatron_lite.model.trunk.loss_terms import Terms
    from megatron_lite.model.trunk.special_heads import SentenceHead, SpanBoundaryHead, TaskHead, TaskHeads


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
        self.loss_rows = loss_rows  # see `loss_logits`
        self.sentence: SentenceHead | None = None
        self.span_boundary: SpanBoundaryHead | None = None
        self.task: TaskHead | TaskHeads | None = None
        if config.sentence_classes or config.span_boundary_places or config.task_outputs or config.task_heads:
            from megatron_lite.model.trunk.special_heads import SentenceHead, SpanBoundaryHead, task_head

            self.sentence = SentenceHead(config) if config.sentence_classes else None
            self.span_boundary = SpanBoundaryHead(config) if config.span_boundary_places else None
            self.task = task_head(config, parallel)
        size = config.embedding_size or config.hidden_size
        self.projection: Transform | None = None
        if config.head_transform or config.embedding_size is not None:
            from megatron_lite.model.layers.dense import Transform

            self.projection = Transform(config.hidden_size, size, config)
        # Its weight is the output projection, where that is not the word embedding.
        self.vocabulary = None if config.tie_word_embeddings else VocabParallelEmbedding(config, parallel)
        self.dropout, self.sentence_dropout = config.final_dropout, config.sentence_dropout
        self.scale = config.hidden_size**-0.5 if config.scale_head else 1 / config.width_ratio
        self.soft_cap = config.logit_soft_cap
        self.bias = _token_biases(config, parallel) if config.head_bias else None
        # SpanBERT's tokens that are predicted from their span's borders have biases of their own.
        self.boundary_bias = (
            _token_biases(config, parallel) if config.head_bias and config.span_boundary_places else None
        )

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
        classes = rows.new_zeros(0, 2)
        if self.sentence is not None:
            labelled = final_layernorm(hidden.index_select(0, loss_rows.sentences))
            # The embedding has no MLP: the salt of that place is free.
            dropped = None if dropout is None else dropout.features(self.sentence_dropout, -1, "expanded")
            if dropped is not None:
                dropped = dropped.of_rows(loss_rows.sentences)
            classes = self.sentence(labelled, dropped, loss_rows.objectives)
        return rows, classes

    def task_rows(
        self,
        layers: Sequence[torch.Tensor],
        rows: torch.Tensor,
        final_layernorm: nn.Module,
        dropout: Dropout | None,
        parts: Parts | None = None,
    ) -> torch.Tensor:
        """Outputs of the task's head for rows int [N]: [N, outputs]; with a pool of the parts, [P, outputs].

        Args: layers: [T, D] of the last block; for a mix those of the embeddings and of all. dropout: of all rows.
        """
        assert self.task is not None
        pooler: Any = self.projection if self.task.pooled is None else getattr(self.sentence, "dense", None)
        return self.task.outputs(layers, rows, final_layernorm, dropout, parts, pooler)

    def vocabulary_logits(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int = 0
    ) -> torch.Tensor:
        """[..., E] -> [..., local V with padding]: so the rows of all products begin at 16 bytes.

        Args: boundaries: P, the last rows, which are predicted from the borders of their span.
        """
        vectors, weight = self._operands(vectors, embedding)
        if self.boundary_bias is None:
            return self._capped(linear(vectors, weight, self.bias))
        tokens, borders = vectors.split([len(vectors) - boundaries, boundaries])
        parts = (tokens, self.bias), (borders, self.boundary_bias)
        return self._capped(torch.cat([linear(rows, weight, bias) for rows, bias in parts]))

    def loss_logits(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int
    ) -> torch.Tensor | LogitsInParts:
        """`vocabulary_logits` for `row_losses`: where `loss_rows` says so, computed there, some rows at a time."""
        if not 0 < self.loss_rows < len(vectors):
            return self.vocabulary_logits(vectors, embedding, boundaries)
        from megatron_lite.model.trunk.loss_in_parts import LogitsInParts

        biases = self.bias, self.boundary_bias
        return LogitsInParts(
            *self._operands(vectors, embedding), biases, boundaries, self.soft_cap, self.loss_rows
        )

    def _operands(
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
    logits: torch.Tensor | LogitsInParts,
    classes: torch.Tensor,
    targets: torch.Tensor,
    embedding: VocabParallelEmbedding,
    terms: Terms | None = None,
) -> torch.Tensor:
    """Cross entropy in nats, fp32 [K + P + M], equal on all tensor-parallel ranks.

    Args: logits: [K + P, local V with padding], or see `loss_logits`. classes: [M, 2]. targets: int [K + P + M].
    """
    vocabulary, sentence = targets.split([len(logits), len(classes)])
    of_rank = embedding.parallel.group, embedding.first, embedding.local_vocab
    if isinstance(logits, torch.Tensor):
        losses = cross_entropy(logits, vocabulary, *of_rank, terms)
    else:
        losses = logits.losses(vocabulary, *of_rank, terms)
    if not len(classes):
        return losses + classes.float().sum()  # an empty sum: an unused head gets a gradient of zero
    return torch.cat([losses, F.cross_entropy(classes.float(), sentence.long(), reduction="none")])


def sum_losses(
    rows: tuple[torch.Tensor | LogitsInParts, torch.Tensor],
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
        from megatron_lite.model.trunk.loss_terms import Terms

        terms = Terms(smoothing, embedding.vocab_size, z_loss)
    weighted = row_losses(*rows, batch.targets, embedding, terms) * weights
    columns = [weighted.detach(), weights]
    if terms is not None and z_loss:
        columns = terms.apart(*columns)
    sums = torch.zeros(num_losses, len(columns), device=weights.device)
    sums.index_add_(0, batch.loss_rows.objectives, torch.stack(columns, dim=1))
    return weighted.sum(), sums
