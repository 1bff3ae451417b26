"""The heads: from the last block's hidden state to logits.

Models predict tokens through their word embedding, after the final norm of pre-norm models. Options replace the word
embedding by a separate matrix (GLM-4), and add a layer before it (BERT; to the smaller embedding in ALBERT) and a bias,
BERT's sentence head (classes at CLS), and SpanBERT's boundary head (a span's tokens from the tokens around it). The
field `objective` decides which head predicts a token: `find_loss_positions`.

Heads compute only the loss rows: the tokens that have a loss. Under tensor parallelism all ranks hold all loss rows;
layers that are not split over the vocabulary are computed by each rank, with equal results and equal gradients.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised), V vocabulary; K loss rows that predict their
token, P of them once more from the boundaries of their span, M loss rows of CLS that predict a class.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig, padded_vocab_size
from megatron_lite.parallel.collectives import gather_tokens
from megatron_lite.transformer.dense import Transform
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.loss_positions import LossPositions
from megatron_lite.transformer.task_heads import (
    SentenceHead,
    SpanBoundaryHead,
    TaskHead,
    TaskHeads,
    task_head,
)
from megatron_lite.transformer.tensor_parallel import (
    Partition,
    TensorParallel,
    VocabParallelEmbedding,
    linear,
    sharded,
)


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
        self.loss_rows = loss_rows  # see loss.py
        self.sentence: SentenceHead | None = None
        self.span_boundary: SpanBoundaryHead | None = None
        self.task: TaskHead | TaskHeads | None = None
        if (
            config.sentence_classes
            or config.span_boundary_places
            or config.task_head.outputs
            or config.task_head.heads
        ):
            self.sentence = SentenceHead(config) if config.sentence_classes else None
            self.span_boundary = SpanBoundaryHead(config) if config.span_boundary_places else None
            self.task = task_head(config, parallel)
        size = config.embedding_size or config.hidden_size
        self.projection: Transform | None = None
        if config.head_transform or config.embedding_size is not None:
            self.projection = Transform(config.hidden_size, size, config)
        # Its weight is the output projection, where that is not the word embedding.
        self.vocabulary = None if config.tie_word_embeddings else VocabParallelEmbedding(config, parallel)
        self.dropout, self.sentence_dropout = config.final_dropout, config.sentence_dropout
        # T5 scales the output of tied embeddings; muP divides by the width ratio.
        self.scale = config.hidden_size**-0.5 if config.scale_head else 1 / config.width_ratio
        self.soft_cap = config.logit_soft_cap
        self.bias = _token_biases(config, parallel) if config.head_bias else None
        # SpanBERT's predictions from the boundaries of a span have separate biases.
        has_boundaries = config.head_bias and config.span_boundary_places
        self.boundary_bias = _token_biases(config, parallel) if has_boundaries else None

    def forward(
        self,
        hidden: torch.Tensor,
        loss_positions: LossPositions[torch.Tensor],
        final_layernorm: nn.Module,
        dropout: Dropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last block's [T, D] -> the vectors that predict tokens, [K + P, E], and class logits [M, classes].

        Args: dropout: of all tokens of `hidden`.
        """
        # Tokens are chosen first: norm, layer and product run on the K tokens with loss, in GLM a fraction of T.
        if self.parallel.sequence_parallel:
            # Loss rows lie anywhere among the tokens, so they are chosen from all of them.
            hidden = gather_tokens(hidden, self.parallel.group)
        vectors = final_layernorm(hidden.index_select(0, loss_positions.tokens))
        final_dropout = None if dropout is None else dropout.features(self.dropout, -1, "final")
        if final_dropout is not None:
            vectors = fused.dropout_add(vectors, None, final_dropout.for_tokens(loss_positions.tokens))
        if self.projection is not None:
            vectors = self.projection(vectors)
        if self.span_boundary is not None:
            *boundaries, positions = loss_positions.boundaries.unbind(1)
            before, after = (final_layernorm(hidden.index_select(0, index)) for index in boundaries)
            vectors = torch.cat([vectors, self.span_boundary(before, after, positions)])
        classes = vectors.new_empty(0, 2)
        if self.sentence is not None:
            sentences = final_layernorm(hidden.index_select(0, loss_positions.sentences))
            # Layer -1 is the embedding, which has no MLP: the salt of this site is free.
            class_dropout = (
                None if dropout is None else dropout.features(self.sentence_dropout, -1, "expanded")
            )
            if class_dropout is not None:
                class_dropout = class_dropout.for_tokens(loss_positions.sentences)
            classes = self.sentence(sentences, class_dropout, loss_positions.objectives)
        return vectors, classes

    def vocabulary_logits(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding, boundaries: int = 0
    ) -> torch.Tensor:
        """[..., E] -> [..., local V with padding], so that the rows of all products are aligned to 16 bytes.

        Args: boundaries: P, how many of the last vectors come from the boundaries of a span.
        """
        vectors, weight = self.operands(vectors, embedding)
        if self.boundary_bias is None:
            return self._capped(linear(vectors, weight, self.bias))
        of_tokens, of_boundaries = vectors.split([len(vectors) - boundaries, boundaries])
        logits = linear(of_tokens, weight, self.bias), linear(of_boundaries, weight, self.boundary_bias)
        return self._capped(torch.cat(logits))

    def operands(
        self, vectors: torch.Tensor, embedding: VocabParallelEmbedding
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors and weight of the product that makes logits."""
        weight = embedding.weight if self.vocabulary is None else self.vocabulary.weight
        # `copy`: each rank has some columns of the vocabulary, and so one term of the vectors' gradient.
        return self.parallel.copy(vectors if self.scale == 1.0 else vectors * self.scale), weight

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def logits(self, normed: torch.Tensor, embedding: VocabParallelEmbedding) -> torch.Tensor:
        """The final LayerNorm's [..., D] -> [..., local V]."""
        vectors = normed if self.projection is None else self.projection(normed)
        # Without the padding that training keeps for alignment.
        return self.vocabulary_logits(vectors, embedding)[..., : embedding.local_vocab]
