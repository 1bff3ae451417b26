"""LAMB: Adam's step of each tensor, scaled to the norm of its weights.

    u = m / (sqrt v + eps) + weight_decay w;  w -= lr |w| / |u| u

The factor is 1 where a norm is 0, and for biases and norms. Source: arXiv:1904.00962; without bias correction as
google-research/albert, `LAMBOptimizer`.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_lite.optim.whole_tensors import BucketShard, TensorOptimizer


class Lamb(TensorOptimizer):
    def update(self, shards: list[BucketShard]) -> None:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        for shard in shards:
            shard.update_moments((1 - beta1) * self.step_factor, (1 - beta2) * self.step_factor)
            first, root = shard.state["exp_avg"], shard.state["exp_avg_sq"].sqrt()
            if self.settings.bias_correction:
                first = first / (1 - beta1**shard.step)
                root.div_((1 - beta2**shard.step).sqrt())
            # u is written over the gradient, which nothing reads after the moments.
            torch.div(first, root.add_(self.eps(shard)), out=shard.gradient)
            shard.gradient.add_(shard.weights, alpha=shard.group["weight_decay"])
        weight_norms, step_norms = self.square_sums(
            shards, lambda shard: shard.weights, lambda shard: shard.gradient
        ).sqrt()
        # The trust ratio of a tensor that is all zero, or has no step, is 1.
        has_ratio = self._adapted & (weight_norms > 0) & (step_norms > 0)
        ratios = torch.where(has_ratio, weight_norms / step_norms, 1.0).float()
        for shard in shards:
            rates = shard.per_element(ratios * self.step_factor * shard.group["lr"])
            shard.weights.addcmul_(shard.gradient, rates, value=-1)

    @cached_property
    def _adapted(self) -> torch.Tensor:
        """Whether a tensor's step is scaled: bool [tensors]."""
        return self.per_tensor(lambda tensor: float(tensor.has_weight_decay)).bool()
