"""Exponential moving averages of the weights: each rank keeps that of its own part of the fp32 weights.

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

_EARLY = 100  # steps in which averages are computed in fp64: fp32 is off by more than a unit while the decay is small
_CHUNK = 1 << 22  # numbers at a time there


class Averages:
    """They begin at the weights, and are of kind `ema` in checkpoints."""

    def __init__(self, optimizer: ShardedOptimizer, settings: EmaConfig):
        assert settings.decay is not None
        self._optimizer, self._interval = optimizer, settings.interval
        # Averaged every `interval` steps only, with the decay that as many steps have together.
        self._decay = settings.decay**settings.interval
        self._values = {bucket: bucket.master.detach().clone() for bucket in optimizer.buckets}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the update of a step, unless it was skipped, which is seen without waiting for the device."""
        if step % self._interval:
            return
        for bucket, average in self._values.items():
            # Adam's own count leaves out skipped steps, and is on the device already.
            updates = self._optimizer.optimizer.state[bucket.master]["step"].double()
            decay = ((1 + updates) / (10 + updates)).clamp(max=self._decay)
            weight = (1 - decay) * (1 - self._optimizer.skipped.to(average.device))
            if step > _EARLY:
                average.lerp_(bucket.master, weight.to(average.dtype))
                continue
            for part, master in zip(average.split(_CHUNK), bucket.master.split(_CHUNK), strict=True):
                part.copy_(part.double().lerp_(master.double(), weight))

    def part(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part of a parameter of which it owns one, flat."""
        bucket = self._optimizer.bucket_of[parameter]
        owned = bucket.owned(parameter)
        assert owned is not None
        return self._values[bucket][owned[1]]

    @contextlib.contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Within the context the model computes with the averages; nothing may be trained or saved."""
        masters = {bucket: bucket.master for bucket in self._values}
        try:
            for bucket, average in self._values.items():
                # Exchanged, not copied: publishing reads `master`, and the masters themselves stay untouched.
                bucket.master = average
            self._optimizer.publish_weights()
            yield
        finally:
            for bucket, master in masters.items():
                bucket.master = master
            self._optimizer.publish_weights()
