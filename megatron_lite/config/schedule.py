"""The section `schedule`: the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.settings import REQUIRED, check, checked, fraction, setting

DEEPSPEED_KINDS = ("deepspeed_constant", "deepspeed_linear", "deepspeed_cosine")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("schedule.parts")
class SchedulePart:
    kind: str = setting(
        REQUIRED,
        "the way from start to end: x, the part of the steps made, is bent to x (linear), (1 - cos pi x) / 2 (cosine), "
        "sqrt(x) (1-sqrt), 2 (1 - 0.5^x) (exponential); constant; inverse_sqrt = falling with 1/sqrt(step) to end",
        one_of=("constant", "linear", "cosine", "1-sqrt", "exponential", "inverse_sqrt"),
    )
    steps: int | None = setting(None, "its length in steps", at_least=1)
    tokens: int | None = setting(None, "its length in tokens instead, as that of a phase", at_least=1)
    start: float | None = setting(
        None, "factor of optimizer.lr where it begins; null = where the part before ends", at_least=0
    )
    end: float | None = setting(None, "factor where it ends; null for a constant part", at_least=0)

    def __post_init__(self) -> None:
        check(
            (self.steps is None) != (self.tokens is None),
            f"a {self.kind} part of schedule.parts has steps {self.steps} and tokens {self.tokens}; give one of them.",
        )
        check(
            (self.kind == "constant") == (self.end is None),
            f"a {self.kind} part of schedule.parts has end {self.end}; a constant part has none, every other one has.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("schedule")
class ScheduleConfig:
    kind: str = setting(
        "cosine",
        "cosine, linear or constant, after a linear warm-up; inverse_sqrt = then falling with 1/sqrt(step), which is "
        "Noam's schedule for a peak of factor / sqrt(hidden_size warmup_steps); slanted = linear up from the floor and "
        "down to it (ULMFiT: warm-up over a tenth of the steps, min_lr_ratio 1/32 = 0.03125); deepspeed_constant, "
        "deepspeed_linear and deepspeed_cosine = DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR",
        one_of=("cosine", "linear", "constant", "inverse_sqrt", "slanted", *DEEPSPEED_KINDS),
    )
    warmup_steps: int = setting(0, "steps of linear warm-up from 0 to the peak", at_least=0)
    decay_steps: int | None = setting(
        None, "step at which the floor is reached, warm-up included; null = training.steps", at_least=1
    )
    min_lr_ratio: float = fraction(0.1, "floor of the schedule as a fraction of the peak")
    warmup_kind: str = setting(
        "linear",
        "of DeepSpeed's kinds: the rate rises with the step (linear) or its logarithm (log)",
        one_of=("linear", "log"),
    )
    warmup_start_ratio: float = fraction(
        0.0, "of DeepSpeed's kinds: where the warm-up begins, as a fraction of the peak"
    )
    parts: tuple[SchedulePart, ...] = setting(
        (), "list of parts, one after another, instead of all above (WSD: linear up, constant, any way down)"
    )

    def __post_init__(self) -> None:
        defaults = {"kind": "cosine", "warmup_steps": 0, "decay_steps": None, "min_lr_ratio": 0.1}
        beside = {key: getattr(self, key) for key, value in defaults.items() if getattr(self, key) != value}
        check(
            not self.parts or not beside,
            "schedule.parts say all, but schedule has also "
            f"{', '.join(f'{key} {value}' for key, value in beside.items())}; leave that out, or, where a file sets "
            "it, write schedule={} before schedule.parts=... on the command line.",
        )
        if self.parts:
            first = self.parts[0]
            check(
                first.start is not None and first.kind != "inverse_sqrt",
                f"the first of schedule.parts is {first.kind} with start {first.start}; give it a start, and another "
                "kind than inverse_sqrt, which begins after a warm-up.",
            )
        check(
            self.is_deepspeeds or (self.warmup_kind, self.warmup_start_ratio) == ("linear", 0.0),
            f"schedule.warmup_kind is {self.warmup_kind} and warmup_start_ratio {self.warmup_start_ratio} with "
            f"schedule.kind {self.kind}, which does not read them; leave them out, or take one of "
            f"{', '.join(DEEPSPEED_KINDS)}.",
        )
        check(
            self.decay_steps is None or self.decay_steps > self.warmup_steps or self.is_deepspeeds,
            f"schedule.decay_steps ({self.decay_steps}) must be larger than schedule.warmup_steps "
            f"({self.warmup_steps}).",
        )

    @property
    def is_deepspeeds(self) -> bool:
        return self.kind in DEEPSPEED_KINDS
