"""The section `ema`: averages of the weights (megatron_lite/optim/ema.py)."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.settings import check, checked, setting
from megatron_lite.config.sections import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ema")
class EmaConfig:
    decay: float | None = setting(
        None,
        "keep an exponential moving average of the weights with this factor, such as 0.999, at 4 bytes per parameter "
        "owned; smaller in the first steps; null = none",
        above=0,
        below=1,
    )
    interval: int = setting(1, "steps between updates of the average, each by decay^interval", at_least=1)
    use: bool = setting(
        False, "evaluate the average instead of the weights, also where the run's checkpoints are read"
    )

    def __post_init__(self) -> None:
        check(
            self.decay is not None or not self.use,
            "ema.use is true, but ema.decay is null; set that to a factor such as 0.999, or use to false.",
        )

    def check_run(self, parallel: ParallelConfig, has_task: bool) -> None:
        """Raise ConfigError unless averages can be kept in this layout, for what is trained."""
        check(
            self.decay is None or not has_task,
            f"ema.decay is {self.decay} with a task, whose best checkpoint is of the weights; set it to null.",
        )
        check(
            self.decay is None or parallel.zero_stage < 3,
            f"ema.decay is {self.decay} with parallel.zero_stage 3, where DeepSpeed holds the weights; set zero_stage "
            "to 1 or 2, or ema.decay to null.",
        )
