"""Quality of a latent space: bounds of the likelihood, perplexity, mutual information, active units.

The importance-weighted bound of a sentence x over k samples z_j of its posterior q(z | x) is

    L_k = log 1/k sum_j p(x | z_j) p(z_j) / q(z_j | x)

Its mean is below log p(x), and rises with k; L_1 is the ELBO, in expectation. All sums are in fp64. Source: Burda et
al., arXiv:1509.00519; OPTIMUS, arXiv:2004.04092, section 4.1 and appendix.
"""

# N sentences, k samples of each, P components of the latent vector

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from data_utils.common.errors import CheckpointError
from data_utils.common.progress import progress_bar
from megatron_lite.models.optimus.inputs import Sampling
from megatron_lite.models.optimus.interface import LatentModel, Sentence
from megatron_lite.models.optimus.latent import gaussian_kl, normals
from megatron_lite.models.optimus.metrics import active_units, mutual_information

LARGEST_EXPONENT = 700.0  # exp of it is still finite


@dataclass(frozen=True)
class Measured:
    """Measures of each of N sentences, on CPU in fp64, in nats."""

    bound: torch.Tensor  # [N] L_k
    reconstruction: torch.Tensor  # [N] mean of -log p(x | z) over the k samples
    divergence: torch.Tensor  # [N, P] of each latent component, without free bits
    tokens: torch.Tensor  # [N] number of predicted tokens
    mu: torch.Tensor  # [N, P]
    logvar: torch.Tensor  # [N, P]
    z: torch.Tensor  # [N, P] the first sample

    @property
    def negative_elbo(self) -> torch.Tensor:
        return self.reconstruction + self.divergence.sum(1)


def posteriors(
    model: LatentModel, sentences: Sequence[Sentence], batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """mu and logvar of all sentences, fp64 [N, P] on CPU."""
    parts = [
        model.encode(sentences[first : first + batch])
        for first in progress_bar(range(0, len(sentences), batch), desc="encoding")
    ]
    mu, logvar = (torch.cat(of_parts).double().cpu() for of_parts in zip(*parts, strict=True))
    require_finite("posterior", mu + logvar, 0)
    return mu, logvar


def require_finite(what: str, values: torch.Tensor, first: int) -> None:
    """Raises: CheckpointError that names the first such sentence. Args: values: [N, ...]."""
    wrong = (~values.isfinite().flatten(1).all(1)).nonzero()
    if len(wrong):
        raise CheckpointError(
            f"the {what} of sentence {first + int(wrong[0]) + 1} is not finite; the weights are unsound: take an "
            "earlier checkpoint of the run."
        )


def measure(model: LatentModel, sentences: Sequence[Sentence], sampling: Sampling) -> Measured:
    """Every sentence, with `sampling.samples` latent vectors. Raises: CheckpointError where a number is not finite."""
    mu, logvar = posteriors(model, sentences, sampling.batch)
    bounds, reconstructions, drawn = [], [], []
    rounds = -(-len(sentences) // sampling.batch) * (sampling.samples // sampling.chunk)
    with progress_bar(total=rounds, desc="sampling") as progress:
        for first in range(0, len(sentences), sampling.batch):
            here = slice(first, first + sampling.batch)
            bound, reconstruction, z = _sample(
                model, sentences[here], mu[here], logvar[here], first, sampling, progress
            )
            bounds.append(bound)
            reconstructions.append(reconstruction)
            drawn.append(z)
    return Measured(
        torch.cat(bounds),
        torch.cat(reconstructions),
        gaussian_kl(mu, logvar).double(),
        torch.tensor([float(sentence.predicted_tokens) for sentence in sentences], dtype=torch.float64),
        mu,
        logvar,
        torch.cat(drawn),
    )


def _sample(
    model: LatentModel,
    sentences: Sequence[Sentence],
    mu: torch.Tensor,
    logvar: torch.Tensor,
    first: int,
    sampling: Sampling,
    progress: tqdm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """L_k [N], reconstruction [N] and first samples [N, P] of the sentences from number `first` on."""
    bound = mu.new_full((len(mu),), -math.inf)
    reconstruction = mu.new_zeros(len(mu))
    z_first, rows = mu, range(first, first + len(mu))
    for start in range(0, sampling.samples, sampling.chunk):
        noise = normals(sampling.seed, "posterior", rows, start, sampling.chunk, mu.shape[1])
        z = mu[:, None] + torch.exp(0.5 * logvar)[:, None] * noise
        log_p = model.log_likelihood(sentences, z).double().cpu()
        require_finite("log likelihood", log_p, first)
        # log p(z) - log q(z | x): the terms with 2 pi cancel.
        ratio = 0.5 * (logvar[:, None] + noise.square() - z.square()).sum(-1)
        # The importance-weighted bound: log of the mean of p(x, z) / q(z | x) over all samples, chunk by chunk,
        # in fp64.
        bound = torch.logaddexp(bound, torch.logsumexp(log_p + ratio, 1))
        reconstruction -= log_p.sum(1) / sampling.samples
        if start == 0:
            z_first = z[:, 0]
        progress.update()
    return bound - math.log(sampling.samples), reconstruction, z_first


def perplexity(measured: Measured, *, count_bos: bool = False) -> float:
    """exp(-sum of L_k / tokens) over all sentences.

    Args: count_bos: divide by a token more for each sentence, as published numbers do. Nothing predicts it.
    """
    tokens = measured.tokens.sum() + (len(measured.tokens) if count_bos else 0)
    return math.exp(min(float(-measured.bound.sum() / tokens), LARGEST_EXPONENT))


def summarize(measured: Measured) -> dict[str, Any]:
    """Means over the sentences, in nats, as `scripts/latent.py evaluate --json` writes them."""
    return {
        "sentences": len(measured.bound),
        "tokens": int(measured.tokens.sum()),
        "perplexity": perplexity(measured),
        "perplexity_with_bos": perplexity(measured, count_bos=True),
        "bound": float(measured.bound.mean()),
        "negative_elbo": float(measured.negative_elbo.mean()),
        "reconstruction": float(measured.reconstruction.mean()),
        "divergence": float(measured.divergence.sum(1).mean()),
        "mutual_information": mutual_information(measured.mu, measured.logvar, measured.z),
        "active_units": int(active_units(measured.mu).sum()),
        "divergence_by_component": measured.divergence.mean(0).tolist(),
    }
