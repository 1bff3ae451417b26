"""Terms of a token's loss beside its target's log probability, for runs that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Terms:
    """Label smoothing: `smoothing` of a target's probability goes to all columns, `share` to each.

    z-loss: `z_loss` times the square of the log-sum-exp (arXiv:2204.02311).
    """

    smoothing: float
    columns: int  # of the whole vocabulary, padding left out
    z_loss: float = 0.0
    of_z: torch.Tensor | None = None  # z-loss of each row, fp32 [K], of the last forward pass

    @property
    def share(self) -> float:
        return self.smoothing / self.columns

    def of_rows(
        self, log_sums: torch.Tensor, picked: torch.Tensor, sums: torch.Tensor | None
    ) -> torch.Tensor:
        """The addition to each row's loss, all fp32 [K]. Args: as `finish_losses` has them."""
        self.of_z = self.z_loss * log_sums.square()
        return self.of_z if sums is None else self.of_z + self.smoothing * picked - self.share * sums

    def growth(self, log_sums: torch.Tensor) -> torch.Tensor:
        """By how much z-loss changes with the log-sum-exp."""
        return 2 * self.z_loss * log_sums

    def apart(self, losses: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        """Weighted losses without z-loss, weights, and weighted z-loss, each [K and rows of other heads]."""
        assert self.of_z is not None
        of_z = torch.zeros_like(losses)
        of_z[: len(self.of_z)] = self.of_z * weights[: len(self.of_z)]
        return [losses - of_z, weights, of_z]

    def add_gradient(
        self,
        gradient: torch.Tensor,
        local: torch.Tensor,
        is_here: torch.Tensor,
        grad: torch.Tensor,
        log_sums: torch.Tensor,
    ) -> None:
        """Args:
        gradient: of the cross entropy, [K, valid columns], each row times 1 + `growth` but for the target's part.
        local, is_here: the targets' columns, and whether they are here.
        """
        if self.smoothing:
            gradient -= (self.share * grad)[:, None].to(gradient.dtype)
        back = (self.smoothing + self.growth(log_sums)) * grad
        back = back.masked_fill(~is_here, 0.0).to(gradient.dtype)
        gradient.scatter_add_(1, local[:, None], back[:, None])
