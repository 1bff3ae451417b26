"""How blanks are filled. Apart from generation.py, so that mistakes are told before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.settings import check, choice, setting

STRATEGIES = ("greedy", "sample", "beam")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    strategy: str = setting("greedy", "greedy, sample or beam")
    max_length: int = setting(64, "most tokens per blank")
    temperature: float = setting(1.0, "sample: divides the logits")
    top_k: int = setting(0, "sample: only the k likeliest tokens; 0 = all")
    top_p: float = setting(1.0, "sample: only the likeliest tokens that together reach this probability")
    num_beams: int = setting(4, "beam: hypotheses kept")
    length_penalty: float = setting(1.0, "beam: scores are divided by length to this power")
    seed: int = setting(0, "sample: seed of the draws")

    def __post_init__(self) -> None:
        choice("strategy", self.strategy, STRATEGIES)
        check(self.max_length >= 1, f"max_length is {self.max_length}; it must be at least 1.")
        check(self.temperature > 0, f"temperature is {self.temperature}; it must be positive.")
        check(self.top_k >= 0, f"top_k is {self.top_k}; it must not be negative.")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be in (0, 1].")
        check(self.num_beams >= 1, f"num_beams is {self.num_beams}; it must be at least 1.")
