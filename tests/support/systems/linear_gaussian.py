"""A latent model whose evidence is known: x = W z + b and normal noise of one deviation, z of N(0, I).

The posterior and log p(x) have closed forms, so that every estimate can be compared with its true value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributions import MultivariateNormal

from data_utils.common.errors import DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus.interface import Sentence

Posterior = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # x [N, D] -> mu, logvar [N, P]


class LinearGaussian:
    """A `LatentModel` in fp64. A sentence's text is the components of its x; its tokens are as many zeros.

    Args: posterior: q(z | x) instead of the exact one, which must have independent components.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        deviation: float,
        posterior: Posterior | None = None,
    ):
        self.weight, self.bias, self.deviation = weight.double(), bias.double(), deviation
        self.latent_size = weight.shape[1]
        self.posterior = posterior or self.exact
        self.calls: list[tuple[int, ...]] = []  # shapes of z

    def draw(self, count: int, seed: int) -> torch.Tensor:
        """x [count, D] of the model."""
        generator = torch.Generator().manual_seed(seed)
        z, noise = (
            torch.randn(count, size, generator=generator, dtype=torch.float64)
            for size in reversed(self.weight.shape)
        )
        return z @ self.weight.T + self.bias + self.deviation * noise

    def evidence(self, x: torch.Tensor) -> torch.Tensor:
        """log p(x), [N]."""
        covariance = self.weight @ self.weight.T + self.deviation**2 * torch.eye(len(self.weight)).double()
        return MultivariateNormal(self.bias, covariance).log_prob(x)

    def exact(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        precision = self.weight.T @ self.weight / self.deviation**2 + torch.eye(self.latent_size).double()
        variance = torch.linalg.inv(precision)
        assert torch.allclose(variance, variance.diag().diag()), "columns of W must be orthogonal"
        mu = (x - self.bias) @ self.weight @ variance / self.deviation**2
        return mu, variance.diag().log().expand(mu.shape)

    def read(self, texts: Sequence[str]) -> list[Sentence]:
        for number, text in enumerate(texts, start=1):
            if len(text.split()) != len(self.weight):
                raise DataError(f"text {number} has {len(text.split())} numbers, not {len(self.weight)}.")
        return [Sentence(text, [0] * len(self.weight), [0] * len(self.weight)) for text in texts]

    def sentences(self, x: torch.Tensor) -> list[Sentence]:
        return self.read([" ".join(map(repr, row)) for row in x.tolist()])

    def values(self, sentences: Sequence[Sentence]) -> torch.Tensor:
        return torch.tensor([list(map(float, s.text.split())) for s in sentences], dtype=torch.float64)

    def encode(self, sentences: Sequence[Sentence]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.posterior(self.values(sentences))

    def features(self, sentences: Sequence[Sentence]) -> torch.Tensor:
        return self.values(sentences)

    def log_likelihood(self, sentences: Sequence[Sentence], z: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(z.shape))
        mean = z @ self.weight.T + self.bias
        x = self.values(sentences)[:, None]
        return torch.distributions.Normal(mean, self.deviation).log_prob(x).sum(-1)

    def decode(self, z: torch.Tensor, config: GenerationConfig, first: int = 0) -> list[str]:
        """The mean of x, rounded; with sampling, noise of (seed, number)."""
        mean = z.double() @ self.weight.T + self.bias
        if config.strategy == "sample":
            for i, row in enumerate(mean):
                generator = torch.Generator().manual_seed(config.seed * 1000 + first + i)
                row += torch.randn(row.shape, generator=generator, dtype=torch.float64)
        return [" ".join(f"{value:.3f}" for value in row) for row in mean.tolist()]

    def untrained(self) -> LinearGaussian:
        """One whose features say nothing of a sentence."""
        other = LinearGaussian(self.weight, self.bias, self.deviation)
        other.features = lambda sentences: self.draw(len(sentences), seed=99)  # type: ignore[method-assign]
        return other
