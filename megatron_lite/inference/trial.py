"""What the demo page asks: server.py serves the results as JSON, and page.html displays them."""

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
from megatron_lite.inference.decoders import check_can_generate
from megatron_lite.inference.open_run import OpenRun, blank_shares
from megatron_lite.inference.search import Hypothesis
from megatron_lite.inference.texts import (
    Completion,
    TextGenerator,
    complete,
    fills_blanks,
    make_text_generator,
)

MOST_TOKENS = 128  # of a text with its completion, whose attention is displayed
KEPT = 32  # completions whose attention can still be requested
OTHERS = 5  # likeliest tokens displayed for each position
# Initial settings of the page. Beam search gives several spans of a blank with their probabilities.
BLANKS = {"strategy": "beam", "length_penalty": 0.0, "max_length": 16}
TEXTS = {"max_length": 32}
EXAMPLES = {True: "If this is [MASK], the function returns the [MASK].", False: "The function returns"}


class Trial:
    """Completes texts with a run, one at a time, and keeps what it needs to display attention.

    Raises: ConfigError, before the weights are loaded, for a run that neither fills blanks nor generates.
    """

    def __init__(self, opened: OpenRun):
        opened.require_one_transformer()
        check_can_generate(opened)
        self._fills = fills_blanks(opened, ())
        self._run = opened.with_model()
        make_text_generator(
            self._run, GenerationConfig(), self._fills
        )  # raises for a model that cannot generate
        self._answers: OrderedDict[int, tuple[TextGenerator, Completion]] = OrderedDict()
        self._numbers = itertools.count()

    def about(self) -> dict[str, Any]:
        """What the page is built from: the run's name, what it does, its settings, layers and heads."""
        model = self._run.config.model
        parts = {SINGLE_STACK: model.num_layers}
        if model.decoder_layers:
            parts |= dict.fromkeys(("decoder", "cross"), model.decoder_layers)
        return {
            "run": str(self._run.checkpoint.path),
            "fills": self._fills,
            "example": EXAMPLES[self._fills],
            "blanks": [
                blank for blank, share in blank_shares(self._run.objectives).items() if share and self._fills
            ],
            "settings": [
                _described(field, BLANKS if self._fills else TEXTS) for field in fields(GenerationConfig)
            ],
            "parts": parts,
            "heads": model.num_attention_heads,
        }

    def answer(self, text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The output of scripts/generate.py with these settings, and its probabilities.

        Raises: UserError for a text or settings that scripts/generate.py refuses.
        """
        config = build(GenerationConfig, settings, "generation.")
        fills = fills_blanks(self._run, [blank for blank in PROMPT_MARKERS if blank in text])
        generator = make_text_generator(self._run, config, fills)
        (answer,) = complete(self._run, generator, [text])
        number = next(self._numbers)
        self._answers[number] = generator, answer
        if len(self._answers) > KEPT:
            self._answers.popitem(last=False)
        replay = generator.replay(answer.context, [found[0] for found in answer.found])
        blanks = [
            self._blank(found, logits.log_softmax(-1), generator)
            for found, logits in zip(answer.found, replay.logits, strict=True)
        ]
        return {"answer": number, "fills": fills, "parts": answer.parts, "blanks": blanks}

    def attention(self, answer: int, part: str, layer: int, head: int | None) -> dict[str, Any]:
        """Attention weights of a layer, from 0. Args: answer: number of the completion. head: None: mean of all heads.

        Raises: DataError for a layer or head that does not exist, and for a text that is too long to display.
        """
        parts = self.about()["parts"]
        heads = self._run.config.model.num_attention_heads
        if part not in parts or layer not in range(parts[part]) or head not in (None, *range(heads)):
            raise DataError(f"there is no head {head} in layer {layer} of {part}; choose one on the page.")
        if answer not in self._answers:
            raise DataError("this completion is no longer kept; generate it again.")
        generator, given = self._answers[answer]
        best = [found[0] for found in given.found]
        count = len(given.context) + sum(len(found.tokens) for found in best)
        if count > MOST_TOKENS:
            raise DataError(
                f"the text has {count} tokens with its completion, and attention is displayed for up to {MOST_TOKENS}; "
                "shorten it."
            )
        before = itertools.takewhile(lambda name: name != part, parts)
        probe = AttentionProbe(part, layer + sum(parts[name] for name in before))
        rows, keys = generator.replay(given.context, best, probe).shown[part]
        weights, name = probe.rows(len(keys)), self._run.tokenizer.token_to_text
        chosen = weights.mean(0) if head is None else weights[head]
        return {
            "queries": [{"text": name(row.token), "predicts": row.predicts} for row in rows],
            "keys": list(map(name, keys)),
            "weights": [[round(weight, 4) for weight in row] for row in chosen.tolist()],
        }

    def _blank(
        self, found: list[Hypothesis], log_p: torch.Tensor, generator: TextGenerator
    ) -> dict[str, Any]:
        """One blank's spans and the tokens of the best one. Args: log_p: fp32 [n, V], see `Replay.logits`."""
        best, name = found[0], self._run.tokenizer.token_to_text
        own = [float(log_p[index, token]) for index, token in enumerate(best.tokens)]
        if best.ended:
            own.append(float(log_p[-1, [end for end in generator.search.ends if end >= 0]].logsumexp(0)))
        names = [*map(name, best.tokens), None][: len(own)]
        others = [zip(*row.topk(min(OTHERS, len(row))), strict=True) for row in log_p]
        tokens = [
            {
                "text": text,
                "p": math.exp(p),
                "others": [{"text": name(int(t)), "p": math.exp(o)} for o, t in likely],
            }
            for text, p, likely in zip(names, own, others, strict=True)
        ]
        totals = {(tuple(best.tokens), best.ended): math.exp(sum(own))}
        for each in found[1:]:  # a span may end with eop and with eos; of the best one both are counted
            key = tuple(each.tokens), each.ended
            if key != next(iter(totals)):
                totals[key] = totals.get(key, 0.0) + math.exp(each.log_p)
        listed = [
            {"text": self._run.tokenizer.decode(span), "p": p, "ended": ended}
            for (span, ended), p in totals.items()
        ]
        return {"answers": listed, "tokens": tokens}


def _described(field: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    """A setting for the page. Args: first: initial values by name."""
    limits = field.metadata["range"]
    return {
        "name": field.name,
        "help": field.metadata["help"],
        "kind": field.type,
        "value": first.get(field.name, field.default),
        "choices": list(limits.one_of) if limits else [],
        "only_for": ONLY_FOR.get(field.name),
    }
