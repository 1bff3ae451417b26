"""The section `schedule`: the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from data_utils.common.settings import REQUIRED, check, checked, fraction, setting

DEEPSPEED_KINDS = ("deepspeed_constant", "deepspeed_linear", "deepspeed_cosine")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("schedule.parts")
class SchedulePart:
    on_resume: ClassVar[str] = "phase"

    kind: str = setting(
        REQUIRED,
        "Shape from start to end, by progress x: linear = x, cosine = (1 - cos pi x) / 2, 1-sqrt = sqrt(x),"
        " exponential = 2 (1 - 0.5^x); constant; inverse_sqrt = decays with 1/sqrt(step), not below end.",
        one_of=("constant", "linear", "cosine", "1-sqrt", "exponential", "inverse_sqrt"),
    )
    steps: int | None = setting(None, "Length in steps.", at_least=1)
    tokens: int | None = setting(None, "Length in tokens, counted as for a phase.", at_least=1)
    start: float | None = setting(
        None, "Factor on optimizer.lr at the start; null = the end of the previous part.", at_least=0
    )
    end: float | None = setting(
        None, "Factor on optimizer.lr at the end; null for a constant part.", at_least=0
    )

    def __post_init__(self) -> None:
        check(
            (self.steps is None) != (self.tokens is None),
            f"a {self.kind} part of schedule.parts has steps {self.steps} and tokens {self.tokens}; set "
            "exactly one of them.",
        )
        check(
            (self.kind == "constant") == (self.end is None),
            f"a {self.kind} part of schedule.parts has end {self.end}; constant parts have no end, all others "
            "need one.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("schedule")
class ScheduleConfig:
    on_resume: ClassVar[str] = "phase"

    kind: str = setting(
        "cosine",
        "cosine, linear or constant after a linear warmup; inverse_sqrt = decays with 1/sqrt(step) after "
        "it (Noam's schedule for a peak of factor / sqrt(hidden_size warmup_steps)); slanted = linear from "
        "the floor to the peak and back (ULMFiT: warmup over a tenth of the steps, min_lr_ratio 1/32 = "
        "0.03125); deepspeed_constant, deepspeed_linear, deepspeed_cosine = DeepSpeed's WarmupLR, "
        "WarmupDecayLR, WarmupCosineLR.",
        one_of=("cosine", "linear", "constant", "inverse_sqrt", "slanted", *DEEPSPEED_KINDS),
    )
    warmup_steps: int = setting(0, "Linear warmup from 0 to the peak, in steps.", at_least=0)
    decay_steps: int | None = setting(
        None, "Step at which the floor is reached, warmup included; null = training.steps.", at_least=1
    )
    min_lr_ratio: float = fraction(0.1, "Floor of the schedule as a fraction of the peak.")
    warmup_kind: str = setting(
        "linear",
        "DeepSpeed kinds: warmup linear in the step (linear) or in its logarithm (log).",
        one_of=("linear", "log"),
    )
    warmup_start_ratio: float = fraction(
        0.0, "DeepSpeed kinds: learning rate at the start of the warmup as a fraction of the peak."
    )
    parts: tuple[SchedulePart, ...] = setting(
        (),
        "List of consecutive parts that replaces all settings above (WSD: linear warmup, constant, any "
        "decay).",
    )

    def __post_init__(self) -> None:
        defaults = {"kind": "cosine", "warmup_steps": 0, "decay_steps": None, "min_lr_ratio": 0.1}
        beside = {key: getattr(self, key) for key, value in defaults.items() if getattr(self, key) != value}
        check(
            not self.parts or not beside,
            "schedule.parts replaces all other keys, but schedule also has "
            f"{', '.join(f'{key} {value}' for key, value in beside.items())}; remove that or, if a file sets "
            "it, put schedule={} before schedule.parts=... on the command line.",
        )
        if self.parts:
            first = self.parts[0]
            check(
                first.start is not None and first.kind != "inverse_sqrt",
                f"the first of schedule.parts is {first.kind} with start {first.start}; it needs a start, and "
                "must not be inverse_sqrt.",
            )
        check(
            self.is_deepspeeds or (self.warmup_kind, self.warmup_start_ratio) == ("linear", 0.0),
            f"schedule.warmup_kind is {self.warmup_kind} and warmup_start_ratio {self.warmup_start_ratio}, "
            f"but schedule.kind {self.kind} does not use them; remove them, or use one of "
            f"{', '.join(DEEPSPEED_KINDS)}.",
        )
        check(
            self.decay_steps is None or self.decay_steps > self.warmup_steps or self.is_deepspeeds,
            f"schedule.decay_steps ({self.decay_steps}) must be larger than schedule.warmup_steps "
            f"({self.warmup_steps}); change one of them.",
        )

    @property
    def is_deepspeeds(self) -> bool:
        return self.kind in DEEPSPEED_KINDS
