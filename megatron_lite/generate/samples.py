"""The same blanks of validation texts, filled at each evaluation: what a report shows of the progress of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.objectives.blank_infilling import TOKEN
from data_utils.objectives.planes import Example
from data_utils.samples.loader import SampleLoader
from data_utils.text.special_tokens import SpecialTokens
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.generate.config import GenerationConfig
from megatron_lite.generate.filling import BlankFiller, insert_spans
from megatron_lite.model.glm import GLM

MOST_BLANKS = 8  # of a text
MOST_TOKENS = 150  # of a text; longer ones are cut
MOST_WRITTEN = 16  # tokens in a blank


@dataclass(frozen=True)
class Prompt:
    """A text with short blanks, and the words that stood there."""

    context: list[int]  # part A, cut at the end
    originals: list[list[int]]


def prompts(loader: SampleLoader, num_samples: int, special: SpecialTokens) -> Iterator[Prompt]:
    """The documents of the token objective among the first samples, in their order."""
    for index in range(num_samples):
        for example in Example.from_planes(loader.batch(np.array([index]))[0]).documents():
            if example.objective[0] == TOKEN:
                prompt = cut(example, special)
                if prompt.originals:
                    yield prompt


def cut(example: Example, special: SpecialTokens) -> Prompt:
    """The beginning of an example's text with at most MOST_BLANKS blanks."""
    context = example.tokens[example.ord == 0][:MOST_TOKENS].tolist()
    blanks = [place for place, token in enumerate(context) if token == special.mask]
    if len(blanks) > MOST_BLANKS:
        context = context[: blanks[MOST_BLANKS]]
        blanks = blanks[:MOST_BLANKS]
    in_part_b = example.ord > 0
    # A span of part B has the position of its blank, and ends with eop.
    positions, targets = example.position_ids[in_part_b], example.targets[in_part_b]
    ends = (special.eop, special.eos)
    spans = [targets[positions == position].tolist() for position in np.unique(positions)[: len(blanks)]]
    return Prompt(context, [[token for token in span if token not in ends] for span in spans])


class SampleFillings:
    """Fills the blanks of a few validation texts, greedily, the same ones every time."""

    def __init__(self, loader: SampleLoader, tokenizer: Tokenizer, count: int, num_samples: int):
        self._tokenizer = tokenizer
        found = prompts(loader, num_samples, tokenizer.special)
        self._prompts = [prompt for prompt, _ in zip(found, range(count), strict=False)]

    def __call__(self, model: GLM) -> dict[str, Any]:
        """The record: texts, the words that stood there and the model's; `exact` of `blanks` are equal."""
        filler = BlankFiller(model, self._tokenizer.special, GenerationConfig(max_length=MOST_WRITTEN))
        items = [self._filled(prompt, filler) for prompt in self._prompts]
        pairs = [pair for item in items for pair in zip(item["originals"], item["answers"], strict=True)]
        return {"blanks": len(pairs), "exact": sum(one == other for one, other in pairs), "fillings": items}

    def _filled(self, prompt: Prompt, filler: BlankFiller) -> dict[str, Any]:
        words = [self._words(span) for span in prompt.originals]
        answers = [self._words(span) for span in filler.fill(prompt.context)]
        return {"text": self._text(prompt), "originals": words, "answers": answers}

    def _words(self, span: list[int]) -> str:
        return self._tokenizer.decode(span).strip()

    def _text(self, prompt: Prompt) -> str:
        """The text with numbered blanks."""
        special = self._tokenizer.special
        tokens = [token for token in prompt.context if token not in (special.cls, special.eos)]
        parts = [self._tokenizer.decode(part) for part in insert_spans(tokens, prompt.originals, special)]
        for number, place in enumerate(range(1, len(parts), 2), start=1):
            space = (
                " " if parts[place].startswith(" ") else ""
            )  # byte-level tokens carry the space before a word
            parts[place] = f"{space}___{number}___"
        return " ".join("".join(parts).split())
