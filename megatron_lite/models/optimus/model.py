"""OPTIMUS: a variational autoencoder of sentences from two stacks and a latent vector (arXiv:2004.04092).

The encoder's CLS state gives mean and variance of the latent vector z. A draw of z reaches the decoder in two linear
ways: it is added to the embeddings of its tokens, and it is a key and value (the same vector) of each layer, in the
slot before the first token. With the architectures of BERT and GPT-2 (`model.system`) this is the published model;
with others it is OPTIMUS's objective on them.

Loss of a sentence: -log p(x|z) + beta sum_i KL_i, where components with KL_i of at most `free_bits` count as 0. A
step's loss is the mean over its sentences.

Shapes: N sentences, P latent size, D hidden size, L blocks of the decoder, K predicted positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from data_utils.common.seeds import derive_seed
from data_utils.objectives import LOSS_NAMES
from data_utils.objectives.optimus import OptimusConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.models.optimus.batch import Sentences
from megatron_lite.models.optimus.latent import beta, draw, gaussian_kl, with_free_bits
from megatron_lite.models.optimus.metrics import LatentMetrics
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.tensor_parallel import linear
from megatron_lite.transformer.trained_model import TrainedModel
from megatron_lite.transformer.transformer import Transformer

LATENT = "latent."  # prefix of the parameters between the stacks


class Projection(nn.Module):
    """x W^T, without a bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self.weight.dtype), self.weight)


