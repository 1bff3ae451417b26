"""The section `embedding`: how the vector of a text is made of a run's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.setting_files import shown
from data_utils.common.settings import check, checked, setting, setting_mapping

POOLINGS = ("mean", "cls", "last")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("embedding")
class EmbeddingConfig:
    """Raises: ConfigError for a value out of range, or settings that contradict each other."""

    pooling: str = setting(
        "auto",
        "Tokens whose hidden states are averaged: mean = all of the text, special tokens too; cls = the first; last = "
        "the last; auto = last for models that read from left to right, else mean.",
        one_of=("auto", *POOLINGS),
    )
    normalize: bool = setting(True, "Divide each vector by its length.")
    prompts: dict[str, str] = setting_mapping("Name -> text before a text, such as {query: 'query: '}.")
    default_prompt: str | None = setting(
        None, "Name of the prompt where none is asked for; null = no prompt."
    )
    include_prompt: bool = setting(
        True, "Average over the tokens of the prompt too; false = over those after it (pooling mean alone)."
    )
    max_length: int | None = setting(
        None,
        "Maximum tokens of a text, prompt and special tokens included; the end is cut. null = the "
        "positions of a learned table, else data.sequence_length.",
        at_least=3,
    )
    similarity: str = setting("cosine", "How two vectors are compared.", one_of=SIMILARITIES)

    def __post_init__(self) -> None:
        for name, text in self.prompts.items():
            check(
                isinstance(text, str),
                f"embedding.prompts.{name} is {shown(text)}; it must be a text, such as 'query: '.",
            )
        self.prompt_text(self.default_prompt)
        check(
            self.include_prompt or self.pooling == "mean",
            f"embedding.include_prompt is false, but embedding.pooling is {self.pooling}, which does not average over "
            "tokens; set pooling to mean, or include_prompt to true.",
        )

    def pooling_of(self, is_causal: bool) -> str:
        """`pooling`, chosen where it is auto. Args: is_causal: texts are read from left to right."""
        return self.pooling if self.pooling != "auto" else "last" if is_causal else "mean"

    def prompt_text(self, name: str | None) -> str:
        """The text of a prompt. Args: name: None or "": no prompt. Raises: ConfigError for an unknown name."""
        check(
            not name or name in self.prompts,
            f"the prompt {shown(name)} is unknown; embedding.prompts has {', '.join(self.prompts) or 'none'}.",
        )
        return self.prompts[name] if name else ""
