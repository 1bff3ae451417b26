"""ELECTRA: a generator and a discriminator with common embeddings, trained together (arXiv:2003.10555).

The discriminator (prefix `encoder.`) owns the embeddings of words, positions and segments and their norm; the generator
shares them, and projects them to its width. With `electra.embeddings: detached` the generator owns them, and the
discriminator adds its own word table to them without giving them a gradient (DeBERTa-v3, arXiv:2111.09543).
Loss: the mean cross entropy of the generator over the chosen tokens, and `training.loss_weights` times the mean binary
cross entropy of the discriminator over all tokens.

Shapes: T tokens, D hidden size, K masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.losses import MASKED, REPLACED
from data_utils.common.seeds import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.models.electra.batch import MaskedPositions
from megatron_lite.models.electra.sampling import draw
from megatron_lite.parallel.collectives import gather_tokens
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.dense import Linear
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.loss import prediction_losses
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.tensor_parallel import VocabParallelEmbedding
from megatron_lite.transformer.trained_model import TrainedModel
from megatron_lite.transformer.transformer import Transformer

SHARED = ("word_embeddings", "position_embeddings", "segment_embeddings", "layernorm")  # of both embeddings
_SALT = 0x5BD1E995  # of the generator's dropout: an int32


class DetachedSum(VocabParallelEmbedding):
    """Another embedding without gradient plus this one's weight, which is initialized to 0."""

    other: VocabParallelEmbedding

    def __init__(self, config: ModelConfig, other: VocabParallelEmbedding):
        super().__init__(config, other.parallel)
        self.__dict__["other"] = other  # not registered as a submodule: its parameters keep one name

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # The discriminator's task would pull the generator's words apart: DeBERTa-v3's "gradient-disentangled"
        # embeddings.
        with torch.no_grad():
            given = self.other(tokens)
        return given + super().forward(tokens)


