"""The rows of a batch of texts while answers to them are written: a `State` of search.py for each way of writing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data_utils.tokenizers.special_tokens import NO_TOKEN
from megatron_lite.inference.cache import (
    CachedCross,
    CachedPlan,
    decoder_rows,
    encoded_rows,
    id_planes,
    padded,
    stack_rows,
)
from megatron_lite.inference.search import State
from megatron_lite.inference.watch import ONE_STACK, Row, Watch, stretch
from megatron_lite.model.transformer import GLM


class Written(State, Protocol):
    """The rows of a batch of texts, made of a model, the texts' tokens, a layout, and maybe a `Watch`."""

    def shown(self, context: Sequence[int], read: Sequence[int]) -> dict[str, tuple[list[Row], list[int]]]:
        """See `Replay`. Args: context: of the one text. read: what has been read of its answer."""
        ...


@dataclass(frozen=True)
class Layout:
    """How an objective lays out a text and its answer.

    Args:
        make: the rows of a batch. An encoder's answers have positions from 0 on.
        before, after: tokens around a text.
        ends: of an answer.
        start: what predicts the answer's first token; none: the text's last token does, or a mask.
        forced: what the answer begins with, unseen.
        allowed: special tokens that answers may have.
        mask: what predicts the token in its place.
        segments: of a text, of its answer.
    """

    make: Callable[..., Any]
    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: tuple[int, ...]
    start: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    is_causal: bool = False
    mask: int = NO_TOKEN
    segments: tuple[int, int] = (0, 0)


class _Rows:
    """Rows of one stack that have read their texts (a `State` of search.py)."""

    def __init__(
        self, model: GLM, contexts: Sequence[Sequence[int]], layout: Layout, watch: Watch | None = None
    ):
        self.model, self.layout = model, layout
        self.device = next(model.parameters()).device
        self.plan = CachedPlan(model.config, watch and watch.of(ONE_STACK))
        self.tokens, self.real = padded(contexts, self.device)
        self.lengths = torch.tensor([len(context) for context in contexts], device=self.device)
        self.places = self.lengths.clone()  # position of each row's next token

    def segment(self, is_answer: bool) -> int:
        return self.layout.segments[is_answer] if self.model.config.segments > 1 else 0

    def read(self) -> torch.Tensor:
        """Hidden states [R, N, D] of the texts."""
        positions = torch.arange(self.tokens.shape[1], device=self.device).expand(self.tokens.shape)
        self.plan.expect(positions, real=self.real, is_causal=self.layout.is_causal)
        return stack_rows(
            self.model, self.tokens, id_planes(positions, segment=self.segment(False)), self.plan
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden).float()

    def select(self, rows: Sequence[int]) -> None:
        self.plan.select(rows)
        self.places = self.places[torch.tensor(rows, device=self.device)]


class LeftToRight(_Rows):
    def first(self) -> torch.Tensor:
        hidden = self.read()
        if self.layout.start:
            return self.next(self.layout.start * len(self.tokens))
        rows = torch.arange(len(self.tokens), device=self.device)
        return self.logits(hidden[rows, self.lengths - 1])

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        words, positions = torch.tensor(tokens, device=self.device)[:, None], self.places[:, None]
        self.places = self.places + 1
        self.plan.expect(positions)
        return self.logits(stack_rows(self.model, words, id_planes(positions), self.plan)[:, -1])

    def shown(self, context: Sequence[int], read: Sequence[int]) -> dict[str, tuple[list[Row], list[int]]]:
        rows = stretch([*context, *self.layout.start], read)
        rows[-1 - len(read)] = Row(rows[-1 - len(read)].token, True)
        return {ONE_STACK: (rows, [row.token for row in rows])}


class MaskAppending(_Rows):
    def first(self) -> torch.Tensor:
        self.read()
        return self._predicted(self.places.new_zeros(len(self.places), 0))

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        self.places = self.places + 1
        return self._predicted(torch.tensor(tokens, device=self.device)[:, None])

    def _predicted(self, chosen: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of a mask at each row's position, after `chosen` [R, 0 or 1], the row's token before it."""
        count = chosen.shape[1]
        words = torch.cat([chosen, chosen.new_full((len(chosen), 1), self.layout.mask)], dim=1)
        positions = self.places[:, None] + torch.arange(-count, 1, device=self.device)
        self.plan.expect(positions, is_causal=True, kept=count)
        ids = id_planes(positions, segment=self.segment(True))
        return self.logits(stack_rows(self.model, words, ids, self.plan)[:, -1])

    def shown(self, context: Sequence[int], read: Sequence[int]) -> dict[str, tuple[list[Row], list[int]]]:
        mask = Row(self.layout.mask, True)
        rows = [*stretch(context, []), mask, *(row for token in read for row in (Row(token, False), mask))]
        return {ONE_STACK: (rows, [*context, *read, self.layout.mask])}


class EncoderDecoder(_Rows):
    def __init__(
        self, model: GLM, contexts: Sequence[Sequence[int]], layout: Layout, watch: Watch | None = None
    ):
        super().__init__(model, contexts, layout, watch)
        positions = torch.arange(self.tokens.shape[1], device=self.device).expand(self.tokens.shape)
        self.plan.expect(positions, real=self.real)
        self.encoded = encoded_rows(model, self.tokens, id_planes(positions), self.plan)
        self.cross = CachedCross(self.real, watch and watch.of("cross"))
        self.plan = CachedPlan(model.config, watch and watch.of("decoder"))
        self.places = torch.zeros_like(self.lengths)

    def first(self) -> torch.Tensor:
        for token in (*self.layout.start, *self.layout.forced):
            logits = self.next([token] * len(self.tokens))
        return logits

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        words, positions = torch.tensor(tokens, device=self.device)[:, None], self.places[:, None]
        self.places = self.places + 1
        self.plan.expect(positions)
        ids = id_planes(positions, segment=self.segment(True))
        hidden = decoder_rows(self.model, words, ids, self.plan, self.encoded, self.cross)
        return self.logits(hidden[:, -1])

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.cross.select(rows)

    def shown(self, context: Sequence[int], read: Sequence[int]) -> dict[str, tuple[list[Row], list[int]]]:
        first = [*self.layout.start, *self.layout.forced]
        own = [*stretch(first[:-1], []), *stretch([], [*first[-1:], *read])]
        text, tokens = stretch(context, []), [row.token for row in own]
        return {ONE_STACK: (text, list(context)), "decoder": (own, tokens), "cross": (own, list(context))}
