"""Exponential moving averages of the weights: each rank keeps those of its shard of the fp32 weights.

    e += (1 - d) (w - e) after each update, d = min(decay, (1 + t) / (10 + t)) in the t-th

Source: TensorFlow's tf.train.ExponentialMovingAverage with num_updates, in its documentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from megatron_lite.config.sections import EmaConfig
from megatron_lite.optim.sharded import ShardedOptimizer

# Steps with averages in fp64: with a small decay fp32 is off by more than a unit in the last place.
_EARLY = 100
_CHUNK = 1 << 22  # elements at a time in fp64, to bound its memory


class Averages:
    """Averages begin at the weights; checkpoints hold them as the tensor `ema` of each parameter."""

    def __init__(self, optimizer: ShardedOptimizer, settings: EmaConfig):
        assert settings.decay is not None
        self._optimizer, self._interval = optimizer, settings.interval
        # Averaged every `interval` steps only, with the decay that as many steps have together.
        self._decay = settings.decay**settings.interval
        self._values = {bucket: bucket.master_shard.detach().clone() for bucket in optimizer.buckets}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the update of a step, unless it was skipped, which is seen without waiting for the device."""
        if step % self._interval:
            return
        for bucket, average in self._values.items():
            # Adam's own count leaves out skipped steps, and is on the device already.
            updates = self._optimizer.optimizer.state[bucket.master_shard]["step"].double()
            decay = ((1 + updates) / (10 + updates)).clamp(max=self._decay)
            weight = (1 - decay) * (1 - self._optimizer.skipped.to(average.device))
            if step > _EARLY:
                average.lerp_(bucket.master_shard, weight.to(average.dtype))
                continue
            chunks = zip(average.split(_CHUNK), bucket.master_shard.split(_CHUNK), strict=True)
            for average_chunk, weights_chunk in chunks:
                average_chunk.copy_(average_chunk.double().lerp_(weights_chunk.double(), weight))

    def owned(self, parameter: nn.Parameter) -> torch.Tensor:
        """The average of the elements of a parameter that this rank owns, one at least: fp32 [elements]."""
        bucket = self._optimizer.bucket_by_param[parameter]
        owned = bucket.owned_range(parameter)
        assert owned is not None
        return self._values[bucket][owned[1]]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the context the model computes with the averages; nothing may be trained or saved."""
        masters = {bucket: bucket.master_shard for bucket in self._values}
        try:
            for bucket, average in self._values.items():
                # Exchanged, not copied: `gather_weights` reads `master_shard`, and the weights stay untouched.
                bucket.master_shard = average
            self._optimizer.gather_weights()
            yield
        finally:
            for bucket, master in masters.items():
                bucket.master_shard = master
            self._optimizer.gather_weights()
