"""ELECTRA: a generator and a discriminator with common embeddings, trained together (arXiv:2003.10555).

The discriminator (prefix `encoder.`) has the tables of words, positions and segments and their norm; the generator
reads the same, and projects them to its own width. With `electra.embeddings: detached` the generator has them, and the
discriminator adds a table of words of its own to them without giving them a gradient (DeBERTa-v3, arXiv:2111.09543).
Loss: the mean cross entropy of the generator over the chosen tokens, and `training.loss_weights` times the mean binary
cross entropy of the discriminator over all tokens.

Shapes: T tokens, D hidden size, K rows with loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.losses import MASKED, REPLACED
from data_utils.common.random_streams import derive_seed
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.dense import Linear
from megatron_lite.model.kernels import fused
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.kernels.fused import Biased
from megatron_lite.model.lm_head import row_losses
from megatron_lite.model.model_input import ModelInput
from megatron_lite.model.tensor_parallel import VocabParallelEmbedding
from megatron_lite.model.trained_model import TrainedModel
from megatron_lite.model.transformer import GLM
from megatron_lite.models.electra.batch import Places
from megatron_lite.models.electra.measures import Found
from megatron_lite.models.electra.sampling import draw
from megatron_lite.parallel.collectives import gather_tokens
from megatron_lite.parallel.context import ParallelContext

SHARED = ("word_embeddings", "position_embeddings", "segment_embeddings", "layernorm")  # of both embeddings
_SALT = 0x5BD1E995  # of the generator's dropout: an int32


class DetachedSum(VocabParallelEmbedding):
    """Words of another embedding, whose gradient stops here, plus the own weight, which begins as 0."""

    other: VocabParallelEmbedding

    def __init__(self, config: ModelConfig, other: VocabParallelEmbedding):
        super().__init__(config, other.parallel)
        self.__dict__["other"] = other  # no module of this one: its parameters have one name

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            given = self.other(tokens)
        return given + super().forward(tokens)


class ReplacedHead(nn.Module):
    """How much more likely a token is replaced than the text's, as a logarithm: [T, D] -> fp32 [T]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.classifier = Linear(config.hidden_size, 1)
        self.activation = config.activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (
            self.classifier(fused.activated(Biased(self.dense(hidden)), self.activation)).squeeze(-1).float()
        )


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
        self.encoder = GLM(config, **options)
        self.generator = GLM(generator, **options)
        self.encoder.heads.projection = None  # it predicts no tokens
        if is_detached:
            words = self.generator.embedding.word_embeddings
            self.encoder.embedding.word_embeddings = DetachedSum(config, words)
        for name in SHARED if not is_detached else ():
            setattr(self.generator.embedding, name, getattr(self.encoder.embedding, name))
        self.replaced = ReplacedHead(config)
        self._found: Found | None = None

    @property
    def before_use(self) -> Callable[[nn.Module], None]:  # type: ignore[override]
        return self.encoder.before_use

    @before_use.setter
    def before_use(self, call: Callable[[nn.Module], None]) -> None:
        self.encoder.before_use = self.generator.before_use = call

    def begin_evaluation(self) -> None:
        self._found = Found()

    def measures(self, context: ParallelContext, loss: float) -> dict[str, float]:
        assert self._found is not None
        found, self._found = self._found, None
        return found.summary(context)

    def end_evaluation(self) -> None:
        """The counts wait for `measures`."""

    def forward(self, batch: ModelInput, *, answers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of both losses (fp32 scalar, nats); without gradient, fp32 [losses, 2]: sum and weight of each."""
        rows = batch.loss_rows.tokens
        of_chosen, of_tokens = batch.weights.split([len(rows), len(batch.tokens)])
        masked, drawn = self.generated(batch)
        is_new = (of_chosen > 0) & (drawn != batch.targets)
        change = torch.where(of_chosen > 0, drawn - batch.tokens.index_select(0, rows), 0)
        tokens = batch.tokens.index_add(0, rows, change.to(batch.tokens.dtype))
        label = torch.zeros_like(of_tokens).index_add(0, rows, is_new.float())
        scores = self.scores(replace(batch, tokens=tokens))
        wrong = F.binary_cross_entropy_with_logits(scores, label, reduction="none")
        if self._found is not None:
            self._found.add(scores, label, of_tokens > 0, of_chosen > 0)
        sums = torch.zeros(self.num_losses, 2, device=wrong.device)
        loss = torch.zeros((), device=wrong.device)
        for which, losses, weights in ((MASKED, masked, of_chosen), (REPLACED, wrong, of_tokens)):
            own = (losses * weights).sum()
            loss, sums[which.number] = loss + own, torch.stack([own.detach(), weights.sum()])
        return loss, sums

    def generated(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropies of the rows with loss, fp32 [K], and a token that is drawn for each, int64 [K]."""
        generator, places = self.generator, batch.parts
        assert isinstance(places, Places)
        hidden = generator.run(batch.tokens, batch.ids, batch.plan, self._other_dropout(batch.dropout))
        words = generator.embedding.word_embeddings
        vectors, classes = generator.heads(hidden, batch.loss_rows, generator.final_layernorm)
        logits = generator.heads.vocabulary_logits(vectors, words)
        drawn = draw(logits.detach(), places.seed, places.samples, places.places, words)
        return row_losses(logits, classes, batch.targets, words), drawn

    def scores(self, batch: ModelInput) -> torch.Tensor:
        """The discriminator's answer for each token, see ReplacedHead: fp32 [T]."""
        encoder = self.encoder
        hidden = encoder.run(batch.tokens, batch.ids, batch.plan, batch.dropout)
        if encoder.parallel.sequence_parallel:
            hidden = gather_tokens(hidden, encoder.parallel.group)
        self.before_use(self.replaced)
        return self.replaced(encoder.final_layernorm(hidden))

    def _other_dropout(self, dropout: Dropout | None) -> Dropout | None:
        """The generator's: other keys than the discriminator's, and the numbers of its own heads."""
        if dropout is None:
            return None
        config, group = self.generator.config, self.generator.parallel.group
        return replace(
            dropout,
            keys=dropout.keys ^ _SALT,
            step=dropout.step ^ _SALT,
            seed=derive_seed(dropout.seed, "generator") >> 1,
            first_head=config.num_attention_heads // group.size * group.rank,
        )
