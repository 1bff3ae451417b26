"""How sentences are sampled in an evaluation of the latent space. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.base.settings import check


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Raises: ConfigError for a number that makes no sense, by the option's name."""

    samples: int = 100  # latent vectors of each sentence: k of the bound L_k
    chunk: int = 5  # of them in one forward pass
    batch: int = 16  # sentences in one forward pass
    seed: int = 0  # of the noise

    def __post_init__(self) -> None:
        for name in ("samples", "chunk", "batch"):
            value = getattr(self, name)
            check(value >= 1, f"--{name} is {value}; it must be at least 1.")
        check(
            self.samples % self.chunk == 0,
            f"--samples ({self.samples}) is no multiple of --chunk ({self.chunk}), the samples of one forward pass; "
            "choose a divisor of it.",
        )
