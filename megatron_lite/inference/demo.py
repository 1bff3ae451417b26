"""The model behind the demo page: completions with probabilities, and attention weights.

server.py serves the results as JSON, and page.html displays them.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from data_utils.common.errors import DataError
from data_utils.common.settings import build
from data_utils.tokenizers.tokenizer import PROMPT_MARKERS
from megatron_lite.config.generation import ONLY_FOR, GenerationConfig
from megatron_lite.inference.attention_probe import SINGLE_STACK, AttentionProbe
from megatron_lite.inference.decoders import check_can_generate, unused_options
from megatron_lite.inference.open_run import OpenRun, blank_shares
from megatron_lite.inference.search import Hypothesis
from megatron_lite.inference.texts import (
    Completion,
    TextGenerator,
    complete,
    fills_blanks,
    make_text_generator,
)

MOST_TOKENS = 128  # of a text with its completion: a larger picture of its attention cannot be read
KEPT = 32  # completions whose attention can still be requested
ALTERNATIVES = 5  # likeliest tokens displayed for each position
# Initial settings of the page. Beam search finds several spans of a blank, with their probabilities.
BLANKS = {"strategy": "beam", "length_penalty": 0.0, "max_length": 16}
TEXTS = {"max_length": 32}
EXAMPLES = {True: "If this is [MASK], the function returns the [MASK].", False: "The function returns"}


class Demo:
    """Completes texts with a run, one at a time, and keeps the last completions, whose attention can be displayed.

    Raises: ConfigError, before the weights are loaded, for a run that neither fills blanks nor generates.
    """

    def __init__(self, opened: OpenRun):
        opened.require_one_transformer()
        check_can_generate(opened)
        self._fills = fills_blanks(opened, ())
        self._run = opened.with_model()
        # At the start, so that a model that cannot generate is refused before the page is opened.
        make_text_generator(self._run, GenerationConfig(), self._fills)
        self._completions: OrderedDict[int, tuple[TextGenerator, Completion]] = OrderedDict()
        self._numbers = itertools.count()

    def about(self) -> dict[str, Any]:
        """The run's path, whether it fills blanks, its settings of generation, and its layers by stack."""
        model = self._run.config.model
        stacks = {SINGLE_STACK: model.num_layers}
        if model.decoder_layers:
            stacks |= dict.fromkeys(("decoder", "cross"), model.decoder_layers)
        return {
            "run": str(self._run.checkpoint.path),
            "fills": self._fills,
            "example": EXAMPLES[self._fills],
            "blanks": [
                blank for blank, share in blank_shares(self._run.objectives).items() if share and self._fills
            ],
            "settings": [
                _described(field, BLANKS if self._fills else TEXTS)
                for field in fields(GenerationConfig)
                if field.name not in unused_options(self._run)
            ],
            "stacks": stacks,
            "heads": model.num_attention_heads,
        }

    def complete(self, text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The output of scripts/generate.py with these settings, and its probabilities.

        Returns: `completion`, a number for `attention`; `segments`: text, filled span, text, ..., or the text and its
            continuation; `blanks`, see `_blank`.

        Raises: UserError for a text or settings that scripts/generate.py refuses.
        """
        config = build(GenerationConfig, settings, "generation.")
        fills = fills_blanks(self._run, [blank for blank in PROMPT_MARKERS if blank in text])
        generator = make_text_generator(self._run, config, fills)
        (completion,) = complete(self._run, generator, [text])
        number = next(self._numbers)
        self._completions[number] = generator, completion
        if len(self._completions) > KEPT:
            self._completions.popitem(last=False)
        replay = generator.replay(completion.context, [found[0] for found in completion.found])
        blanks = [
            self._blank(found, logits.log_softmax(-1), generator)
            for found, logits in zip(completion.found, replay.logits, strict=True)
        ]
        return {"completion": number, "fills": fills, "segments": completion.segments, "blanks": blanks}

    def attention(self, completion: int, stack: str, layer: int, head: int | None) -> dict[str, Any]:
        """Attention weights of a layer, for each query [its keys].

        Args: completion: its number. stack: encoder, decoder or cross. layer, head: from 0; None: mean of all heads.
        Raises: DataError for a layer or head that does not exist, and for a text that is too long to display.
        """
        stacks = self.about()["stacks"]
        heads = self._run.config.model.num_attention_heads
        if stack not in stacks or layer not in range(stacks[stack]) or head not in (None, *range(heads)):
            raise DataError(f"there is no head {head} in layer {layer} of {stack}; choose one on the page.")
        if completion not in self._completions:
            raise DataError("this completion is no longer kept; generate it again.")
        generator, kept = self._completions[completion]
        best = [found[0] for found in kept.found]
        count = len(kept.context) + sum(len(found.tokens) for found in best)
        if count > MOST_TOKENS:
            raise DataError(
                f"the text has {count} tokens with its completion, and attention is displayed for up to {MOST_TOKENS}; "
                "shorten it."
            )
        # The probe counts layers through all stacks.
        earlier = itertools.takewhile(lambda name: name != stack, stacks)
        probe = AttentionProbe(stack, layer + sum(stacks[name] for name in earlier))
        queries, keys = generator.replay(kept.context, best, probe).tokens[stack]
        weights, text_of = probe.matrix(len(keys)), self._run.tokenizer.token_to_text
        chosen = weights.mean(0) if head is None else weights[head]
        return {
            "queries": [{"text": text_of(query.token), "predicts": query.predicts} for query in queries],
            "keys": list(map(text_of, keys)),
            "weights": [[round(weight, 4) for weight in row] for row in chosen.tolist()],
        }

    def _blank(
        self, found: list[Hypothesis], log_p: torch.Tensor, generator: TextGenerator
    ) -> dict[str, Any]:
        """One blank, or the continuation of a text.

        Args: found: the spans, the best first. log_p: of the best one, fp32 [n, V], see `Replay.logits`.
        Returns: `spans` with their probabilities, and the `tokens` of the best span with their alternatives.
        """
        best, text_of = found[0], self._run.tokenizer.token_to_text
        token_log_p = [float(log_p[index, token]) for index, token in enumerate(best.tokens)]
        if best.ended:
            ends = [end for end in generator.search.ends if end >= 0]
            token_log_p.append(float(log_p[-1, ends].logsumexp(0)))
        texts = [*map(text_of, best.tokens), None][: len(token_log_p)]  # None: the end
        likeliest = [zip(*each.topk(min(ALTERNATIVES, len(each))), strict=True) for each in log_p]
        tokens = [
            {
                "text": text,
                "p": math.exp(p),
                "alternatives": [
                    {"text": text_of(int(token)), "p": math.exp(value)} for value, token in likely
                ],
            }
            for text, p, likely in zip(texts, token_log_p, likeliest, strict=True)
        ]
        # A span that ends with eop and the same span that ends with eos are one; token_log_p has both for the best.
        best_key = tuple(best.tokens), best.ended
        totals = {best_key: math.exp(sum(token_log_p))}
        for each in found[1:]:
            key = tuple(each.tokens), each.ended
            if key != best_key:
                totals[key] = totals.get(key, 0.0) + math.exp(each.log_p)
        spans = [
            {"text": self._run.tokenizer.decode(span), "p": p, "ended": ended}
            for (span, ended), p in totals.items()
        ]
        return {"spans": spans, "tokens": tokens}


def _described(field: Any, initial: Mapping[str, Any]) -> dict[str, Any]:
    """A setting for the page. Args: initial: values by name, where they are not the defaults."""
    return {
        "name": field.name,
        "help": field.metadata["help"],
        "type": field.type,
        "value": initial.get(field.name, field.default),
        "choices": list(field.metadata["one_of"]),
        "only_for": ONLY_FOR.get(field.name),
    }
