"""A page to try a run asks this: server.py serves the answers as JSON, and page.html shows them."""

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
from megatron_lite.inference.decoders import require_writer
from megatron_lite.inference.open_run import OpenRun, blank_shares
from megatron_lite.inference.search import Found
from megatron_lite.inference.texts import Answer, Worker, answers, fills_blanks, worker_of
from megatron_lite.inference.watch import ONE_STACK, Watch

MOST_TOKENS = 128  # of a text with its answers, whose attention is shown
KEPT = 32  # answers whose attention may still be asked for
OTHERS = 5  # likeliest tokens that are shown for each place
# Settings that the page begins with. A blank has several answers, in the order of their probabilities.
BLANKS = {"strategy": "beam", "length_penalty": 0.0, "max_length": 16}
TEXTS = {"max_length": 32}
EXAMPLES = {True: "If this is [MASK], the function returns the [MASK].", False: "The function returns"}


class Trial:
    """Answers texts with a run, one at a time, and keeps what it needs to show their attention.

    Raises: ConfigError, before the weights are loaded, for a run that neither fills blanks nor writes.
    """

    def __init__(self, opened: OpenRun):
        opened.require_one_transformer()
        require_writer(opened)
        self._fills = fills_blanks(opened, ())
        self._run = opened.with_model()
        worker_of(self._run, GenerationConfig(), self._fills)  # may refuse the model
        self._answers: OrderedDict[int, tuple[Worker, Answer]] = OrderedDict()
        self._numbers = itertools.count()

    def about(self) -> dict[str, Any]:
        """The facts of which the page is made: the run's name, what it does, its settings, layers and heads."""
        model = self._run.config.model
        parts = {ONE_STACK: model.num_layers}
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
        """The answer of scripts/generate.py with these settings, and its probabilities.

        Raises: UserError for a text or settings that it would refuse.
        """
        config = build(GenerationConfig, settings, "generation.")
        fills = fills_blanks(self._run, [blank for blank in PROMPT_MARKERS if blank in text])
        worker = worker_of(self._run, config, fills)
        (answer,) = answers(self._run, worker, [text])
        number = next(self._numbers)
        self._answers[number] = worker, answer
        if len(self._answers) > KEPT:
            self._answers.popitem(last=False)
        replay = worker.replay(answer.context, [found[0] for found in answer.found])
        blanks = [
            self._blank(found, logits.log_softmax(-1), worker)
            for found, logits in zip(answer.found, replay.logits, strict=True)
        ]
        return {"answer": number, "fills": fills, "parts": answer.parts, "blanks": blanks}

    def attention(self, answer: int, part: str, layer: int, head: int | None) -> dict[str, Any]:
        """Who attends to what in a layer, counted from 0. Args: answer: its number. head: None = the mean of all.

        Raises: DataError for what does not exist, and for a text that is too long to be shown.
        """
        parts = self.about()["parts"]
        heads = self._run.config.model.num_attention_heads
        if part not in parts or layer not in range(parts[part]) or head not in (None, *range(heads)):
            raise DataError(
                f"there is no head {head} in layer {layer} of part {part}; choose one of the page."
            )
        if answer not in self._answers:
            raise DataError("this answer is no longer kept; ask for it again.")
        worker, given = self._answers[answer]
        best = [found[0] for found in given.found]
        count = len(given.context) + sum(len(found.tokens) for found in best)
        if count > MOST_TOKENS:
            raise DataError(
                f"the text has {count} tokens with its answers, and attention is shown for up to {MOST_TOKENS}; "
                "shorten it."
            )
        before = itertools.takewhile(lambda name: name != part, parts)
        watch = Watch(part, layer + sum(parts[name] for name in before))
        rows, keys = worker.replay(given.context, best, watch).shown[part]
        weights, name = watch.rows(len(keys)), self._run.tokenizer.token_to_text
        chosen = weights.mean(0) if head is None else weights[head]
        return {
            "queries": [{"text": name(row.token), "predicts": row.predicts} for row in rows],
            "keys": list(map(name, keys)),
            "weights": [[round(weight, 4) for weight in row] for row in chosen.tolist()],
        }

    def _blank(self, found: list[Found], log_p: torch.Tensor, worker: Worker) -> dict[str, Any]:
        """One blank's answers and the tokens of the best. Args: log_p: fp32 [n, V], see `Replay.logits`."""
        best, name = found[0], self._run.tokenizer.token_to_text
        own = [float(log_p[place, token]) for place, token in enumerate(best.tokens)]
        if best.ended:
            own.append(float(log_p[-1, [end for end in worker.search.ends if end >= 0]].logsumexp(0)))
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
    """A setting for the page. Args: first: values that the page begins with, by name."""
    limits = field.metadata["range"]
    return {
        "name": field.name,
        "help": field.metadata["help"],
        "kind": field.type,
        "value": first.get(field.name, field.default),
        "choices": list(limits.one_of) if limits else [],
        "only_for": ONLY_FOR.get(field.name),
    }
