"""Exponential moving averages of the weights: each rank keeps that of its own part of the fp32 weights.

    e += (1 - d) (w - e) after each update, d = min(decay, (1 + t) / (10 + t)) in the t-th

Source: TensorFlow's tf.train.ExponentialMovingAverage with num_updates, in its documentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from megatron_lite.config.ema import EmaConfig
from megatron_lite.train.engine.sharded import ShardedOptimizer


class Averages:
    """They begin at the weights, and are of kind `ema` in checkpoints."""

    def __init__(self, optimizer: ShardedOptimizer, settings: EmaConfig):
        assert settings.decay is not None
        self._optimizer, self._interval = optimizer, settings.interval
        self._decay = settings.decay**settings.interval
        self._values = {bucket: bucket.master.detach().clone() for bucket in optimizer.buckets}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the update of a step, unless it was skipped, which is seen without waiting for the device."""
        if step % self._interval:
            return
        for bucket, average in self._values.items():
            updates = self._optimizer.optimizer.state[bucket.master]["step"]
            decay = ((1 + updates) / (10 + updates)).clamp(max=self._decay)
            kept = 1 - self._optimizer.skipped.to(average.device)
            average.lerp_(bucket.master, (1 - decay) * kept)

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
                bucket.master = average
            self._optimizer.publish_weights()
            yield
        finally:
            for bucket, master in masters.items():
                bucket.master = master
            self._optimizer.publish_weights()