@dataclass(frozen=True)
class LatentCondition:
    """How latent vectors reach the decoder: embedding and memory (arXiv:2004.04092, section 3.1)."""

    added: torch.Tensor | None  # [T, D], to the embeddings of all tokens
    memory: torch.Tensor | None  # [N, L, H * size of a head]: key and value of each layer in the slots
    slots: torch.Tensor  # int [N], of the T tokens

    def remembered(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """qkv [T, 3, H, size of a head] with the keys and values of the memory slots replaced."""
        if self.memory is None:
            return qkv
        # [N, 2, H, size of a head]. The memory takes the place of a row of the decoder, so that no kernel needs
        # keys of another length; that row's own state is computed and read by nobody.
        both = self.memory[:, layer].unflatten(1, qkv.shape[2:])[:, None].expand(-1, 2, -1, -1)
        places = torch.arange(1, 3, device=qkv.device)
        return qkv.index_put((self.slots[:, None], places), both.to(qkv.dtype))


class LatentLayers(nn.Module):
    """Linear layers between encoder and decoder: feature -> posterior, z -> memory and embedding."""

    def __init__(self, encoder: ModelConfig, decoder: ModelConfig, config: OptimusConfig):
        super().__init__()
        size = config.latent_size
        self.posterior = Projection(encoder.hidden_size, 2 * size)  # mean | logarithm of the variance
        self.shape = decoder.num_layers, decoder.attention_size  # of a sentence's memory
        self.memory = Projection(size, math.prod(self.shape)) if config.memory else None
        self.embedding = Projection(size, decoder.hidden_size) if config.embedding else None

    def condition(
        self, z: torch.Tensor, token_sentence: torch.Tensor, slots: torch.Tensor
    ) -> LatentCondition:
        """The decoder's condition on latent vectors z [N, P] of sentences.

        Args: token_sentence: int [T], the sentence of each token; slots: int [real N], the token that memory replaces.
        """
        added, memory = None, None
        if self.embedding is not None:
            added = self.embedding(z).index_select(0, token_sentence)
        if self.memory is not None:
            # Sentences of padding come last and have no slot.
            memory = self.memory(z[: len(slots)]).view(-1, *self.shape)
        return LatentCondition(added, memory, slots)


class Optimus(TrainedModel):
    """Encoder, decoder and latent layers. `beta` is the weight of the KL divergence in the next step.

    Args: options: keyword arguments of both stacks.
    """

    def __init__(
        self,
        encoder: ModelConfig,
        decoder: ModelConfig,
        config: OptimusConfig,
        *,
        num_losses: int = 1,
        **options: Any,
    ):
        super().__init__()
        self.config = config
        self.num_losses = num_losses
        self.encoder = Transformer(encoder, **options)
        self.decoder = Transformer(decoder, **options)
        self.latent = LatentLayers(encoder, decoder, config)
        self.beta = config.beta
        # Optional callback, called in each forward pass with mu, logvar and z, fp32 [N, P].
        self.observe: Callable[[MicroBatch, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None

    @property
    def before_use(self) -> Callable[[nn.Module], None]:  # type: ignore[override]
        return self.encoder.before_use

    @before_use.setter
    def before_use(self, call: Callable[[nn.Module], None]) -> None:
        self.encoder.before_use = self.decoder.before_use = call

    def set_step(self, step: int, steps: int) -> None:
        config = self.config
        shares = {"zero_share": config.zero_share, "rise_share": config.rise_share}
        # A pure function of the step, so that a resumed run needs no state.
        self.beta = beta(step - 1, steps, peak=config.beta, cycles=config.cycles, **shares)

    @property
    def annealed(self) -> dict[str, float]:
        return {"beta": self.beta}

    def begin_evaluation(self) -> None:
        self._metrics = LatentMetrics()
        self.observe = self._metrics.add

    def end_evaluation(self) -> None:
        self.observe = None

    def measures(self, context: ParallelContext, loss: float) -> dict[str, float]:
        return self._metrics.summary(context, loss)

    def forward(self, batch: MicroBatch, *, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the sentences' losses (fp32 scalar, nats); without gradient, fp32 [losses, 2]: sum and weight of each.

        Reported are the reconstruction and the divergence itself, without beta and free bits.
        """
        sentences = _sentences(batch)
        mu, logvar = self.posterior(batch)
        # beta 0 trains a plain autoencoder: nothing would keep the posterior wide, so no noise is drawn.
        # The noise is a function of (seed, sample, sentence): any number of ranks draws the same.
        z = draw(mu, logvar, sentences.noise) if self.config.beta else mu
        if self.observe is not None:
            self.observe(batch, mu, logvar, z)
        # While the weight of the divergence is 0, noise would only make the latent vector useless to the
        # decoder.
        if self.config.noise_free and not self.beta:
            z = mu
        reconstruction = self.reconstruction(batch, z)
        kl = gaussian_kl(mu, logvar)
        weight = sentences.weight
        loss = reconstruction
        if self.config.length_weighted:
            tokens = torch.zeros_like(weight).index_add(0, sentences.loss_sentence, batch.weights)
            loss = loss / (tokens + 1.0)  # with BOS, as the released code counts
        if self.beta:
            loss = loss + self.beta * with_free_bits(kl, self.config.free_bits).sum(1)
        return (loss * weight).sum(), self._sums(reconstruction * weight, kl.sum(1) * weight, weight)

    def _sums(self, reconstruction: torch.Tensor, kl: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The bound itself is reported: the training loss changes with beta, so that its curve would mean
        # nothing.
        sums = torch.zeros(self.num_losses, 2, device=weight.device)
        for name, values in (("reconstruction", reconstruction), ("kl", kl)):
            sums[LOSS_NAMES.index(name)] = torch.stack([values.detach().sum(), weight.sum()])
        return sums

    def features(self, batch: MicroBatch) -> torch.Tensor:
        """The encoder's feature vector of each sentence, [N, D]."""
        plan, count = _parts(batch)
        hidden = self.encoder.run(
            batch.tokens[:count], batch.ids[:, :count], plan.encoder, _dropout(batch, 0)
        )
        features = self.encoder.final_layernorm(hidden.index_select(0, _sentences(batch).cls_positions))
        if self.config.feature == "cls":
            return features
        head = self.encoder.heads.sentence
        assert head is not None, "the configuration checks it"
        # BERT's pooler is the layer of its next-sentence head.
        return torch.tanh(head.dense(features))

    def posterior(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and logarithm of the variance of each sentence's z, both fp32 [N, P]."""
        features = self.features(batch)
        self.before_use(self.latent)
        mu, logvar = self.latent.posterior(features).float().chunk(2, dim=1)
        return mu, logvar

    def reconstruction(self, batch: MicroBatch, z: torch.Tensor) -> torch.Tensor:
        """-log p(x|z) of each sentence, fp32 [N], nats. Args: z: [N, P]."""
        plan, count = _parts(batch)
        sentences = _sentences(batch)
        self.before_use(self.latent)
        decoded = replace(
            batch,
            tokens=batch.tokens[count:],
            ids=batch.ids[:, count:],
            plan=plan.decoder,
            dropout=_dropout(batch, 1),
        )
        latent = self.latent.condition(z, sentences.token_sentence, sentences.memory_slots)
        losses = self.decoder.losses(decoded, latent) * batch.weights
        return torch.zeros_like(sentences.weight).index_add(0, sentences.loss_sentence, losses)


def _sentences(batch: MicroBatch) -> Sentences:
    assert isinstance(batch.extra_inputs, Sentences)
    return batch.extra_inputs


def _parts(batch: MicroBatch) -> tuple[EncoderDecoderPlan, int]:
    """The attention plans of both stacks, and the number of encoder tokens."""
    assert isinstance(batch.plan, EncoderDecoderPlan)
    return batch.plan, batch.plan.lengths[0]


def _dropout(batch: MicroBatch, part: int) -> Dropout | None:
    """Dropout of the encoder's tokens (part 0) or the decoder's (part 1)."""
    plan, _ = _parts(batch)
    if batch.dropout is None:
        return None
    keys = batch.dropout.keys.split(plan.lengths)[part]
    # Kernels that draw their own numbers are seeded by layer, and both stacks count layers from 0.
    return replace(batch.dropout, keys=keys, seed=derive_seed(batch.dropout.seed, part) >> 1)
