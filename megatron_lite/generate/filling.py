"""Fill blanks: encode the text once, then write each span token by token against cached keys and values.

The layout is that of training. Part A is the text with its mask tokens, bidirectional. Each blank is a span of part B
that starts with sop, has its mask's position, counts block positions 1, 2, ... and ends with eop (or eos). Blanks are
filled in text order; later ones see earlier answers. Beam search keeps several hypotheses for a blank, and only the
best of them for the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch

from data_utils.base.errors import ConfigError, DataError
from data_utils.text.special_tokens import SpecialTokens
from data_utils.text.tokenizers import Tokenizer
from megatron_lite.generate.config import GenerationConfig
from megatron_lite.model.batch import ID_PLANES
from megatron_lite.model.cpu_kernels import attend_all
from megatron_lite.model.dropout import AttentionDropout
from megatron_lite.model.glm import GLM

MAX_BEAM_BYTES = 16 << 30  # of all beams: cached keys and values, and logits
LOGIT_COPIES = 4  # logits, their log softmax, totals, and what topk sorts
_EMPTY = torch.empty(0)


class CachedPlan:
    """Attention of new tokens to all tokens so far, themselves included."""

    def __init__(self, num_layers: int):
        self.keys: list[torch.Tensor] = [_EMPTY] * num_layers
        self.values: list[torch.Tensor] = [_EMPTY] * num_layers

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        """qkv [rows, new tokens, 3, H, D] -> [rows, new tokens, H, D]; there is no dropout."""
        q, k, v = qkv.unbind(2)
        if self.keys[layer] is not _EMPTY:
            k = torch.cat([self.keys[layer], k], dim=1)
            v = torch.cat([self.values[layer], v], dim=1)
        self.keys[layer], self.values[layer] = k, v
        return attend_all(q, k, v)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch, some of them several times: int64 [new rows]."""
        self.keys = [x[rows] for x in self.keys]
        self.values = [x[rows] for x in self.values]