class ReplacedHead(nn.Module):
    """Logit that a token was replaced: [T, D] -> fp32 [T]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.classifier = Linear(config.hidden_size, 1)
        self.activation = config.activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.classifier(fused.activated(self.dense(hidden), self.activation)).squeeze(-1).float()


class DiscriminatorCounts:
    """Metrics of an evaluation, from counts of tokens: right, all, found, replaced, masked."""

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []

    def add(
        self, scores: torch.Tensor, label: torch.Tensor, is_real: torch.Tensor, is_chosen: torch.Tensor
    ) -> None:
        """Args: scores, label: fp32 [T]; is_real: bool [T]; is_chosen: bool [K]."""
        is_new, is_called_new = label > 0, scores > 0
        parts = ((is_new == is_called_new) & is_real, is_real, is_new & is_called_new, is_new, is_chosen)
        self._counts.append(torch.stack([part.sum() for part in parts]))

    def summary(self, context: ParallelContext) -> dict[str, float]:
        """Called by every rank: shares of tokens over all ranks."""
        own = torch.stack(self._counts).sum(0).double().tolist()
        right, tokens, found, replaced, chosen = context.sum_on_hosts(own)
        return {
            "replaced_accuracy": right / max(tokens, 1.0),
            "replaced_recall": found / max(replaced, 1.0),
            "generator_accuracy": 1.0 - replaced / max(chosen, 1.0),
        }


class Electra(TrainedModel):
    """Both stacks. Args: config: of the discriminator. is_detached: see `electra.embeddings`. options: of both."""

    def __init__(
        self,
        config: ModelConfig,
        generator: ModelConfig,
        is_detached: bool = False,
        *,
        num_losses: int = 1,
        **options: Any,
    ):
        super().__init__()
        self.num_losses = num_losses
        self.encoder = Transformer(config, **options)
        self.generator = Transformer(generator, **options)
        self.encoder.heads.projection = None  # the discriminator predicts no tokens
        if is_detached:
            words = self.generator.embedding.word_embeddings
            self.encoder.embedding.word_embeddings = DetachedSum(config, words)
        for name in SHARED if not is_detached else ():
            # One module under two parents: the first name counts, so checkpoints hold the table once, under
            # `encoder.`.
            setattr(self.generator.embedding, name, getattr(self.encoder.embedding, name))
        self.replaced = ReplacedHead(config)
        self._metrics: DiscriminatorCounts | None = None

    @property
    def before_use(self) -> Callable[[nn.Module], None]:  # type: ignore[override]
        return self.encoder.before_use

    @before_use.setter
    def before_use(self, call: Callable[[nn.Module], None]) -> None:
        self.encoder.before_use = self.generator.before_use = call

    def begin_evaluation(self) -> None:
        self._metrics = DiscriminatorCounts()

    def measures(self, context: ParallelContext, loss: float) -> dict[str, float]:
        assert self._metrics is not None
        metrics, self._metrics = self._metrics, None
        return metrics.summary(context)

    def end_evaluation(self) -> None:
        """The counts wait for `measures`."""

    def forward(self, batch: MicroBatch, *, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of both losses (fp32 scalar, nats); without gradient, fp32 [losses, 2]: sum and weight of each."""
        positions = batch.loss_positions.tokens
        # Two losses with a divisor each: the generator's at the K masked positions, the discriminator's at all T
        # tokens (0: padding).
        masked_weights, token_weights = batch.weights, batch.extra_weights
        masked, drawn = self.generated(batch)
        # A draw that happens to be right is a real token, as in the paper. Rows of padding have weight 0 and
        # change nothing.
        is_new = (masked_weights > 0) & (drawn != batch.targets)
        change = torch.where(masked_weights > 0, drawn - batch.tokens.index_select(0, positions), 0)
        # Adds a difference instead of writing: padding repeats a row, and a repeated index is undefined for a
        # write.
        tokens = batch.tokens.index_add(0, positions, change.to(batch.tokens.dtype))
        label = torch.zeros_like(token_weights).index_add(0, positions, is_new.float())
        scores = self.scores(replace(batch, tokens=tokens))
        wrong = F.binary_cross_entropy_with_logits(scores, label, reduction="none")
        if self._metrics is not None:
            self._metrics.add(scores, label, token_weights > 0, masked_weights > 0)
        sums = torch.zeros(self.num_losses, 2, device=wrong.device)
        # No gradient goes from the discriminator to the generator through the drawn tokens: a draw has none.
        loss = torch.zeros((), device=wrong.device)
        for which, losses, weights in ((MASKED, masked, masked_weights), (REPLACED, wrong, token_weights)):
            loss_sum = (losses * weights).sum()
            loss, sums[which.number] = loss + loss_sum, torch.stack([loss_sum.detach(), weights.sum()])
        return loss, sums

    def generated(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropies of the masked positions, fp32 [K], and a token drawn for each, int64 [K]."""
        generator, masked = self.generator, batch.extra_inputs
        assert isinstance(masked, MaskedPositions)
        hidden = generator.run(batch.tokens, batch.ids, batch.plan, self._other_dropout(batch.dropout))
        words = generator.embedding.word_embeddings
        vectors, classes = generator.heads(hidden, batch.loss_positions, generator.final_layernorm)
        logits = generator.heads.vocabulary_logits(vectors, words)
        # Before `prediction_losses`, which may write its gradient over the logits.
        drawn = draw(logits.detach(), masked.seed, masked.samples, masked.positions, words)
        return prediction_losses(logits, classes, batch.targets, words), drawn

    def scores(self, batch: MicroBatch) -> torch.Tensor:
        """The discriminator's logit of each token, see ReplacedHead: fp32 [T]."""
        encoder = self.encoder
        hidden = encoder.run(batch.tokens, batch.ids, batch.plan, batch.dropout)
        if encoder.parallel.sequence_parallel:
            # The head is whole on every rank and scores all tokens.
            hidden = gather_tokens(hidden, encoder.parallel.group)
        self.before_use(self.replaced)
        return self.replaced(encoder.final_layernorm(hidden))

    def _other_dropout(self, dropout: Dropout | None) -> Dropout | None:
        """The generator's dropout: keys that differ from the discriminator's, and its own head numbers."""
        if dropout is None:
            return None
        config, group = self.generator.config, self.generator.parallel.group
        return replace(
            dropout,
            # Masks are a hash of these keys: with the same ones both stacks would drop the same features.
            keys=dropout.keys ^ _SALT,
            step=dropout.step ^ _SALT,
            seed=derive_seed(dropout.seed, "generator") >> 1,
            first_head=config.num_attention_heads // group.size * group.rank,
        )
