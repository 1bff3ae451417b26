"""How blanks are filled. Apart from generation.py, so that mistakes are told before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from data_utils.base.settings import check, choice, setting

STRATEGIES = ("greedy", "sample", "beam")
MAX_BEAMS = 1024
# Options that one strategy alone heeds.
ONLY_FOR = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "seed"), "sample"),
    **dict.fromkeys(("num_beams", "length_penalty"), "beam"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    strategy: str = setting("greedy", "greedy, sample or beam")
    max_length: int = setting(64, "most tokens per blank")
    temperature: float = setting(1.0, "sample: divides the logits")
    top_k: int = setting(0, "sample: only the k likeliest tokens; 0 = all")
    top_p: float = setting(1.0, "sample: only the likeliest tokens that together reach this probability")
    num_beams: int = setting(4, f"beam: hypotheses kept, at most {MAX_BEAMS}")
    length_penalty: float = setting(1.0, "beam: scores are divided by length to this power")
    seed: int = setting(0, "sample: seed of the draws")

    def __post_init__(self) -> None:
        choice("strategy", self.strategy, STRATEGIES)
        check(self.max_length >= 1, f"max_length is {self.max_length}; it must be at least 1.")
        check(self.temperature > 0, f"temperature is {self.temperature}; it must be positive.")
        check(self.top_k >= 0, f"top_k is {self.top_k}; it must not be negative.")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be in (0, 1].")
        beams = self.num_beams
        check(
            1 <= beams <= MAX_BEAMS, f"num_beams is {beams}; it must be at least 1 and at most {MAX_BEAMS}."
        )
        for field in fields(self):
            value, strategy = getattr(self, field.name), ONLY_FOR.get(field.name, self.strategy)
            check(
                strategy == self.strategy or value == field.default,
                f"{field.name} is {value}, but strategy is {self.strategy}, which does not use it; set strategy to "
                f"{strategy}, or leave {field.name} out.",
            )
