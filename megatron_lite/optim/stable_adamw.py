"""StableAdamW: AdamW whose step is shorter for a tensor with a sudden gradient, so that it needs no clipping.

    r = sqrt(mean(g^2 / max(v, eps^2))) over a tensor;  a = lr / max(1, r)
    w = (1 - a weight_decay) w - a m / (sqrt v + eps)

The moments' betas have the bias correction in them. Source: arXiv:2304.13013; as AnswerDotAI/ModernBERT, `StableAdamW`.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_lite.optim.whole_tensors import Part, TensorOptimizer


def _decay(beta: float, step: torch.Tensor) -> torch.Tensor:
    """The factor of the moment before, which makes a mean of it that needs no correction."""
    return (beta**step - beta) / (beta**step - 1)


class StableAdamW(TensorOptimizer):
    def update(self, parts: list[Part]) -> None:
        betas = self.settings.beta1, self.settings.beta2
        for part in parts:
            part.move_moments(*((1 - _decay(beta, part.step)) * self.share for beta in betas))
        (sums,) = self.square_sums(
            parts, lambda part: part.gradient / part.state["exp_avg_sq"].sqrt().clamp_(min=self.eps(part))
        )
        rms = (sums.float() / self._sizes).sqrt()
        for part in parts:
            rate = part.spread(part.group["lr"] * self.share / rms.clamp(min=1.0))
            step = part.state["exp_avg"] / part.state["exp_avg_sq"].sqrt().add_(self.eps(part))
            step.add_(part.weights, alpha=part.group["weight_decay"])
            part.weights.addcmul_(step, rate, value=-1)

    @cached_property
    def _sizes(self) -> torch.Tensor:
        return self.per_tensor(lambda tensor: float(tensor.size))
