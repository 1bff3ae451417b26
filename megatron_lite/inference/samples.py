"""Infills the same blanks of validation texts at each evaluation: a run's progress in its report."""

from __future__ import annotations

import itertools
from typing import Any

from data_utils.loader.blanks import Prompt, prompts
from data_utils.loader.loader import SampleLoader
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.filling import BlankFiller, numbered_text, span_text
from megatron_lite.transformer.transformer import Transformer

MOST_WRITTEN = 16  # tokens in a blank


class SampleFillings:
    """Fills the blanks of a few validation texts, greedily, the same ones every time."""

    def __init__(self, loader: SampleLoader, tokenizer: Tokenizer, count: int, num_samples: int):
        self._tokenizer = tokenizer
        self._prompts = list(itertools.islice(prompts(loader, num_samples, tokenizer.special), count))

    def __call__(self, model: Transformer) -> dict[str, Any]:
        """A record for metrics.jsonl: texts, original and generated words; `exact` of the `blanks` are equal."""
        filler = BlankFiller(model, self._tokenizer.special, GenerationConfig(max_length=MOST_WRITTEN))
        found = filler.fill_all([prompt.context for prompt in self._prompts]) if self._prompts else []
        items = [self._item(prompt, spans) for prompt, spans in zip(self._prompts, found, strict=True)]
        pairs = [pair for item in items for pair in zip(item["originals"], item["answers"], strict=True)]
        return {"blanks": len(pairs), "exact": sum(one == other for one, other in pairs), "fillings": items}

    def _item(self, prompt: Prompt, spans: list[list[int]]) -> dict[str, Any]:
        text = numbered_text(self._tokenizer, prompt.context, prompt.originals)
        words = [span_text(self._tokenizer, span) for span in prompt.originals]
        answers = [span_text(self._tokenizer, span) for span in spans]
        return {"text": text, "originals": words, "answers": answers}
