"""The section `generation`, also the options of scripts/generate.py: how text is generated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from data_utils.common.settings import check, checked, setting

STRATEGIES = ("greedy", "sample", "beam")
PENALTIES = ("power", "gnmt")
MAX_BEAMS = 1024
# Options that only one strategy uses.
ONLY_FOR = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "seed"), "sample"),
    **dict.fromkeys(("num_beams", "length_penalty", "length_penalty_form"), "beam"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("generation")
class GenerationConfig:
    """How text is generated. Raises: ConfigError for a value out of range, or one that the strategy does not use."""

    on_resume: ClassVar[str] = "free"

    strategy: str = setting("greedy", "greedy, sample or beam.", one_of=STRATEGIES)
    max_length: int = setting(64, "Maximum tokens per blank.", at_least=1)
    min_length: int = setting(0, "Minimum tokens per blank.", at_least=0)
    no_repeat_ngram_size: int = setting(
        0, "No n-gram of this size occurs twice in an answer; 0 = off.", at_least=0
    )
    no_repeat_except: str = setting(
        "",
        "Tokens, separated by spaces, after which n-grams may repeat despite no_repeat_ngram_size, such as "
        "'.'.",
    )
    # Far beyond what makes a difference, so that no sum overflows: at 1e-6 the likeliest token is sure.
    temperature: float = setting(1.0, "Sample: sampling temperature.", at_least=1e-6, at_most=1e6)
    top_k: int = setting(0, "Sample: keep the k most likely tokens; 0 = all.", at_least=0)
    top_p: float = setting(
        1.0,
        "Sample: keep the smallest set of most likely tokens whose probabilities sum to top_p.",
        above=0,
        at_most=1,
    )
    num_beams: int = setting(4, "Beam: number of beams.", at_least=1, at_most=MAX_BEAMS)
    length_penalty: float = setting(
        1.0, "Beam: scores are divided by length^length_penalty.", at_least=-50, at_most=50
    )
    length_penalty_form: str = setting(
        "power",
        "Beam: length in length_penalty: power = the length; gnmt = (5 + length) / 6.",
        one_of=PENALTIES,
    )
    mode: str = setting(
        "",
        "UL2: denoiser mode token before the input: regular or extreme (fill blanks) or sequential "
        "(continue the text; default).",
        one_of=("", "regular", "extreme", "sequential"),
    )
    unmask_steps: int = setting(
        0, "masked_diffusion: denoising steps per answer; 0 = max_length.", at_least=0
    )
    unmask_block: int = setting(
        0,
        "masked_diffusion: block length of semi-autoregressive decoding, in tokens; 0 = the whole answer at"
        " once.",
        at_least=0,
    )
    guidance: float = setting(
        0.0, "masked_diffusion: scale of classifier-free guidance; 0 = off.", at_least=0, at_most=1000
    )
    seed: int = setting(0, "Sample: random seed.", at_least=0, below=2**63)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, strategy = getattr(self, field.name), ONLY_FOR.get(field.name, self.strategy)
            check(
                strategy == self.strategy or value == field.default,
                f"{field.name} is {value}, but strategy is {self.strategy}, which does not use it; set strategy to "
                f"{strategy}, or remove {field.name}.",
            )
        check(
            self.min_length < self.max_length,
            f"min_length ({self.min_length}) must be smaller than max_length ({self.max_length}), which "
            "includes the end token; lower it, or raise max_length.",
        )
        check(
            not self.no_repeat_except or self.no_repeat_ngram_size > 0,
            f"no_repeat_except is {self.no_repeat_except!r}, but no_repeat_ngram_size is 0; set "
            "no_repeat_ngram_size, or remove no_repeat_except.",
        )

    def score(self, log_probability: float, length: int) -> float:
        """Score of a hypothesis; higher is better. Args: log_probability: in nats; length: tokens, its end counted."""
        base = float(length) if self.length_penalty_form == "power" else (5.0 + length) / 6.0
        return log_probability / base**self.length_penalty