class BlankFiller:
    """Fills the blanks of one text at a time.

    Args:
        model: in eval mode, on its device.
        special: the tokenizer's special ids.
    """

    def __init__(self, model: GLM, special: SpecialTokens, config: GenerationConfig):
        self.model = model
        self.special = special
        self.config = config
        self.device = next(model.parameters()).device
        self.ends = {special.eop, special.eos}
        self.banned = torch.tensor(sorted(set(asdict(special).values()) - self.ends), device=self.device)
        self.generator = torch.Generator(device=self.device).manual_seed(config.seed)

    @torch.no_grad()
    def fill(self, context: Sequence[int]) -> list[list[int]]:
        """The spans for the mask tokens of `context`, in text order, without sop, eop or eos.

        Args:
            context: part A: CLS, the text with its mask tokens, and eos where the text is complete.
        Raises: DataError without a mask, or if positions exceed the model's tables.
        """
        search = self._beam if self.config.strategy == "beam" else self._one_by_one
        return [search(position) for position in self._begin(context)]

    @torch.no_grad()
    def answers(self, context: Sequence[int]) -> list[list[tuple[float, list[int]]]]:
        """For each blank up to `num_beams` spans with their probabilities, the likeliest first.

        Later blanks see the likeliest span. Beams may miss a likely span that begins unlikely.

        Args: context: as of `fill`.
        """
        assert self.config.strategy == "beam" and self.config.length_penalty == 0.0, (
            "scores are log probabilities"
        )
        found = []
        for position in self._begin(context):
            start = list(self.plan.keys), list(self.plan.values)
            spans = self._hypotheses(position)
            self._replay(start, position, spans[0][1])
            totals: dict[tuple[int, ...], float] = {}
            for score, span in spans:  # a span may end with eop and with eos
                totals[tuple(span)] = totals.get(tuple(span), 0.0) + math.exp(score)
            found.append(sorted(((p, list(span)) for span, p in totals.items()), reverse=True))
        return found

    def _begin(self, context: Sequence[int]) -> list[int]:
        """Encode part A. Returns the positions of its blanks."""
        masks = {self.special.mask, self.special.smask, self.special.gmask}
        blanks = [position for position, token in enumerate(context) if token in masks]
        if not blanks:
            raise DataError("the text has no blank; mark at least one with [MASK], [sMASK] or [gMASK].")
        self.require_room(context)
        self.plan = CachedPlan(self.model.config.num_layers)
        self._hidden([list(context)], [list(range(len(context)))], [[0] * len(context)])
        return blanks

    def require_room(self, context: Sequence[int]) -> None:
        """Raise DataError if part A has more tokens than the model has positions, or its beams need too much memory."""
        model, limit = self.model.config, self.model.config.max_position + 1
        if len(context) > limit:
            raise DataError(
                f"a text has {len(context)} tokens with [CLS] and the end, but the model has positions for {limit}; "
                f"shorten it by {len(context) - limit} tokens, or give a model with a larger model.max_position."
            )
        assert model.vocab_size is not None
        cached = 2 * model.num_layers * model.hidden_size * (len(context) + self._longest())
        beam_bytes = 4 * (cached + LOGIT_COPIES * model.vocab_size)
        if self.config.strategy == "beam" and self.config.num_beams * beam_bytes > MAX_BEAM_BYTES:
            raise DataError(
                f"num_beams ({self.config.num_beams}) need {self.config.num_beams * beam_bytes / 2**30:.3g} GiB for a "
                f"text of {len(context)} tokens, more than {MAX_BEAM_BYTES / 2**30:g}; set it to "
                f"{max(1, MAX_BEAM_BYTES // beam_bytes)} or less, or shorten the text."
            )

    def _hidden(
        self, tokens: list[list[int]], positions: list[list[int]], block_positions: list[list[int]]
    ) -> torch.Tensor:
        words = torch.tensor(tokens, device=self.device)
        ids = torch.zeros(len(ID_PLANES), *words.shape, dtype=words.dtype, device=self.device)
        ids[0], ids[1] = torch.tensor(positions), torch.tensor(block_positions)
        return self.model.hidden_states(words, ids, self.plan)

    def next_logits(self, tokens: Sequence[int], position: int, block_position: int) -> torch.Tensor:
        """fp32 logits [rows, V] of what follows one new part-B token per row, which is added to the cache."""
        rows = len(tokens)
        hidden = self._hidden([[t] for t in tokens], [[position]] * rows, [[block_position]] * rows)
        logits = self.model.logits(hidden[:, -1]).float()
        return logits.index_fill_(1, self.banned, float("-inf"))

    def _longest(self) -> int:
        return min(self.config.max_length, self.model.config.max_position)

    def _one_by_one(self, position: int) -> list[int]:
        token, span = self.special.sop, []
        for block_position in range(1, self._longest() + 1):
            logits = self.next_logits([token], position, block_position)[0]
            token = int(logits.argmax()) if self.config.strategy == "greedy" else self._draw(logits)
            if token in self.ends:
                break
            span.append(token)
        else:  # add the last token to the cache
            self.next_logits([token], position, min(len(span) + 1, self.model.config.max_position))
        return span

    def _draw(self, logits: torch.Tensor) -> int:
        logits = logits / self.config.temperature
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        if self.config.top_k:
            probabilities[self.config.top_k :] = 0.0
        # A token stays if those before it have not yet reached top_p: the likeliest always stays.
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= self.config.top_p * probabilities.sum()] = 0.0
        return int(order[torch.multinomial(probabilities, 1, generator=self.generator)])

    def _score(self, log_probability: float, length: int) -> float:
        return log_probability / max(length, 1) ** self.config.length_penalty

    def _beam(self, position: int) -> list[int]:
        start = list(self.plan.keys), list(self.plan.values)
        span = self._hypotheses(position)[0][1]
        self._replay(start, position, span)
        return span

    def _hypotheses(self, position: int) -> list[tuple[float, list[int]]]:
        """Up to `num_beams` spans for a blank with their scores, the best first; changes the cache."""
        beams = self.config.num_beams
        live: list[tuple[list[int], float]] = [([], 0.0)]  # (span, log probability) per cached row
        finished: list[tuple[float, list[int]]] = []
        tokens = [self.special.sop]
        for block_position in range(1, self._longest() + 1):
            log_p = self.next_logits(tokens, position, block_position).log_softmax(-1)
            totals = log_p + torch.tensor([p for _, p in live], device=self.device)[:, None]
            best, flat = totals.flatten().topk(min(2 * beams, totals.numel()))
            rows: list[int] = []
            live_next: list[tuple[list[int], float]] = []
            for total, index in zip(best.tolist(), flat.tolist(), strict=True):
                row, token = divmod(index, log_p.shape[1])
                span = live[row][0]
                if token in self.ends:
                    finished.append((self._score(total, len(span) + 1), span))
                elif len(live_next) < beams and total > float("-inf"):
                    rows.append(row)
                    live_next.append(([*span, token], total))
            live = live_next
            finished = sorted(finished, key=lambda item: item[0], reverse=True)[:beams]
            if not live or self._is_decided(finished, live, block_position):
                break
            self.plan.select(torch.tensor(rows, device=self.device))
            tokens = [span[-1] for span, _ in live]
        if not finished:  # nothing ended within max_length
            finished = [(self._score(p, len(span)), span) for span, p in live]
        return sorted(finished, key=lambda item: item[0], reverse=True)

    def _is_decided(self, finished: list, live: list, length: int) -> bool:
        """True if no live hypothesis can become better than the finished ones (for length penalties up to 1)."""
        if len(finished) < self.config.num_beams:
            return False
        reachable = max(
            self._score(p, self._longest() if self.config.length_penalty > 0 else length) for _, p in live
        )
        return finished[-1][0] >= reachable

    def _replay(self, start: tuple[list, list], position: int, span: list[int]) -> None:
        """Make the cache as if only the chosen span had been written."""
        self.plan.keys, self.plan.values = list(start[0]), list(start[1])
        for block_position, token in enumerate([self.special.sop, *span], start=1):
            self.next_logits([token], position, min(block_position, self.model.config.max_position))


