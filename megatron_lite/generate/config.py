"""How blanks are filled. A module of its own without torch, so that mistakes are reported before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from data_utils.base.settings import check, checked, setting

STRATEGIES = ("greedy", "sample", "beam")
MAX_BEAMS = 1024
# Options that only one strategy uses.
ONLY_FOR = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "seed"), "sample"),
    **dict.fromkeys(("num_beams", "length_penalty"), "beam"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("")
class GenerationConfig:
    strategy: str = setting("greedy", "greedy, sample or beam", one_of=STRATEGIES)
    max_length: int = setting(64, "most tokens per blank", at_least=1)
    temperature: float = setting(1.0, "sample: divides the logits", above=0)
    top_k: int = setting(0, "sample: only the k likeliest tokens; 0 = all", at_least=0)
    top_p: float = setting(
        1.0, "sample: only the likeliest tokens that together reach this probability", above=0, at_most=1
    )
    num_beams: int = setting(4, f"beam: hypotheses kept, at most {MAX_BEAMS}", at_least=1, at_most=MAX_BEAMS)
    length_penalty: float = setting(1.0, "beam: scores are divided by length to this power")
    seed: int = setting(0, "sample: seed of the draws")

    def __post_init__(self) -> None:
        for field in fields(self):
            value, strategy = getattr(self, field.name), ONLY_FOR.get(field.name, self.strategy)
            check(
                strategy == self.strategy or value == field.default,
                f"{field.name} is {value}, but strategy is {self.strategy}, which does not use it; set strategy to "
                f"{strategy}, or leave {field.name} out.",
            )
