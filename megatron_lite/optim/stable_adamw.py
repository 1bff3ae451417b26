"""StableAdamW: AdamW whose step is shorter for a tensor with a sudden gradient, so that it needs no clipping.

    r = sqrt(mean(g^2 / max(v, eps^2))) over a tensor;  a = lr / max(1, r)
    w = (1 - a weight_decay) w - a m / (sqrt v + eps)

The moments' betas have the bias correction in them. Source: arXiv:2304.13013; as AnswerDotAI/ModernBERT, `StableAdamW`.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_lite.optim.whole_tensors import BucketShard, TensorOptimizer


def _debiased_beta(beta: float, step: torch.Tensor) -> torch.Tensor:
    """The weight of the former moment with which the new moment needs no bias correction."""
    return (beta**step - beta) / (beta**step - 1)


class StableAdamW(TensorOptimizer):
    def update(self, shards: list[BucketShard]) -> None:
        betas = self.settings.beta1, self.settings.beta2
        for shard in shards:
            shard.update_moments(
                *((1 - _debiased_beta(beta, shard.step)) * self.step_factor for beta in betas)
            )
        (sums,) = self.square_sums(
            shards,
            lambda shard: shard.gradient / shard.state["exp_avg_sq"].sqrt().clamp_(min=self.eps(shard)),
        )
        rms = (sums.float() / self._sizes).sqrt()
        for shard in shards:
            rate = shard.per_element(shard.group["lr"] * self.step_factor / rms.clamp(min=1.0))
            step = shard.state["exp_avg"] / shard.state["exp_avg_sq"].sqrt().add_(self.eps(shard))
            step.add_(shard.weights, alpha=shard.group["weight_decay"])
            shard.weights.addcmul_(step, rate, value=-1)

    @cached_property
    def _sizes(self) -> torch.Tensor:
        return self.per_tensor(lambda tensor: float(tensor.size))