def blank_context(tokens: Sequence[int], special: SpecialTokens) -> list[int]:
    """Part A for a text's tokens: CLS first; eos last unless the text is to be continued at a final [gMASK]."""
    is_open = bool(tokens) and tokens[-1] == special.gmask and special.gmask != special.mask
    return [special.cls, *tokens] if is_open else [special.cls, *tokens, special.eos]


def insert_spans(
    tokens: Sequence[int], spans: Sequence[Sequence[int]], special: SpecialTokens
) -> list[list[int]]:
    """The text's tokens cut at the blanks: [text, span, text, span, ..., text]."""
    masks = {special.mask, special.smask, special.gmask}
    parts: list[list[int]] = [[]]
    remaining = iter(spans)
    for token in tokens:
        if token in masks:
            parts += [list(next(remaining)), []]
        else:
            parts[-1].append(token)
    if next(remaining, None) is not None:
        raise ConfigError("there are more spans than blanks.")
    return parts


def span_text(tokenizer: Tokenizer, span: Sequence[int]) -> str:
    """A span for people, without the spaces around it. A blank that holds nothing else, or no token, says so."""
    text = tokenizer.decode(span)
    nothing = "(line break)" if "\n" in text else "(space)" if text else "(nothing)"
    return text.strip() or nothing


def numbered_text(tokenizer: Tokenizer, context: Sequence[int], spans: Sequence[Sequence[int]]) -> str:
    """The text for people, ___1___ in the place of its first blank. Args: spans: what stood in the blanks."""
    hidden = {tokenizer.special.cls, tokenizer.special.eos}
    parts = insert_spans([token for token in context if token not in hidden], spans, tokenizer.special)
    texts = [tokenizer.decode(part) for part in parts]
    for number, place in enumerate(range(1, len(texts), 2), start=1):
        space = " " if texts[place].startswith(" ") else ""  # byte-level tokens carry the space before a word
        texts[place] = f"{space}___{number}___"
    return " ".join("".join(texts).split())
