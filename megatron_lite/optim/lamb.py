"""LAMB: Adam's step of each tensor, scaled to the norm of its weights.

    u = m / (sqrt v + eps) + weight_decay w;  w -= lr |w| / |u| u

The factor is 1 where a norm is 0, and for biases and norms. Source: arXiv:1904.00962; without bias correction as
google-research/albert, `LAMBOptimizer`.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_lite.optim.whole_tensors import Part, TensorOptimizer


class Lamb(TensorOptimizer):
    def update(self, parts: list[Part]) -> None:
        for part in parts:
            self._direction(part)
        norms = self.square_sums(parts, lambda part: part.weights, lambda part: part.gradient).sqrt()
        # The trust ratio of a tensor that is all zero, or has no step, is 1.
        adapts = self._adapts & (norms > 0).all(0)
        factors = torch.where(adapts, norms[0] / norms[1], 1.0).float() * self.share
        for part in parts:
            part.weights.addcmul_(part.gradient, part.spread(factors * part.group["lr"]), value=-1)

    def _direction(self, part: Part) -> None:
        """Write u over the gradient."""
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        part.move_moments((1 - beta1) * self.share, (1 - beta2) * self.share)
        first, root = part.state["exp_avg"], part.state["exp_avg_sq"].sqrt()
        if self.settings.bias_correction:
            first = first / (1 - beta1**part.step)
            root.div_((1 - beta2**part.step).sqrt())
        torch.div(first, root.add_(self.eps(part)), out=part.gradient)
        part.gradient.add_(part.weights, alpha=part.group["weight_decay"])

    @cached_property
    def _adapts(self) -> torch.Tensor:
        return self.per_tensor(lambda tensor: float(tensor.decays)).bool()
