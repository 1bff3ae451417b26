"""Infills the same blanks of validation texts at each evaluation: a run's progress in its report."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from data_utils.loader.blanks import Prompt, prompts
from data_utils.loader.loader import SampleLoader
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.filling import BlankFiller, numbered_text, span_text
from megatron_lite.telemetry.standstill import ADVICE
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)

MOST_WRITTEN = 16  # tokens in a blank
# A model that does not read around its blanks fills most alike: 2 to 4 answers in 19 blanks on the plateau of learned
# positions, 8 to 16 in 16 where a model learns. How many are as in the text says less: 1 of 16 in all of such a run.
FEW_ANSWERS, LEAST_BLANKS, IN_A_ROW = 0.25, 8, 3


class SampleFillings:
    """Fills the blanks of a few validation texts, greedily, the same ones every time."""

    def __init__(self, loader: SampleLoader, tokenizer: Tokenizer, count: int, num_samples: int):
        self._tokenizer, self._alike = tokenizer, 0  # consecutive evaluations with few different spans
        self._prompts = list(itertools.islice(prompts(loader, num_samples, tokenizer.special), count))

    def __call__(self, model: Transformer) -> dict[str, Any]:
        """A record for metrics.jsonl: texts, original and generated words; `exact` of the `blanks` are equal."""
        filler = BlankFiller(model, self._tokenizer.special, GenerationConfig(max_length=MOST_WRITTEN))
        found = filler.fill_all([prompt.context for prompt in self._prompts]) if self._prompts else []
        items = [self._item(prompt, spans) for prompt, spans in zip(self._prompts, found, strict=True)]
        pairs = [pair for item in items for pair in zip(item["originals"], item["answers"], strict=True)]
        self._warn_of_likeness([answer for _, answer in pairs])
        return {"blanks": len(pairs), "exact": sum(one == other for one, other in pairs), "fillings": items}

    def _item(self, prompt: Prompt, spans: list[list[int]]) -> dict[str, Any]:
        text = numbered_text(self._tokenizer, prompt.context, prompt.originals)
        words = [span_text(self._tokenizer, span) for span in prompt.originals]
        answers = [span_text(self._tokenizer, span) for span in spans]
        return {"text": text, "originals": words, "answers": answers}

    def _warn_of_likeness(self, answers: list[str]) -> None:
        different = len(set(answers))
        is_alike = len(answers) >= LEAST_BLANKS and different <= FEW_ANSWERS * len(answers)
        self._alike = self._alike + 1 if is_alike else 0
        if self._alike == IN_A_ROW:
            log.warning(
                "%d blanks are filled with only %d different spans, for %d evaluations in a row: the model writes "
                "frequent words and ignores the text around a blank. Train for more steps, or change the recipe. %s",
                len(answers), different, IN_A_ROW, ADVICE,
            )  # fmt: skip
