"""DeepSpeed's engines with `ShardedOptimizer`.

`deepspeed.initialize` wraps every optimizer in one of DeepSpeed's own. Here the engine is made directly, and the
method that would do so is replaced.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """DeepSpeed prints topologies and memory tables at no log level; within the context they are logged as debug."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        yield
    log.debug("%s", output.getvalue())


class _WithOurOptimizer:
    """Mixin for DeepSpeed's engines: replaces the method that makes the optimizer, and the one that sends weights."""

    def _broadcast_model(self) -> None:
        """Nothing: initial weights follow from their names, and ranks may have the same shapes of other experts."""

    def _configure_optimizer(self, client_optimizer: Callable[[Any], Any], model_parameters: Any) -> None:
        # The one place in DeepSpeed 0.19.8 that wraps an optimizer; ours brings sharding, scaling and clipping itself.
        self.optimizer = self.basic_optimizer = client_optimizer(_loss_scaler(self))


def _loss_scaler(engine: Any) -> Any:
    """DeepSpeed's loss scaler of the engine's configuration; its scale is 1 except in fp16."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    return CreateLossScaler(
        torch.float16 if engine.fp16_enabled() else torch.float32,
        engine.loss_scale(),
        engine.dynamic_loss_scale(),
        engine.dynamic_loss_scale_args(),
    )


def deepspeed_engine(
    module: nn.Module, options: dict[str, Any], mpu: Any, make_optimizer: Callable[[dict[str, Any], Any], Any]
) -> Any:
    """An engine whose `optimizer` is `make_optimizer(options, loss scaler)`, made once the module is on its device.

    Args: mpu: None for a PipelineModule, which has its own.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.module import PipelineModule

    parent: Any = DeepSpeedEngine
    if isinstance(module, PipelineModule):
        parent, mpu = PipelineEngine, module.mpu()
    return type("Engine", (_WithOurOptimizer, parent), {})(
        args=None,
        model=module,
        optimizer=lambda loss_scaler: make_optimizer(options, loss_scaler),
        mpu=mpu,
        dist_init_required=False,
        config=options,
        config_class=DeepSpeedConfig(options, mpu),
    )
